// Bytes per second of compulsory traffic: x and the mask are read, y is written; backward reads two and writes one.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/masked_softmax/masked_softmax.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

constexpr int64_t kHeads = 16;

void Run(benchmark::State& state, bool backward) {
  const auto dtype = static_cast<DType>(state.range(0));
  const int64_t s = state.range(1);
  const int64_t count = kHeads * s * s;
  const auto bytes = static_cast<int64_t>(SizeOf(dtype));
  std::vector<std::vector<char>> memory(3, std::vector<char>(static_cast<size_t>(count * bytes)));
  std::vector<TensorView> views;
  for (auto& m : memory) {
    for (int64_t i = 0; i < count; ++i)
      testing::SetValue(dtype, m.data(), i, static_cast<float>(i % 7) * 0.25f - 0.75f);
    views.push_back(Contiguous(m.data(), dtype, {1, kHeads, s, s}));
  }
  std::vector<uint8_t> mask(static_cast<size_t>(s * s));
  for (int64_t i = 0; i < s * s; ++i) mask[static_cast<size_t>(i)] = i % s > i / s ? 1 : 0;
  const TensorView m = Contiguous(mask.data(), DType::kBool, {1, 1, s, s});
  for (auto _ : state) {
    if (backward) {
      ScaledMaskedSoftmaxBackward("bench", views[0], views[1], m, 0.1, views[2]);
    } else {
      ScaledMaskedSoftmax("bench", views[0], m, 0.1, views[1]);
    }
  }
  state.SetBytesProcessed(state.iterations() * ((backward ? 3 : 2) * count * bytes + s * s));
}

void Forward(benchmark::State& state) { Run(state, false); }
void Backward(benchmark::State& state) { Run(state, true); }

void Shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dtype", "S"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (const int64_t dtype : {0, 1}) b->Args({dtype, 256})->Args({dtype, 1024});
}

BENCHMARK(Forward)->Apply(Shapes);
BENCHMARK(Backward)->Apply(Shapes);

}  // namespace
}  // namespace jumar
