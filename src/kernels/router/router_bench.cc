// Routers forward + backward, as bytes that have to move: logits twice, their gradient, weights, their gradient and the
// experts' numbers twice. The SIMD level is JUMAR_SIMD's; threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "kernels/router/balance.h"
#include "kernels/router/router.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

// Values in (-4, 4), exact in bf16 to 8 bits.
testing::Memory Values(DType dtype, int64_t n) {
  return testing::RandomValues(
      dtype, n, [](uint32_t random) { return static_cast<float>(static_cast<int32_t>(random)) * 0x1p-29f; });
}

struct Data {
  Data(DType dtype, int64_t rows, int64_t experts, int64_t k)
      : x(Values(dtype, rows * experts)),
        weights(Values(dtype, rows * k)),
        dx(x.size()),
        indices(static_cast<size_t>(rows * k)),
        logits(Contiguous(x.data(), dtype, {rows, experts})),
        w(Contiguous(weights.data(), dtype, {rows, k})),
        i(Contiguous(indices.data(), DType::kI64, {rows, k})),
        dlogits(Contiguous(dx.data(), dtype, {rows, experts})) {}
  testing::Memory x, weights, dx;
  std::vector<int64_t> indices;
  TensorView logits, w, i, dlogits;
};

void BM_Router(benchmark::State& state, DType dtype, RouterOptions options, int64_t rows, int64_t experts,
               bool backward) {
  Data data(dtype, rows, experts, options.k);
  std::vector<float> bias(static_cast<size_t>(experts), 0.125F);
  const TensorView b = Contiguous(bias.data(), DType::kF32, {experts});
  RouterTensors t;
  t.logits = data.logits;
  if (options.groups > 1) t.bias = &b;
  t.weights = data.w;
  t.indices = data.i;
  RouterGradTensors g;
  g.source = data.logits;
  g.grad_weights = &data.w;
  g.indices = data.i;
  g.dlogits = data.dlogits;
  RouterTopK("bench", t, options);
  for (auto _ : state) {
    if (!backward) RouterTopK("bench", t, options);
    if (backward) RouterTopKBackward("bench", g, options);
  }
  const auto item = static_cast<int64_t>(SizeOf(dtype));
  const int64_t once = rows * (experts * item + options.k * (item + 8));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * (backward ? once + rows * experts * item : once));
  state.counters["ns/row"] = benchmark::Counter(
      static_cast<double>(rows) * 1e-9, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void BM_LoadBalance(benchmark::State& state, DType dtype, int64_t rows, int64_t experts) {
  Data data(dtype, rows, experts, 8);
  std::vector<float> tokens(static_cast<size_t>(experts));
  float loss = 1;
  const TensorView t = Contiguous(tokens.data(), DType::kF32, {experts});
  const TensorView l = Contiguous(&loss, DType::kF32, {});
  for (auto _ : state) {
    LoadBalanceLoss("bench", {data.logits}, experts, 8, nullptr, l, t);
    LoadBalanceLossBackward("bench", l, {data.logits}, nullptr, t, {data.dlogits});
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * 3 * rows * experts *
                          static_cast<int64_t>(SizeOf(dtype)));
}

const int registered = [] {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string suffix = std::string("/") + Name(dtype);
    RouterOptions qwen;
    qwen.k = 8;
    qwen.renorm = true;
    RouterOptions plain;
    plain.k = 8;
    RouterOptions deepseek;
    deepseek.k = 8;
    deepseek.scoring = Scoring::kSigmoid;
    deepseek.renorm = true;
    deepseek.eps = 1e-20;
    deepseek.groups = 8;
    deepseek.kept_groups = 4;
    for (const bool backward : {false, true}) {
      const std::string way = backward ? "/backward" : "/forward";
      const auto add = [&](const char* name, const RouterOptions& options, int64_t experts) {
        benchmark::RegisterBenchmark((name + suffix + "/8192x" + std::to_string(experts) + way).c_str(), BM_Router,
                                     dtype, options, 8192, experts, backward)
            ->UseRealTime()
            ->Unit(benchmark::kMicrosecond);
      };
      add("renorm", qwen, 128);
      add("softmax", plain, 128);
      add("sigmoid_groups", deepseek, 256);
    }
    benchmark::RegisterBenchmark(("load_balance" + suffix + "/8192x128").c_str(), BM_LoadBalance, dtype, 8192, 128)
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
