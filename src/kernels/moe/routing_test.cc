#include "gtest/gtest.h"
#include "kernels/moe/finalize_routing.h"
#include "kernels/moe/init_routing.h"
#include "kernels/moe/moe_ref.h"
#include "kernels/moe/re_routing.h"
#include "kernels/moe/routing_map.h"
#include "testing/sums.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "moe_op";

Buffer Map(int64_t tokens, int64_t experts, const Ints& ones) {
  Buffer map(DType::kBool, {tokens, experts});
  map.Fill([&](int64_t i) { return std::find(ones.begin(), ones.end(), i) == ones.end() ? 0.0 : 1.0; });
  return map;
}

// Tokens 0 and 2 go to experts 0 and 2, token 1 to experts 1 and 2.
TEST(RoutingMap, ForwardAndBackOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const int layout : {0, 1, 2, 3}) {
        const std::string what = std::string(Name(dtype)) + " layout " + std::to_string(layout);
        const Buffer map = Map(3, 3, {0, 2, 4, 5, 6, 8});
        const Ints rows = {0, 3, 2, 4, 1, 5};
        const Ints cells = {0, 6, 4, 2, 5, 8};  // of each row
        const Ints slots = {0, 2, 4, 5, 6, 8};
        Buffer x = Matrix(dtype, 3, 11, layout);
        x.FillRandom(1);
        Buffer probs = Matrix(DType::kF32, 3, 3, layout);
        probs.FillRandom(2);
        Buffer permuted = Matrix(dtype, 6, 11, layout);
        Buffer moved(DType::kF32, {6});
        Buffer sorted(DType::kI32, {6});
        EXPECT_EQ(CheckPermuteWithRoutingMap(kOp, x.view(), map.view(), &probs.view(), 7, false), 6);
        PermuteWithRoutingMap(kOp, x.view(), map.view(), &probs.view(), false, permuted.view(), &moved.view(),
                              sorted.view());
        EXPECT_EQ(sorted.ToDoubles(), Doubles(rows.begin(), rows.end()));
        ExpectSums(permuted, Spread(x.ToDoubles(), rows, 6, 2, {}, 11), 0, what, dtype);
        Doubles weights;
        for (size_t i = 0; i < 6; ++i) {
          EXPECT_EQ(moved.Get(static_cast<int64_t>(i)), probs.Get(cells[i]));
          weights.push_back(probs.Get(slots[i]));
        }
        Buffer out = Matrix(dtype, 3, 11, layout);
        Buffer index(DType::kI32, {6});
        Buffer ids(DType::kI32, {6});
        UnpermuteWithRoutingMap(kOp, permuted.view(), sorted.view(), &probs.view(), &map.view(), false, out.view(),
                                index.view(), ids.view(), &moved.view());
        ExpectSums(out, Combined(permuted.ToDoubles(), rows, 6, 2, weights, 11), 4, what, dtype);
        Buffer dpermuted = Matrix(dtype, 6, 11, layout);
        Buffer dprobs(dtype, {3, 3});
        UnpermuteWithRoutingMapGrad(kOp, x.view(), index.view(), ids.view(), &map.view(), &permuted.view(),
                                    &probs.view(), false, dpermuted.view(), &dprobs.view());
        ExpectSums(dpermuted, Spread(x.ToDoubles(), rows, 6, 2, weights, 11), 2, what, dtype);
        const Sums dots = Dots(x.ToDoubles(), permuted.ToDoubles(), rows, 6, 2, 11);
        Sums spread = {Doubles(9), Doubles(9)};
        for (size_t i = 0; i < 6; ++i) {
          spread.value[static_cast<size_t>(slots[i])] = dots.value[i];
          spread.terms[static_cast<size_t>(slots[i])] = dots.terms[i];
        }
        ExpectSums(dprobs, spread, 11, what, dtype);
        dpermuted.CheckRedZones(what);
        dprobs.CheckRedZones(what);
        out.CheckRedZones(what);
      }
    }
  });
}

