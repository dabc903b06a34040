// GFLOP/s of forward, dgrad and wgrad, and percent of the multiply-add peak measured around each case.
// The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include "jumar/runtime.h"
#include "kernels/gemm/gemm.h"
#include "kernels/limits/limits.h"
#include "kernels/limits/report.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

using testing::SmallValues;

enum Form { kForward, kDgrad, kWgrad };

// tokens x in -> out: the three products of one linear layer.
void BM_Linear(benchmark::State& state, DType dtype, Form form, int64_t tokens, int64_t in, int64_t out) {
  auto x = SmallValues(dtype, tokens * in);
  auto w = SmallValues(dtype, out * in);
  auto y = SmallValues(dtype, tokens * out);
  const TensorView xv = Contiguous(x.data(), dtype, {tokens, in});
  const TensorView wv = Contiguous(w.data(), dtype, {out, in});
  const TensorView yv = Contiguous(y.data(), dtype, {tokens, out});
  for (auto _ : state) {
    switch (form) {
      case kForward:
        Gemm("bench", xv, Transposed(wv), nullptr, yv);
        break;
      case kDgrad:
        Gemm("bench", yv, wv, nullptr, xv);
        break;
      case kWgrad:
        Gemm("bench", Transposed(yv), xv, nullptr, wv);
        break;
    }
  }
  const double flops = 2.0 * static_cast<double>(tokens * in * out);
  ReportGflops(state, dtype, flops);
}

void BM_FmaPeak(benchmark::State& state) {
  for (auto _ : state) state.counters["GFLOP/s"] = MeasureFmaGflops(NumThreads());
  state.counters["bf16"] = MeasureBf16Gflops(NumThreads());
}
BENCHMARK(BM_FmaPeak)->Iterations(1);

void BM_Copy(benchmark::State& state) {
  for (auto _ : state) state.counters["GB/s"] = MeasureCopyGBs(NumThreads());
}
BENCHMARK(BM_Copy)->Iterations(1);

const int kRegistered = [] {
  struct {
    const char* name;
    int64_t tokens, in, out;
  } const shapes[] = {{"1024x1024x1024", 1024, 1024, 1024}, {"2048x512x4096", 2048, 512, 4096},
                      {"512x512x1536", 512, 512, 1536},     {"1x2048x2048", 1, 2048, 2048},
                      {"8x2048x2048", 8, 2048, 2048},       {"2048x2048x16", 2048, 2048, 16},
                      {"4096x64x256", 4096, 64, 256}};
  for (const auto& shape : shapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      for (const Form form : {kForward, kDgrad, kWgrad}) {
        const std::string name = std::string(form == kForward ? "forward"
                                             : form == kDgrad ? "dgrad"
                                                              : "wgrad") +
                                 "/" + Name(dtype) + "/" + shape.name;
        benchmark::RegisterBenchmark(name.c_str(), BM_Linear, dtype, form, shape.tokens, shape.in, shape.out)
            ->UseRealTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
