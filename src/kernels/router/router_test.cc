#include "kernels/router/router.h"

#include <cmath>

#include "kernels/router/router_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "router_top_k";

struct Case {
  DType dtype = DType::kF32;
  int64_t rows = 5;
  int64_t experts = 16;
  RouterOptions options;
  bool biased = false;
  bool scores = false;  // output and gradient
  bool strided = false;
  bool wide = false;   // weights in the compute type
  bool int32 = false;  // indices
};

ref::Doubles RowOf(const ref::Doubles& all, int64_t row, int64_t cols) {
  return {all.begin() + row * cols, all.begin() + (row + 1) * cols};
}

void Check(const Case& c) {
  const RouterOptions& o = c.options;
  const std::string what = std::string(Name(c.dtype)) + " " + std::to_string(c.rows) + "x" + std::to_string(c.experts) +
                           " k=" + std::to_string(o.k) + (o.scoring == Scoring::kSigmoid ? " sigmoid" : " softmax") +
                           (o.renorm ? " renorm" : "") + (c.biased ? " bias" : "") + (c.scores ? " scores" : "");
  SCOPED_TRACE(what);
  const bool f64 = c.dtype == DType::kF64;
  const double eps = f64 ? 0x1p-53 : 0x1p-24;
  const DType compute = f64 ? DType::kF64 : DType::kF32;
  Buffer logits =
      c.strided ? Buffer(c.dtype, {c.rows, c.experts}, {1, c.rows + 1}) : Buffer(c.dtype, {c.rows, c.experts});
  // Distinct in every dtype, so that no order hangs on a rounding.
  Random random(static_cast<uint64_t>(c.rows * 1000 + c.experts * 10 + o.k));
  logits.Fill([&](int64_t i) {
    const int64_t e = i % c.experts;
    return static_cast<double>((e * 37 + i / c.experts * 11) % c.experts) * 0.015625 - 1 + 0.001 * random.Uniform();
  });
  Buffer bias(compute, {c.experts});
  bias.Fill([&](int64_t e) { return e % 3 == 0 ? 0.3 : -0.2; });
  Buffer weights(c.wide ? compute : c.dtype, {c.rows, o.k});
  Buffer indices(c.int32 ? DType::kI32 : DType::kI64, {c.rows, o.k});
  Buffer scores(compute, {c.rows, c.experts});
  RouterTensors t;
  t.logits = logits.view();
  if (c.biased) t.bias = &bias.view();
  t.weights = weights.view();
  t.indices = indices.view();
  if (c.scores) t.scores = &scores.view();
  RouterTopK(kOp, t, o);

  Buffer grad_weights(c.wide ? compute : c.dtype, {c.rows, o.k});
  Buffer grad_scores(compute, {c.rows, c.experts});
  grad_weights.FillRandom(3);
  grad_scores.FillRandom(4);
  Buffer dlogits(c.dtype, {c.rows, c.experts});
  RouterGradTensors g;
  g.source = logits.view();
  g.grad_weights = &grad_weights.view();
  if (c.scores) g.grad_scores = &grad_scores.view();
  g.indices = indices.view();
  g.dlogits = dlogits.view();
  RouterTopKBackward(kOp, g, o);

  const ref::Doubles xs = logits.ToDoubles();
  const ref::Doubles bs = c.biased ? bias.ToDoubles() : ref::Doubles{};
  ref::Doubles want_weights;
  ref::Doubles want_scores;
  ref::Doubles want_indices;
  ref::Doubles want_dlogits;
  double largest = 0;
  for (int64_t r = 0; r < c.rows; ++r) {
    const ref::Routed row = ref::Route(RowOf(xs, r, c.experts), bs, o);
    for (const int64_t e : row.indices) want_indices.push_back(static_cast<double>(e));
    want_weights.insert(want_weights.end(), row.weights.begin(), row.weights.end());
    want_scores.insert(want_scores.end(), row.scores.begin(), row.scores.end());
    const ref::Doubles gs = c.scores ? RowOf(grad_scores.ToDoubles(), r, c.experts) : ref::Doubles{};
    const ref::Doubles dx = ref::RouteGrad(row, RowOf(grad_weights.ToDoubles(), r, o.k), gs, o);
    want_dlogits.insert(want_dlogits.end(), dx.begin(), dx.end());
    // Terms of a gradient: with renorm up to |d| / S, times the score.
    for (const double w : row.weights) largest = std::max(largest, std::abs(w));
  }
  EXPECT_EQ(indices.ToDoubles(), want_indices);
  // Relative to each weight: |x - max| <= 8 half ulps of exp's argument, its own and those of a sum and a division.
  const double relative = f64 ? 16 : 12;
  ExpectUlp(weights, want_weights, weights.view().dtype == compute ? relative : 0.51, what + " weights");
  if (c.scores) ExpectUlp(scores, want_scores, relative, what + " scores");
  const double floor = 64 * eps * (c.scores ? 4 : 1) * std::max(1.0, largest);
  ExpectUlp(dlogits, want_dlogits, 0.51, what + " dlogits", floor);
  for (const Buffer* b : {&logits, &bias, &weights, &indices, &scores, &grad_weights, &grad_scores, &dlogits}) {
    b->CheckRedZones(what);
  }
  EXPECT_EQ(logits.ToDoubles(), xs);
}