// Two rows an expert. Expert 0 has tokens 0 and 2; expert 1 has token 1, filled up with 0; expert 2 loses token 2.
TEST(RoutingMap, DropsAndPads) {
  const Buffer map = Map(3, 3, {0, 2, 4, 5, 6, 8});
  const Ints tokens = {0, 2, 1, 0, 0, 1};
  Buffer x(DType::kF32, {3, 5});
  x.FillRandom(1);
  Buffer probs(DType::kF32, {3, 3});
  probs.FillRandom(2);
  Buffer permuted(DType::kF32, {6, 5});
  Buffer moved(DType::kF32, {6});
  Buffer sorted(DType::kI32, {6});
  PermuteWithRoutingMap(kOp, x.view(), map.view(), &probs.view(), true, permuted.view(), &moved.view(), sorted.view());
  EXPECT_EQ(sorted.ToDoubles(), Doubles(tokens.begin(), tokens.end()));
  for (int64_t r = 0; r < 6; ++r) {
    const int64_t t = tokens[static_cast<size_t>(r)];
    EXPECT_EQ(moved.Get(r), probs.Get(t * 3 + r / 2)) << r;
    for (int64_t h = 0; h < 5; ++h) EXPECT_EQ(permuted.Get(r * 5 + h), x.Get(t * 5 + h)) << r;
  }
  Buffer dx(DType::kF32, {3, 5});
  Buffer dprobs(DType::kF32, {3, 3});
  permuted.FillRandom(3);
  PermuteWithRoutingMapGrad(kOp, permuted.view(), &moved.view(), sorted.view(), map.view(), true, dx.view(),
                            &dprobs.view());
  ExpectSums(dx, Spread(permuted.ToDoubles(), tokens, 3, 1, {}, 5), 3, "dx", DType::kF32);
  EXPECT_EQ(dprobs.Get(3 * 2 + 0), moved.Get(1));
  EXPECT_EQ(dprobs.Get(3 * 2 + 2), 0.0);
  Buffer out(DType::kF32, {3, 5});
  Buffer index(DType::kI32, {6});
  Buffer ids(DType::kI32, {6});
  Buffer weights(DType::kF32, {6});
  UnpermuteWithRoutingMap(kOp, permuted.view(), sorted.view(), &probs.view(), nullptr, true, out.view(), index.view(),
                          ids.view(), &weights.view());
  EXPECT_EQ(index.ToDoubles(), (Doubles{0, 3, 4, 2, 5, 1}));
  EXPECT_EQ(ids.ToDoubles(), (Doubles{0, 0, 0, 1, 1, 2}));
  Doubles scaled;
  for (int64_t i = 0; i < 30; ++i) scaled.push_back(permuted.Get(i) * weights.Get(i / 5));
  ExpectSums(out, Spread(scaled, tokens, 3, 1, {}, 5), 6, "out", DType::kF32);
}

TEST(RoutingMap, Errors) {
  const Buffer map = Map(3, 3, {0, 2, 4, 6, 8});
  Buffer x(DType::kF32, {3, 5});
  Buffer permuted(DType::kF32, {6, 5});
  Buffer sorted(DType::kI32, {6});
  ExpectError(
      [&] {
        PermuteWithRoutingMap(kOp, x.view(), map.view(), nullptr, false, permuted.view(), nullptr, sorted.view());
      },
      kOp, "row 1 of routing_map has 1 experts; the number of rows asks for 2 in each");
  ExpectError([&] { CheckPermuteWithRoutingMap(kOp, x.view(), x.view(), nullptr, 6, false); }, kOp,
              "routing_map must be bool or int8, got float32");
}

TEST(InitRouting, RowsOfTheActiveExperts) {
  Buffer x(DType::kBF16, {3, 4});
  x.FillRandom(1);
  const Buffer ids = IntBuffer(DType::kI32, {3, 2}, {2, 0, 1, 2, 3, 1});
  RoutingOptions o;
  o.experts = 4;
  o.start = 1;
  o.end = 3;
  o.counts = TokenCounts::kPairs;
  EXPECT_EQ(CheckInitRoutingV2(kOp, x.view(), ids.view(), nullptr, o), 6);
  Buffer expanded(DType::kBF16, {6, 4});
  Buffer index(DType::kI32, {6});
  Buffer counts(DType::kI64, {4, 2});
  InitRoutingV2(kOp, x.view(), ids.view(), nullptr, o, expanded.view(), index.view(), counts.view(), nullptr);
  EXPECT_EQ(index.ToDoubles(), (Doubles{2, -1, 0, 3, -1, 1}));
  EXPECT_EQ(counts.ToDoubles(), (Doubles{1, 2, 2, 2, 0, 0, 0, 0}));
  const Ints source = {1, 2, 0, 1};
  for (int64_t i = 0; i < 24; ++i) {
    EXPECT_EQ(expanded.Get(i), i < 16 ? x.Get(source[static_cast<size_t>(i / 4)] * 4 + i % 4) : 0.0) << i;
  }
  Buffer three(DType::kBF16, {3, 4});
  Buffer cut(DType::kI32, {6});
  o.active_num = 3;
  EXPECT_EQ(CheckInitRoutingV2(kOp, x.view(), ids.view(), nullptr, o), 3);
  InitRoutingV2(kOp, x.view(), ids.view(), nullptr, o, three.view(), cut.view(), counts.view(), nullptr);
  EXPECT_EQ(cut.ToDoubles(), (Doubles{2, -1, 0, -1, -1, 1}));
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(three.Get(i), expanded.Get(i)) << i;
  Buffer dx(DType::kBF16, {3, 4});
  InitRoutingGrad(kOp, expanded.view(), index.view(), false, RowIndex::kSlotToRow, dx.view());
  ExpectSums(dx, Spread(Doubles(expanded.ToDoubles()), {1, 2, 0, 1, 9, 9}, 3, 1, {}, 4), 2, "dx", DType::kBF16);
}

