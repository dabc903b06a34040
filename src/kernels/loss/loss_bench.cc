// Output head and loss, forward and backward: GFLOP/s of the three products that have to be
// done; cross-entropy of given logits: bytes. The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/loss/cross_entropy.h"
#include "kernels/loss/linear_cross_entropy.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

using testing::SmallValues;

void BM_LinearCrossEntropy(benchmark::State& state, DType dtype, int64_t tokens, int64_t width, int64_t classes) {
  auto x = SmallValues(dtype, tokens * width);
  auto w = SmallValues(dtype, classes * width);
  std::vector<char> dx(x.size());
  std::vector<char> dw(w.size());
  std::vector<int64_t> labels(static_cast<size_t>(tokens));
  for (int64_t n = 0; n < tokens; ++n) labels[static_cast<size_t>(n)] = n * 31 % classes;
  std::vector<float> lse(static_cast<size_t>(tokens));
  float loss = 0;
  float one = 1;
  const TensorView xv = Contiguous(x.data(), dtype, {tokens, width});
  const TensorView wv = Contiguous(w.data(), dtype, {classes, width});
  const TensorView tv = Contiguous(labels.data(), DType::kI64, {tokens});
  const TensorView lv = Contiguous(&loss, DType::kF32, {});
  const TensorView gv = Contiguous(&one, DType::kF32, {});
  const TensorView sv = Contiguous(lse.data(), DType::kF32, {tokens});
  const TensorView dxv = Contiguous(dx.data(), dtype, {tokens, width});
  const TensorView dwv = Contiguous(dw.data(), dtype, {classes, width});
  for (auto _ : state) {
    LinearCrossEntropy("bench", xv, wv, nullptr, tv, {}, lv, sv, nullptr);
    LinearCrossEntropyBackward("bench", gv, xv, wv, nullptr, tv, sv, nullptr, {}, &dxv, &dwv, nullptr);
  }
  state.counters["GFLOP/s"] = benchmark::Counter(6e-9 * static_cast<double>(tokens * width * classes),
                                                 benchmark::Counter::kIsIterationInvariantRate);
}

void BM_CrossEntropy(benchmark::State& state, DType dtype, int64_t rows, int64_t classes) {
  auto x = SmallValues(dtype, rows * classes);
  std::vector<char> log_prob(x.size());
  std::vector<char> dx(x.size());
  std::vector<int64_t> labels(static_cast<size_t>(rows), 1);
  std::vector<char> loss(SizeOf(dtype));
  auto one = SmallValues(dtype, 1);
  const TensorView xv = Contiguous(x.data(), dtype, {rows, classes});
  const TensorView pv = Contiguous(log_prob.data(), dtype, {rows, classes});
  const TensorView dv = Contiguous(dx.data(), dtype, {rows, classes});
  const TensorView tv = Contiguous(labels.data(), DType::kI64, {rows});
  const TensorView lv = Contiguous(loss.data(), dtype, {1});
  const TensorView gv = Contiguous(one.data(), dtype, {1});
  for (auto _ : state) {
    CrossEntropy("bench", xv, tv, nullptr, {}, lv, pv);
    CrossEntropyBackward("bench", gv, pv, tv, nullptr, {}, dv);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * 4 * rows * classes *
                          static_cast<int64_t>(SizeOf(dtype)));
}

const int registered = [] {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string suffix = std::string("/") + Name(dtype);
    for (const int64_t classes : {int64_t{4096}, int64_t{32000}}) {
      benchmark::RegisterBenchmark(("linear_cross_entropy" + suffix + "/512x512x" + std::to_string(classes)).c_str(),
                                   BM_LinearCrossEntropy, dtype, 512, 512, classes)
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
    benchmark::RegisterBenchmark(("cross_entropy" + suffix + "/1024x4096").c_str(), BM_CrossEntropy, dtype, 1024, 4096)
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond);
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