RouterOptions Options(int64_t k, Scoring scoring = Scoring::kSoftmax, bool renorm = false, double scale = 1) {
  RouterOptions o;
  o.k = k;
  o.scoring = scoring;
  o.renorm = renorm;
  o.scale = scale;
  return o;
}

TEST(Router, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
        for (const bool renorm : {false, true}) {
          Check({.dtype = dtype, .experts = 16, .options = Options(4, scoring, renorm, 2.5)});
          Check({.dtype = dtype, .experts = 33, .options = Options(5, scoring, renorm), .scores = true, .int32 = true});
          Check({.dtype = dtype, .experts = 64, .options = Options(8, scoring, renorm), .biased = true, .wide = true});
        }
      }
      Check({.dtype = dtype, .experts = 60, .options = Options(4, Scoring::kSoftmax, true), .strided = true});
      Check({.dtype = dtype, .rows = 0, .experts = 8, .options = Options(2)});
      Check({.dtype = dtype, .experts = 8, .options = Options(0)});
    }
  });
}

TEST(Router, EverySizeAndK) {
  ForEachSimdTarget([&](const std::string&) {
    for (const int64_t experts : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 128, 200}) {
      for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{8}, experts / 2, experts - 1, experts}) {
        if (k < 1 || k > experts) continue;
        Check({.rows = 3, .experts = experts, .options = Options(k, Scoring::kSoftmax, k % 2 == 0)});
        if (!SmallTests()) Check({.rows = 3, .experts = experts, .options = Options(k, Scoring::kSigmoid)});
      }
    }
  });
}

TEST(Router, Groups) {
  ForEachSimdTarget([&](const std::string&) {
    for (const int64_t experts : {16, 64, 120, 256}) {
      for (const int64_t groups : {2, 4, 8}) {
        for (const GroupScore score : {GroupScore::kMax, GroupScore::kTop2}) {
          RouterOptions o = Options(2, Scoring::kSigmoid, true, 2.5);
          o.eps = 1e-20;
          o.groups = groups;
          o.kept_groups = groups / 2;
          o.group_score = score;
          Check({.rows = 7, .experts = experts, .options = o, .biased = true});
          o.scoring = Scoring::kSoftmax;
          o.fill = 0;
          Check({.rows = 7, .experts = experts, .options = o});
        }
      }
    }
  });
}

TEST(Router, AnEpsThatCounts) {
  ForEachSimdTarget([&](const std::string&) {
    for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
      RouterOptions o = Options(3, scoring, true, 1.5);
      o.eps = 0.125;
      for (const DType dtype : FloatDTypes()) Check({.dtype = dtype, .experts = 24, .options = o});
    }
  });
}

struct Chosen {
  ref::Doubles indices;
  ref::Doubles weights;
};

Chosen Choose(const std::vector<double>& x, const RouterOptions& o, DType dtype = DType::kF32,
              const std::vector<double>& bias = {}) {
  const auto n = static_cast<int64_t>(x.size());
  Buffer logits(dtype, {1, n});
  logits.Fill([&](int64_t i) { return x[static_cast<size_t>(i)]; });
  Buffer b(dtype == DType::kF64 ? dtype : DType::kF32, {n});
  if (!bias.empty()) b.Fill([&](int64_t i) { return bias[static_cast<size_t>(i)]; });
  Buffer weights(dtype, {1, o.k});
  Buffer indices(DType::kI64, {1, o.k});
  RouterTensors t;
  t.logits = logits.view();
  if (!bias.empty()) t.bias = &b.view();
  t.weights = weights.view();
  t.indices = indices.view();
  RouterTopK(kOp, t, o);
  return {indices.ToDoubles(), weights.ToDoubles()};
}

