// GFLOP/s of the three products of an expert layer, and percent of the multiply-add peak measured around each case.
// The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <numeric>

#include "jumar/runtime.h"
#include "kernels/gemm/gemm.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/limits/limits.h"

namespace jumar {
namespace {

constexpr int64_t kTopK = 8;

// Small values that are exact in every dtype.
std::unique_ptr<char[]> Values(DType dtype, int64_t n) {
  std::unique_ptr<char[]> data(new char[static_cast<size_t>(n) * SizeOf(dtype)]);
  uint32_t state = 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    const float v = static_cast<float>(static_cast<int>(state >> 29) - 3) * 0.25f;
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

// Rows of each expert: equal, or falling as 1 / rank.
RowGroups Rows(int64_t experts, int64_t rows, bool zipf) {
  std::vector<double> share(static_cast<size_t>(experts), 1.0);
  if (zipf) {
    for (size_t e = 0; e < share.size(); ++e) share[e] = 1.0 / static_cast<double>(e * 37 % share.size() + 1);
  }
  const double all = std::accumulate(share.begin(), share.end(), 0.0);
  RowGroups groups;
  double sum = 0;
  for (const double s : share) {
    sum += s;
    const auto end = static_cast<int64_t>(sum / all * static_cast<double>(rows) + 0.5);
    groups.ranges.push_back({groups.used, end});
    groups.used = end;
  }
  return groups;
}

enum Form { kForward, kDgrad, kWgrad, kAll };

// tokens x in -> out; weights as a model stores them, [E, out, in].
void BM_Grouped(benchmark::State& state, DType dtype, Form form, int64_t experts, int64_t tokens, bool zipf, int64_t in,
                int64_t out) {
  const int64_t rows = tokens * kTopK;
  const auto x = Values(dtype, rows * in);
  const auto w = Values(dtype, experts * out * in);
  const auto dw = Values(dtype, experts * out * in);
  const auto y = Values(dtype, rows * out);
  const auto dy = Values(dtype, rows * out);
  const auto dx = Values(dtype, rows * in);
  const TensorView xv = Contiguous(x.get(), dtype, {rows, in});
  const TensorView dxv = Contiguous(dx.get(), dtype, {rows, in});
  const TensorView yv = Contiguous(y.get(), dtype, {rows, out});
  const TensorView dyv = Contiguous(dy.get(), dtype, {rows, out});
  std::vector<TensorView> weights;
  std::vector<TensorView> grads;
  for (const TensorView& m : Unstack(Contiguous(w.get(), dtype, {experts, out, in}))) weights.push_back(Transposed(m));
  for (const TensorView& m : Unstack(Contiguous(dw.get(), dtype, {experts, out, in}))) grads.push_back(Transposed(m));
  const RowGroups groups = Rows(experts, rows, zipf);
  for (auto _ : state) {
    if (form == kForward || form == kAll) GroupedMatmul("bench", xv, weights, {}, groups, yv);
    if (form == kDgrad || form == kAll) GroupedMatmulDgrad("bench", dyv, weights, groups, dxv);
    if (form == kWgrad || form == kAll) GroupedMatmulWgrad("bench", xv, dyv, groups, grads, false);
  }
  const double flops = (form == kAll ? 6.0 : 2.0) * static_cast<double>(rows * in * out);
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["fma_peak"] = MeasureFmaGflops(NumThreads(), 0.05);
  if (dtype == DType::kBF16) {
    const double bf16 = MeasureBf16Gflops(NumThreads(), 0.05);
    if (bf16 > 0) state.counters["bf16_peak"] = bf16;
  }
}

const int kRegistered = [] {
  for (const bool zipf : {false, true}) {
    for (const int64_t experts : {8, 64, 128}) {
      for (const int64_t tokens : {512, 2048, 8192}) {
        for (const DType dtype : {DType::kBF16, DType::kF32}) {
          for (const Form form : {kForward, kDgrad, kWgrad, kAll}) {
            const char* names[] = {"forward", "dgrad", "wgrad", "all"};
            const std::string name = std::string(names[form]) + "/" + Name(dtype) + "/" + std::to_string(experts) +
                                     "x" + std::to_string(tokens) + (zipf ? "/zipf" : "/balanced");
            benchmark::RegisterBenchmark(name.c_str(), BM_Grouped, dtype, form, experts, tokens, zipf, 1024, 768)
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
