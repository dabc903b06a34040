#include "kernels/gemm/linear.h"

#include "base/check.h"
#include "base/rows.h"
#include "kernels/gemm/gemm.h"

namespace jumar {
namespace {

// All but the last dimension merged into one, when they are an arithmetic sequence in memory.
bool TryMatrix(const TensorView& view, TensorView* matrix) {
  const int last = view.rank - 1;
  TensorView m;
  m.data = view.data;
  m.dtype = view.dtype;
  m.rank = 2;
  m.size[0] = 1;
  m.stride[0] = 0;
  m.size[1] = view.size[last];
  m.stride[1] = view.stride[last];
  for (int i = 0; i < last; ++i) {
    if (view.size[i] == 1) continue;
    if (m.size[0] != 1 && m.stride[0] != view.stride[i] * view.size[i]) return false;
    m.size[0] *= view.size[i];
    m.stride[0] = view.stride[i];
  }
  *matrix = m;
  return true;
}

TensorView EmptyMatrix(const TensorView& view) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < view.rank; ++i) rows *= view.size[i];
  return Contiguous(view.data, view.dtype, {rows, view.size[view.rank - 1]});
}

TensorView ContiguousCopyShape(const TensorView& view, void* data) {
  TensorView copy = view;
  copy.data = data;
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    copy.stride[i] = step;
    step *= view.size[i];
  }
  return copy;
}

TensorView InputMatrix(const TensorView& view, ScratchFrame& frame) {
  TensorView matrix;
  if (view.numel() == 0) return EmptyMatrix(view);
  if (TryMatrix(view, &matrix)) return matrix;
  const TensorView copy =
      ContiguousCopyShape(view, frame.AllocBytes(static_cast<size_t>(view.numel()) * SizeOf(view.dtype)));
  CopyStrided(view, copy);
  TryMatrix(copy, &matrix);
  return matrix;
}

// Calls body with the output as a matrix; an output that is none gets a copy of a contiguous one.
template <typename F>
void WithOutputMatrix(const TensorView& view, const F& body) {
  TensorView matrix;
  if (view.numel() == 0) return;
  if (TryMatrix(view, &matrix)) return body(matrix);
  ScratchFrame frame;
  const TensorView copy =
      ContiguousCopyShape(view, frame.AllocBytes(static_cast<size_t>(view.numel()) * SizeOf(view.dtype)));
  TryMatrix(copy, &matrix);
  body(matrix);
  CopyStrided(copy, view);
}

void CheckDTypes(const char* op, std::initializer_list<const TensorView*> views) {
  const TensorView& first = **views.begin();
  for (const TensorView* x : views) {
    JUMAR_CHECK(op, IsFloating(x->dtype), "unsupported dtype ", Name(x->dtype),
                "; expected float32, bfloat16, float16 or float64");
    JUMAR_CHECK(op, (x->dtype == DType::kF64) == (first.dtype == DType::kF64),
                "float64 does not mix with other dtypes, got ", Name(first.dtype), " and ", Name(x->dtype));
  }
}

void CheckWeight(const char* op, const TensorView& weight) {
  JUMAR_CHECK(op, weight.rank == 2, "weight must be [out_features, in_features], got ", ShapeString(weight));
}

// `x` [.., width]: the width is named `what`, and it has to match the dimension of weight that is shown.
void CheckLast(const char* op, const char* name, const TensorView& x, int64_t width, const TensorView& weight) {
  JUMAR_CHECK(op, x.rank >= 1, name, " must have at least one dimension");
  JUMAR_CHECK(op, x.size[x.rank - 1] == width, "last dimension of ", name, " ", ShapeString(x),
              " does not match weight ", ShapeString(weight), ", expected ", width);
}