TEST(Router, EqualOnesComeByNumber) {
  ForEachSimdTarget([&](const std::string&) {
    // More equal ones than are counted, fewer, and signed zeros.
    EXPECT_EQ(Choose(std::vector<double>(300, 0.5), Options(3)).indices, (ref::Doubles{0, 1, 2}));
    EXPECT_EQ(Choose(std::vector<double>(9, 0.5), Options(9)).indices, (ref::Doubles{0, 1, 2, 3, 4, 5, 6, 7, 8}));
    EXPECT_EQ(Choose({0.0, -0.0, 1, 0.0, -0.0, 1}, Options(4)).indices, (ref::Doubles{2, 5, 0, 1}));
    std::vector<double> x(130, -1);
    for (const size_t i : {7u, 64u, 65u, 129u}) x[i] = 2;
    x[100] = 3;
    EXPECT_EQ(Choose(x, Options(6)).indices, (ref::Doubles{100, 7, 64, 65, 129, 0}));
    // Sigmoids that round to 1, and a bias that makes equal sums.
    EXPECT_EQ(Choose({30, 40, 50, -50}, Options(3, Scoring::kSigmoid)).indices, (ref::Doubles{0, 1, 2}));
    EXPECT_EQ(Choose({0, 0, 0, 0}, Options(2, Scoring::kSigmoid), DType::kF32, {0, 0.5, 0.25, 0.5}).indices,
              (ref::Doubles{1, 3}));
    // Equal groups: the first ones.
    RouterOptions o = Options(2, Scoring::kSigmoid);
    o.groups = 4;
    o.kept_groups = 2;
    EXPECT_EQ(Choose(std::vector<double>(8, 1), o).indices, (ref::Doubles{0, 1}));
  });
}

TEST(Router, ProbabilitiesOfZeroAreEqual) {
  ForEachSimdTarget([&](const std::string&) {
    const std::vector<double> x = {-500, -300, 0, -400};
    EXPECT_EQ(Choose(x, Options(4)).indices, (ref::Doubles{2, 0, 1, 3}));
    EXPECT_EQ(Choose(x, Options(4)).weights, (ref::Doubles{0 + 1.0, 0, 0, 0}));
    EXPECT_EQ(Choose({-900, -800, 0, -700}, Options(4), DType::kF64).indices, (ref::Doubles{2, 3, 0, 1}));
    RouterOptions o = Options(4, Scoring::kSoftmax, true);
    o.all_by_logits = true;
    EXPECT_EQ(Choose(x, o).indices, (ref::Doubles{2, 1, 3, 0}));
  });
}

TEST(Router, NaNAndInfinity) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      const auto all_nan = [](const ref::Doubles& w) {
        return std::all_of(w.begin(), w.end(), [](double v) { return std::isnan(v); });
      };
      for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
        for (const bool renorm : {false, true}) {
          const Chosen c = Choose({1, 2, bad, 4, 5, 6, 7, 8, 9}, Options(3, Scoring::kSoftmax, renorm), dtype);
          EXPECT_EQ(c.indices, (ref::Doubles{0, 1, 2}));
          EXPECT_TRUE(all_nan(c.weights));
        }
        RouterOptions by_logits = Options(2, Scoring::kSoftmax, true);
        by_logits.all_by_logits = true;
        const Chosen c = Choose({1, 2, bad, 4, 5}, by_logits, dtype);
        EXPECT_EQ(c.indices, (ref::Doubles{2, 4}));
        EXPECT_TRUE(all_nan(c.weights));
      }
      EXPECT_TRUE(
          all_nan(Choose(std::vector<double>(5, -INFINITY), Options(2, Scoring::kSoftmax, true), dtype).weights));
      // A sigmoid of NaN is chosen first and seen; of infinity it is 1.
      const Chosen s = Choose({1, 2, NAN, INFINITY, -INFINITY}, Options(5, Scoring::kSigmoid), dtype);
      EXPECT_EQ(s.indices, (ref::Doubles{2, 3, 1, 0, 4}));
      EXPECT_TRUE(std::isnan(s.weights[0]));
      EXPECT_EQ(s.weights[1], 1);
      EXPECT_EQ(s.weights[4], 0);
      // Experts at -infinity are never chosen before others.
      const Chosen m = Choose({-INFINITY, 1, -INFINITY, 0}, Options(3), dtype);
      EXPECT_EQ(m.indices, (ref::Doubles{1, 3, 0}));
      EXPECT_EQ(m.weights[2], 0);
    }
  });
}

