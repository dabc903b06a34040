// Rows of x in the order of their experts, for whole models and for the experts of one rank.
//
// x [n, H], expert ids [n, K], P = n K slots i = t K + k, sorted by id, stable.
//
//   first form:   row_idx [n, K] holds k n + t. src[r] = row_idx at the slot of row r;
//                 expanded_x[r] = x[src[r] % n] for r < min(active_num, n) K,  expanded_row_idx[src[r]] = r,
//                 expanded_expert_idx[r] = the sorted ids
//   second form:  only ids in [start, end) are active; V slots have one. Row r < V is the slot order[r];
//                 expanded_x[r] = x[order[r] / K]; rows from V on are 0.
//                 expanded_row_idx: slot -> row, -1 where a slot has no row in expanded_x; or row -> slot, -1 from V on
//     padded:     expanded_x [E, C, H], the first C slots of each expert, 0 where there are fewer; slot -> e C + c or
//     -1 counts:     of slots by active expert (before a capacity cuts them): added up, alone, or (expert, count) of
//     those
//                 that are not 0
//
//   dx[t] = sum over the slots of t, ascending, of grad[row of slot]
//
// x: fp32, bf16, fp16, fp64; indices int32 or int64; any strides. Rows are copied bit for bit. Errors of dx as of
// token_permute.h. Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

// Rows of expanded_x.
int64_t CheckInitRouting(const char* op, const TensorView& x, const TensorView& row_idx, const TensorView& expert_idx,
                         int64_t active_num);
// expanded_row_idx, expanded_expert_idx [P] int32.
void InitRouting(const char* op, const TensorView& x, const TensorView& row_idx, const TensorView& expert_idx,
                 const TensorView& expanded_x, const TensorView& expanded_row_idx,
                 const TensorView& expanded_expert_idx);

enum class RowIndex { kSlotToRow, kRowToSlot };
enum class TokenCounts { kCumulative, kEach, kPairs };

struct RoutingOptions {
  int64_t active_num = -1;
  int64_t capacity = 0;  // > 0: padded
  int64_t experts = -1;
  int64_t start = 0;
  int64_t end = 0;
  RowIndex row_index = RowIndex::kSlotToRow;
  TokenCounts counts = TokenCounts::kCumulative;
};

// Rows of expanded_x, of [experts, capacity] where padded.
int64_t CheckInitRoutingV2(const char* op, const TensorView& x, const TensorView& expert_idx, const TensorView* scale,
                           const RoutingOptions& options);
// expanded_x [rows, H] or [E, C, H]; expanded_row_idx [P] int32; counts int64 [end - start] or [experts, 2]. With scale
// [n] expanded_scale [rows]: each row's, 0 in rows without a slot.
void InitRoutingV2(const char* op, const TensorView& x, const TensorView& expert_idx, const TensorView* scale,
                   const RoutingOptions& options, const TensorView& expanded_x, const TensorView& expanded_row_idx,
                   const TensorView& counts, const TensorView* expanded_scale);

// grad [.., H] like expanded_x, expanded_row_idx [P]; by_column: of the first form. dx [n, H].
void InitRoutingGrad(const char* op, const TensorView& grad, const TensorView& expanded_row_idx, bool by_column,
                     RowIndex row_index, const TensorView& dx);

}  // namespace jumar
