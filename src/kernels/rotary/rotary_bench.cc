// Bytes per second of compulsory traffic (x read once, out written once; tables are small), beside memcpy.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/rotary/rotary.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

enum Memory { kBsnd, kBnsd };

// x of B = 4, N = 32, D = 128 as logical [B, N, S, D], tables [1, 1, S, D] in fp32.
struct Setup {
  explicit Setup(benchmark::State& state)
      : dtype(static_cast<DType>(state.range(0))), s(state.range(2)), mode(static_cast<RotaryMode>(state.range(3))) {
    bytes = 4 * 32 * s * 128 * static_cast<int64_t>(SizeOf(dtype));
    for (testing::Memory& m : memory) m.assign(static_cast<size_t>(bytes), 0x3C);
    table.assign(static_cast<size_t>(s) * 128, 0.5f);
    if (state.range(1) == kBnsd) {
      for (int i = 0; i < 3; ++i) x[i] = Contiguous(memory[i].data(), dtype, {4, 32, s, 128});
    } else {
      for (int i = 0; i < 3; ++i) {
        x[i] = Contiguous(memory[i].data(), dtype, {4, s, 32, 128});
        std::swap(x[i].size[1], x[i].size[2]);
        std::swap(x[i].stride[1], x[i].stride[2]);
      }
    }
    cos = Contiguous(table.data(), DType::kF32, {1, 1, s, 128});
    dcos = dsin = cos;
    sums.assign(2 * table.size(), 0);
    dcos.data = sums.data();
    dsin.data = sums.data() + table.size();
  }
  DType dtype;
  int64_t s;
  RotaryMode mode;
  int64_t bytes;
  testing::Memory memory[3];
  std::vector<float> table, sums;
  TensorView x[3], cos, dcos, dsin;
};

void Copy(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) {
    ParallelFor(s.bytes, 1 << 16, [&](int64_t begin, int64_t end) {
      std::memcpy(s.memory[1].data() + begin, s.memory[0].data() + begin, static_cast<size_t>(end - begin));
    });
  }
  state.SetBytesProcessed(state.iterations() * 2 * s.bytes);
}

void Forward(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) RotaryMul(s.x[0], s.cos, s.cos, s.mode, s.x[1]);
  state.SetBytesProcessed(state.iterations() * 2 * s.bytes);
}

void Backward(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) RotaryMulBackward(s.x[0], s.x[1], s.cos, s.cos, s.mode, s.x[2], nullptr, nullptr);
  state.SetBytesProcessed(state.iterations() * 2 * s.bytes);
}

void BackwardWithTables(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) RotaryMulBackward(s.x[0], s.x[1], s.cos, s.cos, s.mode, s.x[2], &s.dcos, &s.dsin);
  state.SetBytesProcessed(state.iterations() * 3 * s.bytes);
}

void Shapes(benchmark::internal::Benchmark* b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Memory memory : {kBsnd, kBnsd}) {
      for (const RotaryMode mode : {RotaryMode::kHalf, RotaryMode::kInterleave}) {
        b->Args({static_cast<int64_t>(dtype), memory, 4096, static_cast<int64_t>(mode)});
      }
    }
  }
  b->ArgNames({"dtype", "memory", "seq", "mode"})->UseRealTime();
}

BENCHMARK(Copy)->Args({static_cast<int64_t>(DType::kBF16), kBsnd, 4096, 0})->UseRealTime();
BENCHMARK(Forward)->Apply(Shapes);
BENCHMARK(Backward)->Apply(Shapes);
BENCHMARK(BackwardWithTables)->Apply(Shapes);

}  // namespace
}  // namespace jumar