TEST(Router, NaNRowsHaveNaNGradients) {
  ForEachSimdTarget([&](const std::string&) {
    Buffer logits(DType::kF32, {2, 9});
    logits.FillRandom(1);
    logits.Set(8, NAN);
    Buffer grad(DType::kF32, {2, 2});
    grad.FillRandom(2);
    Buffer indices(DType::kI32, {2, 2});
    indices.Fill([](int64_t i) { return static_cast<double>(i % 2); });
    Buffer dlogits(DType::kF32, {2, 9});
    RouterGradTensors t;
    t.source = logits.view();
    t.grad_weights = &grad.view();
    t.indices = indices.view();
    t.dlogits = dlogits.view();
    RouterTopKBackward(kOp, t, Options(2, Scoring::kSoftmax, true));
    for (int64_t i = 0; i < 18; ++i) EXPECT_EQ(std::isnan(dlogits.Get(i)), i < 9) << i;
  });
}

TEST(Router, FinishedRowsAndRowNumbers) {
  ForEachSimdTarget([&](const std::string&) {
    Buffer logits(DType::kBF16, {2, 3, 16});
    logits.FillRandom(5, 2.0);
    Buffer finished(DType::kBool, {2, 3});
    finished.Fill([](int64_t i) { return i % 2 == 1 ? 1.0 : 0.0; });
    const auto run = [&](bool with, Buffer& weights, Buffer& indices, Buffer& dlogits) {
      Buffer rows(DType::kI32, {2, 3, 4});
      RouterTensors t;
      t.logits = logits.view();
      t.finished = with ? &finished.view() : nullptr;
      t.weights = weights.view();
      t.indices = indices.view();
      t.row_index = &rows.view();
      RouterTopK(kOp, t, Options(4));
      for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(rows.Get(i), static_cast<double>(i % 4 * 6 + i / 4));
      Buffer grad(DType::kBF16, {2, 3, 4});
      grad.FillRandom(6);
      RouterGradTensors g;
      g.source = logits.view();
      g.grad_weights = &grad.view();
      g.indices = indices.view();
      g.dlogits = dlogits.view();
      RouterTopKBackward(kOp, g, Options(4));
    };
    Buffer w1(DType::kBF16, {2, 3, 4}), w2(DType::kBF16, {2, 3, 4});
    Buffer i1(DType::kI32, {2, 3, 4}), i2(DType::kI32, {2, 3, 4});
    Buffer d1(DType::kBF16, {2, 3, 16}), d2(DType::kBF16, {2, 3, 16});
    run(false, w1, i1, d1);
    run(true, w2, i2, d2);
    EXPECT_EQ(w1.ToDoubles(), w2.ToDoubles());
    EXPECT_EQ(d1.ToDoubles(), d2.ToDoubles());
    for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(i2.Get(i), i / 4 % 2 == 1 ? 16.0 : i1.Get(i)) << i;
  });
}

TEST(Router, GradientFromScores) {
  ForEachSimdTarget([&](const std::string&) {
    for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
      const RouterOptions o = Options(4, scoring, scoring == Scoring::kSigmoid, 2.5);
      ref::Doubles want;
      Buffer scores(DType::kF32, {3, 20});
      Buffer indices(DType::kI32, {3, 4});
      Buffer grad(DType::kBF16, {3, 4});
      Buffer dlogits(DType::kBF16, {3, 20});
      grad.FillRandom(8);
      Buffer x(DType::kF32, {3, 20});
      x.FillRandom(7, 2.0);
      for (int64_t r = 0; r < 3; ++r) {
        ref::Routed row = ref::Route(RowOf(x.ToDoubles(), r, 20), {}, o);
        for (int64_t e = 0; e < 20; ++e) {
          scores.Set(r * 20 + e, row.scores[static_cast<size_t>(e)]);
          row.scores[static_cast<size_t>(e)] = scores.Get(r * 20 + e);
        }
        for (int64_t j = 0; j < 4; ++j)
          indices.Set(r * 4 + j, static_cast<double>(row.indices[static_cast<size_t>(j)]));
        const ref::Doubles dx = ref::RouteGrad(row, RowOf(grad.ToDoubles(), r, 4), {}, o);
        want.insert(want.end(), dx.begin(), dx.end());
      }
      RouterGradTensors t;
      t.source = scores.view();
      t.from_scores = true;
      t.grad_weights = &grad.view();
      t.indices = indices.view();
      t.dlogits = dlogits.view();
      RouterTopKBackward(kOp, t, o);
      ExpectUlp(dlogits, want, 0.51, "dlogits", 64 * 0x1p-24 * 2.5);
      indices.Set(5, 20);
      ExpectError([&] { RouterTopKBackward(kOp, t, o); }, kOp, "expert 20 of row 1 is not in [0, 20)");
    }
  });
}

