#include "kernels/rotary/rotary.h"

#include <string>

#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// Results lie in memory as the tensor they are computed from (torch.empty_like), so that a transposed view of a
// projection is read and written in one sweep.
Tensor npu_rotary_mul(const Tensor& input, const Tensor& r1, const Tensor& r2, std::string rotary_mode,
                      std::optional<Tensor> rotate) {
  constexpr const char* kOp = "npu_rotary_mul";
  JUMAR_COUNT_CALL("npu_rotary_mul");
  const RotaryMode mode = ParseRotaryMode(kOp, rotary_mode);
  const TensorView x = View(kOp, input);
  Tensor y = torch::stable::empty_like(input);
  if (rotate.has_value()) {
    RotaryMulMatrix(x, View(kOp, r1), View(kOp, r2), View(kOp, *rotate), View(kOp, y));
  } else {
    RotaryMul(x, View(kOp, r1), View(kOp, r2), mode, View(kOp, y));
  }
  return y;
}

std::tuple<Tensor, Tensor, Tensor> npu_rotary_mul_backward(const Tensor& grad, const Tensor& input, const Tensor& r1,
                                                           const Tensor& r2, std::string rotary_mode) {
  constexpr const char* kOp = "npu_rotary_mul_backward";
  JUMAR_COUNT_CALL("npu_rotary_mul_backward");
  const RotaryMode mode = ParseRotaryMode(kOp, rotary_mode);
  const TensorView cos = View(kOp, r1);
  const TensorView sin = View(kOp, r2);
  Tensor dx = torch::stable::empty_like(grad);
  Tensor dr1 = Empty(r1, cos, cos.dtype);
  Tensor dr2 = Empty(r2, sin, sin.dtype);
  const TensorView dcos = View(kOp, dr1);
  const TensorView dsin = View(kOp, dr2);
  RotaryMulBackward(View(kOp, grad), View(kOp, input), cos, sin, mode, View(kOp, dx), &dcos, &dsin);
  return {dx, dr1, dr2};
}

// The gradient of input alone, which needs neither input nor sums.
Tensor rotary_mul_backward(const Tensor& grad, const Tensor& r1, const Tensor& r2, std::string rotary_mode) {
  constexpr const char* kOp = "rotary_mul_backward";
  JUMAR_COUNT_CALL("rotary_mul_backward");
  const RotaryMode mode = ParseRotaryMode(kOp, rotary_mode);
  const TensorView g = View(kOp, grad);
  Tensor dx = torch::stable::empty_like(grad);
  RotaryMulBackward(g, g, View(kOp, r1), View(kOp, r2), mode, View(kOp, dx), nullptr, nullptr);
  return dx;
}

}  // namespace

std::vector<OpEntry> RotaryOps() {
  return {
      {"npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
       TORCH_BOX(&npu_rotary_mul), true},
      {"npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode='half')"
       " -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_rotary_mul_backward), true},
      {"rotary_mul_backward(Tensor grad, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor",
       TORCH_BOX(&rotary_mul_backward), false},
  };
}

}  // namespace jumar::binding
