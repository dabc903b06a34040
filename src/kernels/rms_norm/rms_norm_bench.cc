// Bytes per second of compulsory traffic, beside the copy bandwidth that bench_limits measures.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/rms_norm/rms_norm.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

struct Setup {
  Setup(DType d, int64_t r, int64_t c)
      : dtype(d), rows(r), cols(c), memory(static_cast<size_t>(5 * r * c) * SizeOf(d)) {
    // The high byte of each element keeps it near 1: subnormal data would time the CPU's microcode.
    for (size_t i = 0; i < memory.size(); ++i) {
      memory[i] = i % SizeOf(d) == SizeOf(d) - 1 ? 0x3F : static_cast<char>(i * 37 % 101);
    }
    small.assign(static_cast<size_t>(2 * cols + rows), 0.5f);
  }
  TensorView Big(int64_t i) {
    return Contiguous(memory.data() + static_cast<size_t>(i * rows * cols) * SizeOf(dtype), dtype, {rows, cols});
  }
  TensorView Gamma() { return Contiguous(small.data(), DType::kF32, {cols}); }
  TensorView DGamma() { return Contiguous(small.data() + cols, DType::kF32, {cols}); }
  TensorView Rstd() { return Contiguous(small.data() + 2 * cols, DType::kF32, {rows, 1}); }
  int64_t Bytes() const { return rows * cols * static_cast<int64_t>(SizeOf(dtype)); }
  DType dtype;
  int64_t rows, cols;
  testing::Memory memory;
  std::vector<float> small;
};

void Forward(benchmark::State& state) {
  Setup s(static_cast<DType>(state.range(0)), state.range(1), state.range(2));
  for (auto _ : state) RmsNorm("bench", s.Big(0), s.Gamma(), 1e-6, 0, s.Big(1), s.Rstd());
  state.SetBytesProcessed(state.iterations() * 2 * s.Bytes());
}

void Backward(benchmark::State& state) {
  Setup s(static_cast<DType>(state.range(0)), state.range(1), state.range(2));
  for (auto _ : state) RmsNormBackward("bench", s.Big(0), s.Big(1), s.Gamma(), s.Rstd(), 0, s.Big(2), s.DGamma());
  state.SetBytesProcessed(state.iterations() * 3 * s.Bytes());
}

void Gated(benchmark::State& state) {
  Setup s(static_cast<DType>(state.range(0)), state.range(1), state.range(2));
  for (auto _ : state) RmsNormGated("bench", s.Big(0), s.Big(1), s.Gamma(), 1e-6, s.Big(2), s.Rstd());
  state.SetBytesProcessed(state.iterations() * 3 * s.Bytes());
}

void Shapes(benchmark::internal::Benchmark* b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    b->Args({static_cast<int64_t>(dtype), 8192, 4096});
    b->Args({static_cast<int64_t>(dtype), 65536, 128});
    b->Args({static_cast<int64_t>(dtype), 512, 512});
  }
  b->ArgNames({"dtype", "rows", "cols"})->UseRealTime();
}

BENCHMARK(Forward)->Apply(Shapes);
BENCHMARK(Backward)->Apply(Shapes);
BENCHMARK(Gated)->Apply(Shapes);

}  // namespace
}  // namespace jumar
