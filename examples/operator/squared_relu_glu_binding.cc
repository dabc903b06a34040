// torch sees the operator: tensors become views, results are allocated, nothing is computed.
//
// In jumar itself the functions below return their entries to the operator table (src/torch/ops/families.h), which
// registers them; a library of its own registers them with torch's macros.
#include "base/simd_dispatch.h"
#include "squared_relu_glu.h"
#include "torch/binding.h"

namespace jumar::example {
namespace {

using binding::Empty;
using binding::Tensor;
using binding::View;

Tensor squared_relu_glu(const Tensor& input, const Tensor& gate) {
  constexpr const char* kOp = "squared_relu_glu";
  JUMAR_COUNT_CALL("squared_relu_glu");
  const TensorView x = View(kOp, input);
  Tensor y = Empty(input, x, x.dtype);
  SquaredReluGlu(kOp, x, View(kOp, gate), View(kOp, y));
  return y;
}

std::tuple<Tensor, Tensor> squared_relu_glu_backward(const Tensor& dy, const Tensor& input, const Tensor& gate) {
  constexpr const char* kOp = "squared_relu_glu_backward";
  JUMAR_COUNT_CALL("squared_relu_glu_backward");
  const TensorView x = View(kOp, input);
  Tensor dinput = Empty(input, x, x.dtype);
  Tensor dgate = Empty(input, x, x.dtype);
  SquaredReluGluBackward(kOp, View(kOp, dy), x, View(kOp, gate), View(kOp, dinput), View(kOp, dgate));
  return {dinput, dgate};
}

}  // namespace
}  // namespace jumar::example

STABLE_TORCH_LIBRARY(jumar_example, m) {
  m.def("squared_relu_glu(Tensor input, Tensor gate) -> Tensor");
  m.def("squared_relu_glu_backward(Tensor dy, Tensor input, Tensor gate) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(jumar_example, CPU, m) {
  m.impl("squared_relu_glu", TORCH_BOX(&jumar::example::squared_relu_glu));
  m.impl("squared_relu_glu_backward", TORCH_BOX(&jumar::example::squared_relu_glu_backward));
}
