#include "kernels/loss/linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/check.h"
#include "base/heap_buffer.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "base/widen.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_kernel.h"
#include "kernels/gemm/linear.h"
#include "kernels/loss/loss_rows.h"
#include "kernels/loss/targets.h"

namespace jumar {
namespace {

constexpr int64_t kForwardRows = 2048;  // tokens of one block in the forward
constexpr int64_t kMinColumns = 256;    // of one block in the backward, which holds all tokens
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Columns of a block of logits with `rows` rows: from sizes alone.
int64_t BlockColumns(int64_t rows, int64_t classes) {
  const int64_t columns = std::max(kMinColumns, kLossBlock / std::max<int64_t>(rows, 1));
  return std::min((columns + 63) / 64 * 64, classes);
}

char* At(const TensorView& matrix, int64_t row, int64_t column) {
  return matrix.ptr<char>() +
         (row * matrix.stride[0] + column * matrix.stride[1]) * static_cast<int64_t>(SizeOf(matrix.dtype));
}

TensorView Matrix(void* data, DType dtype, int64_t rows, int64_t columns) {
  return Contiguous(data, dtype, {rows, columns});
}

// The operands, checked, and the tokens that count as a matrix.
class Problem {
 public:
  Problem(const char* op, const TensorView& input, const TensorView& weight, const TensorView* bias,
          const TensorView& target, const LinearCrossEntropyOptions& options)
      : op_(op), weight_(weight), bias_(bias), options_(options) {
    Check(input, target);
    classes_ = weight.size[0];
    width_ = weight.size[1];
    compute_ = ComputeType(input.dtype);
    labels_ = ReadTargets(op, target);
    CheckTargets(op, target, labels_, classes_, &options.ignore_index);
    // A label that is ignored may also be the number of a class.
    for (size_t n = 0; n < labels_.size(); ++n) {
      if (labels_[n] != options.ignore_index) tokens_.push_back(static_cast<int64_t>(n));
    }
    input_ = input;
  }

  const char* op() const { return op_; }
  const LinearCrossEntropyOptions& options() const { return options_; }
  DType compute() const { return compute_; }
  int64_t classes() const { return classes_; }
  int64_t width() const { return width_; }
  int64_t all() const { return static_cast<int64_t>(labels_.size()); }
  // Tokens that count, and for the i-th of them its number and its label.
  int64_t count() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t token(int64_t i) const { return tokens_[static_cast<size_t>(i)]; }
  int64_t label(int64_t i) const { return labels_[static_cast<size_t>(token(i))]; }

  TensorView weight(int64_t begin, int64_t n) const { return Narrow(weight_, 0, begin, n); }

  // The rows of input that count: input itself, or a copy.
  TensorView Rows() {
    if (width_ == 0 || count() == 0) return Matrix(input_.data, input_.dtype, count(), width_);
    RowMap rows;
    if (TryRows(input_, 1, &rows) && rows.rank <= 1 && count() == all()) {
      TensorView view = Matrix(rows.data, input_.dtype, count(), width_);
      view.stride[0] = rows.rank == 0 ? width_ : rows.stride[0];
      return view;
    }
    ScratchFrame frame;
    rows = InputRows(input_, 1, frame);
    const auto bytes = static_cast<int64_t>(SizeOf(input_.dtype));
    copy_ = HeapBuffer(count() * width_ * bytes);
    char* to = static_cast<char*>(copy_.data());
    ParallelFor(count(), 1 + 32768 / width_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const char* from = static_cast<const char*>(rows.data) + rows.Offset(token(i)) * bytes;
        std::memcpy(to + i * width_ * bytes, from, static_cast<size_t>(width_ * bytes));
      }
    });
    return Matrix(to, input_.dtype, count(), width_);
  }

  // out = rows weight[begin, begin + n)^T + bias
  void Logits(const TensorView& rows, int64_t begin, int64_t n, const TensorView& out) const {
    if (bias_ == nullptr) return Gemm(op_, rows, Transposed(weight(begin, n)), nullptr, out);
    const TensorView bias = Narrow(*bias_, 0, begin, n);
    Gemm(op_, rows, Transposed(weight(begin, n)), &bias, out);
  }

