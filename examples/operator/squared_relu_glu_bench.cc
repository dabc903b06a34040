// Bytes per second of compulsory traffic, to be held against the machine's copy bandwidth.
#include <benchmark/benchmark.h>

#include <vector>

#include "squared_relu_glu.h"

namespace jumar::example {
namespace {

void Forward(benchmark::State& state) {
  const auto dtype = static_cast<DType>(state.range(0));
  const int64_t n = state.range(1);
  const auto bytes = static_cast<size_t>(n) * SizeOf(dtype);
  // 0x3C in each byte: values near 0.01 in fp32 and bf16, no subnormals.
  std::vector<char> input(bytes, 0x3C), gate(bytes, 0x3C), y(bytes);
  const TensorView x = Contiguous(input.data(), dtype, {n});
  const TensorView g = Contiguous(gate.data(), dtype, {n});
  const TensorView out = Contiguous(y.data(), dtype, {n});
  for (auto _ : state) SquaredReluGlu("bench", x, g, out);
  state.SetBytesProcessed(state.iterations() * 3 * static_cast<int64_t>(bytes));
}

BENCHMARK(Forward)
    ->ArgNames({"dtype", "n"})
    ->ArgsProduct({{static_cast<int64_t>(DType::kF32), static_cast<int64_t>(DType::kBF16)}, {1 << 12, 1 << 25}})
    ->UseRealTime();

}  // namespace
}  // namespace jumar::example
