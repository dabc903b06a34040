#include <array>
#include <string>

#include "base/check.h"
#include "base/widen.h"
#include "kernels/attention/fusion_attention.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using OptionalInts = std::optional<std::vector<int64_t>>;

std::vector<int64_t> Ints(const OptionalInts& x) { return x.has_value() ? *x : std::vector<int64_t>{}; }

TensorView ByteView(const char* op, const char* name, const OptionalTensor& x) {
  if (!x.has_value()) return {};
  const ScalarType type = x->scalar_type();
  JUMAR_CHECK(op, type == ScalarType::Bool || type == ScalarType::Byte, name, " must be bool or uint8, got ",
              NameOf(type));
  JUMAR_CHECK(op, x->dim() <= 4, name, " must have at most 4 dimensions, got ", x->dim());
  return ViewAs(op, *x, DType::kBool);
}

// Ends of sequences that come as a tensor.
std::vector<int64_t> Ints(const char* op, const char* name, const OptionalTensor& x) {
  if (!x.has_value()) return {};
  const ScalarType type = x->scalar_type();
  JUMAR_CHECK(op, x->dim() == 1 && (type == ScalarType::Long || type == ScalarType::Int), name,
              " must be int64 or int32 with one dimension, got ", NameOf(type), " with ", x->dim(), " dimensions");
  std::vector<int64_t> values;
  for (int64_t i = 0; i < x->numel(); ++i) {
    const int64_t at = i * x->strides()[0];
    values.push_back(type == ScalarType::Long ? static_cast<const int64_t*>(x->data_ptr())[at]
                                              : static_cast<const int32_t*>(x->data_ptr())[at]);
  }
  return values;
}

Tensor OneInt(const Tensor& like, int64_t value) {
  Tensor x = torch::stable::new_empty(like, std::vector<int64_t>{1}, ScalarType::Long);
  *static_cast<int64_t*>(x.data_ptr()) = value;
  return x;
}

int64_t OneInt(const char* op, const char* name, const OptionalTensor& x) {
  if (!x.has_value()) return 0;
  JUMAR_CHECK(op, x->numel() == 1 && x->scalar_type() == ScalarType::Long, name, " must be one int64, got ", x->numel(),
              " elements");
  return *static_cast<const int64_t*>(x->data_ptr());
}

FusionAttentionTensors Operands(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                                const OptionalTensor& pse, const OptionalTensor& padding_mask,
                                const OptionalTensor& atten_mask, const OptionalTensor& sink,
                                const OptionalTensor& query_rope = {}, const OptionalTensor& key_rope = {}) {
  JUMAR_CHECK(op, !padding_mask.has_value(), "padding_mask is not supported, here as in the vendor's operator");
  return {View(op, query),
          View(op, key),
          View(op, value),
          ViewOrNone(op, pse),
          ByteView(op, "atten_mask", atten_mask),
          ViewOrNone(op, sink),
          ViewOrNone(op, query_rope),
          ViewOrNone(op, key_rope)};
}

FusionAttentionOptions Options(int64_t head_num, std::string layout, double scale, double keep_prob, int64_t pre_tokens,
                               int64_t next_tokens, int64_t seed, int64_t offset, const OptionalInts& prefix,
                               std::vector<int64_t> q_ends, std::vector<int64_t> k_ends, int64_t sparse_mode,
                               std::string softmax_layout) {
  return {head_num,
          std::move(layout),
          scale,
          pre_tokens,
          next_tokens,
          Ints(prefix),
          std::move(q_ends),
          std::move(k_ends),
          sparse_mode,
          std::move(softmax_layout),
          {keep_prob, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)}};
}