 private:
  void Check(const TensorView& input, const TensorView& target) const {
    JUMAR_CHECK(op_, weight_.rank == 2, "weight must be [classes, features], got ", ShapeString(weight_));
    JUMAR_CHECK(op_, input.rank >= 1 && input.size[input.rank - 1] == weight_.size[1], "last dimension of input ",
                ShapeString(input), " does not match weight ", ShapeString(weight_), ", expected ", weight_.size[1]);
    JUMAR_CHECK(op_, weight_.size[0] > 0, "weight ", ShapeString(weight_), " has no classes");
    bool same = target.rank + 1 == input.rank;
    for (int i = 0; same && i < target.rank; ++i) same = target.size[i] == input.size[i];
    JUMAR_CHECK(op_, same, "target ", ShapeString(target), " does not match input ", ShapeString(input),
                " in all but its last dimension");
    JUMAR_CHECK(op_, IsFloating(input.dtype), "unsupported dtype ", Name(input.dtype));
    JUMAR_CHECK(op_, weight_.dtype == input.dtype, "input and weight should have one dtype, got ", Describe(input),
                " and ", Describe(weight_));
    if (bias_ != nullptr) {
      JUMAR_CHECK(op_, bias_->rank == 1 && bias_->size[0] == weight_.size[0], "bias ", ShapeString(*bias_),
                  " does not match weight ", ShapeString(weight_));
      JUMAR_CHECK(op_, bias_->dtype == input.dtype, "input and bias should have one dtype, got ", Describe(input),
                  " and ", Describe(*bias_));
    }
    JUMAR_CHECK(op_, options_.label_smoothing >= 0 && options_.label_smoothing <= 1,
                "label_smoothing must be in [0, 1], got ", options_.label_smoothing);
  }

  const char* op_;
  TensorView input_;
  TensorView weight_;
  const TensorView* bias_;
  LinearCrossEntropyOptions options_;
  DType compute_ = DType::kF32;
  int64_t classes_ = 0;
  int64_t width_ = 0;
  std::vector<int64_t> labels_;
  std::vector<int64_t> tokens_;
  HeapBuffer copy_;
};

void CheckShape(const char* op, const char* name, const TensorView& view, const std::vector<int64_t>& sizes,
                DType dtype) {
  const TensorView expected = Contiguous(nullptr, dtype, sizes);
  JUMAR_CHECK(op, SameShape(view, expected) && view.dtype == dtype, name, " is ", Describe(view), ", expected ",
              Describe(expected));
}

// What one token has gathered from the blocks so far.
struct TokenState {
  LogSumExp lse;
  double sum = 0;
  double target = 0;
};

void AddBlock(const Problem& p, const TensorView& block, int64_t row, int64_t column, std::vector<TokenState>& states) {
  const int64_t n = block.size[1];
  ParallelFor(block.size[0], 1 + 16384 / n, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      TokenState& state = states[static_cast<size_t>(row + r)];
      const void* x = At(block, r, 0);
      const RowStats stats = LossRowStats(block.dtype, x, n);
      state.lse.Add(stats);
      state.sum += stats.sum;
      const int64_t label = p.label(row + r) - column;
      if (label >= 0 && label < n) state.target = LossLoad(block.dtype, x, label);
    }
  });
}

// The incoming gradient of each token that counts.
std::vector<double> TokenGrads(const Problem& p, const TensorView& grad) {
  const int64_t count = p.count();
  std::vector<double> grads(static_cast<size_t>(count));
  if (count == 0) return grads;
  ScratchFrame frame;
  const RowMap rows = InputRows(grad, 0, frame);
  const Reduction reduction = p.options().reduction;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = reduction == Reduction::kNone ? rows.Offset(p.token(i)) : rows.Offset(0);
    const double g = LossLoad(grad.dtype, grad.data, at);
    grads[static_cast<size_t>(i)] = reduction == Reduction::kMean ? g / static_cast<double>(count) : g;
  }
  return grads;
}

// bf16 gradients of logits pay where products of bf16 run on instructions of their own.
bool NarrowGrads(DType input) {
  return input == DType::kBF16 &&
         &ChooseGemmKernel(DType::kBF16, DType::kBF16) != &ChooseGemmKernel(DType::kF32, DType::kF32);
}

// One block of gradients of logits from one of logits: `out` may share its memory, row by row.
void GradBlock(const Problem& p, const TensorView& logits, int64_t column, const std::vector<double>& grads,
               const TensorView& lse, const TensorView& out) {
  const int64_t n = logits.size[1];
  const LinearCrossEntropyOptions& o = p.options();
  const double smooth = o.label_smoothing / static_cast<double>(p.classes());
  ParallelFor(p.count(), 1 + 16384 / n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double g = grads[static_cast<size_t>(i)];
      const double log_sum = LossLoad(lse.dtype, lse.data, p.token(i) * lse.stride[0]);
      SoftmaxGrad row;
      row.dtype = logits.dtype;
      row.x = At(logits, i, 0);
      row.lse = log_sum;
      row.scale = g * (1 + 2 * o.z_loss * log_sum);  // makes NaN of all where log_sum is not finite
      row.shift = g * smooth;
      row.w = nullptr;
      row.out_dtype = out.dtype;
      row.out = At(out, i, 0);
      row.n = n;
      const int64_t label = p.label(i) - column;
      const bool here = label >= 0 && label < n;
      const double target = here ? LossLoad(logits.dtype, row.x, label) : 0;
      SoftmaxGradRow(row);
      if (here) {
        const double value = row.scale * std::exp(target - log_sum) - row.shift - g * (1 - o.label_smoothing);
        LossStore(out.dtype, row.out, label, value);
      }
    }
  });
}

