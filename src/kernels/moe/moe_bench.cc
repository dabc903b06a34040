// Bytes per second of compulsory traffic (every row read once, every result row written once), beside memcpy.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/moe/token_permute.h"

namespace jumar {
namespace {

constexpr int64_t kTopK = 8;
constexpr int64_t kExperts = 128;
constexpr int64_t kWidth = 1024;

// Tokens, permuted rows and what goes with them, each on its own pages.
struct Setup {
  explicit Setup(benchmark::State& state)
      : dtype(static_cast<DType>(state.range(0))), tokens(state.range(1)), slots(tokens * kTopK) {
    small = Get({tokens, kWidth}, dtype);
    small_out = Get({tokens, kWidth}, dtype);
    large = Get({slots, kWidth}, dtype);
    large_out = Get({slots, kWidth}, dtype);
    indices = Get({tokens, kTopK}, DType::kI64);
    rows = Get({slots}, DType::kI32);
    probs = Get({tokens, kTopK}, DType::kF32);
    dprobs = Get({tokens, kTopK}, DType::kF32);
    uint64_t x = 1;
    for (int64_t i = 0; i < slots; ++i) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      indices.ptr<int64_t>()[i] = static_cast<int64_t>((x >> 33) % kExperts);
    }
    TokenPermute("bench", small, indices, large, rows);
  }
  TensorView Get(const std::vector<int64_t>& sizes, DType type) {
    TensorView view = Contiguous(nullptr, type, sizes);
    memory.emplace_back(static_cast<size_t>(view.numel()) * SizeOf(type) + 64);
    view.data = memory.back().data() + (64 - reinterpret_cast<uintptr_t>(memory.back().data()) % 64);
    return view;
  }
  int64_t Small() const { return tokens * kWidth * static_cast<int64_t>(SizeOf(dtype)); }
  int64_t Large() const { return Small() * kTopK; }

  DType dtype;
  int64_t tokens, slots;
  TensorView small, small_out, large, large_out, indices, rows, probs, dprobs;
  std::vector<std::vector<char>> memory;
};

void Copy(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) {
    ParallelFor(s.Large(), 1 << 16, [&](int64_t begin, int64_t end) {
      std::memcpy(s.large_out.ptr<char>() + begin, s.large.ptr<char>() + begin, static_cast<size_t>(end - begin));
    });
  }
  state.SetBytesProcessed(state.iterations() * 2 * s.Large());
}

void Permute(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) TokenPermute("bench", s.small, s.indices, s.large_out, s.rows);
  state.SetBytesProcessed(state.iterations() * (s.Small() + s.Large()));
}

void PermuteGrad(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) TokenPermuteGrad("bench", s.large, s.rows, kTopK, false, s.small_out);
  state.SetBytesProcessed(state.iterations() * (s.Small() + s.Large()));
}

void Unpermute(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) TokenUnpermute("bench", s.large, s.rows, &s.probs, s.small_out);
  state.SetBytesProcessed(state.iterations() * (s.Small() + s.Large()));
}

void UnpermuteGrad(benchmark::State& state) {
  Setup s(state);
  for (auto _ : state) {
    TokenUnpermuteGrad("bench", s.small, s.rows, &s.probs, &s.large, false, s.large_out, &s.dprobs);
  }
  state.SetBytesProcessed(state.iterations() * (s.Small() + 2 * s.Large()));
}

void Shapes(benchmark::internal::Benchmark* b) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    b->Args({static_cast<int64_t>(dtype), 4096});
    b->Args({static_cast<int64_t>(dtype), 512});
  }
  b->ArgNames({"dtype", "tokens"})->UseRealTime();
}

BENCHMARK(Copy)->Apply(Shapes);
BENCHMARK(Permute)->Apply(Shapes);
BENCHMARK(PermuteGrad)->Apply(Shapes);
BENCHMARK(Unpermute)->Apply(Shapes);
BENCHMARK(UnpermuteGrad)->Apply(Shapes);

}  // namespace
}  // namespace jumar
