#include "kernels/moe/token_permute.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/convert.h"
#include "base/indices.h"
#include "base/slot_sort.h"
#include "base/widen.h"
#include "kernels/moe/moe_operands.h"
#include "kernels/moe/moe_rows.h"

namespace jumar {
namespace {

int64_t RowsOf(const char* op, const std::optional<int64_t>& num_out_tokens, int64_t slots) {
  const int64_t n = num_out_tokens.value_or(0);
  if (n == 0) return slots;
  if (n > 0) return std::min(n, slots);
  JUMAR_CHECK(op, n >= -slots, "num_out_tokens ", n, " drops more than the ", slots, " rows there are");
  return slots + n;
}

struct UnpermuteSizes {
  int64_t tokens;
  int64_t top_k;
};

UnpermuteSizes CheckUnpermuteIndices(const char* op, const TensorView& sorted_indices, const TensorView* probs,
                                     bool padded_mode) {
  CheckNoPadding(op, padded_mode);
  CheckDims(op, "sorted_indices", sorted_indices, 1);
  const int64_t slots = sorted_indices.size[0];
  if (probs == nullptr) return {slots, 1};
  CheckDims(op, "probs", *probs, 2);
  CheckFloating(op, "probs", *probs);
  JUMAR_CHECK(op, probs->size[1] > 0, "The topk should be greater than zero, got probs ", ShapeString(*probs));
  JUMAR_CHECK(op, probs->numel() == slots, "probs ", ShapeString(*probs), " does not go with ", slots,
              " sorted_indices");
  return {probs->size[0], probs->size[1]};
}

}  // namespace

PermuteSizes CheckTokenPermute(const char* op, const TensorView& tokens, const TensorView& indices,
                               const std::optional<int64_t>& num_out_tokens, bool padded_mode) {
  CheckNoPadding(op, padded_mode);
  CheckDims(op, "tokens", tokens, 2);
  CheckFloating(op, "tokens", tokens);
  JUMAR_CHECK(op, indices.rank == 1 || indices.rank == 2,
              "The dims of input indices should be 2 or 1 dimensional, got ", ShapeString(indices));
  JUMAR_CHECK(op, indices.size[0] == tokens.size[0], "indices ", ShapeString(indices), " does not go with tokens ",
              ShapeString(tokens));
  PermuteSizes sizes;
  sizes.top_k = indices.rank == 1 ? 1 : indices.size[1];
  sizes.slots = indices.numel();
  CheckSlots(op, sizes.slots);
  sizes.rows = RowsOf(op, num_out_tokens, sizes.slots);
  return sizes;
}

void TokenPermute(const char* op, const TensorView& tokens, const TensorView& indices, const TensorView& permuted,
                  const TensorView& sorted_indices) {
  const int64_t slots = indices.numel();
  const std::vector<int64_t> ids = ReadIndices(op, "indices", indices, 0, std::numeric_limits<int64_t>::max());
  auto* rows = sorted_indices.ptr<int32_t>();
  SortSlots(ids.data(), slots, nullptr, rows);
  const SlotTable table{rows, permuted.size[0], indices.rank == 1 ? 1 : indices.size[1]};
  SpreadRows(tokens, table, permuted);
}

void TokenPermuteGrad(const char* op, const TensorView& grad, const TensorView& sorted_indices, int64_t top_k,
                      bool padded_mode, const TensorView& dtokens) {
  CheckNoPadding(op, padded_mode);
  CheckDims(op, "grad_permuted_tokens", grad, 2);
  CheckFloating(op, "grad_permuted_tokens", grad);
  CheckDType(op, "grad_permuted_tokens", grad, dtokens.dtype);
  JUMAR_CHECK(op, grad.size[1] == dtokens.size[1], "grad_permuted_tokens ", ShapeString(grad),
              " does not go with tokens ", ShapeString(dtokens));
  JUMAR_CHECK(op, top_k >= 0, "num_topK must not be negative, got ", top_k);
  JUMAR_CHECK(op, sorted_indices.numel() == dtokens.size[0] * top_k, sorted_indices.numel(),
              " sorted_indices do not go with ", dtokens.size[0], " tokens of ", top_k, " experts");
  const std::vector<int32_t> rows = ReadRows(op, "sorted_indices", sorted_indices, grad.size[0]);
  const SlotTable table{rows.data(), grad.size[0], top_k};
  CombineRows(grad, table, dtokens);
}

int64_t CheckTokenUnpermute(const char* op, const TensorView& permuted, const TensorView& sorted_indices,
                            const TensorView* probs, bool padded_mode) {
  CheckDims(op, "permuted_tokens", permuted, 2);
  CheckFloating(op, "permuted_tokens", permuted);
  return CheckUnpermuteIndices(op, sorted_indices, probs, padded_mode).tokens;
}

void TokenUnpermute(const char* op, const TensorView& permuted, const TensorView& sorted_indices,
                    const TensorView* probs, const TensorView& unpermuted) {
  const int64_t top_k = CheckUnpermuteIndices(op, sorted_indices, probs, false).top_k;
  const std::vector<int32_t> rows = ReadRows(op, "sorted_indices", sorted_indices, permuted.size[0]);
  ScratchFrame frame;
  SlotTable table{rows.data(), permuted.size[0], top_k};
  if (probs != nullptr) table.weights = InComputeType(*probs, permuted.dtype, frame);
  CombineRows(permuted, table, unpermuted);
}

void TokenUnpermuteGrad(const char* op, const TensorView& grad, const TensorView& sorted_indices,
                        const TensorView* probs, const TensorView* permuted, bool padded_mode,
                        const TensorView& dpermuted, const TensorView* dprobs) {
  const auto [tokens, top_k] = CheckUnpermuteIndices(op, sorted_indices, probs, padded_mode);
  CheckDims(op, "grad_unpermuted_tokens", grad, 2);
  CheckDType(op, "grad_unpermuted_tokens", grad, dpermuted.dtype);
  CheckFloating(op, "grad_unpermuted_tokens", grad);
  JUMAR_CHECK(op, grad.size[0] == tokens, "grad_unpermuted_tokens ", ShapeString(grad), " does not go with ", tokens,
              " tokens");
  JUMAR_CHECK(op, dpermuted.rank == 2 && dpermuted.size[1] == grad.size[1], "grad_unpermuted_tokens ",
              ShapeString(grad), " does not go with permuted_tokens ", ShapeString(dpermuted));
  JUMAR_CHECK(op, (probs == nullptr) == (dprobs == nullptr), "a gradient of probs goes with probs");
  if (probs != nullptr) {
    JUMAR_CHECK(op, permuted != nullptr, "the gradient of probs ", ShapeString(*probs), " needs permuted_tokens");
    CheckDType(op, "permuted_tokens", *permuted, grad.dtype);
    JUMAR_CHECK(op, SameShape(*permuted, dpermuted), "permuted_tokens ", ShapeString(*permuted), " must be ",
                ShapeString(dpermuted));
  }
  const std::vector<int32_t> rows = ReadRows(op, "sorted_indices", sorted_indices, dpermuted.size[0]);
  ScratchFrame frame;
  const RowMap in = InputRows(grad, 1, frame);
  const OutputRows out(dpermuted, 1, frame);
  SlotTable table{rows.data(), dpermuted.size[0], top_k};
  if (probs != nullptr) table.weights = InComputeType(*probs, grad.dtype, frame);
  RowMap other;
  TensorView dots;
  if (probs != nullptr) {
    other = InputRows(*permuted, 1, frame);
    dots = Contiguous(nullptr, ComputeType(grad.dtype), {tokens, top_k});
    dots.data = frame.AllocBytes(static_cast<size_t>(dots.numel()) * SizeOf(dots.dtype));
  }
  SpreadRows(in, table, tokens, &out.rows(), probs == nullptr ? nullptr : &other, dots.data);
  out.Finish();
  if (dprobs != nullptr) ConvertAll(dots, *dprobs);
}

void ExpertCounts(const char* op, const TensorView& indices, const TensorView& counts) {
  const int64_t experts = counts.size[0];
  const std::vector<int64_t> ids = ReadIndices(op, "indices", indices, 0, experts + 1);
  const std::vector<int64_t> found = CountIds(ids.data(), static_cast<int64_t>(ids.size()), experts);
  std::copy(found.begin(), found.end(), counts.ptr<int64_t>());
}

}  // namespace jumar
