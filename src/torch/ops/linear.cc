#include "kernels/gemm/linear.h"

#include "base/check.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// As torch.nn.functional.linear: no silent mixing of dtypes.
void CheckSameDType(const char* op, const TensorView& a, const char* a_name, const TensorView& b, const char* b_name) {
  JUMAR_CHECK(op, a.dtype == b.dtype, a_name, " and ", b_name, " should have one dtype, got ", Describe(a), " and ",
              Describe(b));
}

// The sizes of `view` with the last one replaced.
std::vector<int64_t> WithLast(const TensorView& view, int64_t last) {
  std::vector<int64_t> sizes(view.size, view.size + view.rank);
  if (!sizes.empty()) sizes.back() = last;
  return sizes;
}

int64_t SizeOr0(const TensorView& view, int dim) { return dim < view.rank ? view.size[dim] : 0; }

Tensor npu_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  constexpr const char* kOp = "npu_linear";
  JUMAR_COUNT_CALL("npu_linear");
  const TensorView x = View(kOp, input);
  const TensorView w = View(kOp, weight);
  CheckSameDType(kOp, x, "input", w, "weight");
  TensorView b;
  if (bias.has_value()) {
    b = View(kOp, *bias);
    CheckSameDType(kOp, x, "input", b, "bias");
  }
  Tensor y = Empty(input, WithLast(x, SizeOr0(w, 0)), x.dtype);
  Linear(kOp, x, w, bias.has_value() ? &b : nullptr, View(kOp, y));
  return y;
}

Tensor Dgrad(const char* op, const Tensor& grad, const Tensor& weight) {
  const TensorView dy = View(op, grad);
  const TensorView w = View(op, weight);
  CheckSameDType(op, dy, "grad", w, "weight");
  Tensor dx = Empty(grad, WithLast(dy, SizeOr0(w, 1)), dy.dtype);
  LinearDgrad(op, dy, w, View(op, dx));
  return dx;
}

Tensor Wgrad(const char* op, const Tensor& grad, const Tensor& input) {
  const TensorView dy = View(op, grad);
  const TensorView x = View(op, input);
  CheckSameDType(op, dy, "grad", x, "input");
  JUMAR_CHECK(op, dy.rank >= 1 && x.rank >= 1, "grad and input should have at least 1 dimension, got ", ShapeString(dy),
              " and ", ShapeString(x));
  Tensor dw = Empty(grad, {dy.size[dy.rank - 1], x.size[x.rank - 1]}, x.dtype);
  LinearWgrad(op, dy, x, View(op, dw));
  return dw;
}

std::tuple<Tensor, Tensor> npu_linear_backward(const Tensor& grad, const Tensor& input, const Tensor& weight) {
  JUMAR_COUNT_CALL("npu_linear_backward");
  Tensor dx = Dgrad("npu_linear_backward", grad, weight);
  return {dx, Wgrad("npu_linear_backward", grad, input)};
}

Tensor linear_dgrad(const Tensor& grad, const Tensor& weight) {
  JUMAR_COUNT_CALL("linear_dgrad");
  return Dgrad("linear_dgrad", grad, weight);
}

Tensor linear_wgrad(const Tensor& grad, const Tensor& input) {
  JUMAR_COUNT_CALL("linear_wgrad");
  return Wgrad("linear_wgrad", grad, input);
}

Tensor linear_bias_grad(const Tensor& grad) {
  constexpr const char* kOp = "linear_bias_grad";
  JUMAR_COUNT_CALL("linear_bias_grad");
  const TensorView dy = View(kOp, grad);
  JUMAR_CHECK(kOp, dy.rank >= 1, "grad should have at least 1 dimension, got a 0-dim tensor");
  Tensor db = Empty(grad, std::vector<int64_t>{dy.size[dy.rank - 1]}, dy.dtype);
  LinearBiasGrad(kOp, dy, View(kOp, db));
  return db;
}

}  // namespace

std::vector<OpEntry> LinearOps() {
  return {
      {"npu_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", TORCH_BOX(&npu_linear), true},
      {"npu_linear_backward(Tensor grad, Tensor input, Tensor weight) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_linear_backward), true},
      {"linear_dgrad(Tensor grad, Tensor weight) -> Tensor", TORCH_BOX(&linear_dgrad), false},
      {"linear_wgrad(Tensor grad, Tensor input) -> Tensor", TORCH_BOX(&linear_wgrad), false},
      {"linear_bias_grad(Tensor grad) -> Tensor", TORCH_BOX(&linear_bias_grad), false},
  };
}

}  // namespace jumar::binding
