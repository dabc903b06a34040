#include "kernels/moe/token_permute.h"

#include <cmath>
#include <cstring>

#include "base/slot_sort.h"
#include "gtest/gtest.h"
#include "kernels/moe/moe_ref.h"
#include "testing/sums.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "moe_op";

Ints RandomIds(int64_t n, int64_t experts, uint64_t seed) {
  Random random(seed);
  Ints ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int64_t>(random.Next() % static_cast<uint64_t>(experts)));
  return ids;
}

TEST(SlotSort, IsTheStableOrderForEveryThreadCount) {
  for (const auto& [n, experts] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 1}, {1, 1}, {8, 5}, {1000, 8}, {70000, 128}, {70000, 3}, {3000, 1 << 20}, {50, int64_t{1} << 40}}) {
    const Ints ids = RandomIds(n, experts, 7);
    const Ints order = StableOrder(ids);
    const Ints inverse = Inverse(order);
    for (const int threads : {1, 2, 3}) {
      WithThreads(threads, [&, n = n] {
        std::vector<int32_t> got(static_cast<size_t>(n));
        std::vector<int32_t> rows(static_cast<size_t>(n));
        std::vector<int32_t> alone(static_cast<size_t>(n));
        SortSlots(ids.data(), n, got.data(), rows.data());
        EXPECT_EQ(Ints(got.begin(), got.end()), order);
        EXPECT_EQ(Ints(rows.begin(), rows.end()), inverse);
        SortSlots(ids.data(), n, nullptr, alone.data());
        EXPECT_EQ(alone, rows);
      });
    }
  }
}

TEST(SlotSort, CountsAreThoseOfALoop) {
  const Ints ids = RandomIds(50000, 130, 3);
  Ints counts(128);
  for (const int64_t id : ids) {
    if (id < 128) ++counts[static_cast<size_t>(id)];
  }
  for (const int threads : {1, 3}) {
    WithThreads(threads, [&] { EXPECT_EQ(CountIds(ids.data(), 50000, 128), counts); });
  }
  EXPECT_EQ(CountIds(nullptr, 0, 3), Ints(3));
}

// The vendor's example, and the one whose permutation is not its own inverse.
TEST(TokenPermute, WorkedExamples) {
  const auto sorted = [](const Ints& ids, int64_t tokens) {
    Buffer x(DType::kF32, {tokens, 1});
    x.Fill([](int64_t i) { return static_cast<double>(i); });
    Buffer indices = IntBuffer(DType::kI64, {tokens, 2}, ids);
    Buffer permuted(DType::kF32, {2 * tokens, 1});
    Buffer rows(DType::kI32, {2 * tokens});
    TokenPermute(kOp, x.view(), indices.view(), permuted.view(), rows.view());
    return std::pair(rows.ToDoubles(), permuted.ToDoubles());
  };
  EXPECT_EQ(sorted({0, 4, 4, 3, 4, 2, 1, 1}, 4).first, (Doubles{0, 5, 6, 4, 7, 3, 1, 2}));
  const auto [rows, permuted] = sorted({2, 0, 0, 2, 1, 0}, 3);
  EXPECT_EQ(rows, (Doubles{4, 0, 1, 5, 3, 2}));
  EXPECT_EQ(permuted, (Doubles{0, 1, 2, 2, 0, 1}));

  // Expert r of the sorted rows multiplies by r + 1.
  Buffer experts(DType::kF32, {6, 1});
  experts.Fill([&](int64_t r) { return (permuted[static_cast<size_t>(r)] + 1) * static_cast<double>(r + 1); });
  Buffer probs(DType::kF32, {3, 2});
  const Doubles p = {.25, .75, .5, .5, 1, 0};
  probs.Fill([&](int64_t i) { return p[static_cast<size_t>(i)]; });
  Buffer out(DType::kF32, {3, 1});
  Buffer indices = IntBuffer(DType::kI32, {6}, {4, 0, 1, 5, 3, 2});
  TokenUnpermute(kOp, experts.view(), indices.view(), &probs.view(), out.view());
  EXPECT_EQ(out.ToDoubles(), (Doubles{2, 8, 12}));
}

