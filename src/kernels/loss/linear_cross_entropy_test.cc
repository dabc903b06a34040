#include "kernels/loss/linear_cross_entropy.h"

#include <cmath>

#include "kernels/loss/loss_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "linear_cross_entropy";
constexpr int64_t kIgnored = -100;

double Eps(DType dtype) { return dtype == DType::kF64 ? 0x1p-53 : 0x1p-24; }

struct Case {
  DType dtype = DType::kF32;
  int64_t tokens = 0;
  int64_t width = 0;
  int64_t classes = 0;
  Reduction reduction = Reduction::kMean;
  bool bias = true;
  double smoothing = 0;
  double z = 0;
  std::vector<int64_t> ignored = {};
  bool strided = false;
  bool kept = false;  // logits go from the forward to the backward
};

std::string Text(const Case& c) {
  return std::string(Name(c.dtype)) + " " + std::to_string(c.tokens) + "x" + std::to_string(c.width) + "x" +
         std::to_string(c.classes) + " reduction " + std::to_string(static_cast<int>(c.reduction)) +
         (c.kept ? " kept" : "") + (c.strided ? " strided" : "");
}

Buffer Matrix(DType dtype, int64_t rows, int64_t cols, bool strided) {
  return strided ? Buffer(dtype, {rows, cols}, {1, rows + 2}) : Buffer(dtype, {rows, cols});
}

// actual within half an ulp and `bound` of the oracle.
void ExpectWithin(const Buffer& actual, const ref::Doubles& expected, const ref::Doubles& bound,
                  const std::string& what) {
  ASSERT_EQ(actual.numel(), static_cast<int64_t>(expected.size())) << what;
  for (int64_t i = 0; i < actual.numel(); ++i) {
    const double e = expected[static_cast<size_t>(i)];
    const double limit = 0.501 * UlpSize(actual.view().dtype, e) + bound[static_cast<size_t>(i)];
    ASSERT_LE(std::abs(actual.Get(i) - e), limit) << what << " element " << i << ": " << actual.Get(i) << " for " << e;
  }
}

struct Results {
  std::vector<double> loss, dinput, dweight, dbias;
  bool operator==(const Results&) const = default;
};

