#include "kernels/rms_norm/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "base/widen.h"
#include "kernels/rms_norm/rms_norm_rows.h"

namespace jumar {
namespace {

// Elements that are worth a thread of their own.
constexpr int64_t kGrain = 16384;

int64_t GrainRows(int64_t cols) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(cols, 1)); }

void CheckSame(const char* op, const TensorView& x, const TensorView& other, const char* name) {
  JUMAR_CHECK(op, SameShape(x, other) && x.dtype == other.dtype, name, " should be like the input, ", Describe(x),
              ", but is ", Describe(other));
}

void CheckInput(const char* op, const TensorView& x, const TensorView& gamma) {
  JUMAR_CHECK(op, gamma.rank >= 1, "gamma should have at least 1 dimension, got a 0-dim tensor");
  JUMAR_CHECK(op, x.rank >= gamma.rank, "The gamma shape should not be bigger than self shape. Input ", ShapeString(x),
              ", gamma ", ShapeString(gamma));
  for (int i = 0; i < gamma.rank; ++i) {
    JUMAR_CHECK(op, x.size[x.rank - gamma.rank + i] == gamma.size[i], "gamma ", ShapeString(gamma),
                " does not match the trailing dimensions of the input ", ShapeString(x));
  }
  JUMAR_CHECK(op, IsFloating(x.dtype), "the input should be float32, bfloat16, float16 or float64, got ",
              Name(x.dtype));
  JUMAR_CHECK(op, IsFloating(gamma.dtype) && (gamma.dtype != DType::kF64 || x.dtype == DType::kF64), "gamma of dtype ",
              Name(gamma.dtype), " does not go with an input of dtype ", Name(x.dtype));
}

// Outputs come from the binding; these checks guard callers of the C++ API.
void CheckRstd(const char* op, const TensorView& x, const TensorView& gamma, const TensorView& rstd) {
  int64_t rows = 1;
  for (int i = 0; i < x.rank - gamma.rank; ++i) rows *= x.size[i];
  JUMAR_CHECK(op, rstd.dtype == ComputeType(x.dtype), "rstd should be ", Name(ComputeType(x.dtype)), ", got ",
              Name(rstd.dtype));
  JUMAR_CHECK(op, rstd.numel() == rows, "rstd should have one element per row, ", rows, ", got shape ",
              ShapeString(rstd));
}

void CheckRstdOut(const char* op, const TensorView& x, const TensorView& gamma, const TensorView& rstd) {
  CheckRstd(op, x, gamma, rstd);
  JUMAR_CHECK(op, IsContiguous(rstd), "the rstd output should be contiguous");
}

// rstd as a plain array, one value per row, whatever its strides.
void* RstdArray(const TensorView& rstd, ScratchFrame& frame) { return InputRows(rstd, rstd.rank, frame).data; }

// Rows without elements have nothing to normalise: the mean of nothing is NaN, as in torch.
void FillRstdOfEmptyRows(const TensorView& rstd) {
  const int64_t n = rstd.numel();
  for (int64_t i = 0; i < n; ++i) {
    if (rstd.dtype == DType::kF64) {
      rstd.ptr<double>()[i] = NAN;
    } else {
      rstd.ptr<float>()[i] = NAN;
    }
  }
}

// The operand beside x, a summand or a gate, where there is one; `second` must outlive `args`.
template <typename Operands, typename Rows>
void SetSecondInput(const Operands& t, int inner, ScratchFrame& frame, RowMap* second, Rows* args) {
  if (t.add != nullptr) {
    *second = InputRows(*t.add, inner, frame);
    args->add = second;
  } else if (t.gate != nullptr) {
    *second = InputRows(*t.gate, inner, frame);
    args->gate = second;
  }
}

struct ForwardOperands {
  const TensorView* x;
  const TensorView* gamma;
  const TensorView* y;
  const TensorView* rstd;
  const TensorView* add = nullptr;
  const TensorView* sum = nullptr;
  const TensorView* gate = nullptr;
};

void RunForward(const ForwardOperands& t, double epsilon, double offset) {
  if (t.x->numel() == 0) return FillRstdOfEmptyRows(*t.rstd);
  ScratchFrame frame;
  const int inner = t.gamma->rank;
  const RowMap x = InputRows(*t.x, inner, frame);
  const OutputRows y(*t.y, inner, frame);
  RmsForwardRows args = {};
  args.x = &x;
  args.y = &y.rows();
  args.gamma = WidenAll(*t.gamma, ComputeType(t.x->dtype), offset, frame);
  args.epsilon = epsilon;
  args.rstd = t.rstd->data;
  RowMap second;
  SetSecondInput(t, inner, frame, &second, &args);
  const OutputRows sum(t.sum != nullptr ? *t.sum : *t.y, inner, frame);
  if (t.sum != nullptr) args.sum = &sum.rows();
  ParallelFor(x.rows, GrainRows(x.cols), [&](int64_t begin, int64_t end) { RmsForward(args, begin, end); });
  y.Finish();
  if (t.sum != nullptr) sum.Finish();
}

struct BackwardOperands {
  const TensorView* dy;
  const TensorView* x;
  const TensorView* gamma;
  const TensorView* rstd;
  const TensorView* dx;
  const TensorView* dgamma;
  const TensorView* add = nullptr;
  const TensorView* gate = nullptr;
  const TensorView* dgate = nullptr;
};

// Adds the chunks' partial sums in order and rounds once.
template <typename C>
void SumPartials(const double* partials, int64_t chunks, int64_t n, C* out) {
  ParallelFor(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double total = 0;
      for (int64_t c = 0; c < chunks; ++c) total += partials[c * n + i];
      out[i] = static_cast<C>(total);
    }
  });
}

