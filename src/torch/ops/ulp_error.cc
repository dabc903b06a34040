#include "kernels/ulp_error/ulp_error.h"

#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// Not counted: a measuring tool, never part of a model.
std::tuple<Tensor, Tensor> ulp_error(const Tensor& actual, const Tensor& expected, const std::optional<Tensor>& slack) {
  constexpr const char* kOp = "ulp_error";
  const TensorView a = View(kOp, actual);
  const TensorView e = View(kOp, expected);
  TensorView s;
  if (slack.has_value()) s = View(kOp, *slack);
  const UlpErrorResult result = UlpError(kOp, a, e, slack.has_value() ? &s : nullptr);
  Tensor max_ulp = Empty(actual, std::vector<int64_t>{}, DType::kF64);
  Tensor index = Empty(actual, std::vector<int64_t>{}, DType::kI64);
  *static_cast<double*>(max_ulp.data_ptr()) = result.max_ulp;
  *static_cast<int64_t*>(index.data_ptr()) = result.index;
  return {max_ulp, index};
}

}  // namespace

std::vector<OpEntry> UlpErrorOps() {
  return {
      {"ulp_error(Tensor actual, Tensor expected, Tensor? slack=None) -> (Tensor, Tensor)", TORCH_BOX(&ulp_error),
       false},
  };
}

}  // namespace jumar::binding
