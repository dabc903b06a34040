#include <string>

#include "base/check.h"
#include "base/widen.h"
#include "kernels/router/balance.h"
#include "kernels/router/router.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// The sizes of `view`, the last one replaced.
std::vector<int64_t> RowsOf(const TensorView& view, int64_t cols) {
  std::vector<int64_t> sizes(view.size, view.size + view.rank);
  if (!sizes.empty()) sizes.back() = cols;
  return sizes;
}

std::tuple<Tensor, Tensor, Tensor> router_top_k(const Tensor& logits, int64_t k, std::string scoring, bool renorm,
                                                const OptionalTensor& bias, int64_t n_group, int64_t topk_group,
                                                double scale, double eps, std::optional<double> group_fill,
                                                std::string group_score, bool wide_weights, bool output_scores) {
  constexpr const char* kOp = "router_top_k";
  JUMAR_COUNT_CALL("router_top_k");
  RouterOptions options;
  options.k = k;
  options.scoring = ParseScoring(kOp, scoring);
  options.renorm = renorm;
  options.scale = scale;
  options.eps = eps;
  options.groups = n_group;
  options.kept_groups = topk_group;
  options.group_score = ParseGroupScore(kOp, group_score);
  options.fill = group_fill.value_or(options.fill);
  JUMAR_CHECK(kOp, k >= 0, "k must not be negative, got ", k);
  const TensorView x = View(kOp, logits);
  const OptionalView b(kOp, bias);
  const DType compute = ComputeType(x.dtype);
  Tensor weights = Empty(logits, RowsOf(x, k), wide_weights ? compute : x.dtype);
  Tensor indices = Empty(logits, RowsOf(x, k), DType::kI64);
  Tensor scores = EmptyIf(output_scores, logits, x, compute);
  RouterTensors t;
  t.logits = x;
  t.bias = b.get();
  t.weights = View(kOp, weights);
  t.indices = View(kOp, indices);
  const TensorView s = View(kOp, scores);
  if (output_scores) t.scores = &s;
  RouterTopK(kOp, t, options);
  return {weights, indices, scores};
}

Tensor Backward(const char* op, const OptionalTensor& grad_weights, const OptionalTensor& grad_scores,
                const Tensor& source, const Tensor& indices, bool from_scores, RouterOptions options, DType dtype) {
  const OptionalView gw(op, grad_weights);
  const OptionalView gs(op, grad_scores);
  RouterGradTensors t;
  t.source = View(op, source);
  t.from_scores = from_scores;
  t.grad_weights = gw.get();
  t.grad_scores = gs.get();
  t.indices = View(op, indices);
  options.k = t.indices.rank > 0 ? t.indices.size[t.indices.rank - 1] : 0;
  Tensor dlogits = Empty(source, t.source, dtype);
  t.dlogits = View(op, dlogits);
  RouterTopKBackward(op, t, options);
  return dlogits;
}

Tensor router_top_k_backward(const OptionalTensor& grad_weights, const OptionalTensor& grad_scores,
                             const Tensor& logits, const Tensor& indices, std::string scoring, bool renorm,
                             double scale, double eps) {
  constexpr const char* kOp = "router_top_k_backward";
  JUMAR_COUNT_CALL("router_top_k_backward");
  RouterOptions options;
  options.scoring = ParseScoring(kOp, scoring);
  options.renorm = renorm;
  options.scale = scale;
  options.eps = eps;
  return Backward(kOp, grad_weights, grad_scores, logits, indices, false, options, View(kOp, logits).dtype);
}

void CheckVendorInput(const char* op, const TensorView& x, int64_t k) {
  JUMAR_CHECK(op, x.rank == 2 || x.rank == 3, "The x should be 2D or 3D, got ", ShapeString(x));
  JUMAR_CHECK(op, IsFloating(x.dtype), "float16, float32 or bfloat16 tensor expected (or float64), got ",
              Name(x.dtype));
  JUMAR_CHECK(op, k >= 0 && k <= x.size[x.rank - 1], "The k should be in [0, ", x.size[x.rank - 1], "], got ", k);
}