Results Check(const Case& c) {
  const std::string what = Text(c);
  const DType compute = c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Buffer input = Matrix(c.dtype, c.tokens, c.width, c.strided);
  Buffer weight = Matrix(c.dtype, c.classes, c.width, c.strided);
  Buffer bias(c.dtype, {c.classes});
  Buffer target(DType::kI64, {c.tokens}, c.strided ? std::vector<int64_t>{3} : std::vector<int64_t>{});
  input.FillRandom(1);
  weight.FillRandom(2, 0.5);
  bias.FillRandom(3);
  std::vector<int64_t> labels(static_cast<size_t>(c.tokens));
  Random random(4);
  for (size_t n = 0; n < labels.size(); ++n) labels[n] = static_cast<int64_t>(random.Next() >> 33) % c.classes;
  for (const int64_t n : c.ignored) labels[static_cast<size_t>(n)] = kIgnored;
  target.Fill([&](int64_t n) { return static_cast<double>(labels[static_cast<size_t>(n)]); });

  const ref::Doubles xs = input.ToDoubles();
  const ref::Doubles ws = weight.ToDoubles();
  const ref::Doubles bs = c.bias ? bias.ToDoubles() : ref::Doubles{};
  const ref::LinearLoss oracle = ref::LinearCrossEntropy(xs, ws, bs, labels, static_cast<size_t>(c.width),
                                                         static_cast<size_t>(c.classes), kIgnored, c.smoothing, c.z);

  const bool each = c.reduction == Reduction::kNone;
  const std::vector<int64_t> loss_size = each ? std::vector<int64_t>{c.tokens} : std::vector<int64_t>{};
  Buffer loss(compute, loss_size);
  Buffer lse(compute, {c.tokens});
  Buffer logits(compute, {c.tokens, c.classes});
  const LinearCrossEntropyOptions options{kIgnored, c.reduction, c.smoothing, c.z};
  const TensorView* b = c.bias ? &bias.view() : nullptr;
  const TensorView* kept = c.kept ? &logits.view() : nullptr;
  LinearCrossEntropy(kOp, input.view(), weight.view(), b, target.view(), options, loss.view(), lse.view(), kept);

  // A logit is off by its product's bound; a loss by that of two logits and, with z, by 2 z lse of one.
  double logit_error = 0;
  for (size_t i = 0; i < static_cast<size_t>(c.tokens); ++i) {
    for (size_t v = 0; v < static_cast<size_t>(c.classes); ++v) {
      double size = bs.empty() ? 0 : std::abs(bs[v]);
      for (size_t h = 0; h < static_cast<size_t>(c.width); ++h) {
        size += std::abs(xs[i * static_cast<size_t>(c.width) + h] * ws[v * static_cast<size_t>(c.width) + h]);
      }
      logit_error = std::max(logit_error, static_cast<double>(c.width + 3) * Eps(compute) * size);
    }
  }
  double top = 1;
  for (const double value : oracle.lse) top = std::max(top, std::abs(value));
  const double loss_error = (2 + 2 * c.z * top) * logit_error + 40 * Eps(compute) * top;
  const auto counted = static_cast<double>(oracle.count);
  ref::Doubles expected_loss = oracle.loss;
  if (!each) {
    double total = 0;
    for (const double value : oracle.loss) total += value;
    expected_loss = {c.reduction == Reduction::kMean ? total / counted : total};
  }
  if (!each && c.reduction == Reduction::kMean && oracle.count == 0) {
    EXPECT_TRUE(std::isnan(loss.Get(0))) << what;
  } else {
    const double sum_of = c.reduction == Reduction::kSum ? counted : 1;
    ExpectWithin(loss, expected_loss, ref::Doubles(expected_loss.size(), loss_error * sum_of), what + " loss");
  }

  Buffer grad(compute, loss_size);
  grad.FillRandom(5);
  if (!each) grad.Set(0, -1.75);
  ref::Doubles dx = oracle.dx;
  const auto classes = static_cast<size_t>(c.classes);
  for (size_t n = 0; n < labels.size(); ++n) {
    double g = grad.Get(each ? static_cast<int64_t>(n) : 0);
    if (c.reduction == Reduction::kMean) g /= counted;
    for (size_t v = 0; v < classes; ++v) dx[n * classes + v] = labels[n] == kIgnored ? 0 : g * dx[n * classes + v];
  }
  // dx: the logits' error, that of lse, a few roundings, and those of bf16 where it is narrowed.
  double top_grad = 0;
  for (int64_t n = 0; n < grad.numel(); ++n) top_grad = std::max(top_grad, std::abs(grad.Get(n)));
  if (c.reduction == Reduction::kMean) top_grad /= std::max(counted, 1.0);
  const double dx_error =
      (1 + 2 * c.z * top) * top_grad * (2 * logit_error + 10 * Eps(compute) * top + 8 * Eps(compute));
  const double relative = c.dtype == DType::kBF16 ? 0x1p-8 : 2 * Eps(compute);
  const auto sums = [&](size_t rows, size_t cols, size_t terms, const auto& a, const auto& f) {
    ref::Doubles value(rows * cols);
    ref::Doubles bound(rows * cols);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < cols; ++j) {
        for (size_t t = 0; t < terms; ++t) {
          value[i * cols + j] += a(i, t) * f(t, j);
          bound[i * cols + j] +=
              std::abs(f(t, j)) * dx_error +
              std::abs(a(i, t) * f(t, j)) * (relative + static_cast<double>(terms + 2) * Eps(compute));
        }
      }
    }
    return std::pair(value, bound);
  };
  const auto width = static_cast<size_t>(c.width);
  const auto tokens = static_cast<size_t>(c.tokens);

  Buffer dinput = Matrix(c.dtype, c.tokens, c.width, c.strided);
  Buffer dweight = Matrix(c.dtype, c.classes, c.width, c.strided);
  Buffer dbias(c.dtype, {c.classes});
  LinearCrossEntropyBackward(kOp, grad.view(), input.view(), weight.view(), b, target.view(), lse.view(), kept, options,
                             &dinput.view(), &dweight.view(), c.bias ? &dbias.view() : nullptr);
  const auto [dinput_ref, dinput_bound] = sums(
      tokens, width, classes, [&](size_t n, size_t v) { return dx[n * classes + v]; },
      [&](size_t v, size_t h) { return ws[v * width + h]; });
  ExpectWithin(dinput, dinput_ref, dinput_bound, what + " dinput");
  const auto [dweight_ref, dweight_bound] = sums(
      classes, width, tokens, [&](size_t v, size_t n) { return dx[n * classes + v]; },
      [&](size_t n, size_t h) { return labels[n] == kIgnored ? 0 : xs[n * width + h]; });
  ExpectWithin(dweight, dweight_ref, dweight_bound, what + " dweight");
  if (c.bias) {
    const auto [dbias_ref, dbias_bound] = sums(
        classes, 1, tokens, [&](size_t v, size_t n) { return dx[n * classes + v]; },
        [&](size_t n, size_t) { return labels[n] == kIgnored ? 0.0 : 1.0; });
    ExpectWithin(dbias, dbias_ref, dbias_bound, what + " dbias");
  }
  for (const Buffer* buffer :
       {&input, &weight, &bias, &target, &loss, &lse, &logits, &grad, &dinput, &dweight, &dbias}) {
    buffer->CheckRedZones(what);
  }
  EXPECT_EQ(input.ToDoubles(), xs) << what;
  EXPECT_EQ(weight.ToDoubles(), ws) << what;
  return {loss.ToDoubles(), dinput.ToDoubles(), dweight.ToDoubles(), c.bias ? dbias.ToDoubles() : ref::Doubles{}};
}

