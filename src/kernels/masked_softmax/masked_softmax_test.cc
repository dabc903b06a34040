#include "kernels/masked_softmax/masked_softmax.h"

#include <cmath>

#include "kernels/masked_softmax/masked_softmax_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr int64_t kBatch = 2, kHeads = 3, kRows = 5;

// mask_sizes: 1 or the size of x, from the last dimension on.
void Check(DType dtype, int64_t n, const std::vector<int64_t>& mask_sizes, double scale, uint64_t seed) {
  const std::vector<int64_t> sizes{kBatch, kHeads, kRows, n};
  const bool strided = seed % 2 == 1;
  const std::vector<int64_t> strides{kRows * kHeads * n, n, kHeads * n, 1};
  Buffer x(dtype, sizes, strided ? strides : std::vector<int64_t>{kHeads * kRows * n, kRows * n, n, 1});
  Buffer y(dtype, sizes), dy(dtype, sizes), dx(dtype, sizes);
  x.FillRandom(seed, 3);
  dy.FillRandom(seed + 1);
  Random random(seed + 2);
  int64_t count = 1;
  for (const int64_t size : mask_sizes) count *= size;
  std::vector<uint8_t> bits(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const bool whole = i / mask_sizes.back() == 1;  // a row that is hidden whole
    bits[static_cast<size_t>(i)] = whole || random.Uniform() < -0.4 ? 2 : 0;
  }
  TensorView mask = Contiguous(bits.data(), DType::kBool, mask_sizes);
  ScaledMaskedSoftmax("op", x.view(), mask, scale, y.view());
  ScaledMaskedSoftmaxBackward("op", dy.view(), y.view(), mask, scale, dx.view());
  const double u = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
  for (int64_t row = 0; row < kBatch * kHeads * kRows; ++row) {
    const int64_t at[4] = {row / kRows / kHeads, row / kRows % kHeads, row % kRows, 0};
    std::vector<double> xs, dys, ys, size;
    std::vector<bool> hidden;
    double largest = 0;
    for (int64_t j = 0; j < n; ++j) {
      int64_t index = 0;
      for (size_t i = 0; i < mask_sizes.size(); ++i) {
        const size_t dim = 4 - mask_sizes.size() + i;
        index = index * mask_sizes[i] + (mask_sizes[i] == 1 ? 0 : dim == 3 ? j : at[dim]);
      }
      hidden.push_back(bits[static_cast<size_t>(index)] != 0);
      xs.push_back(x.Get(row * n + j));
      dys.push_back(dy.Get(row * n + j));
      ys.push_back(y.Get(row * n + j));
      largest = std::max(largest, std::abs(scale * xs.back()));
    }
    const std::vector<double> want = ref::MaskedSoftmax(xs, hidden, scale);
    const std::vector<double> grad = ref::MaskedSoftmaxGrad(dys, ys, hidden, scale, &size);
    const double terms = static_cast<double>(n) / 8;
    for (size_t j = 0; j < want.size(); ++j) {
      ASSERT_NEAR(ys[j], want[j], 0.51 * UlpSize(dtype, want[j]) + (12 + 2 * largest + terms) * u * want[j])
          << Describe(x.view()) << " row " << row << " column " << j;
      const double got = dx.Get(row * n + static_cast<int64_t>(j));
      ASSERT_NEAR(got, grad[j], 0.51 * UlpSize(dtype, grad[j]) + (6 + terms) * u * size[j]) << row << " " << j;
      if (hidden[j]) {
        ASSERT_EQ(got, 0);
      }
    }
  }
  for (const Buffer* b : {&y, &dx}) b->CheckRedZones("masked softmax");
}

TEST(MaskedSoftmax, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t n : {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 130}) {
        for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
                 {kBatch, kHeads, kRows, n}, {kBatch, 1, kRows, n}, {kRows, n}, {1, 1, 1, n}, {kHeads, 1, 1}}) {
          if (SmallTests() && n > 9 && sizes.size() != 2) continue;
          Check(dtype, n, sizes, seed % 3 == 0 ? -0.7 : 0.9, seed);
          ++seed;
        }
      }
    }
  });
}

TEST(MaskedSoftmax, NaNStaysInItsRow) {
  Buffer x(DType::kF32, {3, 10}), y(DType::kF32, {3, 10});
  x.FillRandom(1);
  x.Set(14, std::nan(""));
  std::vector<uint8_t> none(10, 0);
  ScaledMaskedSoftmax("op", x.view(), Contiguous(none.data(), DType::kBool, {10}), 1, y.view());
  for (int64_t i = 0; i < 30; ++i) EXPECT_EQ(std::isnan(y.Get(i)), i / 10 == 1) << i;
}

TEST(MaskedSoftmax, ResultsDoNotDependOnThreads) {
  std::vector<double> first;
  for (const int threads : {1, 2, 5}) {
    WithThreads(threads, [&] {
      Buffer x(DType::kBF16, {40, 700}), y(DType::kBF16, {40, 700});
      x.FillRandom(3);
      std::vector<uint8_t> mask(40, 0);
      mask[7] = 1;
      ScaledMaskedSoftmax("op", x.view(), Contiguous(mask.data(), DType::kBool, {40, 1}), 0.5, y.view());
      if (first.empty()) first = y.ToDoubles();
      EXPECT_EQ(y.ToDoubles(), first);
    });
  }
}

TEST(MaskedSoftmax, Errors) {
  Buffer x(DType::kF32, {2, 4}), other(DType::kF32, {2, 3});
  std::vector<uint8_t> mask(8, 0);
  const auto fails = [&](const std::vector<int64_t>& sizes, const TensorView& y, const std::string& text) {
    ExpectError([&] { ScaledMaskedSoftmax("op", x.view(), Contiguous(mask.data(), DType::kBool, sizes), 1, y); }, "op",
                text);
  };
  fails({2, 3}, x.view(), "does not broadcast");
  fails({1, 2, 4}, x.view(), "does not broadcast");
  fails({2, 4}, other.view(), "y must be");
}

}  // namespace
}  // namespace jumar::testing
