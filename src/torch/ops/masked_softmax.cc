#include "kernels/masked_softmax/masked_softmax.h"

#include "base/check.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

TensorView BoolView(const char* op, const Tensor& mask) {
  JUMAR_CHECK(op, mask.scalar_type() == ScalarType::Bool, "mask must be bool, got ", NameOf(mask.scalar_type()));
  return View(op, mask);
}

Tensor scaled_masked_softmax(const Tensor& x, const Tensor& mask, double scale) {
  constexpr const char* kOp = "npu_scaled_masked_softmax";
  JUMAR_COUNT_CALL("npu_scaled_masked_softmax");
  const TensorView view = View(kOp, x);
  Tensor y = Empty(x, view, view.dtype);
  ScaledMaskedSoftmax(kOp, view, BoolView(kOp, mask), scale, View(kOp, y));
  return y;
}

Tensor scaled_masked_softmax_backward(const Tensor& y_grad, const Tensor& y, const Tensor& mask, double scale) {
  constexpr const char* kOp = "npu_scaled_masked_softmax_backward";
  JUMAR_COUNT_CALL("npu_scaled_masked_softmax_backward");
  const TensorView view = View(kOp, y);
  Tensor dx = Empty(y, view, view.dtype);
  ScaledMaskedSoftmaxBackward(kOp, View(kOp, y_grad), view, BoolView(kOp, mask), scale, View(kOp, dx));
  return dx;
}

}  // namespace

std::vector<OpEntry> MaskedSoftmaxOps() {
  return {
      {"scaled_masked_softmax(Tensor x, Tensor mask, float scale) -> Tensor", TORCH_BOX(&scaled_masked_softmax), false},
      {"scaled_masked_softmax_backward(Tensor y_grad, Tensor y, Tensor mask, float scale) -> Tensor",
       TORCH_BOX(&scaled_masked_softmax_backward), false},
  };
}

}  // namespace jumar::binding
