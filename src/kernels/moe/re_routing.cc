#include "kernels/moe/re_routing.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/indices.h"
#include "kernels/moe/cells.h"
#include "kernels/moe/moe_operands.h"
#include "kernels/moe/moe_rows.h"

namespace jumar {

void CheckReRouting(const char* op, const TensorView& tokens, const TensorView& counts, const TensorView* scales) {
  CheckDims(op, "tokens", tokens, 2);
  CheckFloating(op, "tokens", tokens);
  CheckSlots(op, tokens.size[0]);
  CheckDims(op, "expert_token_num_per_rank", counts, 2);
  if (scales == nullptr) return;
  CheckFloating(op, "per_token_scales", *scales);
  JUMAR_CHECK(op, scales->rank == 1 && scales->size[0] == tokens.size[0], "per_token_scales must be [", tokens.size[0],
              "], got ", ShapeString(*scales));
}

void ReRouting(const char* op, const TensorView& tokens, const TensorView& counts, const TensorView* scales,
               const TensorView& permuted, const TensorView* permuted_scales, const TensorView& idx,
               const TensorView& totals) {
  const int64_t all = tokens.size[0];
  const int64_t ranks = counts.size[0];
  const int64_t experts = counts.size[1];
  const std::vector<int64_t> sizes =
      ReadIndices(op, "expert_token_num_per_rank", counts, 0, std::numeric_limits<int64_t>::max());
  // begin[rank][expert] of the blocks as they come; saturating, so that no sum wraps.
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> begin;
  int64_t sum = 0;
  for (const int64_t size : sizes) {
    begin.push_back(sum);
    sum = size > kMost - sum ? kMost : sum + size;
  }
  JUMAR_CHECK(op, sum == all, "expert_token_num_per_rank adds up to ", sum < kMost ? "" : "at least ", sum,
              ", but tokens has ", all, " rows");
  std::vector<int32_t> row_of(static_cast<size_t>(all));  // source -> result
  Cells cells;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t total = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const auto block = static_cast<size_t>(r * experts + e);
      total += sizes[block];
      for (int64_t i = 0; i < sizes[block]; ++i) {
        row_of[static_cast<size_t>(begin[block] + i)] = static_cast<int32_t>(cells.size());
        cells.Add(begin[block] + i, 0);
      }
    }
    if (totals.dtype == DType::kI32) {
      totals.ptr<int32_t>()[e] = static_cast<int32_t>(total);
    } else {
      totals.ptr<int64_t>()[e] = total;
    }
  }
  std::copy(cells.token.begin(), cells.token.end(), idx.ptr<int32_t>());
  const SlotTable table{row_of.data(), all};
  SpreadRows(tokens, table, permuted);
  if (scales == nullptr) return;
  TensorView from = *scales;
  from.rank = 2;
  from.size[1] = 1;
  GatherCells(from, cells, nullptr, *permuted_scales);
}

void ReRoutingGrad(const char* op, const TensorView& grad, const TensorView& idx, const TensorView& dtokens) {
  CheckDims(op, "grad", grad, 2);
  CheckFloating(op, "grad", grad);
  CheckDims(op, "permute_token_idx", idx, 1);
  JUMAR_CHECK(op, idx.size[0] == grad.size[0], idx.size[0], " permute_token_idx do not go with ", grad.size[0],
              " rows");
  const std::vector<int32_t> rows = ReadRowsBelow(op, "permute_token_idx", idx, grad.size[0]);
  const SlotTable table{rows.data(), dtokens.size[0]};
  SpreadRows(grad, table, dtokens);
}

}  // namespace jumar