TEST(Router, TheSameForEveryThreadCount) {
  const auto run = [](int threads) {
    Buffer logits(DType::kBF16, {700, 96});
    logits.FillRandom(1);
    Buffer weights(DType::kBF16, {700, 6}), scores(DType::kF32, {700, 96}), dlogits(DType::kBF16, {700, 96});
    Buffer indices(DType::kI64, {700, 6});
    RouterTensors t;
    t.logits = logits.view();
    t.weights = weights.view();
    t.indices = indices.view();
    t.scores = &scores.view();
    RouterGradTensors g;
    g.source = logits.view();
    g.grad_weights = &weights.view();
    g.grad_scores = &scores.view();
    g.indices = indices.view();
    g.dlogits = dlogits.view();
    WithThreads(threads, [&] {
      RouterTopK(kOp, t, Options(6));
      RouterTopKBackward(kOp, g, Options(6));
    });
    ref::Doubles all = indices.ToDoubles();
    for (const Buffer* b : {&weights, &scores, &dlogits}) {
      const ref::Doubles part = b->ToDoubles();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  };
  const ref::Doubles one = run(1);
  for (const int threads : {2, 3, 7}) EXPECT_EQ(run(threads), one) << threads;
}

TEST(Router, Errors) {
  Buffer logits(DType::kF32, {2, 12});
  Buffer weights(DType::kF32, {2, 3});
  Buffer indices(DType::kI64, {2, 3});
  Buffer bias(DType::kF32, {11});
  RouterTensors t;
  t.logits = logits.view();
  t.weights = weights.view();
  t.indices = indices.view();
  const auto expect = [&](const RouterOptions& o, const std::string& text) {
    ExpectError([&] { RouterTopK(kOp, t, o); }, kOp, text);
  };
  expect(Options(13), "got 13");
  expect(Options(-1), "got -1");
  expect(Options(2), "weights [2, 3] does not match [2, 12]");
  RouterOptions o = Options(3);
  o.groups = 5;
  expect(o, "the 12 experts do not form 5 groups of one size");
  o.groups = 0;
  expect(o, "do not form 0 groups");
  o.groups = 4;
  o.kept_groups = 5;
  expect(o, "5 of 4 groups cannot be kept");
  o.groups = 12;
  o.kept_groups = 4;
  expect(o, "groups of at least two experts");
  o.groups = 6;
  o.kept_groups = 1;
  expect(o, "k = 3 exceeds the 2 experts of the 1 groups that are kept");
  t.bias = &bias.view();
  expect(Options(3), "bias [11] does not fit the 12 experts");
  t.bias = nullptr;
  Buffer finished(DType::kBool, {3});
  t.finished = &finished.view();
  expect(Options(3), "finished [3] does not match [2, 12]: Input rows shoud be same.");
  Buffer numbers(DType::kF32, {2});
  t.finished = &numbers.view();
  expect(Options(3), "bool tensor expected for finished, got float32");
  t.finished = nullptr;
  t.logits = indices.view();
  expect(Options(3), "must be float32, bfloat16, float16 or float64, got int64");
  EXPECT_TRUE(std::isnan(weights.Get(0)));
  ExpectError([] { ParseScoring(kOp, "relu"); }, kOp, "got 'relu'");
  ExpectError([] { ParseGroupScore(kOp, "sum"); }, kOp, "got 'sum'");
}

TEST(Router, BackwardErrors) {
  Buffer logits(DType::kF32, {2, 8});
  Buffer grad(DType::kF32, {2, 2});
  Buffer wide(DType::kF64, {2, 2});
  Buffer indices(DType::kI64, {2, 2});
  Buffer dlogits(DType::kF32, {2, 8});
  indices.Fill([](int64_t) { return 1; });
  RouterGradTensors t;
  t.source = logits.view();
  t.grad_weights = &grad.view();
  t.indices = indices.view();
  t.dlogits = dlogits.view();
  const auto expect = [&](const std::string& text) {
    ExpectError([&] { RouterTopKBackward(kOp, t, Options(2)); }, kOp, text);
  };
  for (const double bad : {-1.0, 8.0, 9.0}) {
    indices.Set(3, bad);
    expect("expert " + std::to_string(static_cast<int>(bad)) + " of row 1 is not in [0, 8)");
  }
  indices.Set(3, 0);
  t.grad_weights = &wide.view();
  expect("grad of weights of float64 does not go with float32");
  EXPECT_TRUE(std::isnan(dlogits.Get(0)));
}

}  // namespace
}  // namespace jumar::testing