TEST(LinearCrossEntropy, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      Check({dtype, 5, 7, 9, Reduction::kMean, true, 0, 0, {1}});
      Check({dtype, 6, 16, 33, Reduction::kSum, false, 0.1, 0, {}});
      Check({dtype, 3, 9, 65, Reduction::kNone, true, 0.2, 0.01, {0}});
      Check({dtype, 1, 1, 1, Reduction::kMean, true});
      Check({dtype, 17, 5, 130, Reduction::kMean, true, 0, 0.02, {16, 3}, true});
      Check({dtype, 17, 5, 130, Reduction::kSum, true, 0, 0, {}, true, true});
      Check({dtype, 4, 3, 47, Reduction::kMean, true, 0.1, 0.01, {2}, false, true});
    }
  });
}

TEST(LinearCrossEntropy, BlocksOfTheVocabulary) {
  // 8200 tokens leave blocks of 256 columns, with a last one of 60: of the backward, and of the forward where it keeps
  // the logits.
  Case c{DType::kF32, 8200, 1, 316, Reduction::kMean, true, 0.1, 0.01, {5, 8199}};
  if (!SmallTests()) Check(c);
  c.dtype = DType::kBF16;
  if (!SmallTests()) Check(c);
  c.kept = true;
  Check(c);
}

TEST(LinearCrossEntropy, NoTokens) {
  for (const bool kept : {false, true}) {
    Check({DType::kF32, 0, 4, 5, Reduction::kSum, true, 0, 0, {}, false, kept});
    Check({DType::kBF16, 0, 4, 5, Reduction::kMean, true, 0.1, 0, {}, false, kept});
    Check({DType::kF32, 3, 4, 5, Reduction::kSum, true, 0, 0, {0, 1, 2}, false, kept});
    Check({DType::kF32, 3, 4, 5, Reduction::kMean, true, 0.1, 0.1, {0, 1, 2}, false, kept});
  }
  Check({DType::kF32, 3, 0, 5, Reduction::kMean, true});
}

TEST(LinearCrossEntropy, SameForEveryThreadCount) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c{dtype, 70, 33, 515, Reduction::kMean, true, 0.1, 0.01, {7}};
    std::vector<Results> results;
    for (const int threads : SmallTests() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 5}) {
      WithThreads(threads, [&] { results.push_back(Check(c)); });
    }
    for (const Results& r : results) EXPECT_TRUE(r == results.front());
  }
}

