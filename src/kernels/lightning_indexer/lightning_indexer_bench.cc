// GFLOP/s of the indexer and of its losses over what queries see, beside the multiply-add peak measured around each
// case. Queries are the last S1 of S2 tokens, as a rank of context parallel has them. The SIMD level is JUMAR_SIMD's;
// threads are OMP_NUM_THREADS'.
#include <benchmark/benchmark.h>

#include <list>

#include "kernels/lightning_indexer/lightning_indexer.h"
#include "kernels/limits/report.h"
#include "testing/bench_util.h"

namespace jumar {
namespace {

constexpr int64_t kD = 128;

class Setup {
 public:
  Setup(DType type, int64_t rows, int64_t keys, int64_t heads) : dtype(type), s1(rows), s2(keys), n(heads) {
    in.query = Make({1, s1, n, kD});
    in.key = Make({1, s2, 1, kD});
    in.weights = Make({1, s1, n});
    in.sequences = {{0, 0, s1, 0, s2}};
    gradients = {Make({1, s1, n, kD}), Make({1, s2, 1, kD}), Make({1, s1, n})};
  }
  TensorView Make(const std::vector<int64_t>& sizes) { return Make(sizes, dtype); }
  TensorView Make(const std::vector<int64_t>& sizes, DType type) {
    const int64_t count = Contiguous(nullptr, type, sizes).numel();
    memory_.push_back(testing::RandomValues(type, count, [](uint32_t random) {
      return static_cast<float>(static_cast<int>(random >> 8) - (1 << 23)) * 0x1p-23f;
    }));
    return Contiguous(memory_.back().data(), type, sizes);
  }
  TensorView Indices(int64_t k) {
    memory_.emplace_back(static_cast<size_t>(s1 * k) * 4);
    return Contiguous(memory_.back().data(), DType::kI32, {1, s1, 1, k});
  }
  double Pairs() const { return static_cast<double>(s1) * (static_cast<double>(s2) - static_cast<double>(s1 - 1) / 2); }

  DType dtype;
  int64_t s1, s2, n;
  IndexerInputs in;
  IndexerGradients gradients;

 private:
  std::list<testing::Memory> memory_;
};

void BM_Choose(benchmark::State& state, DType dtype, int64_t rows, int64_t keys, int64_t heads, int64_t k) {
  Setup x(dtype, rows, keys, heads);
  const TensorView indices = x.Indices(k);
  for (auto _ : state) LightningIndexer("bench", x.in, indices, nullptr);
  ReportGflops(state, dtype, x.Pairs() * static_cast<double>(2 * heads * kD));
}

void BM_Grad(benchmark::State& state, DType dtype, int64_t rows, int64_t keys, int64_t heads, int64_t k) {
  Setup x(dtype, rows, keys, heads);
  const TensorView indices = x.Indices(k);
  LightningIndexer("bench", x.in, indices, nullptr);
  const TensorView slots = Contiguous(indices.data, DType::kI32, {1, rows, k});
  const TensorView dy = x.Make({1, rows, k});
  for (auto _ : state) LightningIndexerGrad("bench", x.in, dy, slots, x.gradients.dq, x.gradients.dk, x.gradients.dw);
  ReportGflops(state, dtype, static_cast<double>(rows * k) * static_cast<double>(6 * heads * kD));
}

// Attention of 32 heads: absorbed, 512 columns and 64 of rope.
void BM_SparseLoss(benchmark::State& state, DType dtype, int64_t rows, int64_t keys, int64_t heads, int64_t k) {
  Setup x(dtype, rows, keys, heads);
  const TensorView indices = x.Indices(k);
  LightningIndexer("bench", x.in, indices, nullptr);
  const TensorView slots = Contiguous(indices.data, DType::kI32, {1, rows, k});
  IndexerTeacher teacher{x.Make({1, rows, 32, 512}),
                         x.Make({1, keys, 1, 512}),
                         x.Make({1, rows, 32, 64}),
                         x.Make({1, keys, 1, 64}),
                         x.Make({1, rows, 32}, DType::kF32),
                         x.Make({1, rows, 32}, DType::kF32),
                         0.04};
  for (auto _ : state) SparseIndexerLoss("bench", x.in, teacher, slots, x.gradients);
  ReportGflops(state, dtype, static_cast<double>(rows * k) * static_cast<double>(6 * heads * kD + 2 * 32 * 576));
}

// Attention of 32 heads of 128 columns and 64 of rope.
void BM_DenseLoss(benchmark::State& state, DType dtype, int64_t rows, int64_t keys, int64_t heads) {
  Setup x(dtype, rows, keys, heads);
  IndexerTeacher teacher{x.Make({1, rows, 32, 128}),
                         x.Make({1, keys, 32, 128}),
                         x.Make({1, rows, 32, 64}),
                         x.Make({1, keys, 32, 64}),
                         x.Make({1, rows, 32}, DType::kF32),
                         x.Make({1, rows, 32}, DType::kF32),
                         0.07};
  const TensorView max = x.Make({1, rows}, DType::kF32);
  const TensorView sum = x.Make({1, rows}, DType::kF32);
  IndexerSoftmax("bench", x.in, max, sum);
  for (auto _ : state) DenseIndexerLoss("bench", x.in, teacher, max, sum, x.gradients);
  ReportGflops(state, dtype, x.Pairs() * static_cast<double>(6 * heads * kD + 2 * 32 * 192));
}

const int registered = [] {
  const auto add = [](const std::string& name, auto function, auto... arguments) {
    benchmark::RegisterBenchmark(name.c_str(), function, arguments...)->UseRealTime()->Unit(benchmark::kMillisecond);
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string type = Name(dtype);
    for (const int64_t heads : {16, 64}) {
      const std::string n = "/heads:" + std::to_string(heads) + "/" + type;
      for (const int64_t k : {512, 2048}) {
        add("choose/s2:8192/k:" + std::to_string(k) + n, &BM_Choose, dtype, 256, 8192, heads, k);
      }
      add("choose/s1:1024/k:256" + n, &BM_Choose, dtype, 1024, 1024, heads, 256);
      add("grad/s2:8192/k:512" + n, &BM_Grad, dtype, 512, 8192, heads, 512);
      add("sparse_loss/s2:8192/k:512" + n, &BM_SparseLoss, dtype, 512, 8192, heads, 512);
      add("dense_loss/s2:2048" + n, &BM_DenseLoss, dtype, 512, 2048, heads);
    }
  }
  return 0;
}();

}  // namespace
}  // namespace jumar
