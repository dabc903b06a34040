// Bytes per second of compulsory traffic (every input read once, every output written once), beside memcpy.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/swiglu/swiglu.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

// `count` tensors of [rows, cols] with values in about (-2, 2), each on its own pages.
struct Setup {
  Setup(benchmark::State& state, int count)
      : dtype(static_cast<DType>(state.range(0))), rows(state.range(1)), cols(state.range(2)) {
    const float values[] = {0.5f, -1.25f, 1.75f, -0.375f, 0.0625f, -1.0f, 1.5f};
    for (int t = 0; t < count; ++t) {
      memory.emplace_back(static_cast<size_t>(Bytes()));
      for (int64_t i = 0; i < rows * cols; ++i) testing::SetValue(dtype, memory.back().data(), i, values[(i + t) % 7]);
    }
  }
  TensorView Get(int t, int64_t r, int64_t c) {
    return Contiguous(memory[static_cast<size_t>(t)].data(), dtype, {r, c});
  }
  TensorView Get(int t) { return Get(t, rows, cols); }
  int64_t Bytes() const { return rows * cols * static_cast<int64_t>(SizeOf(dtype)); }
  DType dtype;
  int64_t rows, cols;
  std::vector<std::vector<char>> memory;
};

void Copy(benchmark::State& state) {
  Setup s(state, 2);
  for (auto _ : state) {
    ParallelFor(s.Bytes(), 1 << 16, [&](int64_t begin, int64_t end) {
      std::memcpy(s.memory[1].data() + begin, s.memory[0].data() + begin, static_cast<size_t>(end - begin));
    });
  }
  state.SetBytesProcessed(state.iterations() * 2 * s.Bytes());
}

void Forward(benchmark::State& state) {
  Setup s(state, 3);
  for (auto _ : state) Swiglu("bench", s.Get(0), s.Get(1), s.Get(2));
  state.SetBytesProcessed(state.iterations() * 3 * s.Bytes());
}

void Backward(benchmark::State& state) {
  Setup s(state, 5);
  for (auto _ : state) SwigluBackward("bench", s.Get(0), s.Get(1), s.Get(2), s.Get(3), s.Get(4));
  state.SetBytesProcessed(state.iterations() * 5 * s.Bytes());
}

// [rows, cols] packed into [rows / 2, 2 * cols].
void Packed(benchmark::State& state) {
  Setup s(state, 2);
  for (auto _ : state) SwigluPacked(s.Get(0), -1, s.Get(1, s.rows, s.cols / 2));
  state.SetBytesProcessed(state.iterations() * s.Bytes() * 3 / 2);
}

void Shapes(benchmark::internal::Benchmark* b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    b->Args({static_cast<int64_t>(dtype), 16384, 6144});
    b->Args({static_cast<int64_t>(dtype), 512, 1536});
  }
  b->ArgNames({"dtype", "rows", "cols"})->UseRealTime();
}

BENCHMARK(Copy)->Apply(Shapes);
BENCHMARK(Forward)->Apply(Shapes);
BENCHMARK(Backward)->Apply(Shapes);
BENCHMARK(Packed)->Apply(Shapes);

}  // namespace
}  // namespace jumar
