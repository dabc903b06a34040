#include "kernels/loss/cross_entropy.h"

#include <cmath>

#include "kernels/loss/loss_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "npu_cross_entropy_loss";

struct Case {
  DType dtype;
  int64_t rows;
  int64_t classes;
  Reduction reduction = Reduction::kMean;
  bool weighted = true;
  int64_t ignore_index = -100;
  double smoothing = 0;
  bool strided = false;
};

void Check(const Case& c) {
  const std::string what = std::string(Name(c.dtype)) + " " + std::to_string(c.rows) + "x" + std::to_string(c.classes);
  const bool f64 = c.dtype == DType::kF64;
  const double eps = f64 ? 0x1p-53 : 0x1p-24;
  Buffer input =
      c.strided ? Buffer(c.dtype, {c.rows, c.classes}, {1, c.rows + 1}) : Buffer(c.dtype, {c.rows, c.classes});
  Buffer weight(f64 ? DType::kF64 : DType::kF32, {c.classes});
  Buffer target(DType::kI32, {c.rows});
  input.FillRandom(1, 3.0);
  weight.Fill([](int64_t i) { return 0.25 * static_cast<double>(i % 7) + 0.25; });
  std::vector<int64_t> labels(static_cast<size_t>(c.rows));
  for (int64_t n = 0; n < c.rows; ++n) labels[static_cast<size_t>(n)] = n * 5 % c.classes;
  target.Fill([&](int64_t n) { return static_cast<double>(labels[static_cast<size_t>(n)]); });
  ref::Doubles ws = weight.ToDoubles();
  if (!c.weighted) ws.assign(static_cast<size_t>(c.classes), 1.0);
  const ref::Doubles xs = input.ToDoubles();
  const ref::VendorLoss oracle = ref::CrossEntropy(xs, labels, ws, c.ignore_index, c.smoothing);

  const bool each = c.reduction == Reduction::kNone;
  Buffer loss(c.dtype, {each ? c.rows : 1});
  Buffer log_prob(c.dtype, {c.rows, c.classes});
  const CrossEntropyOptions options{c.reduction, c.ignore_index, c.smoothing};
  const TensorView* w = c.weighted ? &weight.view() : nullptr;
  CrossEntropy(kOp, input.view(), target.view(), w, options, loss.view(), log_prob.view());
  double total = 0;
  for (const double value : oracle.loss) total += value;
  const ref::Doubles expected =
      each ? oracle.loss : ref::Doubles{c.reduction == Reduction::kMean ? total / oracle.divisor : total};
  // e^x is within an ulp, its argument within half an ulp of the largest difference.
  double top = 0;
  for (const double x : xs) top = std::max(top, std::abs(x));
  const double error = 40 * (top + 8) * eps;
  ExpectUlp(loss, expected, 0.51, what + " loss", error * static_cast<double>(each ? 2 : c.rows + 2));
  ExpectUlp(log_prob, oracle.log_prob, 0.51, what + " log_prob", error);

  for (const DType grad_dtype : {c.dtype, f64 ? DType::kF64 : DType::kF32}) {
    Buffer grad(grad_dtype, {each ? c.rows : 1});
    grad.FillRandom(2);
    if (!each) grad.Set(0, 1.5);
    ref::Doubles dx = ref::CrossEntropyGrad(log_prob.ToDoubles(), labels, ws, c.ignore_index, c.smoothing);
    for (size_t i = 0; i < dx.size(); ++i) {
      double g = grad.Get(each ? static_cast<int64_t>(i) / c.classes : 0);
      if (c.reduction == Reduction::kMean) g /= oracle.divisor;
      dx[i] *= g;
    }
    Buffer dinput(grad_dtype, {c.rows, c.classes});
    CrossEntropyBackward(kOp, grad.view(), log_prob.view(), target.view(), w, options, dinput.view());
    ExpectUlp(dinput, dx, 0.51, what + " dinput", 64 * eps);
    dinput.CheckRedZones(what);
  }
  for (const Buffer* b : {&input, &weight, &target, &loss, &log_prob}) b->CheckRedZones(what);
  EXPECT_EQ(input.ToDoubles(), xs) << what;
}

TEST(CrossEntropy, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t classes : {1, 3, 8, 16, 17, 33, 130}) Check({dtype, 5, classes});
      Check({dtype, 6, 40, Reduction::kSum, true, 5, 0.1});
      Check({dtype, 6, 40, Reduction::kNone, false, 0, 0.2, true});
      Check({dtype, 6, 40, Reduction::kMean, true, 5, 0.3, true});
    }
    Check({DType::kF32, 2, 5000});
    Check({DType::kF32, 0, 4, Reduction::kSum});
  });
}

TEST(CrossEntropy, NegativeIgnoreIndexIgnoresNothing) {
  Buffer input(DType::kF32, {2, 3});
  Buffer target(DType::kI64, {2});
  Buffer loss(DType::kF32, {1});
  Buffer log_prob(DType::kF32, {2, 3});
  input.FillRandom(1);
  target.Set(0, 1);
  target.Set(1, -100);
  const auto run = [&](const CrossEntropyOptions& options) {
    CrossEntropy(kOp, input.view(), target.view(), nullptr, options, loss.view(), log_prob.view());
  };
  ExpectError([&] { run({}); }, kOp, "target -100 at position [1] is not in [0, 3)");
  EXPECT_TRUE(std::isnan(loss.Get(0)));
  target.Set(1, 3);
  ExpectError([&] { run({Reduction::kSum, 2, 0}); }, kOp, "target 3 at position [1]");
  target.Set(1, 2);
  run({Reduction::kSum, 2, 0});
  EXPECT_TRUE(std::isfinite(loss.Get(0)));
}

TEST(CrossEntropy, Errors) {
  Buffer input(DType::kF32, {2, 3});
  Buffer target(DType::kI64, {2});
  Buffer loss(DType::kF32, {1});
  Buffer log_prob(DType::kF32, {2, 3});
  Buffer vector(DType::kF32, {3});
  Buffer two(DType::kF32, {2});
  Buffer wide(DType::kF64, {1});
  target.Fill([](int64_t) { return 1; });
  ExpectError([&] { CrossEntropy(kOp, vector.view(), target.view(), nullptr, {}, loss.view(), log_prob.view()); }, kOp,
              "[3]");
  ExpectError([&] { CrossEntropy(kOp, input.view(), target.view(), &two.view(), {}, loss.view(), log_prob.view()); },
              kOp, "weight float32[2]");
  ExpectError([&] { CrossEntropy(kOp, input.view(), target.view(), nullptr, {}, two.view(), log_prob.view()); }, kOp,
              "loss is");
  ExpectError(
      [&] { CrossEntropyBackward(kOp, wide.view(), log_prob.view(), target.view(), nullptr, {}, log_prob.view()); },
      kOp, "float64 does not mix");
}

}  // namespace
}  // namespace jumar::testing
