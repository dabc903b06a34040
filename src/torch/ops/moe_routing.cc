#include "base/check.h"
#include "kernels/moe/finalize_routing.h"
#include "kernels/moe/init_routing.h"
#include "kernels/moe/re_routing.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using OptionalInt = std::optional<int64_t>;
using Sizes = std::vector<int64_t>;

std::tuple<Tensor, Tensor, Tensor> npu_moe_init_routing(const Tensor& x, const Tensor& row_idx,
                                                        const Tensor& expert_idx, int64_t active_num) {
  constexpr const char* kOp = "npu_moe_init_routing";
  JUMAR_COUNT_CALL("npu_moe_init_routing");
  const TensorView tokens = View(kOp, x);
  const TensorView source = View(kOp, row_idx);
  const TensorView ids = View(kOp, expert_idx);
  const int64_t rows = CheckInitRouting(kOp, tokens, source, ids, active_num);
  Tensor expanded = Empty(x, Sizes{rows, tokens.size[1]}, tokens.dtype);
  Tensor index = Empty(x, Sizes{ids.numel()}, DType::kI32);
  Tensor experts = Empty(x, Sizes{ids.numel()}, DType::kI32);
  InitRouting(kOp, tokens, source, ids, View(kOp, expanded), View(kOp, index), View(kOp, experts));
  return {expanded, index, experts};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_init_routing_v2(
    const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale, const OptionalTensor& offset,
    int64_t active_num, int64_t expert_capacity, int64_t expert_num, int64_t drop_pad_mode,
    int64_t expert_tokens_num_type, bool /*expert_tokens_num_flag*/, int64_t quant_mode,
    const Sizes& active_expert_range, int64_t row_idx_type, OptionalInt x_dtype) {
  constexpr const char* kOp = "npu_moe_init_routing_v2";
  JUMAR_COUNT_CALL("npu_moe_init_routing_v2");
  JUMAR_CHECK(kOp, quant_mode == -1, "quantisation is not supported, got quant_mode ", quant_mode);
  JUMAR_CHECK(kOp, !offset.has_value() && !x_dtype.has_value(), "offset and x_dtype belong to quantisation, which is",
              " not supported");
  JUMAR_CHECK(kOp, drop_pad_mode == 0 || drop_pad_mode == 1, "drop_pad_mode must be 0 or 1, got ", drop_pad_mode);
  JUMAR_CHECK(kOp, expert_tokens_num_type >= 0 && expert_tokens_num_type <= 2,
              "expert_tokens_num_type must be 0, 1 or 2, got ", expert_tokens_num_type);
  JUMAR_CHECK(kOp, row_idx_type == 0 || row_idx_type == 1, "row_idx_type must be 0 or 1, got ", row_idx_type);
  JUMAR_CHECK(kOp, active_expert_range.empty() || active_expert_range.size() == 2,
              "active_expert_range must be [start, end], got ", active_expert_range.size(), " numbers");
  JUMAR_CHECK(kOp, drop_pad_mode == 0 || expert_capacity > 0, "drop_pad_mode 1 needs expert_capacity, got ",
              expert_capacity);
  const TensorView tokens = View(kOp, x);
  const TensorView ids = View(kOp, expert_idx);
  const OptionalView scales(kOp, scale);
  RoutingOptions o;
  o.active_num = active_num;
  o.capacity = drop_pad_mode == 1 ? expert_capacity : 0;
  o.experts = expert_num;
  o.start = active_expert_range.empty() ? 0 : active_expert_range[0];
  o.end = active_expert_range.empty() ? expert_num : active_expert_range[1];
  o.row_index = static_cast<RowIndex>(row_idx_type);
  o.counts = static_cast<TokenCounts>(expert_tokens_num_type);
  const int64_t rows = CheckInitRoutingV2(kOp, tokens, ids, scales.get(), o);
  Tensor expanded = o.capacity > 0 ? Empty(x, Sizes{expert_num, o.capacity, tokens.size[1]}, tokens.dtype)
                                   : Empty(x, Sizes{rows, tokens.size[1]}, tokens.dtype);
  Tensor index = Empty(x, Sizes{ids.numel()}, DType::kI32);
  Tensor counts = o.counts == TokenCounts::kPairs ? Empty(x, Sizes{expert_num, 2}, DType::kI64)
                                                  : Empty(x, Sizes{o.end - o.start}, DType::kI64);
  Tensor moved =
      Empty(x, Sizes{scales.get() == nullptr ? 0 : rows}, scales.get() == nullptr ? DType::kF32 : scales.get()->dtype);
  const TensorView moved_view = View(kOp, moved);
  InitRoutingV2(kOp, tokens, ids, scales.get(), o, View(kOp, expanded), View(kOp, index), View(kOp, counts),
                &moved_view);
  return {expanded, index, counts, moved};
}

Tensor moe_init_routing_grad(const Tensor& grad, const Tensor& expanded_row_idx, int64_t tokens, bool by_column,
                             int64_t row_idx_type) {
  constexpr const char* kOp = "moe_init_routing_grad";
  JUMAR_COUNT_CALL("moe_init_routing_grad");
  const TensorView g = View(kOp, grad);
  JUMAR_CHECK(kOp, tokens >= 0 && g.rank > 0, "tokens must not be negative, got ", tokens);
  JUMAR_CHECK(kOp, row_idx_type == 0 || row_idx_type == 1, "row_idx_type must be 0 or 1, got ", row_idx_type);
  Tensor dx = Empty(grad, Sizes{tokens, g.size[g.rank - 1]}, g.dtype);
  InitRoutingGrad(kOp, g, View(kOp, expanded_row_idx), by_column, static_cast<RowIndex>(row_idx_type), View(kOp, dx));
  return dx;
}

// What both directions of finalize_routing take.
class Finalize {
 public:
  Finalize(const char* op, const Tensor& rows, const OptionalTensor& bias, const OptionalTensor& scales,
           const Tensor& row_idx, const OptionalTensor& experts, OptionalInt drop_pad_mode, OptionalInt k)
      : bias_(op, bias), scales_(op, scales), experts_(op, experts) {
    const int64_t mode = drop_pad_mode.value_or(0);
    JUMAR_CHECK(op, mode >= 0 && mode <= 3, "drop_pad_mode must be 0, 1, 2 or 3, got ", mode);
    operands_.rows = View(op, rows);
    operands_.row_idx = View(op, row_idx);
    operands_.bias = bias_.get();
    operands_.scales = scales_.get();
    operands_.experts = experts_.get();
    operands_.by_row = mode >= 2;
    operands_.top_k = k.value_or(1);
  }
  const FinalizeOperands& operands() const { return operands_; }

 private:
  OptionalView bias_;
  OptionalView scales_;
  OptionalView experts_;
  FinalizeOperands operands_;
};

Tensor npu_moe_finalize_routing(const Tensor& expanded_permuted_rows, const OptionalTensor& skip1,
                                const OptionalTensor& skip2, const OptionalTensor& bias, const OptionalTensor& scales,
                                const Tensor& expanded_src_to_dst_row, const OptionalTensor& export_for_source_row,
                                OptionalInt drop_pad_mode, OptionalInt k) {
  constexpr const char* kOp = "npu_moe_finalize_routing";
  JUMAR_COUNT_CALL("npu_moe_finalize_routing");
  const Finalize f(kOp, expanded_permuted_rows, bias, scales, expanded_src_to_dst_row, export_for_source_row,
                   drop_pad_mode, k);
  const OptionalView s1(kOp, skip1);
  const OptionalView s2(kOp, skip2);
  const int64_t tokens = CheckFinalizeRouting(kOp, f.operands(), s1.get(), s2.get());
  const TensorView& rows = f.operands().rows;
  Tensor out = Empty(expanded_permuted_rows, Sizes{tokens, rows.size[rows.rank - 1]}, rows.dtype);
  FinalizeRouting(kOp, f.operands(), s1.get(), s2.get(), View(kOp, out));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> moe_finalize_routing_grad(const Tensor& grad, const Tensor& expanded_permuted_rows,
                                                             const OptionalTensor& bias, const OptionalTensor& scales,
                                                             const Tensor& expanded_src_to_dst_row,
                                                             const OptionalTensor& export_for_source_row,
                                                             int64_t drop_pad_mode, int64_t k) {
  constexpr const char* kOp = "moe_finalize_routing_grad";
  JUMAR_COUNT_CALL("moe_finalize_routing_grad");
  const Finalize f(kOp, expanded_permuted_rows, bias, scales, expanded_src_to_dst_row, export_for_source_row,
                   drop_pad_mode, k);
  const FinalizeOperands& o = f.operands();
  Tensor drows = Empty(grad, o.rows, o.rows.dtype);
  Tensor dscales;
  Tensor dbias;
  if (o.scales != nullptr) dscales = Empty(grad, *o.scales, o.scales->dtype);
  if (o.bias != nullptr) dbias = Empty(grad, *o.bias, o.bias->dtype);
  const OptionalView ds(kOp, dscales);
  const OptionalView db(kOp, dbias);
  FinalizeRoutingGrad(kOp, View(kOp, grad), o, View(kOp, drows), ds.get(), db.get());
  return {drows, dscales, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_re_routing(const Tensor& tokens, const Tensor& expert_token_num_per_rank,
                                                          const OptionalTensor& per_token_scales,
                                                          int64_t expert_token_num_type, int64_t idx_type,
                                                          OptionalInt tokens_dtype) {
  constexpr const char* kOp = "npu_moe_re_routing";
  JUMAR_COUNT_CALL("npu_moe_re_routing");
  JUMAR_CHECK(kOp, expert_token_num_type == 1, "expert_token_num_type must be 1, got ", expert_token_num_type);
  JUMAR_CHECK(kOp, idx_type == 0, "idx_type must be 0, got ", idx_type);
  JUMAR_CHECK(kOp, !tokens_dtype.has_value(), "tokens_dtype is not supported, got ", tokens_dtype.value_or(0));
  const TensorView x = View(kOp, tokens);
  const TensorView counts = View(kOp, expert_token_num_per_rank);
  const OptionalView scales(kOp, per_token_scales);
  CheckReRouting(kOp, x, counts, scales.get());
  Tensor permuted = Empty(tokens, x, x.dtype);
  Tensor moved = Empty(tokens, Sizes{scales.get() == nullptr ? 0 : x.size[0]},
                       scales.get() == nullptr ? DType::kF32 : scales.get()->dtype);
  Tensor idx = Empty(tokens, Sizes{x.size[0]}, DType::kI32);
  Tensor totals = Empty(tokens, Sizes{counts.size[1]}, counts.dtype);
  const TensorView moved_view = View(kOp, moved);
  ReRouting(kOp, x, counts, scales.get(), View(kOp, permuted), &moved_view, View(kOp, idx), View(kOp, totals));
  return {permuted, moved, idx, totals};
}

Tensor moe_re_routing_grad(const Tensor& grad, const Tensor& permute_token_idx) {
  constexpr const char* kOp = "moe_re_routing_grad";
  JUMAR_COUNT_CALL("moe_re_routing_grad");
  const TensorView g = View(kOp, grad);
  Tensor dtokens = Empty(grad, g, g.dtype);
  ReRoutingGrad(kOp, g, View(kOp, permute_token_idx), View(kOp, dtokens));
  return dtokens;
}

}  // namespace

std::vector<OpEntry> MoeRoutingOps() {
  return {
      {"npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_moe_init_routing), true},
      {"moe_init_routing_v2(Tensor x, Tensor expert_idx, Tensor? scale, Tensor? offset, int active_num,"
       " int expert_capacity, int expert_num, int drop_pad_mode, int expert_tokens_num_type,"
       " bool expert_tokens_num_flag, int quant_mode, int[] active_expert_range, int row_idx_type, int? x_dtype)"
       " -> (Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_init_routing_v2), false},
      {"moe_init_routing_grad(Tensor grad, Tensor expanded_row_idx, int tokens, bool by_column, int row_idx_type)"
       " -> Tensor",
       TORCH_BOX(&moe_init_routing_grad), false},
      {"npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias,"
       " Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0,"
       " int? k=1) -> Tensor",
       TORCH_BOX(&npu_moe_finalize_routing), true},
      {"moe_finalize_routing_grad(Tensor grad, Tensor expanded_permuted_rows, Tensor? bias, Tensor? scales,"
       " Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int drop_pad_mode, int k)"
       " -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_finalize_routing_grad), false},
      {"moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, Tensor? per_token_scales,"
       " int expert_token_num_type, int idx_type, int? tokens_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_re_routing), false},
      {"moe_re_routing_grad(Tensor grad, Tensor permute_token_idx) -> Tensor", TORCH_BOX(&moe_re_routing_grad), false},
  };
}

}  // namespace jumar::binding
