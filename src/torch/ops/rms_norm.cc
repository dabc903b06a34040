#include "kernels/rms_norm/rms_norm.h"

#include <algorithm>

#include "base/widen.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// [a.., 1..]: x's rank, ones where gamma normalises.
Tensor EmptyRstd(const Tensor& like, const TensorView& x, const TensorView& gamma) {
  std::vector<int64_t> sizes(x.size, x.size + x.rank);
  for (int i = std::max(0, x.rank - gamma.rank); i < x.rank; ++i) sizes[static_cast<size_t>(i)] = 1;
  return Empty(like, sizes, ComputeType(x.dtype));
}

std::tuple<Tensor, Tensor> Norm(const char* op, const Tensor& input, const Tensor& gamma, double epsilon,
                                double offset) {
  const TensorView x = View(op, input);
  const TensorView g = View(op, gamma);
  Tensor y = Empty(input, x, x.dtype);
  Tensor rstd = EmptyRstd(input, x, g);
  RmsNorm(op, x, g, epsilon, offset, View(op, y), View(op, rstd));
  return {y, rstd};
}

std::tuple<Tensor, Tensor> npu_rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  JUMAR_COUNT_CALL("npu_rms_norm");
  return Norm("npu_rms_norm", input, gamma, epsilon, 0.0);
}

std::tuple<Tensor, Tensor> npu_gemma_rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  JUMAR_COUNT_CALL("npu_gemma_rms_norm");
  return Norm("npu_gemma_rms_norm", input, gamma, epsilon, 1.0);
}

std::tuple<Tensor, Tensor> NormBackward(const char* op, const Tensor& dy, const Tensor& input, const Tensor& gamma,
                                        const Tensor& rstd, double offset) {
  const TensorView x = View(op, input);
  const TensorView g = View(op, gamma);
  Tensor dx = Empty(input, x, x.dtype);
  Tensor dgamma = Empty(input, g, ComputeType(x.dtype));
  RmsNormBackward(op, View(op, dy), x, g, View(op, rstd), offset, View(op, dx), View(op, dgamma));
  return {dx, dgamma};
}

std::tuple<Tensor, Tensor> npu_rms_norm_backward(const Tensor& dy, const Tensor& input, const Tensor& gamma,
                                                 const Tensor& rstd) {
  JUMAR_COUNT_CALL("npu_rms_norm_backward");
  return NormBackward("npu_rms_norm_backward", dy, input, gamma, rstd, 0.0);
}

std::tuple<Tensor, Tensor> gemma_rms_norm_backward(const Tensor& dy, const Tensor& input, const Tensor& gamma,
                                                   const Tensor& rstd) {
  JUMAR_COUNT_CALL("gemma_rms_norm_backward");
  return NormBackward("gemma_rms_norm_backward", dy, input, gamma, rstd, 1.0);
}

std::tuple<Tensor, Tensor, Tensor> npu_add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                                                    double epsilon) {
  constexpr const char* kOp = "npu_add_rms_norm";
  JUMAR_COUNT_CALL("npu_add_rms_norm");
  const TensorView x = View(kOp, x1);
  const TensorView g = View(kOp, gamma);
  Tensor y = Empty(x1, x, x.dtype);
  Tensor rstd = EmptyRstd(x1, x, g);
  Tensor sum = Empty(x1, x, x.dtype);
  AddRmsNorm(kOp, x, View(kOp, x2), g, epsilon, View(kOp, y), View(kOp, rstd), View(kOp, sum));
  return {y, rstd, sum};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& dy, const Tensor& dx, const Tensor& x,
                                                 const Tensor& gamma, const Tensor& rstd) {
  constexpr const char* kOp = "add_rms_norm_backward";
  JUMAR_COUNT_CALL("add_rms_norm_backward");
  const TensorView sum = View(kOp, x);
  const TensorView g = View(kOp, gamma);
  Tensor grad = Empty(x, sum, sum.dtype);
  Tensor dgamma = Empty(x, g, ComputeType(sum.dtype));
  AddRmsNormBackward(kOp, View(kOp, dy), View(kOp, dx), sum, g, View(kOp, rstd), View(kOp, grad), View(kOp, dgamma));
  return {grad, dgamma};
}

std::tuple<Tensor, Tensor> rms_norm_gated(const Tensor& input, const Tensor& gate, const Tensor& gamma,
                                          double epsilon) {
  constexpr const char* kOp = "rms_norm_gated";
  JUMAR_COUNT_CALL("rms_norm_gated");
  const TensorView x = View(kOp, input);
  const TensorView g = View(kOp, gamma);
  Tensor y = Empty(input, x, x.dtype);
  Tensor rstd = EmptyRstd(input, x, g);
  RmsNormGated(kOp, x, View(kOp, gate), g, epsilon, View(kOp, y), View(kOp, rstd));
  return {y, rstd};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_gated_backward(const Tensor& dy, const Tensor& input, const Tensor& gate,
                                                           const Tensor& gamma, const Tensor& rstd) {
  constexpr const char* kOp = "rms_norm_gated_backward";
  JUMAR_COUNT_CALL("rms_norm_gated_backward");
  const TensorView x = View(kOp, input);
  const TensorView g = View(kOp, gamma);
  Tensor dx = Empty(input, x, x.dtype);
  Tensor dgate = Empty(input, x, x.dtype);
  Tensor dgamma = Empty(input, g, ComputeType(x.dtype));
  RmsNormGatedBackward(kOp, View(kOp, dy), x, View(kOp, gate), g, View(kOp, rstd), View(kOp, dx), View(kOp, dgate),
                       View(kOp, dgamma));
  return {dx, dgate, dgamma};
}

}  // namespace

std::vector<OpEntry> RmsNormOps() {
  return {
      {"npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)", TORCH_BOX(&npu_rms_norm),
       true},
      {"npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_rms_norm_backward), true},
      {"npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_gemma_rms_norm), true},
      {"gemma_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
       TORCH_BOX(&gemma_rms_norm_backward), false},
      {"npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_add_rms_norm), true},
      {"add_rms_norm_backward(Tensor dy, Tensor dx, Tensor x, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
       TORCH_BOX(&add_rms_norm_backward), false},
      {"rms_norm_gated(Tensor input, Tensor gate, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
       TORCH_BOX(&rms_norm_gated), false},
      {"rms_norm_gated_backward(Tensor dy, Tensor input, Tensor gate, Tensor gamma, Tensor rstd)"
       " -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&rms_norm_gated_backward), false},
  };
}

}  // namespace jumar::binding
