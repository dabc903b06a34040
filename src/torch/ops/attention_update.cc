#include "kernels/attention/attention_update.h"

#include <string>

#include "base/check.h"
#include "base/widen.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

std::tuple<Tensor, Tensor, Tensor> npu_ring_attention_update(
    const Tensor& prev_attn_out, const Tensor& prev_softmax_max, const Tensor& prev_softmax_sum,
    const Tensor& cur_attn_out, const Tensor& cur_softmax_max, const Tensor& cur_softmax_sum,
    const OptionalTensor& actual_seq_qlen, std::string input_layout, std::string input_softmax_layout) {
  constexpr const char* kOp = "npu_ring_attention_update";
  JUMAR_COUNT_CALL("npu_ring_attention_update");
  JUMAR_CHECK(kOp, input_layout != "TND" || actual_seq_qlen.has_value(), "input_layout TND needs actual_seq_qlen");
  JUMAR_CHECK(kOp, !actual_seq_qlen.has_value() || actual_seq_qlen->scalar_type() == ScalarType::Long,
              "actual_seq_qlen must be int64, got ", NameOf(actual_seq_qlen->scalar_type()));
  const AttentionPart previous{View(kOp, prev_attn_out), View(kOp, prev_softmax_max), View(kOp, prev_softmax_sum)};
  const AttentionPart current{View(kOp, cur_attn_out), View(kOp, cur_softmax_max), View(kOp, cur_softmax_sum)};
  Tensor out = Empty(prev_attn_out, previous.out, previous.out.dtype);
  Tensor max = Empty(prev_attn_out, previous.max, previous.max.dtype);
  Tensor sum = Empty(prev_attn_out, previous.max, previous.max.dtype);
  RingAttentionUpdate(kOp, previous, current, input_layout, input_softmax_layout,
                      {View(kOp, out), View(kOp, max), View(kOp, sum)});
  return {out, max, sum};
}

std::tuple<Tensor, Tensor> npu_attention_update(Tensors lse, Tensors local_out, int64_t update_type) {
  constexpr const char* kOp = "npu_attention_update";
  JUMAR_COUNT_CALL("npu_attention_update");
  JUMAR_CHECK(kOp, update_type == 0 || update_type == 1, "update_type must be 0 or 1, got ", update_type);
  JUMAR_CHECK(kOp, !local_out.empty(), "lse and local_out must have one length of at least 1, got ", lse.size(),
              " and 0");
  const std::vector<TensorView> parts = ViewAll(kOp, local_out);
  Tensor out = Empty(local_out[0], parts[0], parts[0].dtype);
  TensorView rows = parts[0];
  rows.rank = std::min(rows.rank, 1);
  Tensor total = EmptyIf(update_type == 1, local_out[0], rows, ComputeType(parts[0].dtype));
  const TensorView view = View(kOp, total);
  AttentionUpdate(kOp, ViewAll(kOp, lse), parts, View(kOp, out), update_type == 1 ? &view : nullptr);
  return {out, total};
}

}  // namespace

std::vector<OpEntry> AttentionUpdateOps() {
  return {
      {"npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum,"
       " Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, *, Tensor? actual_seq_qlen=None,"
       " str input_layout=\"SBH\", str input_softmax_layout=\"\") -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_ring_attention_update), true},
      {"npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_attention_update), true},
  };
}

}  // namespace jumar::binding
