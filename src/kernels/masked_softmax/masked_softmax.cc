#include "kernels/masked_softmax/masked_softmax.h"

#include <algorithm>

#include "base/check.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "base/widen.h"
#include "kernels/masked_softmax/masked_softmax_simd.h"

namespace jumar {
namespace {

constexpr int64_t kGrain = 8192;  // elements

// Rows of a mask that repeats along some dimensions of x.
class MaskRows {
 public:
  // `name`: what x is called.
  MaskRows(const char* op, const TensorView& mask, const char* name, const TensorView& x)
      : data_(static_cast<const uint8_t*>(mask.data)) {
    const auto check = [&](bool fits) {
      JUMAR_CHECK(op, fits, "mask has shape ", ShapeString(mask), ", which does not broadcast to ", name, " ",
                  ShapeString(x));
    };
    check(mask.rank <= x.rank);
    TensorView rows = x;
    rows.rank = x.rank - 1;
    for (int i = 0; i < x.rank; ++i) {
      const int at = i - (x.rank - mask.rank);
      const bool repeats = at < 0 || mask.size[at] == 1;
      check(repeats || mask.size[at] == x.size[i]);
      rows.stride[i] = repeats ? 0 : mask.stride[at];
    }
    step_ = rows.stride[x.rank - 1];
    TryRows(rows, 0, &rows_);
  }

  // 1 where the row's elements are hidden.
  template <typename C>
  void Widen(int64_t row, int64_t n, C* out) const {
    const uint8_t* from = data_ + rows_.Offset(row);
    if (step_ == 1) {
      for (int64_t j = 0; j < n; ++j) out[j] = from[j] != 0 ? C(1) : C(0);
    } else {
      for (int64_t j = 0; j < n; ++j) out[j] = from[j * step_] != 0 ? C(1) : C(0);
    }
  }

 private:
  const uint8_t* data_;
  int64_t step_;
  RowMap rows_;
};

void CheckRows(const char* op, const char* name, const TensorView& x) {
  JUMAR_CHECK(op, IsFloating(x.dtype) && x.rank >= 1, name, " must be floating point with at least one dimension, got ",
              Describe(x));
}

void CheckLike(const char* op, const char* name, const TensorView& x, const TensorView& model) {
  JUMAR_CHECK(op, SameShape(x, model) && x.dtype == model.dtype, name, " must be ", Describe(model), ", got ",
              Describe(x));
}

char* At(const RowMap& map, int64_t row) {
  return static_cast<char*>(map.data) + map.Offset(row) * static_cast<int64_t>(SizeOf(map.dtype));
}

// Calls body(row, hide, work) with two buffers of a row each.
template <typename F>
void ForEachRow(const TensorView& x, const MaskRows& mask, const F& body) {
  const int64_t n = x.size[x.rank - 1];
  if (x.numel() == 0) return;
  ParallelFor(x.numel() / n, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
    ScratchFrame frame;
    const auto walk = [&](auto type) {
      using C = decltype(type);
      C* hide = frame.Alloc<C>(n);
      C* work = frame.Alloc<C>(n);
      for (int64_t row = begin; row < end; ++row) {
        mask.Widen(row, n, hide);
        body(row, hide, work);
      }
    };
    ComputeType(x.dtype) == DType::kF64 ? walk(double()) : walk(float());
  });
}

}  // namespace

void ScaledMaskedSoftmax(const char* op, const TensorView& x, const TensorView& mask, double scale,
                         const TensorView& y) {
  CheckRows(op, "x", x);
  CheckLike(op, "y", y, x);
  const MaskRows masks(op, mask, "x", x);
  ScratchFrame frame;
  const RowMap from = InputRows(x, 1, frame);
  const OutputRows to(y, 1, frame);
  ForEachRow(x, masks, [&](int64_t row, const void* hide, void* work) {
    MaskedSoftmaxRow(x.dtype, At(from, row), hide, scale, work, At(to.rows(), row), from.cols);
  });
  to.Finish();
}

void ScaledMaskedSoftmaxBackward(const char* op, const TensorView& dy, const TensorView& y, const TensorView& mask,
                                 double scale, const TensorView& dx) {
  CheckRows(op, "y", y);
  CheckLike(op, "y_grad", dy, y);
  CheckLike(op, "the gradient of x", dx, y);
  const MaskRows masks(op, mask, "y", y);
  ScratchFrame frame;
  const RowMap grads = InputRows(dy, 1, frame);
  const RowMap values = InputRows(y, 1, frame);
  const OutputRows to(dx, 1, frame);
  ForEachRow(y, masks, [&](int64_t row, const void* hide, void*) {
    MaskedSoftmaxBackwardRow(y.dtype, At(grads, row), At(values, row), hide, scale, At(to.rows(), row), values.cols);
  });
  to.Finish();
}

}  // namespace jumar
