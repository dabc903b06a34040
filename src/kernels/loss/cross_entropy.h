// Cross-entropy of given logits, by the vendor's rule.
//
//   lse[n] = log sum over c of e^input[n, c],  log_prob[n, c] = input[n, c] - lse[n]
//   m[n]   = 0 where ignore_index >= 0 and target[n] == ignore_index, else 1;  w = weight, ones without
//   loss[n] = -m[n] ((1 - s) w[y] log_prob[n, y] + s / C * sum over c of w[c] log_prob[n, c])     s = label_smoothing
//
//   mean: sum of loss over sum of w[y] m;  sum: sum of loss;  none: each
//
//   dinput[n, c] = G[n] m[n] ((1 - s) w[y] (p - [c == y]) + s / C (p sum of w - w[c])),  p = e^log_prob[n, c]
//
// with the incoming gradient G, over sum of w[y] m for `mean`. p comes from log_prob as it was rounded.
//
// input, log_prob [N, C]: one dtype of fp32, bf16, fp16, fp64, any strides; target [N] int64 or int32; weight [C] fp32
// (any floating dtype). Computed in fp32 (fp64 for fp64), sums in fp64, one rounding. A negative ignore_index ignores
// nothing. Unlike torch's, a mean is a tensor of one element.
//
// Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include "kernels/loss/linear_cross_entropy.h"

namespace jumar {

struct CrossEntropyOptions {
  Reduction reduction = Reduction::kMean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
};

// loss: input's dtype, [N] for `none`, else [1]. `weight` may be null.
void CrossEntropy(const char* op, const TensorView& input, const TensorView& target, const TensorView* weight,
                  const CrossEntropyOptions& options, const TensorView& loss, const TensorView& log_prob);

// grad: [N] for `none`, else one element; dinput has its dtype (fp64 goes with fp64).
void CrossEntropyBackward(const char* op, const TensorView& grad, const TensorView& log_prob, const TensorView& target,
                          const TensorView* weight, const CrossEntropyOptions& options, const TensorView& dinput);

}  // namespace jumar
