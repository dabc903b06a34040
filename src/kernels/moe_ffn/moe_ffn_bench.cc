// GFLOP/s of the experts of a mixture, forward and forward + backward, and percent of the multiply-add peak measured
// around each case. The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <vector>

#include "jumar/runtime.h"
#include "kernels/gemm/gemm.h"
#include "kernels/limits/report.h"
#include "kernels/moe_ffn/moe_ffn.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

using testing::SmallValues;

constexpr int64_t kTopK = 8;
constexpr int64_t kHidden = 1024;
constexpr int64_t kInner = 768;

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
  auto x = SmallValues(dtype, tokens * kHidden);
  auto dy = SmallValues(dtype, tokens * kHidden);
  auto y = SmallValues(dtype, tokens * kHidden);
  auto dx = SmallValues(dtype, tokens * kHidden);
  auto probs = SmallValues(DType::kF32, tokens * kTopK);
  auto dprobs = SmallValues(DType::kF32, tokens * kTopK);
  auto saved = SmallValues(dtype, tokens * kTopK * 2 * kInner);
  auto gate_up = SmallValues(dtype, experts * kHidden * 2 * kInner);
  auto down = SmallValues(dtype, experts * kHidden * kInner);
  auto dgate_up = SmallValues(dtype, experts * kHidden * 2 * kInner);
  auto ddown = SmallValues(dtype, experts * kHidden * kInner);
  std::vector<int64_t> ids = Ids(tokens, experts, zipf);
  const TensorView xv = Contiguous(x.data(), dtype, {tokens, kHidden});
  const TensorView dyv = Contiguous(dy.data(), dtype, {tokens, kHidden});
  const TensorView yv = Contiguous(y.data(), dtype, {tokens, kHidden});
  const TensorView dxv = Contiguous(dx.data(), dtype, {tokens, kHidden});
  const TensorView pv = Contiguous(probs.data(), DType::kF32, {tokens, kTopK});
  const TensorView dpv = Contiguous(dprobs.data(), DType::kF32, {tokens, kTopK});
  const TensorView sv = Contiguous(saved.data(), dtype, {tokens * kTopK, 2 * kInner});
  const TensorView idv = Contiguous(ids.data(), DType::kI64, {tokens, kTopK});
  const ExpertWeights w = {Stack(gate_up.data(), dtype, experts, kHidden, 2 * kInner),
                           {},
                           Stack(down.data(), dtype, experts, kInner, kHidden)};
  const ExpertWeights dw = {Stack(dgate_up.data(), dtype, experts, kHidden, 2 * kInner),
                            {},
                            Stack(ddown.data(), dtype, experts, kInner, kHidden)};
  for (auto _ : state) {
    MoeFfn("bench", xv, idv, pv, w, yv, &sv);
    if (backward) MoeFfnBackward("bench", dyv, xv, idv, pv, w, sv, &dxv, &dpv, dw);
  }
  const double flops = (backward ? 18.0 : 6.0) * static_cast<double>(tokens * kTopK * kHidden * kInner);
  ReportGflops(state, dtype, flops);
}

const int kRegistered = [] {
  for (const testing::Mixture& m : testing::Mixtures()) {
    for (const bool backward : {false, true}) {
      benchmark::RegisterBenchmark(((backward ? "both/" : "forward/") + m.Text()).c_str(), BM_MoeFfn, m.dtype, backward,
                                   m.experts, m.tokens, m.zipf)
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