std::tuple<Tensor, Tensor, Tensor> SoftmaxTopK(const char* op, const Tensor& input, const OptionalTensor& finished,
                                               const RouterOptions& options, bool row_idx, bool softmax) {
  const TensorView x = View(op, input);
  CheckVendorInput(op, x, options.k);
  const OptionalView done(op, finished);
  const DType compute = ComputeType(x.dtype);
  Tensor y = Empty(input, RowsOf(x, options.k), x.dtype);
  Tensor expert_idx = Empty(input, RowsOf(x, options.k), DType::kI32);
  Tensor third = row_idx ? Empty(input, RowsOf(x, options.k), DType::kI32) : EmptyIf(softmax, input, x, compute);
  RouterTensors t;
  t.logits = x;
  t.finished = done.get();
  t.weights = View(op, y);
  t.indices = View(op, expert_idx);
  const TensorView last = View(op, third);
  if (row_idx) t.row_index = &last;
  if (softmax) t.scores = &last;
  RouterTopK(op, t, options);
  return {y, expert_idx, third};
}

std::tuple<Tensor, Tensor, Tensor> npu_moe_gating_top_k_softmax(const Tensor& x, const OptionalTensor& finished,
                                                                int64_t k) {
  JUMAR_COUNT_CALL("npu_moe_gating_top_k_softmax");
  RouterOptions options;
  options.k = k;
  return SoftmaxTopK("npu_moe_gating_top_k_softmax", x, finished, options, true, false);
}

Tensor npu_moe_gating_top_k_softmax_backward(const Tensor& grad_y, const Tensor& x, const Tensor& expert_idx) {
  constexpr const char* kOp = "npu_moe_gating_top_k_softmax_backward";
  JUMAR_COUNT_CALL("npu_moe_gating_top_k_softmax_backward");
  return Backward(kOp, grad_y, std::nullopt, x, expert_idx, false, {}, View(kOp, x).dtype);
}

RouterOptions V2Options(const char* op, int64_t renorm) {
  JUMAR_CHECK(op, renorm == 0 || renorm == 1, "renorm must be 0 or 1, but got ", renorm);
  RouterOptions options;
  options.renorm = options.all_by_logits = renorm == 1;
  return options;
}

// The vendor's operators whose schemas have keyword-only tensors, which torch cannot differentiate, are defined in
// Python and call these.
std::tuple<Tensor, Tensor, Tensor> moe_gating_top_k_softmax_v2(const Tensor& x, int64_t k,
                                                               const OptionalTensor& finished, int64_t renorm,
                                                               bool output_softmax) {
  constexpr const char* kOp = "npu_moe_gating_top_k_softmax_v2";
  JUMAR_COUNT_CALL("npu_moe_gating_top_k_softmax_v2");
  RouterOptions options = V2Options(kOp, renorm);
  options.k = k;
  return SoftmaxTopK(kOp, x, finished, options, false, output_softmax && !options.renorm);
}

Tensor npu_moe_gating_top_k_softmax_v2_backward(const OptionalTensor& grad_y, const OptionalTensor& grad_softmax,
                                                const Tensor& x, const Tensor& expert_idx, int64_t renorm) {
  constexpr const char* kOp = "npu_moe_gating_top_k_softmax_v2_backward";
  JUMAR_COUNT_CALL("npu_moe_gating_top_k_softmax_v2_backward");
  return Backward(kOp, grad_y, grad_softmax, x, expert_idx, false, V2Options(kOp, renorm), View(kOp, x).dtype);
}

// norm_type 0: softmax; 1: sigmoid, its weights over their sum.
RouterOptions GatingOptions(const char* op, int64_t renorm, int64_t norm_type, double scale, double eps) {
  JUMAR_CHECK(op, renorm == 0, "renorm must be 0 (norm_type 1 alone divides by the sum), got ", renorm);
  JUMAR_CHECK(op, norm_type == 0 || norm_type == 1, "norm_type must be 0 (softmax) or 1 (sigmoid), got ", norm_type);
  RouterOptions options;
  options.scoring = norm_type == 0 ? Scoring::kSoftmax : Scoring::kSigmoid;
  options.renorm = norm_type == 1;
  options.scale = scale;
  options.eps = eps;
  return options;
}

