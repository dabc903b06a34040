// Multiply-adds per second over the slots, beside the peak of the machine: a slot costs a head D + Dr and Dv forward,
// three and two times that backward. Causal, slots picked at random. Arguments: dtype, S, heads of q, D, Dr, Dv, K.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "kernels/sparse_attention/sparse_attention.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

struct Setup {
  explicit Setup(benchmark::State& state)
      : dtype(static_cast<DType>(state.range(0))),
        s(state.range(1)),
        heads(state.range(2)),
        d(state.range(3)),
        dr(state.range(4)),
        dv(state.range(5)),
        ids(state.range(6)) {
    in.q = Make(dtype, {1, s, heads, d});
    in.k = Make(dtype, {1, s, 1, d});
    in.v = dv == d ? in.k : Make(dtype, {1, s, 1, dv});
    g.dq = Make(dtype, {1, s, heads, d});
    g.dk = Make(dtype, {1, s, 1, d});
    g.dv = Make(dtype, {1, s, 1, dv});
    if (dr > 0) {
      in.q_rope = Make(dtype, {1, s, heads, dr});
      in.k_rope = Make(dtype, {1, s, 1, dr});
      g.dq_rope = Make(dtype, {1, s, heads, dr});
      g.dk_rope = Make(dtype, {1, s, 1, dr});
    }
    in.indices = Make(DType::kI32, {1, s, 1, ids});
    uint32_t random = 1;
    for (int64_t i = 0; i < s; ++i) {
      for (int64_t j = 0; j < ids; ++j) {
        random = random * 1664525u + 1013904223u;
        // The first rows see fewer keys than they have slots.
        const bool any = j <= i;
        in.indices.ptr<int32_t>()[i * ids + j] =
            any ? static_cast<int32_t>((random >> 8) % static_cast<uint32_t>(i + 1)) : -1;
      }
      slots += std::min(i + 1, ids);
    }
    in.scale = 0.1;
    in.sequences = {{0, 0, s, 0, s}};
    out = Make(dtype, {1, s, heads, dv});
    dy = Make(dtype, {1, s, heads, dv});
    max = Make(DType::kF32, {1, 1, s, heads});
    sum = Make(DType::kF32, {1, 1, s, heads});
    SparseAttention("bench", in, out, max, sum);
  }
  TensorView Make(DType type, const std::vector<int64_t>& sizes) {
    TensorView x = Contiguous(nullptr, type, sizes);
    if (type == DType::kI32) {
      memory.emplace_back(static_cast<size_t>(x.numel()) * 4);
    } else {
      memory.push_back(testing::SmallValues(type, x.numel()));
    }
    x.data = memory.back().data();
    return x;
  }
  void Report(benchmark::State& state, int64_t products) const {
    state.counters["flops"] = benchmark::Counter(static_cast<double>(2 * heads * slots * products),
                                                 benchmark::Counter::kIsIterationInvariantRate);
  }

  DType dtype;
  int64_t s, heads, d, dr, dv, ids;
  int64_t slots = 0;
  SparseAttentionInputs in;
  SparseAttentionGradients g;
  TensorView out, dy, max, sum;
  std::vector<testing::Memory> memory;
};

void BM_Forward(benchmark::State& state) {
  Setup x(state);
  for (auto _ : state) SparseAttention("bench", x.in, x.out, x.max, x.sum);
  x.Report(state, x.d + x.dr + x.dv);
}

void BM_Backward(benchmark::State& state) {
  Setup x(state);
  for (auto _ : state) SparseAttentionBackward("bench", x.in, x.dy, x.out, x.max, x.sum, x.g);
  x.Report(state, 3 * (x.d + x.dr) + 2 * x.dv);
}

void Shapes(benchmark::internal::Benchmark* b) {
  const auto f32 = static_cast<int64_t>(DType::kF32);
  const auto bf16 = static_cast<int64_t>(DType::kBF16);
  for (const int64_t dtype : {f32, bf16}) {
    b->Args({dtype, 512, 16, 128, 0, 128, 512});
    b->Args({dtype, 2048, 16, 64, 0, 64, 512});
    b->Args({dtype, 2048, 16, 128, 0, 128, 512});
    b->Args({dtype, 8192, 16, 128, 0, 128, 512});
    b->Args({dtype, 2048, 16, 512, 64, 512, 512});
  }
}
BENCHMARK(BM_Forward)->Apply(Shapes)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(BM_Backward)->Apply(Shapes)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace jumar