// Numbers of torch's default generator, so that torch.manual_seed governs dropout.
void DrawSeed(const Tensor& like, int64_t& seed, int64_t& offset) {
  Tensor drawn = torch::stable::new_empty(like, std::vector<int64_t>{2}, ScalarType::Long);
  std::array<StableIValue, 2> stack{torch::stable::detail::from(drawn), torch::stable::detail::from(std::nullopt)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::random_", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor result = torch::stable::detail::to<Tensor>(stack[0]);
  seed = static_cast<const int64_t*>(result.data_ptr())[0];
  offset = static_cast<const int64_t*>(result.data_ptr())[1];
}

void SetDropoutMask(const char* op, const OptionalTensor& mask, FusionAttentionOptions& o) {
  if (!mask.has_value()) return;
  JUMAR_CHECK(op, mask->scalar_type() == ScalarType::Byte && mask->is_contiguous(),
              "dropout_mask must be contiguous uint8");
  o.dropout.bits = static_cast<const uint8_t*>(mask->data_ptr());
}

void CheckDropoutMask(const char* op, const OptionalTensor& mask, int64_t elements) {
  if (!mask.has_value()) return;
  JUMAR_CHECK(op, mask->numel() * 8 >= elements, "dropout_mask has ", mask->numel() * 8, " bits for ", elements,
              " scores");
}

struct Forward {
  Tensor out, max, sum, softmax_out;
  int64_t seed, offset, elements;
};

Forward RunForward(const char* op, const Tensor& like, const FusionAttentionTensors& tensors, FusionAttentionOptions o,
                   const OptionalTensor& dropout_mask = {}) {
  const bool drops = o.dropout.keep_prob < 1;
  auto seed = static_cast<int64_t>(o.dropout.seed);
  auto offset = static_cast<int64_t>(o.dropout.offset);
  if (drops && !dropout_mask.has_value() && seed == 0 && offset == 0) DrawSeed(like, seed, offset);
  o.dropout.seed = static_cast<uint64_t>(seed);
  o.dropout.offset = static_cast<uint64_t>(offset);
  SetDropoutMask(op, dropout_mask, o);
  const FusionAttention attention(op, tensors, o);
  const int64_t elements = attention.Elements();
  CheckDropoutMask(op, dropout_mask, elements);
  const DType compute = ComputeType(tensors.query.dtype);
  Tensor out = Empty(like, attention.OutSizes(), tensors.query.dtype);
  Tensor max = Empty(like, attention.StatisticsSizes(), compute);
  Tensor sum = Empty(like, attention.StatisticsSizes(), compute);
  Attention(op, attention.inputs(), attention.QueryHeads("out", View(op, out)),
            attention.Statistics("softmax_max", View(op, max)), attention.Statistics("softmax_sum", View(op, sum)));
  return {out, max, sum, Empty(like, std::vector<int64_t>{0}, tensors.query.dtype), seed, offset, elements};
}

struct Gradients {
  Tensor dq, dk, dv, dpse, dq_rope, dk_rope, dsink;

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> Five() const { return {dq, dk, dv, dpse, dsink}; }
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> Seven() const {
    return {dq, dk, dv, dpse, dq_rope, dk_rope, dsink};
  }
};

Gradients RunBackward(const char* op, const Tensor& like, const FusionAttentionTensors& tensors,
                      FusionAttentionOptions o, const Tensor& dy, const OptionalTensor& out, const OptionalTensor& max,
                      const OptionalTensor& sum, bool need_pse = true, const OptionalTensor& dropout_mask = {}) {
  JUMAR_CHECK(op, out.has_value() && max.has_value() && sum.has_value(),
              "softmax_max, softmax_sum and attention_in of the forward are needed");
  SetDropoutMask(op, dropout_mask, o);
  const FusionAttention attention(op, tensors, o);
  const DType dtype = tensors.query.dtype;
  // Empty where the input is absent.
  const auto empty = [&](const TensorView& x, DType type, bool wanted = true) {
    return x.rank != 0 && wanted ? Empty(like, x, type) : Empty(like, std::vector<int64_t>{0}, type);
  };
  const Gradients g{empty(tensors.query, dtype),
                    empty(tensors.key, dtype),
                    empty(tensors.value, dtype),
                    empty(tensors.pse, dtype, need_pse),
                    empty(tensors.query_rope, dtype),
                    empty(tensors.key_rope, dtype),
                    empty(tensors.sink, ComputeType(dtype))};
  AttentionGrads grads;
  grads.dq = attention.QueryHeads("dq", View(op, g.dq));
  grads.dk = attention.KeyHeads("dk", View(op, g.dk));
  grads.dv = attention.KeyHeads("dv", View(op, g.dv));
  if (tensors.query_rope.rank != 0) {
    grads.dq_rope = attention.QueryHeads("dq_rope", View(op, g.dq_rope));
    grads.dk_rope = attention.KeyHeads("dk_rope", View(op, g.dk_rope));
  }
  if (tensors.pse.rank != 0 && need_pse) grads.dpse = View(op, g.dpse);
  if (tensors.sink.rank != 0) grads.dsink = View(op, g.dsink);
  AttentionBackward(op, attention.inputs(), attention.QueryHeads("dy", View(op, dy)),
                    attention.QueryHeads("attention_in", View(op, *out)),
                    attention.Statistics("softmax_max", View(op, *max)),
                    attention.Statistics("softmax_sum", View(op, *sum)), grads);
  return g;
}

using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t>;

ForwardResults npu_fusion_attention(const Tensor& query, const Tensor& key, const Tensor& value, int64_t head_num,
                                    std::string input_layout, const OptionalTensor& pse,
                                    const OptionalTensor& padding_mask, const OptionalTensor& atten_mask, double scale,
                                    double keep_prob, int64_t pre_tockens, int64_t next_tockens,
                                    int64_t /*inner_precise*/, const OptionalInts& prefix,
                                    const OptionalInts& actual_seq_qlen, const OptionalInts& actual_seq_kvlen,
                                    int64_t sparse_mode, bool /*gen_mask_parallel*/, bool /*sync*/,
                                    std::string softmax_layout, const OptionalTensor& sink,
                                    const OptionalTensor& dropout_mask, int64_t seed, int64_t offset) {
  constexpr const char* kOp = "npu_fusion_attention";
  JUMAR_COUNT_CALL("npu_fusion_attention");
  const Forward f =
      RunForward(kOp, query, Operands(kOp, query, key, value, pse, padding_mask, atten_mask, sink),
                 Options(head_num, input_layout, scale, keep_prob, pre_tockens, next_tockens, seed, offset, prefix,
                         Ints(actual_seq_qlen), Ints(actual_seq_kvlen), sparse_mode, softmax_layout),
                 dropout_mask);
  return {f.out, f.max, f.sum, f.softmax_out, f.seed, f.offset, f.elements};
}

ForwardResults fusion_attention_v2(const Tensor& query, const Tensor& key, const Tensor& value, int64_t head_num,
                                   std::string input_layout, const OptionalTensor& pse,
                                   const OptionalTensor& padding_mask, const OptionalTensor& atten_mask,
                                   const OptionalTensor& query_rope, const OptionalTensor& key_rope, double scale,
                                   double keep_prob, int64_t pre_tokens, int64_t next_tokens,
                                   const OptionalInts& prefix, const OptionalInts& actual_seq_qlen,
                                   const OptionalInts& actual_seq_kvlen, int64_t sparse_mode,
                                   std::string softmax_layout, const OptionalTensor& sink,
                                   const OptionalTensor& dropout_mask, int64_t seed, int64_t offset) {
  constexpr const char* kOp = "npu_fusion_attention_v2";
  JUMAR_COUNT_CALL("npu_fusion_attention_v2");
  const Forward f = RunForward(
      kOp, query, Operands(kOp, query, key, value, pse, padding_mask, atten_mask, sink, query_rope, key_rope),
      Options(head_num, input_layout, scale, keep_prob, pre_tokens, next_tokens, seed, offset, prefix,
              Ints(actual_seq_qlen), Ints(actual_seq_kvlen), sparse_mode, softmax_layout),
      dropout_mask);
  return {f.out, f.max, f.sum, f.softmax_out, f.seed, f.offset, f.elements};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> npu_fusion_attention_v3(
    const Tensor& query, const Tensor& key, const Tensor& value, int64_t head_num, std::string input_layout,
    const OptionalTensor& pse, const OptionalTensor& padding_mask, const OptionalTensor& atten_mask, double scale,
    double keep_prob, int64_t pre_tockens, int64_t next_tockens, int64_t /*inner_precise*/, const OptionalInts& prefix,
    const OptionalTensor& actual_seq_qlen, const OptionalTensor& actual_seq_kvlen, int64_t sparse_mode,
    bool /*gen_mask_parallel*/, bool /*sync*/, std::string softmax_layout, const OptionalTensor& sink) {
  constexpr const char* kOp = "npu_fusion_attention_v3";
  JUMAR_COUNT_CALL("npu_fusion_attention_v3");
  const Forward f = RunForward(kOp, query, Operands(kOp, query, key, value, pse, padding_mask, atten_mask, sink),
                               Options(head_num, input_layout, scale, keep_prob, pre_tockens, next_tockens, 0, 0,
                                       prefix, Ints(kOp, "actual_seq_qlen", actual_seq_qlen),
                                       Ints(kOp, "actual_seq_kvlen", actual_seq_kvlen), sparse_mode, softmax_layout));
  return {f.out, f.max, f.sum, f.softmax_out, OneInt(query, f.seed), OneInt(query, f.offset)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> npu_fusion_attention_grad(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy, int64_t head_num,
    std::string input_layout, const OptionalTensor& pse, const OptionalTensor& padding_mask,
    const OptionalTensor& atten_mask, const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum,
    const OptionalTensor& /*softmax_in*/, const OptionalTensor& attention_in, double scale_value, double keep_prob,
    int64_t pre_tockens, int64_t next_tockens, int64_t /*inner_precise*/, int64_t seed, int64_t offset,
    int64_t /*numels*/, const OptionalInts& prefix, const OptionalInts& actual_seq_qlen,
    const OptionalInts& actual_seq_kvlen, int64_t sparse_mode, bool /*gen_mask_parallel*/, bool /*sync*/,
    std::string softmax_layout, const OptionalTensor& sink) {
  constexpr const char* kOp = "npu_fusion_attention_grad";
  JUMAR_COUNT_CALL("npu_fusion_attention_grad");
  return RunBackward(kOp, query, Operands(kOp, query, key, value, pse, padding_mask, atten_mask, sink),
                     Options(head_num, input_layout, scale_value, keep_prob, pre_tockens, next_tockens, seed, offset,
                             prefix, Ints(actual_seq_qlen), Ints(actual_seq_kvlen), sparse_mode, softmax_layout),
                     dy, attention_in, softmax_max, softmax_sum)
      .Five();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> npu_fusion_attention_grad_v2(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy, int64_t head_num,
    std::string input_layout, const OptionalTensor& pse, const OptionalTensor& padding_mask,
    const OptionalTensor& atten_mask, const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum,
    const OptionalTensor& /*softmax_in*/, const OptionalTensor& attention_in, const OptionalTensor& query_rope,
    const OptionalTensor& key_rope, double scale_value, double keep_prob, int64_t pre_tokens, int64_t next_tokens,
    int64_t /*inner_precise*/, int64_t seed, int64_t offset, int64_t /*numels*/, const OptionalInts& prefix,
    const OptionalInts& actual_seq_qlen, const OptionalInts& actual_seq_kvlen, int64_t sparse_mode,
    bool /*gen_mask_parallel*/, bool /*sync*/, int64_t pse_type, const OptionalInts& q_start_idx,
    const OptionalInts& kv_start_idx, std::string softmax_layout, const OptionalTensor& sink) {
  constexpr const char* kOp = "npu_fusion_attention_grad_v2";
  JUMAR_COUNT_CALL("npu_fusion_attention_grad_v2");
  JUMAR_CHECK(kOp, pse_type == 1, "only pse_type 1 is supported, got ", pse_type);
  JUMAR_CHECK(kOp, Ints(q_start_idx).empty() && Ints(kv_start_idx).empty(),
              "q_start_idx and kv_start_idx are not supported");
  return RunBackward(kOp, query,
                     Operands(kOp, query, key, value, pse, padding_mask, atten_mask, sink, query_rope, key_rope),
                     Options(head_num, input_layout, scale_value, keep_prob, pre_tokens, next_tokens, seed, offset,
                             prefix, Ints(actual_seq_qlen), Ints(actual_seq_kvlen), sparse_mode, softmax_layout),
                     dy, attention_in, softmax_max, softmax_sum)
      .Seven();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> npu_fusion_attention_grad_v3(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy, int64_t head_num,
    std::string input_layout, const OptionalTensor& pse, const OptionalTensor& padding_mask,
    const OptionalTensor& atten_mask, const OptionalTensor& softmax_max, const OptionalTensor& softmax_sum,
    const OptionalTensor& /*softmax_in*/, const OptionalTensor& attention_in, double scale_value, double keep_prob,
    int64_t pre_tockens, int64_t next_tockens, int64_t /*inner_precise*/, const OptionalTensor& seed,
    const OptionalTensor& offset, const OptionalInts& prefix, const OptionalTensor& actual_seq_qlen,
    const OptionalTensor& actual_seq_kvlen, int64_t sparse_mode, bool /*gen_mask_parallel*/, bool /*sync*/,
    std::string softmax_layout, const OptionalTensor& sink) {
  constexpr const char* kOp = "npu_fusion_attention_grad_v3";
  JUMAR_COUNT_CALL("npu_fusion_attention_grad_v3");
  return RunBackward(kOp, query, Operands(kOp, query, key, value, pse, padding_mask, atten_mask, sink),
                     Options(head_num, input_layout, scale_value, keep_prob, pre_tockens, next_tockens,
                             OneInt(kOp, "seed", seed), OneInt(kOp, "offset", offset), prefix,
                             Ints(kOp, "actual_seq_qlen", actual_seq_qlen),
                             Ints(kOp, "actual_seq_kvlen", actual_seq_kvlen), sparse_mode, softmax_layout),
                     dy, attention_in, softmax_max, softmax_sum)
      .Five();
}

// What autograd calls: as npu_fusion_attention_grad, with the forward's dropout_mask, and dpse only where it is needed.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fusion_attention_backward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy, const Tensor& out, const Tensor& max,
    const Tensor& sum, int64_t head_num, std::string input_layout, const OptionalTensor& pse,
    const OptionalTensor& atten_mask, const OptionalTensor& sink, const OptionalTensor& dropout_mask,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, double scale, double keep_prob,
    int64_t pre_tokens, int64_t next_tokens, int64_t seed, int64_t offset, const OptionalInts& prefix,
    const OptionalInts& actual_seq_qlen, const OptionalInts& actual_seq_kvlen, int64_t sparse_mode,
    std::string softmax_layout, bool need_pse) {
  constexpr const char* kOp = "npu_fusion_attention_grad";
  JUMAR_COUNT_CALL("npu_fusion_attention_grad");
  return RunBackward(kOp, query,
                     Operands(kOp, query, key, value, pse, std::nullopt, atten_mask, sink, query_rope, key_rope),
                     Options(head_num, input_layout, scale, keep_prob, pre_tokens, next_tokens, seed, offset, prefix,
                             Ints(actual_seq_qlen), Ints(actual_seq_kvlen), sparse_mode, softmax_layout),
                     dy, out, max, sum, need_pse, dropout_mask)
      .Seven();
}

// The same for npu_fusion_attention_v3, whose numbers are tensors.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fusion_attention_backward_v3(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& dy, const Tensor& out, const Tensor& max,
    const Tensor& sum, int64_t head_num, std::string input_layout, const OptionalTensor& pse,
    const OptionalTensor& atten_mask, const OptionalTensor& sink, double scale, double keep_prob, int64_t pre_tokens,
    int64_t next_tokens, const Tensor& seed, const Tensor& offset, const OptionalInts& prefix,
    const OptionalTensor& actual_seq_qlen, const OptionalTensor& actual_seq_kvlen, int64_t sparse_mode,
    std::string softmax_layout, bool need_pse) {
  constexpr const char* kOp = "npu_fusion_attention_grad_v3";
  JUMAR_COUNT_CALL("npu_fusion_attention_grad_v3");
  return RunBackward(
             kOp, query, Operands(kOp, query, key, value, pse, std::nullopt, atten_mask, sink),
             Options(head_num, input_layout, scale, keep_prob, pre_tokens, next_tokens, OneInt(kOp, "seed", seed),
                     OneInt(kOp, "offset", offset), prefix, Ints(kOp, "actual_seq_qlen", actual_seq_qlen),
                     Ints(kOp, "actual_seq_kvlen", actual_seq_kvlen), sparse_mode, softmax_layout),
             dy, out, max, sum, need_pse)
      .Five();
}

}  // namespace

std::vector<OpEntry> AttentionOps() {
  return {
      {"npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor?"
       " pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int"
       " pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]?"
       " actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool"
       " sync=False, str softmax_layout=\"\", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int"
       " offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
       TORCH_BOX(&npu_fusion_attention), true},
      {"npu_fusion_attention_v3(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor?"
       " pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int"
       " pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, SymInt[]? prefix=None, Tensor?"
       " actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool"
       " sync=False, str softmax_layout=\"\", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_fusion_attention_v3), true},
      {"npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout,"
       " *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor?"
       " softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float"
       " keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int"
       " offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int"
       " sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout=\"\", Tensor? sink=None) ->"
       " (Tensor, Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_fusion_attention_grad), true},
      {"npu_fusion_attention_grad_v2(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str"
       " input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor?"
       " softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, Tensor?"
       " query_rope=None, Tensor? key_rope=None, float scale_value=1., float keep_prob=1., int"
       " pre_tokens=2147483647, int next_tokens=2147483647, int inner_precise=0, int seed=0, int offset=0, int"
       " numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0,"
       " bool gen_mask_parallel=True, bool sync=False, int pse_type=1, int[]? q_start_idx=None, int[]?"
       " kv_start_idx=None, str softmax_layout=\"\", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor,"
       " Tensor, Tensor)",
       TORCH_BOX(&npu_fusion_attention_grad_v2), true},
      {"npu_fusion_attention_grad_v3(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str"
       " input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor?"
       " softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float"
       " scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int"
       " inner_precise=0, Tensor? seed=None, Tensor? offset=None, SymInt[]? prefix=None, Tensor?"
       " actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool"
       " sync=False, str softmax_layout=\"\", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_fusion_attention_grad_v3), true},
      {"fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse,"
       " Tensor? padding_mask, Tensor? atten_mask, Tensor? query_rope, Tensor? key_rope, float scale, float"
       " keep_prob, int pre_tokens, int next_tokens, int[]? prefix, int[]? actual_seq_qlen, int[]? actual_seq_kvlen,"
       " int sparse_mode, str softmax_layout, Tensor? sink, Tensor? dropout_mask, int seed, int offset) -> (Tensor,"
       " Tensor, Tensor, Tensor, int, int, int)",
       TORCH_BOX(&fusion_attention_v2), false},
      {"fusion_attention_backward(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor out, Tensor max, Tensor"
       " sum, int head_num, str input_layout, Tensor? pse, Tensor? atten_mask, Tensor? sink, Tensor? dropout_mask,"
       " Tensor? query_rope, Tensor? key_rope, float scale, float keep_prob, int pre_tokens, int next_tokens, int"
       " seed, int offset, int[]? prefix, int[]? actual_seq_qlen, int[]? actual_seq_kvlen, int sparse_mode, str"
       " softmax_layout, bool need_pse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&fusion_attention_backward), false},
      {"fusion_attention_backward_v3(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor out, Tensor max,"
       " Tensor sum, int head_num, str input_layout, Tensor? pse, Tensor? atten_mask, Tensor? sink, float scale,"
       " float keep_prob, int pre_tokens, int next_tokens, Tensor seed, Tensor offset, SymInt[]? prefix, Tensor?"
       " actual_seq_qlen, Tensor? actual_seq_kvlen, int sparse_mode, str softmax_layout, bool need_pse) -> (Tensor,"
       " Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&fusion_attention_backward_v3), false},
  };
}

}  // namespace jumar::binding
