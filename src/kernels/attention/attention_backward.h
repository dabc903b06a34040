// Between the checks of the backward and its tasks.
#pragma once

#include "kernels/attention/attention_blocks.h"

namespace jumar {

struct AttentionGradients {
  const AttentionPlan& plan;
  const TensorView& dy;
  const TensorView& max;
  const TensorView& sum;
  const TensorView& delta;  // [B, Nq, Sq], contiguous: sum over columns of dy * out
  const TensorView& dq;
  const TensorView& dk;
  const TensorView& dv;
  const TensorView* dpse;  // [sequences, Nq, Sq, Skv], stride 0 where rows share an element; zeros; may be null
};

// Writes dq, dk, dv; adds to dpse.
void AttentionBackwardTasks(const AttentionGradients& gradients);

}  // namespace jumar
