#include "kernels/grouped_matmul/grouped_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/gemm/gemm.h"
#include "kernels/grouped_matmul/grouped_matmul_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

using reference::GroupedOracle;
using reference::Sums;

constexpr const char* kOp = "grouped_matmul";

RowGroups Sizes(const std::vector<int64_t>& sizes) {
  RowGroups groups;
  for (const int64_t n : sizes) {
    groups.ranges.push_back({groups.used, groups.used + n});
    groups.used += n;
  }
  return groups;
}

// Half an ulp and one fp32 (fp64) rounding a term.
void ExpectSums(const Buffer& got, const Sums& sums, int64_t terms, const std::string& what) {
  const DType dtype = got.view().dtype;
  const double eps =
      (dtype == DType::kF64 ? 0x1p-52 : 0x1p-24) * static_cast<double>(std::min<int64_t>(terms, 600) + 4);
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double value = sums.value[static_cast<size_t>(i)];
    const double bound = sums.size[static_cast<size_t>(i)] * eps + (value == 0 ? 0 : 0.501 * UlpSize(dtype, value));
    ASSERT_LE(std::abs(got.Get(i) - value), bound)
        << what << " element " << i << ": " << got.Get(i) << " for " << value;
  }
  got.CheckRedZones(what);
}

struct Case {
  std::vector<int64_t> sizes;
  int64_t rest;  // rows of no group
  int64_t k;
  int64_t n;
};

std::vector<Case> Cases() {
  std::vector<Case> cases = {
      {{3, 0, 5, 1}, 2, 7, 5},
      {{0, 0}, 3, 4, 4},
      {{}, 2, 4, 4},
      {{1, 1, 1, 17, 0, 33}, 0, 33, 130},
      {{4, 2}, 1, 0, 3},
      {{2, 9}, 0, 5, 1},
      {{70, 1, 3}, 5, 270, 19},
  };
  if (!SmallTests()) {
    cases.push_back({{530, 7, 130}, 9, 20, 270});
    cases.push_back({{2, 2100}, 0, 7, 19});  // several runs over the rows in the weight gradient
    cases.push_back({{9}, 0, 2100, 150});    // and over K forward, with two slabs of columns
  }
  return cases;
}

// How the weights, the gradients of weights and the rows lie in memory.
struct Layout {
  const char* name;
  bool weight_columns;
  bool rows_spaced;
  bool gradient_expanded;
};

constexpr Layout kLayouts[] = {{"contiguous", false, false, false},
                               {"transposed weights", true, false, false},
                               {"spaced rows, expanded gradient", true, true, true}};

void CheckCase(const Case& c, DType dtype, const Layout& layout) {
  const RowGroups groups = Sizes(c.sizes);
  const int64_t rows = groups.used + c.rest;
  const int64_t e = groups.count();
  const auto matrix = [&](int64_t r, int64_t cols) {
    return layout.rows_spaced ? Buffer(dtype, {r, cols}, {2 * cols + 3, 2}) : Buffer(dtype, {r, cols});
  };
  const auto stack = [&](DType type) {
    return layout.weight_columns ? Buffer(type, {e, c.k, c.n}, {c.k * c.n, 1, c.k}) : Buffer(type, {e, c.k, c.n});
  };
  const DType sums = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Buffer x = matrix(rows, c.k);
  Buffer dy = layout.gradient_expanded ? Buffer(dtype, {rows, c.n}, {0, 0}) : matrix(rows, c.n);
  Buffer w = stack(dtype);
  Buffer bias(sums, {e, c.n});
  x.FillRandom(1);
  dy.FillRandom(2);
  w.FillRandom(3);
  bias.FillRandom(4);
  const GroupedOracle oracle(groups, rows, c.k, c.n, x.ToDoubles(), dy.ToDoubles(), w.ToDoubles(), bias.ToDoubles());
  for (int64_t t = groups.used; t < rows; ++t) {
    for (int64_t k = 0; k < c.k; ++k) x.Set(t * c.k + k, NAN);
    for (int64_t n = 0; n < c.n && !layout.gradient_expanded; ++n) dy.Set(t * c.n + n, NAN);
  }
  ForEachSimdTarget([&](const std::string& target) {
    const std::string what =
        target + " " + Name(dtype) + " " + std::to_string(c.k) + "x" + std::to_string(c.n) + " " + layout.name;
    Buffer y = matrix(rows, c.n);
    GroupedMatmul(kOp, x.view(), Unstack(w.view()), Unstack(bias.view()), groups, y.view());
    ExpectSums(y, oracle.y, c.k + 1, what + " y");
    Buffer dx = matrix(rows, c.k);
    GroupedMatmulDgrad(kOp, dy.view(), Unstack(w.view()), groups, dx.view());
    ExpectSums(dx, oracle.dx, c.n, what + " dx");
    Buffer dw = stack(dtype);
    GroupedMatmulWgrad(kOp, x.view(), dy.view(), groups, Unstack(dw.view()), false);
    ExpectSums(dw, oracle.dw, rows, what + " dw");
    Buffer db(sums, {e, c.n});
    GroupedMatmulBiasGrad(kOp, dy.view(), groups, Unstack(db.view()));
    ExpectSums(db, oracle.db, rows, what + " db");
    for (const DType type : {sums, dtype}) {
      Buffer added = stack(type);
      added.FillRandom(5);
      Sums to = oracle.dw;
      for (int64_t i = 0; i < added.numel(); ++i) to.Add(i, added.Get(i));
      GroupedMatmulWgrad(kOp, x.view(), dy.view(), groups, Unstack(added.view()), true);
      ExpectSums(added, to, rows + 1, what + " dw added");
    }
  });
}