// 256 + 7 in bf16, whose neighbours are 2 apart there: 263 rounds once, to even.
TEST(TokenUnpermute, SumsAreNotKeptInBF16) {
  ForEachSimdTarget([&](const std::string&) {
    for (const int64_t width : {1, 40}) {
      Buffer rows(DType::kBF16, {8, width});
      rows.Fill([&](int64_t i) { return i < width ? 256.0 : 1.0; });
      Buffer probs(DType::kBF16, {1, 8});
      probs.Fill([](int64_t) { return 1.0; });
      Buffer indices = IntBuffer(DType::kI32, {8}, {0, 1, 2, 3, 4, 5, 6, 7});
      Buffer out(DType::kBF16, {1, width});
      TokenUnpermute(kOp, rows.view(), indices.view(), &probs.view(), out.view());
      EXPECT_EQ(out.ToDoubles(), Doubles(static_cast<size_t>(width), 264.0));
      TokenPermuteGrad(kOp, rows.view(), indices.view(), 8, false, out.view());
      EXPECT_EQ(out.ToDoubles(), Doubles(static_cast<size_t>(width), 264.0));
    }
  });
}

struct Problem {
  DType dtype = DType::kF32;
  DType probs = DType::kF32;
  int64_t tokens = 5;
  int64_t top_k = 2;
  int64_t width = 7;
  int64_t dropped = 0;
  int layout = 0;
};

std::string Text(const Problem& p) {
  return std::string(Name(p.dtype)) + " probs " + Name(p.probs) + " T " + std::to_string(p.tokens) + " K " +
         std::to_string(p.top_k) + " H " + std::to_string(p.width) + " dropped " + std::to_string(p.dropped) +
         " layout " + std::to_string(p.layout);
}

// Every operator on one problem: permute and its gradient, unpermute with and without probs and its gradients.
void Check(const Problem& p, uint64_t seed) {
  const std::string what = Text(p);
  const int64_t slots = p.tokens * p.top_k;
  const int64_t rows = slots - p.dropped;
  const Ints ids = RandomIds(slots, 4, seed);
  const Ints sorted = Inverse(StableOrder(ids));

  Buffer x = Matrix(p.dtype, p.tokens, p.width, p.layout);
  x.FillRandom(seed);
  Buffer indices = IntBuffer(seed % 2 == 0 ? DType::kI32 : DType::kI64, {p.tokens, p.top_k}, ids);
  EXPECT_EQ(CheckTokenPermute(kOp, x.view(), indices.view(), -p.dropped, false).rows, rows) << what;
  Buffer permuted = Matrix(p.dtype, rows, p.width, p.layout);
  Buffer sorted_indices(DType::kI32, {slots});
  TokenPermute(kOp, x.view(), indices.view(), permuted.view(), sorted_indices.view());
  EXPECT_EQ(sorted_indices.ToDoubles(), Doubles(sorted.begin(), sorted.end())) << what;
  ExpectSums(permuted, Spread(x.ToDoubles(), sorted, rows, p.top_k, {}, p.width), 1, "permuted " + what, p.dtype);
  permuted.CheckRedZones(what);

  Buffer dx = Matrix(p.dtype, p.tokens, p.width, p.layout);
  permuted.FillRandom(seed + 1);
  TokenPermuteGrad(kOp, permuted.view(), sorted_indices.view(), p.top_k, false, dx.view());
  ExpectSums(dx, Combined(permuted.ToDoubles(), sorted, rows, p.top_k, {}, p.width), p.top_k, "dtokens " + what,
             p.dtype);
  dx.CheckRedZones(what);

  Buffer probs = Matrix(p.probs, p.tokens, p.top_k, p.layout);
  probs.FillRandom(seed + 2);
  Buffer out = Matrix(p.dtype, p.tokens, p.width, p.layout);
  TokenUnpermute(kOp, permuted.view(), sorted_indices.view(), &probs.view(), out.view());
  const Doubles w = probs.ToDoubles();
  ExpectSums(out, Combined(permuted.ToDoubles(), sorted, rows, p.top_k, w, p.width), 2 * p.top_k, "out " + what,
             p.dtype);
  out.CheckRedZones(what);

  Buffer grad = Matrix(p.dtype, p.tokens, p.width, p.layout);
  grad.FillRandom(seed + 3);
  Buffer dpermuted = Matrix(p.dtype, rows, p.width, p.layout);
  Buffer dprobs = Matrix(p.probs, p.tokens, p.top_k, p.layout);
  TokenUnpermuteGrad(kOp, grad.view(), sorted_indices.view(), &probs.view(), &permuted.view(), false, dpermuted.view(),
                     &dprobs.view());
  ExpectSums(dpermuted, Spread(grad.ToDoubles(), sorted, rows, p.top_k, w, p.width), 2, "dpermuted " + what, p.dtype);
  ExpectSums(dprobs, Dots(grad.ToDoubles(), permuted.ToDoubles(), sorted, rows, p.top_k, p.width),
             static_cast<double>(p.width), "dprobs " + what, p.dtype);
  dpermuted.CheckRedZones(what);
  dprobs.CheckRedZones(what);

  Buffer plain = Matrix(p.dtype, slots, p.width, p.layout);
  TokenUnpermute(kOp, permuted.view(), sorted_indices.view(), nullptr, plain.view());
  ExpectSums(plain, Combined(permuted.ToDoubles(), sorted, rows, 1, {}, p.width), 1, "plain " + what, p.dtype);
  plain.FillRandom(seed + 4);
  TokenUnpermuteGrad(kOp, plain.view(), sorted_indices.view(), nullptr, nullptr, false, dpermuted.view(), nullptr);
  ExpectSums(dpermuted, Spread(plain.ToDoubles(), sorted, rows, 1, {}, p.width), 1, "dplain " + what, p.dtype);
}