void Zero(const TensorView& view) {
  ScratchFrame frame;
  const OutputRows rows(view, view.rank == 0 ? 0 : 1, frame);
  const RowMap& map = rows.rows();
  const auto bytes = static_cast<int64_t>(SizeOf(view.dtype));
  for (int64_t r = 0; r < map.rows && map.cols > 0; ++r) {
    std::memset(static_cast<char*>(map.data) + map.Offset(r) * bytes, 0, static_cast<size_t>(map.cols * bytes));
  }
  rows.Finish();
}

// Sums of the tokens that count, rounded to the rows of dinput; zeros in the other rows.
void ScatterRows(const Problem& p, const TensorView& sums, const TensorView& dinput) {
  ScratchFrame frame;
  const OutputRows out(dinput, 1, frame);
  const RowMap& rows = out.rows();
  const auto bytes = static_cast<int64_t>(SizeOf(dinput.dtype));
  std::vector<int64_t> row_of(static_cast<size_t>(p.all()), -1);
  for (int64_t i = 0; i < p.count(); ++i) row_of[static_cast<size_t>(p.token(i))] = i;
  ParallelFor(p.all(), 1 + 32768 / p.width(), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      char* to = static_cast<char*>(rows.data) + rows.Offset(n) * bytes;
      const int64_t i = row_of[static_cast<size_t>(n)];
      if (i < 0) {
        std::memset(to, 0, static_cast<size_t>(p.width() * bytes));
      } else {
        NarrowRow(sums.dtype, At(sums, i, 0), dinput.dtype, to, p.width());
      }
    }
  });
  out.Finish();
}

}  // namespace

Reduction ParseReduction(const char* op, const std::string& name) {
  if (name == "none") return Reduction::kNone;
  if (name == "mean") return Reduction::kMean;
  if (name == "sum") return Reduction::kSum;
  Fail(op, "reduction must be 'none', 'mean' or 'sum', got '", name, "'");
}

void LinearCrossEntropy(const char* op, const TensorView& input, const TensorView& weight, const TensorView* bias,
                        const TensorView& target, const LinearCrossEntropyOptions& options, const TensorView& loss,
                        const TensorView& lse, const TensorView* logits) {
  Problem p(op, input, weight, bias, target, options);
  const bool each = options.reduction == Reduction::kNone;
  CheckShape(op, "loss", loss,
             each ? std::vector<int64_t>(target.size, target.size + target.rank) : std::vector<int64_t>{}, p.compute());
  CheckShape(op, "lse", lse, {p.all()}, p.compute());
  if (logits != nullptr) CheckShape(op, "logits", *logits, {p.all(), p.classes()}, p.compute());

  const TensorView rows = p.Rows();
  std::vector<TokenState> states(static_cast<size_t>(p.count()));
  const int64_t height = logits != nullptr ? p.count() : std::min(p.count(), kForwardRows);
  const int64_t columns = BlockColumns(height, p.classes());
  HeapBuffer buffer;
  if (logits == nullptr) buffer = HeapBuffer(height * columns * static_cast<int64_t>(SizeOf(p.compute())));
  for (int64_t v = 0; v < p.classes(); v += columns) {
    const int64_t n = std::min(columns, p.classes() - v);
    for (int64_t t = 0; t < p.count(); t += height) {
      const int64_t m = std::min(height, p.count() - t);
      const TensorView block =
          logits != nullptr ? Narrow(Narrow(*logits, 0, 0, m), 1, v, n) : Matrix(buffer.data(), p.compute(), m, n);
      p.Logits(Narrow(rows, 0, t, m), v, n, block);
      AddBlock(p, block, t, v, states);
    }
  }
  if (logits != nullptr) Zero(Narrow(*logits, 0, p.count(), p.all() - p.count()));

  Zero(lse);
  std::vector<double> losses(static_cast<size_t>(p.all()));
  double total = 0;
  for (int64_t i = 0; i < p.count(); ++i) {
    const TokenState& state = states[static_cast<size_t>(i)];
    const double log_sum = state.lse.Value();
    double value = log_sum - (1 - options.label_smoothing) * state.target + options.z_loss * log_sum * log_sum;
    if (options.label_smoothing != 0) value -= options.label_smoothing / static_cast<double>(p.classes()) * state.sum;
    LossStore(lse.dtype, lse.data, p.token(i) * lse.stride[0], log_sum);
    losses[static_cast<size_t>(p.token(i))] = value;
    total += value;
  }
  if (each) {
    ScratchFrame frame;
    const OutputRows out(loss, 0, frame);
    for (int64_t n = 0; n < p.all(); ++n) {
      LossStore(loss.dtype, out.rows().data, out.rows().Offset(n), losses[static_cast<size_t>(n)]);
    }
    out.Finish();
    return;
  }
  // 0 / 0 = NaN, as in torch.
  if (options.reduction == Reduction::kMean) total = p.count() == 0 ? kNaN : total / static_cast<double>(p.count());
  LossStore(loss.dtype, loss.data, 0, total);
}

