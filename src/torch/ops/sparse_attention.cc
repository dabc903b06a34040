#include <string>

#include "base/check.h"
#include "base/widen.h"
#include "kernels/sparse_attention/sparse_flash_attention.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

constexpr const char* kForward = "npu_sparse_flash_attention";
constexpr const char* kGrad = "npu_sparse_flash_attention_grad";

// The arguments that both directions have, as views.
struct Call {
  OptionalView q_lengths, k_lengths;
  SparseFlashTensors tensors;
  DType compute;

  Call(const char* op, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& indices,
       const OptionalTensor& q_len, const OptionalTensor& k_len, const OptionalTensor& query_rope,
       const OptionalTensor& key_rope, const OptionalTensor& sinks)
      : q_lengths(op, q_len),
        k_lengths(op, k_len),
        tensors{View(op, query),
                View(op, key),
                View(op, value),
                View(op, indices),
                q_lengths.get(),
                k_lengths.get(),
                ViewOrNone(op, query_rope),
                ViewOrNone(op, key_rope),
                ViewOrNone(op, sinks)},
        compute(ComputeType(tensors.query.dtype)) {}
};

std::tuple<Tensor, Tensor, Tensor> sparse_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const Tensor& sparse_indices, double scale,
                                                    const OptionalTensor& q_lengths, const OptionalTensor& k_lengths,
                                                    const OptionalTensor& query_rope, const OptionalTensor& key_rope,
                                                    const OptionalTensor& sinks, int64_t block_size, std::string layout,
                                                    int64_t sparse_mode) {
  JUMAR_COUNT_CALL("npu_sparse_flash_attention");
  const Call call(kForward, query, key, value, sparse_indices, q_lengths, k_lengths, query_rope, key_rope, sinks);
  const SparseFlashAttention attention(kForward, call.tensors, {scale, block_size, layout, sparse_mode});
  Tensor out = Empty(query, attention.OutSizes(), call.tensors.query.dtype);
  Tensor max = Empty(query, attention.StatisticsSizes(), call.compute);
  Tensor sum = Empty(query, attention.StatisticsSizes(), call.compute);
  SparseAttention(kForward, attention.inputs(), attention.Tokens("out", View(kForward, out)),
                  attention.Statistics("softmax_max", View(kForward, max)),
                  attention.Statistics("softmax_sum", View(kForward, sum)));
  return {out, max, sum};
}

struct Gradients {
  Tensor dq, dk, dv, dq_rope, dk_rope, dsinks;
};