TEST(TokenPermute, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (const DType probs : FloatDTypes()) {
        for (const int64_t width : {0, 1, 7, 8, 16, 33, 130}) Check({dtype, probs, 5, 2, width, 0, 0}, seed++);
      }
      for (const int layout : {0, 1, 2, 3}) Check({dtype, DType::kF32, 9, 3, 19, 4, layout}, seed++);
      Check({dtype, dtype, 0, 2, 8, 0, 0}, seed++);
      Check({dtype, dtype, 1, 1, 8, 0, 0}, seed++);
      Check({dtype, dtype, 6, 1, 8, 2, 0}, seed++);
      Check({dtype, dtype, 4, 8, 65, 32, 0}, seed++);  // every row dropped
      Check({dtype, DType::kF32, 40, 8, 65, 5, 0}, seed++);
    }
  });
}

// Large enough that rows are written past the caches, with and without whole vectors.
TEST(TokenPermute, StreamedRowsAreTheSameBits) {
  for (const int64_t width : {2048, 2049}) {
    const int64_t tokens = 1100;
    const int64_t slots = 4 * tokens;
    const Ints ids = RandomIds(slots, 9, 5);
    const Ints order = StableOrder(ids);
    Buffer x(DType::kBF16, {tokens, width});
    x.FillRandom(3);
    Buffer indices = IntBuffer(DType::kI32, {tokens, 4}, ids);
    Aligned permuted(DType::kBF16, {slots, width});
    Buffer sorted(DType::kI32, {slots});
    TokenPermute(kOp, x.view(), indices.view(), permuted.view(), sorted.view());
    const auto* got = permuted.view().ptr<uint16_t>();
    const auto* from = x.view().ptr<uint16_t>();
    for (int64_t r = 0; r < slots; ++r) {
      const uint16_t* row = from + order[static_cast<size_t>(r)] / 4 * width;
      ASSERT_TRUE(std::equal(row, row + width, got + r * width)) << r;
    }
    Buffer probs(DType::kF32, {tokens, 4});
    probs.FillRandom(4);
    Aligned dpermuted(DType::kBF16, {slots, width});
    Buffer small(DType::kBF16, {slots, width}, {width + 1, 1});
    Buffer dprobs(DType::kF32, {tokens, 4});
    for (const TensorView& result : {dpermuted.view(), small.view()}) {
      TokenUnpermuteGrad(kOp, x.view(), sorted.view(), &probs.view(), &permuted.view(), false, result, &dprobs.view());
    }
    for (int64_t i = 0; i < slots * width; ++i) {
      ASSERT_EQ(LoadAsDouble(dpermuted.view().data, DType::kBF16, i), small.Get(i)) << i;
    }
    Aligned back(DType::kBF16, {slots, width});
    TokenUnpermute(kOp, permuted.view(), sorted.view(), nullptr, back.view());
    for (int64_t i = 0; i < slots; ++i) {
      ASSERT_TRUE(
          std::equal(from + i / 4 * width, from + (i / 4 + 1) * width, back.view().ptr<uint16_t>() + i * width));
    }
    Aligned wide(DType::kF32, {tokens, 2 * width});
    Buffer rows32(DType::kF32, {slots, 2 * width});
    rows32.FillRandom(6);
    TokenUnpermute(kOp, rows32.view(), sorted.view(), &probs.view(), wide.view());
    Buffer narrow(DType::kF32, {tokens, 2 * width}, {2 * width + 1, 1});
    TokenUnpermute(kOp, rows32.view(), sorted.view(), &probs.view(), narrow.view());
    for (int64_t i = 0; i < tokens * 2 * width; ++i) {
      ASSERT_EQ(LoadAsDouble(wide.view().data, DType::kF32, i), narrow.Get(i)) << i;
    }
  }
}

