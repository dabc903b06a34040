#include "kernels/loss/cross_entropy.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "base/widen.h"
#include "kernels/loss/loss_rows.h"
#include "kernels/loss/targets.h"

namespace jumar {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Labels, weights and which rows count.
class Classes {
 public:
  Classes(const char* op, const char* name, const TensorView& matrix, const TensorView& target,
          const TensorView* weight, const CrossEntropyOptions& options, ScratchFrame& frame)
      : options_(options) {
    JUMAR_CHECK(op, matrix.rank == 2 && matrix.size[1] > 0, name, " must be [rows, classes], got ",
                ShapeString(matrix));
    JUMAR_CHECK(op, IsFloating(matrix.dtype), "unsupported dtype ", Name(matrix.dtype));
    JUMAR_CHECK(op, target.rank == 1 && target.size[0] == matrix.size[0], "target ", ShapeString(target),
                " does not match ", name, " ", ShapeString(matrix), ", expected [", matrix.size[0], "]");
    classes_ = matrix.size[1];
    if (weight != nullptr) {
      JUMAR_CHECK(op, weight->rank == 1 && weight->size[0] == classes_ && IsFloating(weight->dtype), "weight ",
                  Describe(*weight), " does not match ", name, " ", ShapeString(matrix));
      JUMAR_CHECK(op, weight->dtype != DType::kF64 || matrix.dtype == DType::kF64,
                  "a float64 weight goes with float64 only, got ", Name(matrix.dtype));
    }
    JUMAR_CHECK(op, options.label_smoothing >= 0 && options.label_smoothing <= 1,
                "label_smoothing must be in [0, 1], got ", options.label_smoothing);
    labels_ = ReadTargets(op, target);
    CheckTargets(op, target, labels_, classes_, options.ignore_index >= 0 ? &options.ignore_index : nullptr);
    compute_ = ComputeType(matrix.dtype);
    if (weight == nullptr) {
      weight_sum_ = static_cast<double>(classes_);
    } else {
      weight_ = WidenAll(*weight, compute_, 0.0, frame);
      for (int64_t c = 0; c < classes_; ++c) weight_sum_ += LossLoad(compute_, weight_, c);
    }
    for (int64_t n = 0; n < rows(); ++n) divisor_ += RowWeight(n);
  }

  int64_t rows() const { return static_cast<int64_t>(labels_.size()); }
  int64_t classes() const { return classes_; }
  DType compute() const { return compute_; }
  int64_t label(int64_t n) const { return labels_[static_cast<size_t>(n)]; }
  bool Counts(int64_t n) const { return options_.ignore_index < 0 || label(n) != options_.ignore_index; }
  // w[y] m
  double RowWeight(int64_t n) const {
    if (!Counts(n)) return 0;
    return weight_ == nullptr ? 1 : LossLoad(compute_, weight_, label(n));
  }
  const void* weight() const { return weight_; }
  double weight_sum() const { return weight_sum_; }
  double divisor() const { return divisor_; }

 private:
  CrossEntropyOptions options_;
  int64_t classes_ = 0;
  DType compute_ = DType::kF32;
  std::vector<int64_t> labels_;
  void* weight_ = nullptr;
  double weight_sum_ = 0;
  double divisor_ = 0;
};

void CheckLoss(const char* op, const char* name, const TensorView& loss, const Classes& classes, bool each) {
  JUMAR_CHECK(op, each ? loss.rank == 1 && loss.size[0] == classes.rows() : loss.numel() == 1, name, " is ",
              Describe(loss), ", expected [", each ? classes.rows() : 1, "]");
}

}  // namespace