std::tuple<Tensor, Tensor, Tensor> moe_gating_top_k(const Tensor& x, int64_t k, const OptionalTensor& bias,
                                                    int64_t k_group, int64_t group_count, int64_t group_select_mode,
                                                    int64_t renorm, int64_t norm_type, double routed_scaling_factor,
                                                    double eps) {
  constexpr const char* kOp = "npu_moe_gating_top_k";
  JUMAR_COUNT_CALL("npu_moe_gating_top_k");
  RouterOptions options = GatingOptions(kOp, renorm, norm_type, routed_scaling_factor, eps);
  JUMAR_CHECK(kOp, group_select_mode == 0 || group_select_mode == 1,
              "group_select_mode must be 0 (largest) or 1 (sum of the two largest), got ", group_select_mode);
  options.k = k;
  options.groups = group_count;
  options.kept_groups = k_group;
  options.group_score = group_select_mode == 0 ? GroupScore::kMax : GroupScore::kTop2;
  const TensorView in = View(kOp, x);
  CheckVendorInput(kOp, in, k);
  const OptionalView b(kOp, bias);
  JUMAR_CHECK(kOp, b.get() == nullptr || b.get()->dtype == in.dtype, "bias and x must have one dtype, got ",
              Name(b.get()->dtype), " and ", Name(in.dtype));
  Tensor y = Empty(x, RowsOf(in, k), in.dtype);
  Tensor expert_idx = Empty(x, RowsOf(in, k), DType::kI32);
  Tensor norm_out = Empty(x, in, ComputeType(in.dtype));
  RouterTensors t;
  t.logits = in;
  t.bias = b.get();
  t.weights = View(kOp, y);
  t.indices = View(kOp, expert_idx);
  const TensorView scores = View(kOp, norm_out);
  t.scores = &scores;
  RouterTopK(kOp, t, options);
  return {y, expert_idx, norm_out};
}

Tensor npu_moe_gating_top_k_backward(const Tensor& x_norm, const Tensor& grad_y, const Tensor& expert_idx,
                                     int64_t renorm, int64_t norm_type, double routed_scaling_factor, double eps) {
  constexpr const char* kOp = "npu_moe_gating_top_k_backward";
  JUMAR_COUNT_CALL("npu_moe_gating_top_k_backward");
  const RouterOptions options = GatingOptions(kOp, renorm, norm_type, routed_scaling_factor, eps);
  return Backward(kOp, grad_y, std::nullopt, x_norm, expert_idx, true, options, View(kOp, grad_y).dtype);
}

std::tuple<Tensor, Tensor> load_balance_loss(const Tensors& gate_logits, int64_t num_experts, int64_t top_k,
                                             const OptionalTensor& attention_mask) {
  constexpr const char* kOp = "load_balance_loss";
  JUMAR_COUNT_CALL("load_balance_loss");
  const std::vector<TensorView> layers = ViewAll(kOp, gate_logits);
  JUMAR_CHECK(kOp, !layers.empty(), "gate_logits must hold the logits of at least one layer");
  JUMAR_CHECK(kOp, num_experts >= 1, "num_experts must be positive, got ", num_experts);
  const OptionalView mask(kOp, attention_mask);
  const DType compute = ComputeType(layers[0].dtype);
  Tensor loss = Empty(gate_logits[0], std::vector<int64_t>{}, compute);
  Tensor tokens = Empty(gate_logits[0], std::vector<int64_t>{num_experts}, compute);
  LoadBalanceLoss(kOp, layers, num_experts, top_k, mask.get(), View(kOp, loss), View(kOp, tokens));
  return {loss, tokens};
}

Tensors load_balance_loss_backward(const Tensor& grad, const Tensors& gate_logits, const OptionalTensor& attention_mask,
                                   const Tensor& tokens_per_expert) {
  constexpr const char* kOp = "load_balance_loss_backward";
  JUMAR_COUNT_CALL("load_balance_loss_backward");
  const std::vector<TensorView> layers = ViewAll(kOp, gate_logits);
  const OptionalView mask(kOp, attention_mask);
  Tensors results;
  for (size_t i = 0; i < layers.size(); ++i) results.push_back(Empty(gate_logits[i], layers[i], layers[i].dtype));
  LoadBalanceLossBackward(kOp, View(kOp, grad), layers, mask.get(), View(kOp, tokens_per_expert),
                          ViewAll(kOp, results));
  return results;
}

