// Bytes per second of compulsory traffic: AdamW reads four tensors and writes three, the norm reads one, the scaling
// reads and writes one.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/optimizer/adamw.h"
#include "kernels/optimizer/grad_norm.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

constexpr int64_t kElements = int64_t{1} << 24;

// `tensors` entries of kElements / tensors elements; four tensors each, of one dtype.
struct Setup {
  explicit Setup(benchmark::State& state) : dtype(static_cast<DType>(state.range(0))), tensors(state.range(1)) {
    const float values[] = {0.5f, 1.25f, 0.75f, 0.375f, 0.0625f, 1.0f, 1.5f};
    for (int t = 0; t < 4; ++t) {
      memory.emplace_back(static_cast<size_t>(kElements) * SizeOf(dtype));
      for (int64_t i = 0; i < kElements; ++i) testing::SetValue(dtype, memory.back().data(), i, values[(i + t) % 7]);
    }
  }
  TensorView Get(int t, int64_t i) {
    const int64_t each = kElements / tensors;
    return Contiguous(memory[static_cast<size_t>(t)].data() + i * each * static_cast<int64_t>(SizeOf(dtype)), dtype,
                      {each});
  }
  std::vector<TensorView> All(int t) {
    std::vector<TensorView> views;
    for (int64_t i = 0; i < tensors; ++i) views.push_back(Get(t, i));
    return views;
  }
  int64_t Bytes() const { return kElements * static_cast<int64_t>(SizeOf(dtype)); }
  DType dtype;
  int64_t tensors;
  std::vector<std::vector<char>> memory;
};

void Step(benchmark::State& state) {
  Setup s(state);
  std::vector<AdamWTensors> entries;
  for (int64_t i = 0; i < s.tensors; ++i) {
    const AdamWNumbers numbers = {1e-6, 0.9, 0.95, 1e-8, 0.1, false, 0.5, 0.5};
    entries.push_back({s.Get(0, i), s.Get(1, i), s.Get(2, i), s.Get(3, i), {}, {}, numbers});
  }
  for (auto _ : state) AdamW("bench", entries);
  state.SetBytesProcessed(state.iterations() * 7 * s.Bytes());
}

void Norm(benchmark::State& state) {
  Setup s(state);
  const std::vector<TensorView> grads = s.All(0);
  const std::vector<int64_t> groups(grads.size(), 0);
  for (auto _ : state) benchmark::DoNotOptimize(GradPowerSums("bench", grads, groups, 1, 2));
  state.SetBytesProcessed(state.iterations() * s.Bytes());
}

void Scale(benchmark::State& state) {
  Setup s(state);
  const std::vector<TensorView> grads = s.All(0);
  for (auto _ : state) ScaleAll("bench", grads, 1.0);
  state.SetBytesProcessed(state.iterations() * 2 * s.Bytes());
}

void Shapes(benchmark::internal::Benchmark* b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t tensors : {1, 4096}) b->Args({static_cast<int64_t>(dtype), tensors});
  }
  b->ArgNames({"dtype", "tensors"})->UseRealTime();
}

BENCHMARK(Step)->Apply(Shapes);
BENCHMARK(Norm)->Apply(Shapes);
BENCHMARK(Scale)->Apply(Shapes);

}  // namespace
}  // namespace jumar
