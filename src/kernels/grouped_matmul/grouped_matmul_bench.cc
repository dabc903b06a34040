// GFLOP/s of the three products of an expert layer, and percent of the multiply-add peak measured around each case.
// The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <numeric>

#include "jumar/runtime.h"
#include "kernels/gemm/gemm.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/limits/report.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

using testing::SmallValues;

constexpr int64_t kTopK = 8;

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
  auto x = SmallValues(dtype, rows * in);
  auto w = SmallValues(dtype, experts * out * in);
  auto dw = SmallValues(dtype, experts * out * in);
  auto y = SmallValues(dtype, rows * out);
  auto dy = SmallValues(dtype, rows * out);
  auto dx = SmallValues(dtype, rows * in);
  const TensorView xv = Contiguous(x.data(), dtype, {rows, in});
  const TensorView dxv = Contiguous(dx.data(), dtype, {rows, in});
  const TensorView yv = Contiguous(y.data(), dtype, {rows, out});
  const TensorView dyv = Contiguous(dy.data(), dtype, {rows, out});
  std::vector<TensorView> weights;
  std::vector<TensorView> grads;
  for (const TensorView& m : Unstack(Contiguous(w.data(), dtype, {experts, out, in}))) weights.push_back(Transposed(m));
  for (const TensorView& m : Unstack(Contiguous(dw.data(), dtype, {experts, out, in}))) grads.push_back(Transposed(m));
  const RowGroups groups = Rows(experts, rows, zipf);
  for (auto _ : state) {
    if (form == kForward || form == kAll) GroupedMatmul("bench", xv, weights, {}, groups, yv);
    if (form == kDgrad || form == kAll) GroupedMatmulDgrad("bench", dyv, weights, groups, dxv);
    if (form == kWgrad || form == kAll) GroupedMatmulWgrad("bench", xv, dyv, groups, grads, false);
  }
  const double flops = (form == kAll ? 6.0 : 2.0) * static_cast<double>(rows * in * out);
  ReportGflops(state, dtype, flops);
}

const int kRegistered = [] {
  for (const testing::Mixture& m : testing::Mixtures()) {
    for (const Form form : {kForward, kDgrad, kWgrad, kAll}) {
      const char* names[] = {"forward/", "dgrad/", "wgrad/", "all/"};
      benchmark::RegisterBenchmark((names[form] + m.Text()).c_str(), BM_Grouped, m.dtype, form, m.experts, m.tokens,
                                   m.zipf, 1024, 768)
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