Tensor router_z_loss(const Tensor& logits) {
  constexpr const char* kOp = "router_z_loss";
  JUMAR_COUNT_CALL("router_z_loss");
  const TensorView x = View(kOp, logits);
  Tensor loss = Empty(logits, std::vector<int64_t>{}, ComputeType(x.dtype));
  RouterZLoss(kOp, x, View(kOp, loss));
  return loss;
}

Tensor router_z_loss_backward(const Tensor& grad, const Tensor& logits) {
  constexpr const char* kOp = "router_z_loss_backward";
  JUMAR_COUNT_CALL("router_z_loss_backward");
  const TensorView x = View(kOp, logits);
  Tensor dlogits = Empty(logits, x, x.dtype);
  RouterZLossBackward(kOp, View(kOp, grad), x, View(kOp, dlogits));
  return dlogits;
}

Tensor expert_bias_update(const Tensor& bias, const Tensor& tokens_per_expert, double rate, bool center) {
  constexpr const char* kOp = "expert_bias_update";
  JUMAR_COUNT_CALL("expert_bias_update");
  const TensorView b = View(kOp, bias);
  Tensor updated = Empty(bias, b, b.dtype);
  ExpertBiasUpdate(kOp, b, View(kOp, tokens_per_expert), rate, center, View(kOp, updated));
  return updated;
}

}  // namespace

std::vector<OpEntry> RouterOps() {
  return {
      {"router_top_k(Tensor logits, int k, str scoring='softmax', bool renorm=False, Tensor? bias=None, int n_group=1,"
       " int topk_group=1, float scale=1.0, float eps=0.0, float? group_fill=None, str group_score='top2',"
       " bool wide_weights=False, bool output_scores=False) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&router_top_k), false},
      {"router_top_k_backward(Tensor? grad_weights, Tensor? grad_scores, Tensor logits, Tensor indices, str scoring,"
       " bool renorm, float scale, float eps) -> Tensor",
       TORCH_BOX(&router_top_k_backward), false},
      {"npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_moe_gating_top_k_softmax), true},
      {"npu_moe_gating_top_k_softmax_backward(Tensor grad_y, Tensor x, Tensor expert_idx) -> Tensor",
       TORCH_BOX(&npu_moe_gating_top_k_softmax_backward), false},
      {"moe_gating_top_k_softmax_v2(Tensor x, int k, Tensor? finished, int renorm, bool output_softmax)"
       " -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_gating_top_k_softmax_v2), false},
      {"npu_moe_gating_top_k_softmax_v2_backward(Tensor? grad_y, Tensor? grad_softmax, Tensor x, Tensor expert_idx,"
       " int renorm) -> Tensor",
       TORCH_BOX(&npu_moe_gating_top_k_softmax_v2_backward), false},
      {"moe_gating_top_k(Tensor x, int k, Tensor? bias, int k_group, int group_count, int group_select_mode,"
       " int renorm, int norm_type, float routed_scaling_factor, float eps) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_gating_top_k), false},
      {"npu_moe_gating_top_k_backward(Tensor x_norm, Tensor grad_y, Tensor expertIdx, *, int renorm=0,"
       " int norm_type=0, float routed_scaling_factor=1.0, float eps=1e-20) -> Tensor",
       TORCH_BOX(&npu_moe_gating_top_k_backward), true},
      {"load_balance_loss(Tensor[] gate_logits, int num_experts, int top_k, Tensor? attention_mask=None)"
       " -> (Tensor, Tensor)",
       TORCH_BOX(&load_balance_loss), false},
      {"load_balance_loss_backward(Tensor grad, Tensor[] gate_logits, Tensor? attention_mask,"
       " Tensor tokens_per_expert) -> Tensor[]",
       TORCH_BOX(&load_balance_loss_backward), false},
      {"router_z_loss(Tensor logits) -> Tensor", TORCH_BOX(&router_z_loss), false},
      {"router_z_loss_backward(Tensor grad, Tensor logits) -> Tensor", TORCH_BOX(&router_z_loss_backward), false},
      {"expert_bias_update(Tensor bias, Tensor tokens_per_expert, float rate, bool center=True) -> Tensor",
       TORCH_BOX(&expert_bias_update), false},
  };
}

}  // namespace jumar::binding