void RunBackward(const BackwardOperands& t, double offset) {
  ScratchFrame frame;
  const int inner = t.gamma->rank;
  const RowMap x = InputRows(*t.x, inner, frame);
  const int64_t chunks = x.cols == 0 ? 0 : FixedChunks(x.rows, GrainRows(x.cols));
  double* partials = frame.Alloc<double>(chunks * x.cols);
  if (chunks > 0) {
    const RowMap dy = InputRows(*t.dy, inner, frame);
    const OutputRows dx(*t.dx, inner, frame);
    RmsBackwardRows args = {};
    args.dy = &dy;
    args.x = &x;
    args.gamma = WidenAll(*t.gamma, ComputeType(t.x->dtype), offset, frame);
    args.rstd = RstdArray(*t.rstd, frame);
    args.dx = &dx.rows();
    RowMap second;
    SetSecondInput(t, inner, frame, &second, &args);
    const OutputRows dgate(t.dgate != nullptr ? *t.dgate : *t.dx, inner, frame);
    if (t.dgate != nullptr) args.dgate = &dgate.rows();
    ParallelChunks(chunks, [&](int64_t c) {
      RmsBackwardRows mine = args;
      mine.dgamma = partials + c * x.cols;
      RmsBackward(mine, ChunkBegin(x.rows, chunks, c), ChunkBegin(x.rows, chunks, c + 1));
    });
    dx.Finish();
    if (t.dgate != nullptr) dgate.Finish();
  }
  if (t.dgamma->dtype == DType::kF64) {
    SumPartials(partials, chunks, t.dgamma->numel(), t.dgamma->ptr<double>());
  } else {
    SumPartials(partials, chunks, t.dgamma->numel(), t.dgamma->ptr<float>());
  }
}

void CheckBackward(const char* op, const BackwardOperands& t) {
  CheckInput(op, *t.x, *t.gamma);
  CheckSame(op, *t.x, *t.dy, "dy");
  CheckRstd(op, *t.x, *t.gamma, *t.rstd);
  CheckSame(op, *t.x, *t.dx, "dx");
  JUMAR_CHECK(op,
              SameShape(*t.gamma, *t.dgamma) && t.dgamma->dtype == ComputeType(t.x->dtype) && IsContiguous(*t.dgamma),
              "dgamma should be contiguous ", Name(ComputeType(t.x->dtype)), ShapeString(*t.gamma), ", got ",
              Describe(*t.dgamma));
}

}  // namespace

void RmsNorm(const char* op, const TensorView& x, const TensorView& gamma, double epsilon, double offset,
             const TensorView& y, const TensorView& rstd) {
  CheckInput(op, x, gamma);
  CheckSame(op, x, y, "y");
  CheckRstdOut(op, x, gamma, rstd);
  RunForward({.x = &x, .gamma = &gamma, .y = &y, .rstd = &rstd}, epsilon, offset);
}

void RmsNormBackward(const char* op, const TensorView& dy, const TensorView& x, const TensorView& gamma,
                     const TensorView& rstd, double offset, const TensorView& dx, const TensorView& dgamma) {
  const BackwardOperands t = {.dy = &dy, .x = &x, .gamma = &gamma, .rstd = &rstd, .dx = &dx, .dgamma = &dgamma};
  CheckBackward(op, t);
  RunBackward(t, offset);
}

void AddRmsNorm(const char* op, const TensorView& x1, const TensorView& x2, const TensorView& gamma, double epsilon,
                const TensorView& y, const TensorView& rstd, const TensorView& sum) {
  CheckInput(op, x1, gamma);
  CheckSame(op, x1, x2, "x2");
  CheckSame(op, x1, y, "y");
  CheckSame(op, x1, sum, "x");
  CheckRstdOut(op, x1, gamma, rstd);
  RunForward({.x = &x1, .gamma = &gamma, .y = &y, .rstd = &rstd, .add = &x2, .sum = &sum}, epsilon, 0.0);
}

void AddRmsNormBackward(const char* op, const TensorView& dy, const TensorView& dsum, const TensorView& sum,
                        const TensorView& gamma, const TensorView& rstd, const TensorView& dx,
                        const TensorView& dgamma) {
  const BackwardOperands t = {
      .dy = &dy, .x = &sum, .gamma = &gamma, .rstd = &rstd, .dx = &dx, .dgamma = &dgamma, .add = &dsum};
  CheckBackward(op, t);
  CheckSame(op, sum, dsum, "the gradient of x");
  RunBackward(t, 0.0);
}

void RmsNormGated(const char* op, const TensorView& x, const TensorView& gate, const TensorView& gamma, double epsilon,
                  const TensorView& y, const TensorView& rstd) {
  CheckInput(op, x, gamma);
  CheckSame(op, x, gate, "gate");
  CheckSame(op, x, y, "y");
  CheckRstdOut(op, x, gamma, rstd);
  RunForward({.x = &x, .gamma = &gamma, .y = &y, .rstd = &rstd, .gate = &gate}, epsilon, 0.0);
}

void RmsNormGatedBackward(const char* op, const TensorView& dy, const TensorView& x, const TensorView& gate,
                          const TensorView& gamma, const TensorView& rstd, const TensorView& dx,
                          const TensorView& dgate, const TensorView& dgamma) {
  const BackwardOperands t = {
      .dy = &dy, .x = &x, .gamma = &gamma, .rstd = &rstd, .dx = &dx, .dgamma = &dgamma, .gate = &gate, .dgate = &dgate};
  CheckBackward(op, t);
  CheckSame(op, x, gate, "gate");
  CheckSame(op, x, dgate, "dgate");
  RunBackward(t, 0.0);
}

}  // namespace jumar
