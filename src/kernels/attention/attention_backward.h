// Between the checks of the backward and its tasks.
#pragma once

#include "kernels/attention/attention_blocks.h"

namespace jumar {

inline constexpr int64_t kBackwardUnitRows = 512;

struct AttentionGradients {
  const AttentionPlan& plan;
  const TensorView& dy;
  const TensorView& max;
  const TensorView& sum;
  const TensorView& delta;  // [B, Nq, Sq], contiguous: sum over columns of dy * out
  const AttentionGrads& grads;
  // [sequences, Nq, rows, Skv], adjacent columns, zeros, or null. Rows are those of pse and, for queries before
  // pse_first, one more for each kBackwardUnitRows of them. Stride 0 where queries share a row.
  const TensorView* dpse;
};

// Writes the gradients of q, k, v and ropes; adds to dpse.
void AttentionBackwardTasks(const AttentionGradients& gradients);

}  // namespace jumar
