#include "kernels/swiglu/swiglu.h"

#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// Contiguous, as input but half its size along dim.
Tensor npu_swiglu(const Tensor& input, int64_t dim) {
  constexpr const char* kOp = "npu_swiglu";
  JUMAR_COUNT_CALL("npu_swiglu");
  const TensorView x = View(kOp, input);
  TensorView half = x;
  half.size[CheckSwigluPacked(kOp, x, dim)] /= 2;
  Tensor y = Empty(input, half, x.dtype);
  SwigluPacked(x, dim, View(kOp, y));
  return y;
}

Tensor npu_swiglu_backward(const Tensor& grad_output, const Tensor& input, int64_t dim) {
  constexpr const char* kOp = "npu_swiglu_backward";
  JUMAR_COUNT_CALL("npu_swiglu_backward");
  const TensorView x = View(kOp, input);
  Tensor dinput = Empty(input, x, x.dtype);
  SwigluPackedBackward(View(kOp, grad_output), x, dim, View(kOp, dinput));
  return dinput;
}

Tensor swiglu_gate_up(const Tensor& gate, const Tensor& up) {
  constexpr const char* kOp = "swiglu_gate_up";
  JUMAR_COUNT_CALL("swiglu_gate_up");
  const TensorView g = View(kOp, gate);
  Tensor y = Empty(gate, g, g.dtype);
  Swiglu(kOp, g, View(kOp, up), View(kOp, y));
  return y;
}

std::tuple<Tensor, Tensor> swiglu_gate_up_backward(const Tensor& grad_output, const Tensor& gate, const Tensor& up) {
  constexpr const char* kOp = "swiglu_gate_up_backward";
  JUMAR_COUNT_CALL("swiglu_gate_up_backward");
  const TensorView g = View(kOp, gate);
  Tensor dgate = Empty(gate, g, g.dtype);
  Tensor dup = Empty(gate, g, g.dtype);
  SwigluBackward(kOp, View(kOp, grad_output), g, View(kOp, up), View(kOp, dgate), View(kOp, dup));
  return {dgate, dup};
}

}  // namespace

std::vector<OpEntry> SwigluOps() {
  return {
      {"npu_swiglu(Tensor input, int dim=-1) -> Tensor", TORCH_BOX(&npu_swiglu), true},
      {"npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor", TORCH_BOX(&npu_swiglu_backward),
       true},
      {"swiglu_gate_up(Tensor gate, Tensor up) -> Tensor", TORCH_BOX(&swiglu_gate_up), false},
      {"swiglu_gate_up_backward(Tensor grad_output, Tensor gate, Tensor up) -> (Tensor, Tensor)",
       TORCH_BOX(&swiglu_gate_up_backward), false},
  };
}

}  // namespace jumar::binding