TEST(GroupedMatmul, MatchesTheOracleOnEveryTarget) {
  for (const DType dtype : FloatDTypes()) {
    for (const Case& c : Cases()) {
      for (const Layout& layout : kLayouts) {
        CheckCase(c, dtype, layout);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(GroupedMatmul, SameBitsForEveryThreadCount) {
  const RowGroups groups = SmallTests() ? Sizes({60, 1, 0, 4, 70}) : Sizes({300, 1, 0, 40, 700});
  const int64_t k = SmallTests() ? 70 : 300;
  const int64_t n = SmallTests() ? 150 : 530;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Buffer x(dtype, {groups.used, k});
    Buffer w(dtype, {5, k, n});
    Buffer dy(dtype, {groups.used, n});
    x.FillRandom(1);
    w.FillRandom(2);
    dy.FillRandom(3);
    std::vector<std::vector<double>> results;
    for (const int threads : {1, 2, 3, 7}) {
      WithThreads(threads, [&] {
        Buffer y(dtype, {groups.used, n});
        Buffer dx(dtype, {groups.used, k});
        Buffer dw(dtype, {5, k, n});
        GroupedMatmul(kOp, x.view(), Unstack(w.view()), {}, groups, y.view());
        GroupedMatmulDgrad(kOp, dy.view(), Unstack(w.view()), groups, dx.view());
        GroupedMatmulWgrad(kOp, x.view(), dy.view(), groups, Unstack(dw.view()), false);
        std::vector<double> all = y.ToDoubles();
        for (const Buffer* b : {&dx, &dw}) {
          for (const double v : b->ToDoubles()) all.push_back(v);
        }
        results.push_back(all);
      });
    }
    for (const auto& other : results) ASSERT_EQ(results[0], other) << Name(dtype);
  }
}

// However many rows a group has, its numbers are those of a product of its own.
TEST(GroupedMatmul, EveryCountOfRows) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= 67; ++n) sizes.push_back(n);
  const RowGroups groups = Sizes(sizes);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Buffer x(dtype, {groups.used, 300});
    Buffer w(dtype, {300, 70});
    x.FillRandom(1);
    w.FillRandom(2);
    ForEachSimdTarget([&](const std::string& target) {
      Buffer y(dtype, {groups.used, 70});
      GroupedMatmul(kOp, x.view(), std::vector<TensorView>(sizes.size(), w.view()), {}, groups, y.view());
      Buffer expected(dtype, {groups.used, 70});
      for (const auto& range : groups.ranges) {
        Gemm(kOp, Narrow(x.view(), 0, range.begin, range.end - range.begin), w.view(), nullptr,
             Narrow(expected.view(), 0, range.begin, range.end - range.begin));
      }
      EXPECT_EQ(y.ToDoubles(), expected.ToDoubles()) << target << " " << Name(dtype);
    });
  }
}