struct Small {
  Buffer input{DType::kF32, {2, 2}};
  Buffer weight{DType::kF32, {3, 2}};
  Buffer target{DType::kI64, {2}};
  Buffer loss{DType::kF32, {}};
  Buffer lse{DType::kF32, {2}};
  Small() {
    input.Fill([](int64_t) { return 1; });
    weight.Fill([](int64_t i) { return static_cast<double>(i); });
    target.Fill([](int64_t i) { return static_cast<double>(i); });
  }
  void Run() {
    LinearCrossEntropy(kOp, input.view(), weight.view(), nullptr, target.view(), {}, loss.view(), lse.view(), nullptr);
  }
};

TEST(LinearCrossEntropy, NotFiniteValues) {
  ForEachSimdTarget([&](const std::string& target) {
    for (const double bad : {NAN, INFINITY, -INFINITY}) {
      for (int64_t at = 0; at < 3; ++at) {
        Small s;
        s.weight.Set(2 * at, bad);
        s.Run();
        // -infinity is a class that cannot be, unless it is a label.
        const bool finite = bad == -INFINITY && at == 2;
        EXPECT_EQ(std::isfinite(s.loss.Get(0)), finite) << target << " " << bad << " at " << at;
        if (bad != -INFINITY) {
          EXPECT_TRUE(std::isnan(s.loss.Get(0))) << target << " " << bad << " at " << at;
          Buffer grad(DType::kF32, {});
          grad.Set(0, 1);
          Buffer dweight(DType::kF32, {3, 2});
          LinearCrossEntropyBackward(kOp, grad.view(), s.input.view(), s.weight.view(), nullptr, s.target.view(),
                                     s.lse.view(), nullptr, {}, nullptr, &dweight.view(), nullptr);
          for (int64_t i = 0; i < 6; ++i) EXPECT_TRUE(std::isnan(dweight.Get(i))) << target << " " << i;
        }
      }
    }
  });
}

TEST(LinearCrossEntropy, Errors) {
  Small s;
  s.target.Set(1, 3);
  s.loss.Set(0, 42);
  ExpectError([&] { s.Run(); }, kOp, "target 3 at position [1] is not in [0, 3) and is not ignore_index, -100");
  EXPECT_EQ(s.loss.Get(0), 42);
  s.target.Set(1, -1);
  ExpectError([&] { s.Run(); }, kOp, "target -1 at position [1]");
  Small shapes;
  const auto with = [&](const Buffer& input, const Buffer& weight, const Buffer* bias, const Buffer& target) {
    LinearCrossEntropy(kOp, input.view(), weight.view(), bias == nullptr ? nullptr : &bias->view(), target.view(), {},
                       shapes.loss.view(), shapes.lse.view(), nullptr);
  };
  const Buffer wide(DType::kF32, {2, 5});
  const Buffer half(DType::kBF16, {3, 2});
  const Buffer bias(DType::kF32, {2});
  const Buffer labels(DType::kI64, {3});
  const Buffer floats(DType::kF32, {2});
  const Buffer none(DType::kF32, {0, 2});
  ExpectError([&] { with(wide, shapes.weight, nullptr, shapes.target); }, kOp, "last dimension of input [2, 5]");
  ExpectError([&] { with(shapes.input, half, nullptr, shapes.target); }, kOp, "bfloat16[3, 2]");
  ExpectError([&] { with(shapes.input, shapes.weight, &bias, shapes.target); }, kOp, "bias [2]");
  ExpectError([&] { with(shapes.input, shapes.weight, nullptr, labels); }, kOp, "target [3]");
  ExpectError([&] { with(shapes.input, shapes.weight, nullptr, floats); }, kOp, "int64 or int32, got float32");
  ExpectError([&] { with(shapes.input, none, nullptr, shapes.target); }, kOp, "no classes");
  ExpectError([&] { ParseReduction(kOp, "avg"); }, kOp, "'avg'");
}

}  // namespace
}  // namespace jumar::testing