// Forward, two slots may read one row; the gradient of that row is then their sum.
TEST(TokenUnpermute, RowsThatSeveralSlotsShare) {
  for (const DType dtype : FloatDTypes()) {
    const Ints rows = {0, 2, 2, 0, 1, 2};
    Buffer indices = IntBuffer(DType::kI64, {6}, rows);
    Buffer permuted(dtype, {4, 9});
    permuted.FillRandom(1);
    Buffer probs(DType::kF32, {3, 2});
    probs.FillRandom(2);
    Buffer grad(dtype, {3, 9});
    grad.FillRandom(3);
    Buffer dpermuted(dtype, {4, 9});
    Buffer dprobs(DType::kF32, {3, 2});
    TokenUnpermuteGrad(kOp, grad.view(), indices.view(), &probs.view(), &permuted.view(), false, dpermuted.view(),
                       &dprobs.view());
    ExpectSums(dpermuted, Spread(grad.ToDoubles(), rows, 4, 2, probs.ToDoubles(), 9), 6, Name(dtype), dtype);
    ExpectSums(dprobs, Dots(grad.ToDoubles(), permuted.ToDoubles(), rows, 4, 2, 9), 9, Name(dtype), dtype);
  }
}

// A NaN whose bits are all set would overflow where it is rounded like a number.
TEST(TokenUnpermute, EveryNaNStaysOne) {
  const uint32_t bits[] = {0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800001u};
  ForEachSimdTarget([&](const std::string& target) {
    for (const DType dtype : FloatDTypes()) {
      for (const uint32_t nan : bits) {
        Buffer indices = IntBuffer(DType::kI32, {4}, {3, 1, 0, 2});
        Buffer probs(DType::kF32, {2, 2});
        probs.FillRandom(1);
        std::memcpy(probs.view().ptr<float>() + 1, &nan, sizeof(nan));
        Buffer rows(dtype, {4, 71});
        rows.FillRandom(2);
        Buffer grad(dtype, {2, 71});
        grad.FillRandom(3);
        Buffer y(dtype, {2, 71});
        TokenUnpermute(kOp, rows.view(), indices.view(), &probs.view(), y.view());
        Buffer drows(dtype, {4, 71});
        Buffer dprobs(DType::kF32, {2, 2});
        TokenUnpermuteGrad(kOp, grad.view(), indices.view(), &probs.view(), &rows.view(), false, drows.view(),
                           &dprobs.view());
        for (int64_t i = 0; i < 71; ++i) {
          ASSERT_TRUE(std::isnan(y.Get(i)) && !std::isnan(y.Get(71 + i))) << target << " " << Name(dtype) << " " << i;
          ASSERT_TRUE(std::isnan(drows.Get(71 + i)) && !std::isnan(drows.Get(i)))
              << target << " " << Name(dtype) << " " << i;
        }
      }
    }
  });
}

TEST(TokenPermute, SameBitsForEveryThreadCount) {
  const int64_t tokens = 700;
  Buffer indices = IntBuffer(DType::kI32, {tokens, 3}, RandomIds(3 * tokens, 5, 1));
  Buffer x(DType::kBF16, {tokens, 130});
  x.FillRandom(1);
  Buffer probs(DType::kF32, {tokens, 3});
  probs.FillRandom(2);
  std::vector<Doubles> first;
  for (const int threads : {1, 2, 3}) {
    WithThreads(threads, [&] {
      Buffer permuted(DType::kBF16, {3 * tokens, 130});
      Buffer sorted(DType::kI32, {3 * tokens});
      Buffer out(DType::kBF16, {tokens, 130});
      Buffer dpermuted(DType::kBF16, {3 * tokens, 130});
      Buffer dprobs(DType::kF32, {tokens, 3});
      TokenPermute(kOp, x.view(), indices.view(), permuted.view(), sorted.view());
      TokenUnpermute(kOp, permuted.view(), sorted.view(), &probs.view(), out.view());
      TokenUnpermuteGrad(kOp, x.view(), sorted.view(), &probs.view(), &permuted.view(), false, dpermuted.view(),
                         &dprobs.view());
      const std::vector<Doubles> got = {permuted.ToDoubles(), sorted.ToDoubles(), out.ToDoubles(),
                                        dpermuted.ToDoubles(), dprobs.ToDoubles()};
      if (first.empty()) first = got;
      EXPECT_EQ(got, first);
    });
  }
}