// Results that are larger than the caches go past them; the numbers are those of each gradient alone, which does not.
TEST(GroupedMatmul, LargeGradients) {
  const RowGroups groups = Sizes({3, 0, 1, 4, 2, 3, 1, 2, 5});
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Buffer x(dtype, {groups.used, 1000});
    Buffer dy(dtype, {groups.used, 1000});
    x.FillRandom(1);
    dy.FillRandom(2);
    ForEachSimdTarget([&](const std::string& target) {
      Buffer all(dtype, {9, 1000, 1000});
      GroupedMatmulWgrad(kOp, x.view(), dy.view(), groups, Unstack(all.view()), false);
      all.CheckRedZones(target);
      for (int64_t g = 0; g < 9; ++g) {
        Buffer one(dtype, {1, 1000, 1000});
        RowGroups alone;
        alone.ranges = {groups.ranges[static_cast<size_t>(g)]};
        alone.used = groups.used;
        GroupedMatmulWgrad(kOp, x.view(), dy.view(), alone, Unstack(one.view()), false);
        const TensorView part = Unstack(all.view())[static_cast<size_t>(g)];
        ASSERT_EQ(std::memcmp(part.data, one.view().data, 1000 * 1000 * SizeOf(dtype)), 0)
            << target << " " << Name(dtype) << " group " << g;
      }
    });
  }
}

TEST(GroupedMatmul, SeparateProducts) {
  Buffer x0(DType::kF32, {3, 5});
  Buffer x1(DType::kF32, {2, 7});
  Buffer w0(DType::kF32, {5, 4});
  Buffer w1(DType::kF32, {7, 9});
  Buffer b0(DType::kF32, {4});
  Buffer b1(DType::kF32, {9});
  uint64_t seed = 1;
  for (Buffer* b : {&x0, &x1, &w0, &w1, &b0, &b1}) b->FillRandom(seed++);
  ForEachSimdTarget([&](const std::string& target) {
    Buffer y0(DType::kF32, {3, 4});
    Buffer y1(DType::kF32, {2, 9});
    Buffer e0(DType::kF32, {3, 4});
    Buffer e1(DType::kF32, {2, 9});
    SeparateProducts(kOp, {x0.view(), x1.view()}, {w0.view(), w1.view()}, {b0.view(), b1.view()},
                     {y0.view(), y1.view()});
    Gemm(kOp, x0.view(), w0.view(), &b0.view(), e0.view());
    Gemm(kOp, x1.view(), w1.view(), &b1.view(), e1.view());
    EXPECT_EQ(y0.ToDoubles(), e0.ToDoubles()) << target;
    EXPECT_EQ(y1.ToDoubles(), e1.ToDoubles()) << target;
  });
}

TensorView List(std::vector<int64_t>& values, std::vector<int64_t> sizes) {
  return Contiguous(values.data(), DType::kI64, sizes);
}

TEST(Groups, TypesMeanTheSame) {
  std::vector<int64_t> ends = {3, 3, 8};
  std::vector<int64_t> counts = {3, 0, 5};
  std::vector<int64_t> pairs = {2, 5, 0, 3, 1, 0};
  const RowGroups a = ParseGroups(kOp, List(ends, {3}), 0, 9);
  const RowGroups b = ParseGroups(kOp, List(counts, {3}), 1, 9);
  const RowGroups c = ParseGroups(kOp, List(pairs, {3, 2}), 2, 9);
  std::vector<int32_t> narrow = {3, 3, 8};
  const RowGroups d = ParseGroups(kOp, Contiguous(narrow.data(), DType::kI32, {3}), 0, 8);
  for (const RowGroups* g : {&a, &b, &d}) {
    EXPECT_EQ(g->used, 8);
    EXPECT_EQ(g->ranges[0].end, 3);
    EXPECT_EQ(g->ranges[1].begin, g->ranges[1].end);
    EXPECT_EQ(g->ranges[2].begin, 3);
    EXPECT_EQ(g->ranges[2].end, 8);
  }
  EXPECT_EQ(c.ranges[2].begin, 0);
  EXPECT_EQ(c.ranges[2].end, 5);
  EXPECT_EQ(c.ranges[0].begin, 5);
  EXPECT_EQ(c.ranges[0].end, 8);
  EXPECT_EQ(c.used, 8);
}