void LinearCrossEntropyBackward(const char* op, const TensorView& grad, const TensorView& input,
                                const TensorView& weight, const TensorView* bias, const TensorView& target,
                                const TensorView& lse, const TensorView* logits,
                                const LinearCrossEntropyOptions& options, const TensorView* dinput,
                                const TensorView* dweight, const TensorView* dbias) {
  Problem p(op, input, weight, bias, target, options);
  const bool each = options.reduction == Reduction::kNone;
  JUMAR_CHECK(op, IsFloating(grad.dtype) && (each ? SameShape(grad, target) : grad.numel() == 1), "grad is ",
              Describe(grad), ", expected ", each ? ShapeString(target) : "one element");
  CheckShape(op, "lse", lse, {p.all()}, p.compute());
  if (logits != nullptr) CheckShape(op, "logits", *logits, {p.all(), p.classes()}, p.compute());
  const auto check = [&](const char* name, const TensorView* result, const TensorView& like) {
    JUMAR_CHECK(op, result == nullptr || (SameShape(*result, like) && result->dtype == like.dtype), name, " is ",
                Describe(result == nullptr ? like : *result), ", expected ", Describe(like));
  };
  check("grad of input", dinput, input);
  check("grad of weight", dweight, weight);
  JUMAR_CHECK(op, dbias == nullptr || bias != nullptr, "grad of bias without a bias");
  if (bias != nullptr) check("grad of bias", dbias, *bias);

  const int64_t count = p.count();
  if (count == 0) {
    for (const TensorView* result : {dinput, dweight, dbias}) {
      if (result != nullptr) Zero(*result);
    }
    return;
  }
  const std::vector<double> grads = TokenGrads(p, grad);
  const TensorView rows = p.Rows();
  const int64_t columns = BlockColumns(count, p.classes());
  const auto bytes = static_cast<int64_t>(SizeOf(p.compute()));
  const HeapBuffer buffer(count * columns * bytes);
  HeapBuffer sums_buffer;
  TensorView sums;
  if (dinput != nullptr && p.width() > 0) {
    // fp32 and fp64 are summed in place.
    const bool in_place = dinput->dtype == p.compute() && count == p.all() && IsContiguous(*dinput);
    if (!in_place) sums_buffer = HeapBuffer(count * p.width() * bytes);
    sums = Matrix(in_place ? dinput->data : sums_buffer.data(), p.compute(), count, p.width());
    Zero(sums);
  }
  for (int64_t v = 0; v < p.classes(); v += columns) {
    const int64_t n = std::min(columns, p.classes() - v);
    TensorView block = Matrix(buffer.data(), p.compute(), count, n);
    if (logits == nullptr) p.Logits(rows, v, n, block);
    TensorView dx = block;
    if (NarrowGrads(input.dtype)) {
      dx.dtype = DType::kBF16;
      dx.stride[0] *= 2;
    }
    GradBlock(p, logits == nullptr ? block : Narrow(Narrow(*logits, 0, 0, count), 1, v, n), v, grads, lse, dx);
    if (dweight != nullptr) Gemm(op, Transposed(dx), rows, nullptr, Narrow(*dweight, 0, v, n));
    if (dbias != nullptr) LinearBiasGrad(op, dx, Narrow(*dbias, 0, v, n));
    if (sums.data != nullptr) GemmAdd(op, dx, p.weight(v, n), sums);
  }
  if (sums_buffer.data() != nullptr) ScatterRows(p, sums, *dinput);
}

}  // namespace jumar
