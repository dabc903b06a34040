#include "kernels/sparse_attention/pair_dots.h"

#include <cmath>
#include <vector>

#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr int64_t kKeys = 23;

// Rows come in any order, some twice; columns are adjacent, rows are not.
void Check(int64_t n, int64_t columns, int64_t lanes, int64_t ld, bool accumulate) {
  const PairDots& pairs = *ChoosePairDots();
  Buffer keys(DType::kBF16, {kKeys, columns}, {columns + 1, 1});
  Buffer heads(DType::kBF16, {lanes, columns});
  Buffer out(DType::kF32, {n, ld});
  keys.FillRandom(1);
  heads.FillRandom(2);
  out.Fill([](int64_t i) { return static_cast<double>(i % 5); });
  std::vector<const void*> rows;
  for (int64_t i = 0; i < n; ++i) rows.push_back(keys.view().ptr<uint16_t>() + i / 2 * 7 % kKeys * (columns + 1));
  const GemmOperand operand{heads.view().data, DType::kBF16, lanes, columns, columns, 1};
  const int64_t panel = pairs.gemm.PanelStride(pairs.gemm.nr, columns);
  std::vector<uint16_t> packed(static_cast<size_t>(panel), 0xFFFF);
  pairs.gemm.pack_b({&operand, 0, lanes, 0, columns, panel, packed.data()});
  pairs.dots({rows.data(), n, columns, packed.data(), lanes > 16, out.view().ptr<float>(), ld, accumulate});
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t h = 0; h < lanes; ++h) {
      double sum = accumulate ? static_cast<double>((i * ld + h) % 5) : 0, size = sum;
      for (int64_t c = 0; c < columns; ++c) {
        const double product = keys.Get(i / 2 * 7 % kKeys * columns + c) * heads.Get(h * columns + c);
        sum += product;
        size += std::abs(product);
      }
      ASSERT_NEAR(out.Get(i * ld + h), sum, static_cast<double>(columns + 2) * 0x1p-24 * size)
          << n << " rows, " << columns << " columns, " << lanes << " heads: " << i << " " << h;
    }
    // The softmax of a whole panel sees the other vector.
    for (int64_t h = 16; h < ld && lanes <= 16 && !accumulate; ++h) ASSERT_EQ(out.Get(i * ld + h), 0) << i << " " << h;
  }
  out.CheckRedZones("dots");
}

TEST(PairDots, MatchSumsInDouble) {
  if (ChoosePairDots() == nullptr) GTEST_SKIP() << "no products of pairs";
  for (const int64_t lanes : {1, 9, 16, 17, 32}) {
    for (const int64_t columns : {2, 30, 64, 150}) {
      for (const int64_t n : {1, 2, 11, 12, 13, 24, 77}) {
        for (const bool accumulate : {false, true}) {
          if (lanes <= 16) Check(n, columns, lanes, 16, accumulate);
          Check(n, columns, lanes, 32, accumulate);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(PairDots, AreThoseOfTheMatrixKernel) {
  ForEachSimdTarget([](const std::string&) {
    const GemmKernel& kernel = ChooseGemmKernel(DType::kBF16, DType::kBF16);
    const PairDots* pairs = ChoosePairDots();
    EXPECT_EQ(pairs != nullptr, kernel.packed_bytes == 2 && kernel.k_step == 2);
    if (pairs != nullptr) {
      EXPECT_EQ(&pairs->gemm, &kernel);
    }
  });
}

}  // namespace
}  // namespace jumar::testing