TEST(Groups, Errors) {
  std::vector<int64_t> ends = {3, 2, 8};
  std::vector<int64_t> negative = {-1, 2, 8};
  std::vector<int64_t> counts = {3, 4, 5};
  std::vector<int64_t> twice = {1, 2, 1, 3};
  std::vector<int64_t> unknown = {0, 2, 2, 3};
  std::vector<int64_t> huge = {1, INT64_MAX};
  Buffer floats(DType::kF32, {3});
  ExpectError([&] { ParseGroups(kOp, List(ends, {3}), 0, 9); }, kOp, "got 3 followed by 2 at entry 1");
  ExpectError([&] { ParseGroups(kOp, List(negative, {3}), 0, 9); }, kOp,
              "group_list[0] should be larger than or equal to 0, got -1");
  ExpectError([&] { ParseGroups(kOp, List(negative, {3}), 1, 9); }, kOp, "got -1");
  ExpectError([&] { ParseGroups(kOp, List(counts, {3}), 0, 4); }, kOp, "beyond the 4 rows: group 2 ends at 5");
  ExpectError([&] { ParseGroups(kOp, List(counts, {3}), 1, 11); }, kOp, "more than the 11 rows: group 2 has 5");
  ExpectError([&] { ParseGroups(kOp, List(huge, {2}), 1, 11); }, kOp, "more than the 11 rows");
  ExpectError([&] { ParseGroups(kOp, List(twice, {2, 2}), 2, 9); }, kOp, "names group 1 twice");
  ExpectError([&] { ParseGroups(kOp, List(unknown, {2, 2}), 2, 9); }, kOp, "names group 2 of 2");
  ExpectError([&] { ParseGroups(kOp, List(twice, {4}), 2, 9); }, kOp, "[4]");
  ExpectError([&] { ParseGroups(kOp, List(twice, {2, 2}), 1, 9); }, kOp, "[2, 2]");
  ExpectError([&] { ParseGroups(kOp, List(counts, {3}), 3, 90); }, kOp, "0, 1 or 2, but now is 3");
  ExpectError([&] { ParseGroups(kOp, floats.view(), 1, 9); }, kOp, "float32");
  uint8_t bools[] = {1, 0, 1};  // three bytes: no memory for integers of any width
  ExpectError([&] { ParseGroups(kOp, Contiguous(bools, DType::kBool, {3}), 1, 9); }, kOp, "int64 or int32, got bool");
}

TEST(GroupedMatmul, Errors) {
  const RowGroups groups = Sizes({2, 1});
  Buffer x(DType::kF32, {3, 4});
  Buffer w(DType::kF32, {2, 4, 5});
  Buffer y(DType::kF32, {3, 5});
  Buffer three(DType::kF32, {3, 4, 5});
  Buffer tall(DType::kF32, {2, 3, 5});
  Buffer f64(DType::kF64, {2, 4, 5});
  Buffer bias(DType::kF32, {2, 4});
  ExpectError([&] { GroupedMatmul(kOp, x.view(), Unstack(three.view()), {}, groups, y.view()); }, kOp,
              "group_list has 2 groups, but there are 3 of weight");
  ExpectError([&] { GroupedMatmul(kOp, x.view(), Unstack(tall.view()), {}, groups, y.view()); }, kOp, "[3, 5]");
  ExpectError([&] { GroupedMatmul(kOp, x.view(), Unstack(f64.view()), {}, groups, y.view()); }, kOp, "float64");
  ExpectError([&] { GroupedMatmul(kOp, x.view(), Unstack(w.view()), Unstack(bias.view()), groups, y.view()); }, kOp,
              "bias of group 0 [4]");
  ExpectError(
      [&] {
        GroupedMatmul(kOp, x.view(), Unstack(w.view()), {}, Sizes({2, 2}), y.view());
      },
      kOp, "groups of 4 rows");
  ExpectError([&] { GroupedMatmulWgrad(kOp, x.view(), y.view(), groups, Unstack(tall.view()), false); }, kOp, "[3, 5]");
  ExpectError([&] { GroupedMatmulDgrad(kOp, x.view(), Unstack(w.view()), groups, x.view()); }, kOp, "[4, 5]");
}

}  // namespace
}  // namespace jumar::testing
