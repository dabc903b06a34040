#include <cmath>

#include "base/check.h"
#include "kernels/optimizer/adamw.h"
#include "kernels/optimizer/grad_norm.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using Doubles = std::vector<double>;

double StepOf(const char* op, const Tensor& step, size_t i) {
  const TensorView view = View(op, step);
  JUMAR_CHECK(op, view.numel() == 1 && (view.dtype == DType::kF32 || view.dtype == DType::kF64), "step[", i,
              "] must be one element of float32 or float64, got ", Describe(view));
  return view.dtype == DType::kF32 ? view.ptr<float>()[0] : view.ptr<double>()[0];
}

void SetStep(const Tensor& step, double value) {
  if (step.scalar_type() == ScalarType::Float) {
    *static_cast<float*>(step.data_ptr()) = static_cast<float>(value);
  } else {
    *static_cast<double*>(step.data_ptr()) = value;
  }
}

// Tensors of group k follow those of group k - 1; group_sizes says how many each has, the lists of numbers have one
// entry a group. masters[j] belongs to params[master_of[j]].
void adamw_(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
            const Tensors& masters, const std::vector<int64_t>& master_of, const Tensors& steps,
            const std::vector<int64_t>& group_sizes, const Doubles& lr, const Doubles& beta1, const Doubles& beta2,
            const Doubles& eps, const Doubles& weight_decay, const std::vector<int64_t>& maximize) {
  constexpr const char* kOp = "adamw_";
  JUMAR_COUNT_CALL("adamw_");
  const size_t n = params.size();
  for (const Tensors* list : {&grads, &exp_avgs, &exp_avg_sqs, &steps}) {
    JUMAR_CHECK(kOp, list->size() == n, "every list must have the ", n, " entries of params, got one of ",
                list->size());
  }
  const size_t groups = group_sizes.size();
  for (const Doubles* list : {&lr, &beta1, &beta2, &eps, &weight_decay}) {
    JUMAR_CHECK(kOp, list->size() == groups, "a number for each of ", groups, " groups, got ", list->size());
  }
  JUMAR_CHECK(kOp, maximize.size() == groups, "a number for each of ", groups, " groups, got ", maximize.size());
  JUMAR_CHECK(kOp, masters.size() == master_of.size(), "an index for each of ", masters.size(), " masters, got ",
              master_of.size());
  std::vector<AdamWTensors> tensors(n);
  std::vector<double> counts(n);
  size_t at = 0;
  for (size_t g = 0; g < groups; ++g) {
    for (int64_t k = 0; k < group_sizes[g]; ++k, ++at) {
      JUMAR_CHECK(kOp, at < n, "the groups have more than ", n, " tensors");
      counts[at] = StepOf(kOp, steps[at], at) + 1;
      AdamWTensors& t = tensors[at];
      t.param = View(kOp, params[at]);
      t.grad = View(kOp, grads[at]);
      t.exp_avg = View(kOp, exp_avgs[at]);
      t.exp_avg_sq = View(kOp, exp_avg_sqs[at]);
      t.numbers = {lr[g],
                   beta1[g],
                   beta2[g],
                   eps[g],
                   weight_decay[g],
                   maximize[g] != 0,
                   1 - std::pow(beta1[g], counts[at]),
                   1 - std::pow(beta2[g], counts[at])};
    }
  }
  JUMAR_CHECK(kOp, at == n, "the groups have ", at, " tensors, there are ", n);
  for (size_t j = 0; j < masters.size(); ++j) {
    JUMAR_CHECK(kOp, master_of[j] >= 0 && static_cast<size_t>(master_of[j]) < n, "masters[", j, "] is for params[",
                master_of[j], "], of ", n);
    tensors[static_cast<size_t>(master_of[j])].master = View(kOp, masters[j]);
  }
  AdamW(kOp, tensors);
  for (size_t i = 0; i < n; ++i) SetStep(steps[i], counts[i]);
}

// The body of npu_apply_adam_w: beta1_power and beta2_power are those of the step before.
void apply_adam_w_(const Tensor& var, const Tensor& m, const Tensor& v, const Tensor& grad,
                   const std::optional<Tensor>& max_grad_norm, double beta1_power, double beta2_power, double lr,
                   double weight_decay, double beta1, double beta2, double epsilon, bool maximize) {
  constexpr const char* kOp = "npu_apply_adam_w";
  JUMAR_COUNT_CALL("npu_apply_adam_w");
  AdamWTensors t;
  t.param = View(kOp, var);
  t.grad = View(kOp, grad);
  t.exp_avg = View(kOp, m);
  t.exp_avg_sq = View(kOp, v);
  if (max_grad_norm.has_value()) t.max_exp_avg_sq = View(kOp, *max_grad_norm);
  t.numbers = {lr, beta1, beta2, epsilon, weight_decay, maximize, 1 - beta1_power * beta1, 1 - beta2_power * beta2};
  AdamW(kOp, {t});
}

Tensor grad_power_sums(const Tensors& grads, const std::vector<int64_t>& groups, int64_t group_count,
                       double norm_type) {
  constexpr const char* kOp = "grad_power_sums";
  JUMAR_COUNT_CALL("grad_power_sums");
  JUMAR_CHECK(kOp, !grads.empty(), "no gradients");
  const std::vector<double> sums = GradPowerSums(kOp, ViewAll(kOp, grads), groups, group_count, norm_type);
  Tensor out = Empty(grads[0], std::vector<int64_t>{group_count}, DType::kF64);
  std::copy(sums.begin(), sums.end(), static_cast<double*>(out.data_ptr()));
  return out;
}

void scale_grads_(const Tensors& grads, double factor) {
  constexpr const char* kOp = "scale_grads_";
  JUMAR_COUNT_CALL("scale_grads_");
  ScaleAll(kOp, ViewAll(kOp, grads), factor);
}

}  // namespace

std::vector<OpEntry> OptimizerOps() {
  return {
      {"adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
       "Tensor(d!)[] masters, int[] master_of, Tensor(e!)[] steps, int[] group_sizes, float[] lr, float[] beta1, "
       "float[] beta2, "
       "float[] eps, float[] weight_decay, int[] maximize) -> ()",
       TORCH_BOX(&adamw_), false},
      {"apply_adam_w_(Tensor(a!) var, Tensor(b!) m, Tensor(c!) v, Tensor grad, Tensor? max_grad_norm, "
       "float beta1_power, float beta2_power, float lr, float weight_decay, float beta1, float beta2, float epsilon, "
       "bool maximize) -> ()",
       TORCH_BOX(&apply_adam_w_), false},
      {"grad_power_sums(Tensor[] grads, int[] groups, int group_count, float norm_type) -> Tensor",
       TORCH_BOX(&grad_power_sums), false},
      {"scale_grads_(Tensor(a!)[] grads, float factor) -> ()", TORCH_BOX(&scale_grads_), false},
  };
}

}  // namespace jumar::binding