TEST(FinalizeRouting, SkipsBiasAndScales) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const bool by_row : {false, true}) {
        Buffer rows(dtype, {4, 9});
        rows.FillRandom(1);
        Buffer skip(dtype, {2, 9});
        skip.FillRandom(2);
        Buffer bias(dtype, {3, 9});
        bias.FillRandom(3);
        Buffer scales(DType::kF32, {2, 2});
        scales.FillRandom(4);
        const Buffer experts = IntBuffer(DType::kI32, {2, 2}, {2, 0, 2, 1});
        const Ints by_token = {3, 1, 0, 9};  // the last slot has no row
        const Buffer index = IntBuffer(DType::kI32, {4}, by_row ? Ints{3, 1, 0, -1} : Ints{3, 0, 1, -1});
        FinalizeOperands o;
        o.rows = rows.view();
        o.row_idx = index.view();
        o.bias = &bias.view();
        o.scales = &scales.view();
        o.experts = &experts.view();
        o.by_row = by_row;
        EXPECT_EQ(CheckFinalizeRouting(kOp, o, &skip.view(), nullptr), 2);
        Buffer out(dtype, {2, 9});
        FinalizeRouting(kOp, o, &skip.view(), &skip.view(), out.view());
        const Doubles w = scales.ToDoubles();
        Sums right = Combined(rows.ToDoubles(), by_token, 4, 2, w, 9);
        const Sums more = Combined(bias.ToDoubles(), {2, 0, 2, 1}, 3, 2, w, 9);
        for (size_t i = 0; i < 18; ++i) {
          const double s = skip.Get(static_cast<int64_t>(i));
          right.value[i] += more.value[i] + 2 * s;
          right.terms[i] += more.terms[i] + 2 * std::abs(s);
        }
        ExpectSums(out, right, 8, Name(dtype), dtype);
        Buffer drows(dtype, {4, 9});
        Buffer dscales(DType::kF32, {2, 2});
        Buffer dbias(dtype, {3, 9});
        FinalizeRoutingGrad(kOp, skip.view(), o, drows.view(), &dscales.view(), &dbias.view());
        ExpectSums(drows, Spread(skip.ToDoubles(), by_token, 4, 2, w, 9), 2, "drows", dtype);
        ExpectSums(dbias, Spread(skip.ToDoubles(), {2, 0, 2, 1}, 3, 2, w, 9), 4, "dbias", dtype);
        Sums dots = Dots(skip.ToDoubles(), rows.ToDoubles(), by_token, 4, 2, 9);
        const Sums bias_dots = Dots(skip.ToDoubles(), bias.ToDoubles(), {2, 0, 2, 1}, 3, 2, 9);
        for (size_t i = 0; i < 4; ++i) {
          dots.value[i] += bias_dots.value[i];
          dots.terms[i] += bias_dots.terms[i];
        }
        ExpectSums(dscales, dots, 10, "dscales", dtype);
      }
    }
  });
}

TEST(ReRouting, BlocksByExpert) {
  const Buffer counts = IntBuffer(DType::kI64, {2, 3}, {1, 2, 1, 2, 1, 3});
  Buffer x(DType::kF32, {10, 3});
  x.FillRandom(1);
  Buffer permuted(DType::kF32, {10, 3});
  Buffer index(DType::kI32, {10});
  Buffer totals(DType::kI64, {3});
  ReRouting(kOp, x.view(), counts.view(), nullptr, permuted.view(), nullptr, index.view(), totals.view());
  const Doubles right = {0, 4, 5, 1, 2, 6, 3, 7, 8, 9};
  EXPECT_EQ(index.ToDoubles(), right);
  EXPECT_EQ(totals.ToDoubles(), (Doubles{3, 3, 4}));
  Buffer dx(DType::kF32, {10, 3});
  ReRoutingGrad(kOp, permuted.view(), index.view(), dx.view());
  EXPECT_EQ(dx.ToDoubles(), x.ToDoubles());
  for (int64_t i = 0; i < 30; ++i) {
    EXPECT_EQ(permuted.Get(i), x.Get(static_cast<int64_t>(right[static_cast<size_t>(i / 3)]) * 3 + i % 3));
  }
  Buffer nine(DType::kF32, {9, 3});
  ExpectError(
      [&] { ReRouting(kOp, nine.view(), counts.view(), nullptr, nine.view(), nullptr, index.view(), totals.view()); },
      kOp, "adds up to 10, but tokens has 9 rows");
}

}  // namespace
}  // namespace jumar::testing
