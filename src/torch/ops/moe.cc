#include "kernels/moe/token_permute.h"

#include "base/check.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using OptionalInts = std::optional<std::vector<int64_t>>;

std::tuple<Tensor, Tensor> npu_moe_token_permute(const Tensor& tokens, const Tensor& indices,
                                                 std::optional<int64_t> num_out_tokens, bool padded_mode) {
  constexpr const char* kOp = "npu_moe_token_permute";
  JUMAR_COUNT_CALL("npu_moe_token_permute");
  const TensorView x = View(kOp, tokens);
  const TensorView ids = View(kOp, indices);
  const PermuteSizes sizes = CheckTokenPermute(kOp, x, ids, num_out_tokens, padded_mode);
  Tensor permuted = Empty(tokens, {sizes.rows, x.size[1]}, x.dtype);
  Tensor sorted_indices = Empty(tokens, std::vector<int64_t>{sizes.slots}, DType::kI32);
  TokenPermute(kOp, x, ids, View(kOp, permuted), View(kOp, sorted_indices));
  return {permuted, sorted_indices};
}

Tensor npu_moe_token_permute_grad(const Tensor& tokens, const Tensor& grad_permuted_tokens, const Tensor& indices,
                                  const Tensor& sorted_indices, bool padded_mode) {
  constexpr const char* kOp = "npu_moe_token_permute_grad";
  JUMAR_COUNT_CALL("npu_moe_token_permute_grad");
  const TensorView x = View(kOp, tokens);
  const PermuteSizes sizes = CheckTokenPermute(kOp, x, View(kOp, indices), std::nullopt, padded_mode);
  Tensor dtokens = Empty(tokens, x, x.dtype);
  TokenPermuteGrad(kOp, View(kOp, grad_permuted_tokens), View(kOp, sorted_indices), sizes.top_k, padded_mode,
                   View(kOp, dtokens));
  return dtokens;
}

Tensor npu_moe_token_permute_grad_v2(const Tensor& grad_permuted_tokens, const Tensor& sorted_indices,
                                     int64_t tokens_size_0, ScalarType tokens_dtype, int64_t num_topK,
                                     bool padded_mode) {
  constexpr const char* kOp = "npu_moe_token_permute_grad_v2";
  JUMAR_COUNT_CALL("npu_moe_token_permute_grad_v2");
  const TensorView g = View(kOp, grad_permuted_tokens);
  JUMAR_CHECK(kOp, tokens_size_0 >= 0, "tokens_size_0 must not be negative, got ", tokens_size_0);
  Tensor dtokens =
      Empty(grad_permuted_tokens, {tokens_size_0, g.rank == 2 ? g.size[1] : 0}, FromScalarType(kOp, tokens_dtype));
  TokenPermuteGrad(kOp, g, View(kOp, sorted_indices), num_topK, padded_mode, View(kOp, dtokens));
  return dtokens;
}

Tensor Unpermute(const char* op, const Tensor& permuted_tokens, const Tensor& sorted_indices,
                 const OptionalTensor& probs, bool padded_mode) {
  const TensorView rows = View(op, permuted_tokens);
  const TensorView indices = View(op, sorted_indices);
  const OptionalView p(op, probs);
  const int64_t tokens = CheckTokenUnpermute(op, rows, indices, p.get(), padded_mode);
  Tensor out = Empty(permuted_tokens, {tokens, rows.size[1]}, rows.dtype);
  TokenUnpermute(op, rows, indices, p.get(), View(op, out));
  return out;
}