void CheckSameRows(const char* op, const char* a_name, const TensorView& a, const char* b_name, const TensorView& b) {
  bool same = a.rank == b.rank;
  for (int i = 0; same && i + 1 < a.rank; ++i) same = a.size[i] == b.size[i];
  JUMAR_CHECK(op, same, a_name, " ", ShapeString(a), " and ", b_name, " ", ShapeString(b),
              " must agree in all but the last dimension");
}

}  // namespace

void Linear(const char* op, const TensorView& x, const TensorView& weight, const TensorView* bias,
            const TensorView& y) {
  CheckWeight(op, weight);
  CheckLast(op, "input", x, weight.size[1], weight);
  CheckLast(op, "output", y, weight.size[0], weight);
  CheckSameRows(op, "input", x, "output", y);
  if (bias != nullptr) {
    JUMAR_CHECK(op, bias->rank == 1 && bias->size[0] == weight.size[0], "bias ", ShapeString(*bias),
                " does not match weight ", ShapeString(weight), ", expected [", weight.size[0], "]");
    CheckDTypes(op, {&x, &weight, bias, &y});
  } else {
    CheckDTypes(op, {&x, &weight, &y});
  }
  WithOutputMatrix(y, [&](const TensorView& out) {
    ScratchFrame frame;
    Gemm(op, InputMatrix(x, frame), Transposed(weight), bias, out);
  });
}

void LinearDgrad(const char* op, const TensorView& dy, const TensorView& weight, const TensorView& dx) {
  CheckWeight(op, weight);
  CheckLast(op, "grad", dy, weight.size[0], weight);
  CheckLast(op, "grad of input", dx, weight.size[1], weight);
  CheckSameRows(op, "grad", dy, "grad of input", dx);
  CheckDTypes(op, {&dy, &weight, &dx});
  WithOutputMatrix(dx, [&](const TensorView& out) {
    ScratchFrame frame;
    Gemm(op, InputMatrix(dy, frame), weight, nullptr, out);
  });
}

void LinearWgrad(const char* op, const TensorView& dy, const TensorView& x, const TensorView& dw) {
  CheckWeight(op, dw);
  CheckLast(op, "grad", dy, dw.size[0], dw);
  CheckLast(op, "input", x, dw.size[1], dw);
  CheckSameRows(op, "grad", dy, "input", x);
  CheckDTypes(op, {&dy, &x, &dw});
  ScratchFrame frame;
  Gemm(op, Transposed(InputMatrix(dy, frame)), InputMatrix(x, frame), nullptr, dw);
}

// A row of ones times dy.
void LinearBiasGrad(const char* op, const TensorView& dy, const TensorView& db) {
  JUMAR_CHECK(op, dy.rank >= 1, "grad must have at least one dimension");
  JUMAR_CHECK(op, db.rank == 1 && db.size[0] == dy.size[dy.rank - 1], "grad of bias ", ShapeString(db),
              " does not match the last dimension of grad ", ShapeString(dy));
  CheckDTypes(op, {&dy, &db});
  ScratchFrame frame;
  const TensorView rows = InputMatrix(dy, frame);
  double one_f64 = 1.0;
  uint16_t one_bf16 = 0x3F80;  // exact, and keeps bf16 x bf16 together
  float one_f32 = 1.0f;
  TensorView ones;
  ones.dtype = dy.dtype == DType::kF64 ? DType::kF64 : dy.dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  ones.data = ones.dtype == DType::kF64    ? static_cast<void*>(&one_f64)
              : ones.dtype == DType::kBF16 ? static_cast<void*>(&one_bf16)
                                           : static_cast<void*>(&one_f32);
  ones.rank = 2;
  ones.size[0] = 1;
  ones.size[1] = rows.size[0];
  TensorView sum = db;
  sum.rank = 2;
  sum.size[0] = 1;
  sum.size[1] = db.size[0];
  sum.stride[0] = 0;
  sum.stride[1] = db.stride[0];
  Gemm(op, ones, rows, nullptr, sum);
}

}  // namespace jumar