Gradients Backward(const Tensor& query, const Call& call, const SparseFlashOptions& options, const Tensor& d_out,
                   const Tensor& out, const Tensor& max, const Tensor& sum, bool need_sinks) {
  const SparseFlashTensors& t = call.tensors;
  const SparseFlashAttention attention(kGrad, t, options);
  const auto like = [&](const TensorView& x, bool needed, DType dtype) { return EmptyIf(needed, query, x, dtype); };
  const bool ropes = t.query_rope.rank != 0;
  const DType dtype = t.query.dtype;
  Gradients g{like(t.query, true, dtype),     like(t.key, true, dtype),
              like(t.value, true, dtype),     like(t.query_rope, ropes, dtype),
              like(t.key_rope, ropes, dtype), like(t.sinks, need_sinks, need_sinks ? call.compute : dtype)};
  const auto view = [&](const char* name, const Tensor& x) { return attention.Tokens(name, View(kGrad, x)); };
  SparseAttentionGradients gradients{view("dq", g.dq), view("dk", g.dk), view("dv", g.dv), {}, {}, {}};
  if (ropes) {
    gradients.dq_rope = view("dq_rope", g.dq_rope);
    gradients.dk_rope = view("dk_rope", g.dk_rope);
  }
  if (need_sinks) gradients.dsinks = View(kGrad, g.dsinks);
  SparseAttentionBackward(kGrad, attention.inputs(), view("d_out", d_out), view("out", out),
                          attention.Statistics("softmax_max", View(kGrad, max)),
                          attention.Statistics("softmax_sum", View(kGrad, sum)), gradients);
  return g;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> npu_sparse_flash_attention_grad(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sparse_indices, const Tensor& d_out,
    const Tensor& out, const Tensor& softmax_max, const Tensor& softmax_sum, double scale_value,
    int64_t sparse_block_size, const OptionalTensor& query_rope, const OptionalTensor& key_rope,
    const OptionalTensor& actual_seq_qlen, const OptionalTensor& actual_seq_kvlen, std::optional<std::string> layout,
    std::optional<int64_t> sparse_mode, std::optional<int64_t> pre_tokens, std::optional<int64_t> next_tokens,
    std::optional<int64_t> /*attention_mode*/) {
  JUMAR_COUNT_CALL("npu_sparse_flash_attention_grad");
  constexpr int64_t kUnbounded = INT64_MAX;
  for (const auto& [name, value] : {std::pair("pre_tokens", pre_tokens), std::pair("next_tokens", next_tokens)}) {
    JUMAR_CHECK(kGrad, value.value_or(kUnbounded) == kUnbounded, name, " must keep its default ", kUnbounded, ", got ",
                *value);
  }
  const Call call(kGrad, query, key, value, sparse_indices, actual_seq_qlen, actual_seq_kvlen, query_rope, key_rope,
                  std::nullopt);
  const SparseFlashOptions options{
      scale_value,       sparse_block_size, layout.value_or("BSND"), sparse_mode.value_or(3),
      "actual_seq_qlen", "actual_seq_kvlen"};
  const Gradients g = Backward(query, call, options, d_out, out, softmax_max, softmax_sum, false);
  return {g.dq, g.dk, g.dv, g.dq_rope, g.dk_rope};
}

// What autograd calls: as npu_sparse_flash_attention_grad, with the gradient of sinks where there are some.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sparse_attention_backward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sparse_indices, const Tensor& d_out,
    const Tensor& out, const Tensor& max, const Tensor& sum, double scale, const OptionalTensor& q_lengths,
    const OptionalTensor& k_lengths, const OptionalTensor& query_rope, const OptionalTensor& key_rope,
    const OptionalTensor& sinks, int64_t block_size, std::string layout, int64_t sparse_mode) {
  JUMAR_COUNT_CALL("npu_sparse_flash_attention_grad");
  const Call call(kGrad, query, key, value, sparse_indices, q_lengths, k_lengths, query_rope, key_rope, sinks);
  const Gradients g =
      Backward(query, call, {scale, block_size, layout, sparse_mode}, d_out, out, max, sum, sinks.has_value());
  return {g.dq, g.dk, g.dv, g.dq_rope, g.dk_rope, g.dsinks};
}

}  // namespace

std::vector<OpEntry> SparseAttentionOps() {
  return {
      {"sparse_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value,"
       " Tensor? actual_seq_lengths_query, Tensor? actual_seq_lengths_kv, Tensor? query_rope, Tensor? key_rope,"
       " Tensor? sinks, int sparse_block_size, str layout, int sparse_mode) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&sparse_attention), false},
      {"npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, Tensor d_out,"
       " Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size,"
       " Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None,"
       " str? layout=\"BSND\", int? sparse_mode=3, int? pre_tokens=9223372036854775807,"
       " int? next_tokens=9223372036854775807, int? attention_mode=0)"
       " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_sparse_flash_attention_grad), true},
      {"sparse_attention_backward(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, Tensor d_out,"
       " Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, Tensor? actual_seq_lengths_query,"
       " Tensor? actual_seq_lengths_kv, Tensor? query_rope, Tensor? key_rope, Tensor? sinks, int sparse_block_size,"
       " str layout, int sparse_mode) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&sparse_attention_backward), false},
  };
}

}  // namespace jumar::binding
