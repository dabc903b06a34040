// Multiply-adds per second of the visible part, beside the peak of the machine: forward has 2 products of D per score,
// backward 5. Arguments: dtype, S, D, heads of k (of 16 of q), causal, documents: with more than one, S rows are packed
// sequences of uneven length.
#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/attention/attention.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

constexpr int64_t kHeads = 16;

struct Setup {
  explicit Setup(benchmark::State& state)
      : dtype(static_cast<DType>(state.range(0))), s(state.range(1)), d(state.range(2)), causal(state.range(4) != 0) {
    in.q = Make(kHeads, d);
    in.k = Make(state.range(3), d);
    in.v = Make(state.range(3), d);
    in.scale = 0.1;
    const int64_t documents = state.range(5);
    // Lengths in proportion to 1, 2, .. documents.
    for (int64_t i = 0, begin = 0; i < documents; ++i) {
      const int64_t end = s * (i + 1) * (i + 2) / (documents * (documents + 1));
      AttentionSequence sequence;
      sequence.index = i;
      sequence.q_begin = sequence.k_begin = begin;
      sequence.q_len = sequence.k_len = end - begin;
      if (causal) sequence.high = 0;
      in.sequences.push_back(sequence);
      scores += causal ? (end - begin) * (end - begin + 1) / 2 : (end - begin) * (end - begin);
      begin = end;
    }
    for (TensorView* x : {&out, &dy, &dq}) *x = Make(kHeads, d);
    for (TensorView* x : {&dk, &dv}) *x = Make(state.range(3), d);
    for (TensorView* x : {&max, &sum}) {
      memory.emplace_back(static_cast<size_t>(kHeads * s * 8 * 4));
      *x = Contiguous(memory.back().data(), DType::kF32, {1, kHeads, s, 8});
    }
    Attention("bench", in, out, max, sum);
  }
  // [1, heads, S, D] as a view of [1, S, heads, D].
  TensorView Make(int64_t heads, int64_t cols) {
    memory.emplace_back(static_cast<size_t>(s * heads * cols) * SizeOf(dtype));
    const float values[] = {0.5f, -1.25f, 1.75f, -0.375f, 0.0625f, -1.0f, 1.5f};
    uint32_t random = static_cast<uint32_t>(memory.size());
    for (int64_t i = 0; i < s * heads * cols; ++i) {
      random = random * 1664525u + 1013904223u;
      testing::SetValue(dtype, memory.back().data(), i, values[(random >> 16) % 7]);
    }
    TensorView x = Contiguous(memory.back().data(), dtype, {1, heads, s, cols});
    x.stride[1] = cols;
    x.stride[2] = heads * cols;
    return x;
  }
  void Report(benchmark::State& state, int products) const {
    state.counters["flops"] = benchmark::Counter(static_cast<double>(2 * products * kHeads * d * scores),
                                                 benchmark::Counter::kIsIterationInvariantRate);
  }
  DType dtype;
  int64_t s, d;
  int64_t scores = 0;
  bool causal;
  AttentionInputs in;
  TensorView out, dy, max, sum, dq, dk, dv;
  std::vector<testing::Memory> memory;
};

void Forward(benchmark::State& state) {
  Setup x(state);
  for (auto _ : state) Attention("bench", x.in, x.out, x.max, x.sum);
  x.Report(state, 2);
}

void Backward(benchmark::State& state) {
  Setup x(state);
  for (auto _ : state) {
    AttentionBackward("bench", x.in, x.dy, x.out, x.max, x.sum, {x.dq, x.dk, x.dv, {}, {}, {}, {}});
  }
  x.Report(state, 5);
}

void Shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"dtype", "S", "D", "kv", "causal", "documents"})->UseRealTime()->Unit(benchmark::kMillisecond);
  for (const int64_t dtype : {0, 1}) {
    for (const int64_t s : {512, 2048}) {
      for (const int64_t d : {64, 128}) b->Args({dtype, s, d, 16, 1, 1});
    }
    b->Args({dtype, 2048, 128, 4, 1, 1});
    b->Args({dtype, 2048, 128, 16, 0, 1});
    for (const int64_t d : {64, 128}) {
      b->Args({dtype, 16384, d, 4, 1, 32});
      for (const int64_t s : {8192, 16384}) b->Args({dtype, s, d, 16, 1, 32});
    }
    b->Args({dtype, 8192, 128, 1, 1, 1});
  }
}

BENCHMARK(Forward)->Apply(Shapes);
BENCHMARK(Backward)->Apply(Shapes);

}  // namespace
}  // namespace jumar