Tensor npu_moe_token_unpermute(const Tensor& permuted_tokens, const Tensor& sorted_indices, const OptionalTensor& probs,
                               bool padded_mode, const OptionalInts& /*restore_shape*/) {
  JUMAR_COUNT_CALL("npu_moe_token_unpermute");
  return Unpermute("npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode);
}

std::tuple<Tensor, Tensor> _npu_moe_token_unpermute(const Tensor& permuted_tokens, const Tensor& sorted_indices,
                                                    const OptionalTensor& probs, bool padded_mode,
                                                    const OptionalInts& /*restore_shape*/) {
  JUMAR_COUNT_CALL("_npu_moe_token_unpermute");
  return {Unpermute("_npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode), Tensor()};
}

std::tuple<Tensor, Tensor> UnpermuteGrad(const char* op, const Tensor& grad, const Tensor& sorted_indices,
                                         const std::vector<int64_t>& permuted_shape, DType dtype,
                                         const OptionalTensor& probs, const OptionalTensor& permuted_tokens,
                                         bool padded_mode) {
  const TensorView g = View(op, grad);
  const OptionalView p(op, probs);
  const OptionalView rows(op, permuted_tokens);
  Tensor dpermuted = Empty(grad, permuted_shape, dtype);
  Tensor dprobs;
  if (p.get() != nullptr) dprobs = Empty(grad, *p.get(), p.get()->dtype);
  const OptionalView dp(op, dprobs);
  TokenUnpermuteGrad(op, g, View(op, sorted_indices), p.get(), rows.get(), padded_mode, View(op, dpermuted), dp.get());
  return {dpermuted, dprobs};
}

std::tuple<Tensor, Tensor> npu_moe_token_unpermute_grad(const Tensor& permuted_tokens,
                                                        const Tensor& grad_unpermuted_tokens,
                                                        const Tensor& sorted_indices, const OptionalTensor& probs,
                                                        bool padded_mode, const OptionalInts& /*restore_shape*/) {
  constexpr const char* kOp = "npu_moe_token_unpermute_grad";
  JUMAR_COUNT_CALL("npu_moe_token_unpermute_grad");
  const TensorView rows = View(kOp, permuted_tokens);
  return UnpermuteGrad(kOp, grad_unpermuted_tokens, sorted_indices,
                       std::vector<int64_t>(rows.size, rows.size + rows.rank), rows.dtype, probs, permuted_tokens,
                       padded_mode);
}

std::tuple<Tensor, Tensor> npu_moe_token_unpermute_grad_v2(const Tensor& grad_unpermuted_tokens,
                                                           const Tensor& sorted_indices, int64_t permuted_tokens_size_0,
                                                           ScalarType permuted_tokens_dtype,
                                                           const OptionalTensor& probs, bool padded_mode,
                                                           const OptionalInts& /*restore_shape*/,
                                                           const OptionalTensor& permuted_tokens) {
  constexpr const char* kOp = "npu_moe_token_unpermute_grad_v2";
  JUMAR_COUNT_CALL("npu_moe_token_unpermute_grad_v2");
  const TensorView g = View(kOp, grad_unpermuted_tokens);
  JUMAR_CHECK(kOp, permuted_tokens_size_0 >= 0, "permuted_tokens_size_0 must not be negative, got ",
              permuted_tokens_size_0);
  return UnpermuteGrad(kOp, grad_unpermuted_tokens, sorted_indices,
                       {permuted_tokens_size_0, g.rank == 2 ? g.size[1] : 0},
                       FromScalarType(kOp, permuted_tokens_dtype), probs, permuted_tokens, padded_mode);
}

Tensor expert_counts(const Tensor& indices, int64_t num_experts) {
  constexpr const char* kOp = "expert_counts";
  JUMAR_COUNT_CALL("expert_counts");
  const TensorView ids = View(kOp, indices);
  JUMAR_CHECK(kOp, num_experts >= 0, "num_experts must not be negative, got ", num_experts);
  Tensor counts = Empty(indices, std::vector<int64_t>{num_experts}, DType::kI64);
  ExpertCounts(kOp, ids, View(kOp, counts));
  return counts;
}

}  // namespace

std::vector<OpEntry> MoeOps() {
  return {
      {"npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False)"
       " -> (Tensor, Tensor)",
       TORCH_BOX(&npu_moe_token_permute), true},
      {"npu_moe_token_permute_grad(Tensor tokens, Tensor grad_permuted_tokens, Tensor indices, Tensor sorted_indices,"
       " bool padded_mode=False) -> Tensor",
       TORCH_BOX(&npu_moe_token_permute_grad), true},
      {"npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, int tokens_size_0,"
       " ScalarType tokens_dtype, int num_topK, bool padded_mode=False) -> Tensor",
       TORCH_BOX(&npu_moe_token_permute_grad_v2), true},
      {"npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,"
       " bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
       TORCH_BOX(&npu_moe_token_unpermute), true},
      {"_npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,"
       " bool padded_mode=False, int[]? restore_shape=None) -> (Tensor unpermuted_tokens,"
       " Tensor permuted_tokens_for_backward)",
       TORCH_BOX(&_npu_moe_token_unpermute), true},
      {"npu_moe_token_unpermute_grad(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, Tensor sorted_indices,"
       " Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_moe_token_unpermute_grad), true},
      {"npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices,"
       " int permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, bool padded_mode=False,"
       " int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_moe_token_unpermute_grad_v2), true},
      {"expert_counts(Tensor indices, int num_experts) -> Tensor", TORCH_BOX(&expert_counts), false},
  };
}

}  // namespace jumar::binding
