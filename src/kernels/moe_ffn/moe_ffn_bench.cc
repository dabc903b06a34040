// GFLOP/s of the experts of a mixture, forward and forward + backward, and percent of the multiply-add peak measured
// around each case. The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <vector>

#include "jumar/runtime.h"
#include "kernels/gemm/gemm.h"
#include "kernels/limits/limits.h"
#include "kernels/moe_ffn/moe_ffn.h"

namespace jumar {
namespace {

constexpr int64_t kTopK = 8;
constexpr int64_t kHidden = 1024;
constexpr int64_t kInner = 768;

// Small values that are exact in every dtype.
std::unique_ptr<char[]> Values(DType dtype, int64_t n) {
  std::unique_ptr<char[]> data(new char[static_cast<size_t>(n) * SizeOf(dtype)]);
  uint32_t state = 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    const float v = static_cast<float>(static_cast<int>(state >> 29) - 3) * 0.03125f;
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof(bits));
    if (dtype == DType::kF32) {
      std::memcpy(data.get() + 4 * i, &v, 4);
    } else {
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(data.get() + 2 * i, &half, 2);
    }
  }
  return data;
}

// Ids in no order; experts get equal shares of the slots, or shares that fall as 1 / rank.
std::vector<int64_t> Ids(int64_t tokens, int64_t experts, bool zipf) {
  std::vector<double> ends;
  double sum = 0;
  for (int64_t e = 0; e < experts; ++e) ends.push_back(sum += zipf ? 1.0 / static_cast<double>(e + 1) : 1.0);
  std::vector<int64_t> ids;
  const int64_t slots = tokens * kTopK;
  for (int64_t i = 0; i < slots; ++i) {
    const double at = (static_cast<double>(i * 2654435761 % slots) + 0.5) / static_cast<double>(slots) * sum;
    int64_t e = 0;
    while (ends[static_cast<size_t>(e)] < at) ++e;
    ids.push_back(e * 37 % experts);
  }
  return ids;
}

// Matrices [rows, cols] as models store them: column by column.
std::vector<TensorView> Stack(void* data, DType dtype, int64_t experts, int64_t rows, int64_t cols) {
  std::vector<TensorView> list;
  for (int64_t e = 0; e < experts; ++e) {
    char* at = static_cast<char*>(data) + e * rows * cols * static_cast<int64_t>(SizeOf(dtype));
    list.push_back(Transposed(Contiguous(at, dtype, {cols, rows})));
  }
  return list;
}

void BM_MoeFfn(benchmark::State& state, DType dtype, bool backward, int64_t experts, int64_t tokens, bool zipf) {
  const auto x = Values(dtype, tokens * kHidden);
  const auto dy = Values(dtype, tokens * kHidden);
  const auto y = Values(dtype, tokens * kHidden);
  const auto dx = Values(dtype, tokens * kHidden);
  const auto probs = Values(DType::kF32, tokens * kTopK);
  const auto dprobs = Values(DType::kF32, tokens * kTopK);
  const auto saved = Values(dtype, tokens * kTopK * 2 * kInner);
  const auto gate_up = Values(dtype, experts * kHidden * 2 * kInner);
  const auto down = Values(dtype, experts * kHidden * kInner);
  const auto dgate_up = Values(dtype, experts * kHidden * 2 * kInner);
  const auto ddown = Values(dtype, experts * kHidden * kInner);
  std::vector<int64_t> ids = Ids(tokens, experts, zipf);
  const TensorView xv = Contiguous(x.get(), dtype, {tokens, kHidden});
  const TensorView dyv = Contiguous(dy.get(), dtype, {tokens, kHidden});
  const TensorView yv = Contiguous(y.get(), dtype, {tokens, kHidden});
  const TensorView dxv = Contiguous(dx.get(), dtype, {tokens, kHidden});
  const TensorView pv = Contiguous(probs.get(), DType::kF32, {tokens, kTopK});
  const TensorView dpv = Contiguous(dprobs.get(), DType::kF32, {tokens, kTopK});
  const TensorView sv = Contiguous(saved.get(), dtype, {tokens * kTopK, 2 * kInner});
  const TensorView idv = Contiguous(ids.data(), DType::kI64, {tokens, kTopK});
  const ExpertWeights w = {Stack(gate_up.get(), dtype, experts, kHidden, 2 * kInner),
                           {},
                           Stack(down.get(), dtype, experts, kInner, kHidden)};
  const ExpertWeights dw = {Stack(dgate_up.get(), dtype, experts, kHidden, 2 * kInner),
                            {},
                            Stack(ddown.get(), dtype, experts, kInner, kHidden)};
  for (auto _ : state) {
    MoeFfn("bench", xv, idv, pv, w, yv, &sv);
    if (backward) MoeFfnBackward("bench", dyv, xv, idv, pv, w, sv, &dxv, &dpv, dw);
  }
  const double flops = (backward ? 18.0 : 6.0) * static_cast<double>(tokens * kTopK * kHidden * kInner);
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["fma_peak"] = MeasureFmaGflops(NumThreads(), 0.05);
}

const int kRegistered = [] {
  for (const bool zipf : {false, true}) {
    for (const int64_t experts : {8, 64, 128}) {
      for (const int64_t tokens : {512, 2048, 8192}) {
        for (const DType dtype : {DType::kBF16, DType::kF32}) {
          for (const bool backward : {false, true}) {
            const std::string name = std::string(backward ? "both" : "forward") + "/" + Name(dtype) + "/" +
                                     std::to_string(experts) + "x" + std::to_string(tokens) +
                                     (zipf ? "/zipf" : "/balanced");
            benchmark::RegisterBenchmark(name.c_str(), BM_MoeFfn, dtype, backward, experts, tokens, zipf)
                ->UseRealTime()
                ->Unit(benchmark::kMillisecond);
          }
        }
      }
    }
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