TEST(TokenPermute, Errors) {
  Buffer x(DType::kF32, {3, 4});
  Buffer ids = IntBuffer(DType::kI64, {3, 2}, {0, 1, 2, -3, 4, 5});
  const auto check = [&](const TensorView& tokens, const TensorView& indices, std::optional<int64_t> n, bool padded) {
    CheckTokenPermute(kOp, tokens, indices, n, padded);
  };
  Buffer flat(DType::kF32, {12});
  Buffer two = IntBuffer(DType::kI64, {2, 2}, {0, 1, 2, 3});
  ExpectError([&] { check(flat.view(), ids.view(), {}, false); }, kOp,
              "The dims of input tokens should be 2 dimensional, got [12]");
  ExpectError(
      [&] {
        check(x.view(), Contiguous(nullptr, DType::kI64, {1, 3, 2}), {}, false);
      },
      kOp, "The dims of input indices should be 2 or 1 dimensional");
  ExpectError([&] { check(x.view(), two.view(), {}, false); }, kOp, "indices [2, 2] does not go with tokens [3, 4]");
  ExpectError([&] { check(x.view(), ids.view(), -7, false); }, kOp, "num_out_tokens -7 drops more than the 6 rows");
  ExpectError([&] { check(x.view(), ids.view(), {}, true); }, kOp, "padded_mode");
  ExpectError([&] { check(ids.view(), ids.view(), {}, false); }, kOp, "got int64");
  Buffer permuted(DType::kF32, {6, 4});
  Buffer sorted(DType::kI32, {6});
  ExpectError([&] { TokenPermute(kOp, x.view(), ids.view(), permuted.view(), sorted.view()); }, kOp,
              "indices must not be below 0, got -3 at position [1, 1]");
  ExpectError(
      [&] {
        TokenPermute(kOp, x.view(), Contiguous(x.view().data, DType::kF32, {3, 2}), permuted.view(), sorted.view());
      },
      kOp, "indices must be int32 or int64, got float32");
  EXPECT_TRUE(std::isnan(permuted.Get(0)));
  Buffer rows = IntBuffer(DType::kI32, {6}, {0, 1, 2, 3, 4, 6});
  Buffer out(DType::kF32, {3, 4});
  Buffer probs(DType::kF32, {3, 2});
  ExpectError([&] { TokenUnpermute(kOp, permuted.view(), rows.view(), &probs.view(), out.view()); }, kOp,
              "sorted_indices 6 at position [5] is not in [0, 6)");
  ExpectError([&] { CheckTokenUnpermute(kOp, permuted.view(), ids.view(), nullptr, false); }, kOp,
              "The dims of input sorted_indices should be 1 dimensional");
  ExpectError([&] { CheckTokenUnpermute(kOp, permuted.view(), rows.view(), &flat.view(), false); }, kOp,
              "The dims of input probs should be 2 dimensional");
  Buffer none(DType::kF32, {3, 0});
  ExpectError([&] { CheckTokenUnpermute(kOp, permuted.view(), rows.view(), &none.view(), false); }, kOp,
              "The topk should be greater than zero");
  Buffer four(DType::kF32, {2, 2});
  ExpectError([&] { CheckTokenUnpermute(kOp, permuted.view(), rows.view(), &four.view(), false); }, kOp,
              "probs [2, 2] does not go with 6 sorted_indices");
  Buffer half(DType::kBF16, {3, 4});
  ExpectError([&] { TokenPermuteGrad(kOp, permuted.view(), rows.view(), 2, false, half.view()); }, kOp,
              "grad_permuted_tokens must be bfloat16, got float32");
  ExpectError([&] { TokenPermuteGrad(kOp, permuted.view(), rows.view(), 3, false, out.view()); }, kOp,
              "6 sorted_indices do not go with 3 tokens of 3 experts");
  ExpectError(
      [&] {
        TokenUnpermuteGrad(kOp, out.view(), rows.view(), &probs.view(), nullptr, false, permuted.view(), &probs.view());
      },
      kOp, "needs permuted_tokens");
  Buffer wider(DType::kF32, {permuted.view().size[0], permuted.view().size[1] + 1});
  ExpectError(
      [&] {
        TokenUnpermuteGrad(kOp, out.view(), rows.view(), &probs.view(), &wider.view(), false, wider.view(),
                           &probs.view());
      },
      kOp, "does not go with permuted_tokens");
  Buffer counts(DType::kI64, {4});
  ExpectError(
      [&] {
        ExpertCounts(kOp, IntBuffer(DType::kI32, {2}, {3, 5}).view(), counts.view());
      },
      kOp, "indices 5 at position [1] is not in [0, 5)");
  ExpertCounts(kOp, IntBuffer(DType::kI32, {5}, {3, 4, 0, 3, 4}).view(), counts.view());
  EXPECT_EQ(counts.ToDoubles(), (Doubles{1, 0, 0, 2}));
}

}  // namespace
}  // namespace jumar::testing
