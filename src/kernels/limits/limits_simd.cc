#include "base/simd_dispatch.h"
#include "kernels/limits/limits_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/limits/limits_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 12 chains: two units with a latency of up to 5 cycles need 10.
#define JUMAR_CHAINS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

float FmaRounds(int64_t rounds) {
  const hn::ScalableTag<float> d;
  // The fixed point of x = 0.5 x + 0.5 is 1: values stay normal.
  const auto half = hn::Set(d, 0.5f);
#define JUMAR_X(i) auto x##i = hn::Set(d, 1.0f + 0.01f * (i));
  JUMAR_CHAINS(JUMAR_X)
#undef JUMAR_X
  for (int64_t r = 0; r < rounds; ++r) {
#define JUMAR_X(i) x##i = hn::MulAdd(x##i, half, half);
    JUMAR_CHAINS(JUMAR_X)
    JUMAR_CHAINS(JUMAR_X)
    JUMAR_CHAINS(JUMAR_X)
    JUMAR_CHAINS(JUMAR_X)
#undef JUMAR_X
  }
  auto sum = hn::Zero(d);
#define JUMAR_X(i) sum = hn::Add(sum, x##i);
  JUMAR_CHAINS(JUMAR_X)
#undef JUMAR_X
  return hn::GetLane(sum);
}

double FmaFlopsPerRound() { return 4.0 * 12 * 2 * static_cast<double>(hn::Lanes(hn::ScalableTag<float>())); }

// n is a multiple of 4 vectors.
void CopyRange(const float* from, float* to, size_t n, bool stream) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  if (stream) {
    for (size_t i = 0; i < n; i += lanes) hn::Stream(hn::Load(d, from + i), d, to + i);
    hwy::FlushStream();
  } else {
    for (size_t i = 0; i < n; i += lanes) hn::Store(hn::Load(d, from + i), d, to + i);
  }
}

#undef JUMAR_CHAINS

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/parallel.h"
#include "hwy/aligned_allocator.h"
#include "jumar/runtime.h"
#include "kernels/limits/limits.h"

namespace jumar {
HWY_EXPORT(FmaRounds);
HWY_EXPORT(FmaFlopsPerRound);
HWY_EXPORT(CopyRange);

namespace {

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Runs work() for about `seconds`, at least five times, and returns the shortest time of one.
template <typename F>
double BestTime(double seconds, const F& work) {
  work();
  double best = 1e30;
  const double end = Now() + seconds;
  for (int i = 0; i < 5 || Now() < end; ++i) {
    const double start = Now();
    work();
    best = std::min(best, Now() - start);
  }
  return best;
}

double MeasurePeak(const PeakKernel& kernel, int threads, double seconds) {
  // About 5 ms of work per slice: long against the start of the threads.
  int64_t rounds = 1000;
  volatile float sink = 0;
  for (;;) {
    const double start = Now();
    sink = kernel.run(rounds);
    if (Now() - start > 0.004) break;
    rounds *= 2;
  }
  const double time = BestTime(seconds, [&] {
    ParallelChunks(threads, [&](int64_t) {
      volatile float local = kernel.run(rounds);
      (void)local;
    });
  });
  (void)sink;
  return kernel.flops_per_round * static_cast<double>(rounds) * threads / time * 1e-9;
}

float RunFma(int64_t rounds) { return JUMAR_DISPATCH(FmaRounds)(rounds); }

}  // namespace

double MeasureFmaGflops(int threads, double seconds) {
  return MeasurePeak({JUMAR_DISPATCH(FmaFlopsPerRound)(), &RunFma}, threads, seconds);
}

double MeasureBf16Gflops(int threads, double seconds) {
  if (SimdAllows("AVX3_SPR") && PeakAmx().run != nullptr) return MeasurePeak(PeakAmx(), threads, seconds);
  if (SimdAllows("AVX3_ZEN4") && PeakAvx512Bf16().run != nullptr)
    return MeasurePeak(PeakAvx512Bf16(), threads, seconds);
  return 0;
}

double MeasureCopyGBs(int threads, double seconds, int megabytes) {
  constexpr size_t kUnit = size_t{1} << 18;  // floats of one megabyte
  const size_t n = kUnit * static_cast<size_t>(megabytes);
  const auto from = hwy::AllocateAligned<float>(n);
  const auto to = hwy::AllocateAligned<float>(n);
  std::memset(from.get(), 0, n * sizeof(float));
  std::memset(to.get(), 0, n * sizeof(float));
  const auto chunks = static_cast<int64_t>(threads);
  double best = 0;
  for (const bool stream : {false, true}) {
    const double time = BestTime(seconds / 2, [&] {
      ParallelChunks(chunks, [&](int64_t c) {
        const auto begin = static_cast<size_t>(ChunkBegin(megabytes, chunks, c)) * kUnit;
        const auto end = static_cast<size_t>(ChunkBegin(megabytes, chunks, c + 1)) * kUnit;
        JUMAR_DISPATCH(CopyRange)(from.get() + begin, to.get() + begin, end - begin, stream);
      });
    });
    best = std::max(best, 2.0 * static_cast<double>(n * sizeof(float)) / time * 1e-9);
  }
  return best;
}

}  // namespace jumar
#endif  // HWY_ONCE
