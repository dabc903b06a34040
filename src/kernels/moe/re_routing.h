// Rows that arrive from every rank, sorted by expert within a rank, to the order of experts over all ranks.
//
// tokens [A, H] in blocks by (rank, expert) of counts[rank, expert] rows, A in all; the results by (expert, rank):
//   permuted[r] = tokens[idx[r]],  permuted_scales[r] = scales[idx[r]],  totals[e] = sum over ranks of counts[rank, e]
//   dtokens[idx[r]] = grad[r]
//
// tokens: fp32, bf16, fp16, fp64; counts [N, E] int32 or int64, totals [E] of that dtype; scales [A] any floating
// dtype; idx [A] int32. Bits are moved, not computed with. Throws jumar::Error, with `op` first, before any memory is
// written.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

void CheckReRouting(const char* op, const TensorView& tokens, const TensorView& counts, const TensorView* scales);
void ReRouting(const char* op, const TensorView& tokens, const TensorView& counts, const TensorView* scales,
               const TensorView& permuted, const TensorView* permuted_scales, const TensorView& idx,
               const TensorView& totals);
void ReRoutingGrad(const char* op, const TensorView& grad, const TensorView& idx, const TensorView& dtokens);

}  // namespace jumar