void CrossEntropy(const char* op, const TensorView& input, const TensorView& target, const TensorView* weight,
                  const CrossEntropyOptions& options, const TensorView& loss, const TensorView& log_prob) {
  ScratchFrame frame;
  const Classes classes(op, "input", input, target, weight, options, frame);
  const bool each = options.reduction == Reduction::kNone;
  CheckLoss(op, "loss", loss, classes, each);
  JUMAR_CHECK(op, SameShape(log_prob, input) && log_prob.dtype == input.dtype, "log_prob is ", Describe(log_prob),
              ", expected ", Describe(input));
  const RowMap in = InputRows(input, 1, frame);
  const OutputRows out(log_prob, 1, frame);
  const int64_t n_classes = classes.classes();
  const auto bytes = static_cast<int64_t>(SizeOf(input.dtype));
  std::vector<double> losses(static_cast<size_t>(classes.rows()));
  ParallelFor(classes.rows(), 1 + 16384 / n_classes, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const char* x = static_cast<const char*>(in.data) + in.Offset(n) * bytes;
      const RowStats stats = LossRowStats(input.dtype, x, n_classes);
      LogSumExp sum;
      sum.Add(stats);
      const double lse = sum.Value();
      if (classes.Counts(n)) {
        const double label = LossLoad(input.dtype, x, classes.label(n)) - lse;
        double value = -(1 - options.label_smoothing) * classes.RowWeight(n) * label;
        if (options.label_smoothing != 0) {
          const double weighted =
              classes.weight() == nullptr ? stats.sum : LossWeightedSum(input.dtype, x, classes.weight(), n_classes);
          value -= options.label_smoothing / static_cast<double>(n_classes) * (weighted - lse * classes.weight_sum());
        }
        losses[static_cast<size_t>(n)] = value;
      }
      LogProbRow(input.dtype, x, lse, static_cast<char*>(out.rows().data) + out.rows().Offset(n) * bytes, n_classes);
    }
  });
  out.Finish();
  if (each) {
    for (int64_t n = 0; n < classes.rows(); ++n) {
      LossStore(loss.dtype, loss.data, n * loss.stride[0], losses[static_cast<size_t>(n)]);
    }
    return;
  }
  double total = 0;
  for (const double value : losses) total += value;
  if (options.reduction == Reduction::kMean) total /= classes.divisor();
  LossStore(loss.dtype, loss.data, 0, total);
}

void CrossEntropyBackward(const char* op, const TensorView& grad, const TensorView& log_prob, const TensorView& target,
                          const TensorView* weight, const CrossEntropyOptions& options, const TensorView& dinput) {
  ScratchFrame frame;
  const Classes classes(op, "log_prob", log_prob, target, weight, options, frame);
  const bool each = options.reduction == Reduction::kNone;
  CheckLoss(op, "grad_loss", grad, classes, each);
  JUMAR_CHECK(op, IsFloating(grad.dtype) && (grad.dtype == DType::kF64) == (log_prob.dtype == DType::kF64),
              "float64 does not mix with other dtypes, got grad_loss ", Name(grad.dtype), " and log_prob ",
              Name(log_prob.dtype));
  JUMAR_CHECK(op, SameShape(dinput, log_prob) && dinput.dtype == grad.dtype, "grad of input is ", Describe(dinput),
              ", expected ", Name(grad.dtype), ShapeString(log_prob));
  const RowMap in = InputRows(log_prob, 1, frame);
  const OutputRows out(dinput, 1, frame);
  const int64_t n_classes = classes.classes();
  const double smooth = options.label_smoothing / static_cast<double>(n_classes);
  ParallelFor(classes.rows(), 1 + 16384 / n_classes, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      SoftmaxGrad row;
      row.dtype = log_prob.dtype;
      row.x = static_cast<const char*>(in.data) + in.Offset(n) * static_cast<int64_t>(SizeOf(log_prob.dtype));
      row.lse = 0;
      row.out_dtype = dinput.dtype;
      row.out = static_cast<char*>(out.rows().data) + out.rows().Offset(n) * static_cast<int64_t>(SizeOf(dinput.dtype));
      row.n = n_classes;
      row.w = classes.weight();
      if (!classes.Counts(n)) {
        std::memset(row.out, 0, static_cast<size_t>(n_classes) * SizeOf(dinput.dtype));
        continue;
      }
      double g = LossLoad(grad.dtype, grad.data, each ? n * grad.stride[0] : 0);
      if (options.reduction == Reduction::kMean) g /= classes.divisor();
      const int64_t label = classes.label(n);
      const double own = (1 - options.label_smoothing) * classes.RowWeight(n);
      const double target_log_prob = LossLoad(log_prob.dtype, row.x, label);
      // A row that holds NaN is NaN throughout: its sum would be.
      row.scale = std::isnan(target_log_prob) ? kNaN : g * (own + smooth * classes.weight_sum());
      row.shift = g * smooth;
      SoftmaxGradRow(row);
      const double w = classes.weight() == nullptr ? 1 : LossLoad(classes.compute(), classes.weight(), label);
      LossStore(dinput.dtype, row.out, label, row.scale * std::exp(target_log_prob) - row.shift * w - g * own);
    }
  });
  out.Finish();
}

}  // namespace jumar
