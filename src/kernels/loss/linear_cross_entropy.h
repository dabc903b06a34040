// Linear layer and cross-entropy in one: the logits of all tokens never exist at once.
//
//   x[n, v] = sum over h of input[n, h] * weight[v, h] + bias[v]
//   lse[n]  = log sum over v of e^x[n, v]
//   loss[n] = lse[n] - (1 - s) x[n, y] - s / V * sum over v of x[n, v] + z lse[n]^2      y = target[n], s = smoothing
//
//   dx[n, v] = g[n] ((1 + 2 z lse[n]) e^(x[n, v] - lse[n]) - s / V - (1 - s) [v == y])
//   dinput = dx weight,  dweight = dx^T input,  dbias[v] = sum over n of dx[n, v]
//
// Tokens whose target is ignore_index have loss 0 and no gradient, and cost nothing: their rows are left out of every
// product. `mean` divides by the number of the other tokens (NaN when there are none, with zero gradients), `sum` adds,
// `none` gives the loss of each token. g is the incoming gradient, over that number for `mean`.
//
// input [.., H], weight [V, H], bias [V]: one dtype of fp32, bf16, fp16, fp64, any strides. target [..] int64 or int32.
// loss (scalar, or [..] for `none`) and lse [N] have the compute type: fp32, and fp64 for fp64.
//
// Everything is computed in the compute type: x by the packed product (see gemm.h for its bound), sums over a part of
// the vocabulary in vectors, over parts and tokens in fp64. dx is rounded once, with g in it: to the compute type, or
// to bf16 where bf16 products run on bf16 instructions. dweight and dbias are summed over all tokens and rounded once;
// dinput is summed over the vocabulary in the compute type and rounded once. Results are the same bit for bit for every
// number of threads.
//
// Memory beyond the results: a block of logits of kLossBlock elements (more beyond 8192 tokens: 256 columns), for the
// backward the sums of dinput [N, H] in the compute type, and a copy of the input's rows when tokens are ignored.
#pragma once

#include <string>

#include "jumar/tensor.h"

namespace jumar {

// Elements of one block of logits.
inline constexpr int64_t kLossBlock = int64_t{2} << 20;
// Up to so many logits (16 MiB in fp32) are kept for the backward, which computes them again otherwise.
inline constexpr int64_t kKeptLogits = int64_t{4} << 20;

enum class Reduction { kNone, kMean, kSum };
Reduction ParseReduction(const char* op, const std::string& name);

struct LinearCrossEntropyOptions {
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::kMean;
  double label_smoothing = 0;
  double z_loss = 0;
};

// logits, in the compute type [N, V], may be null; if given it takes the logits of the tokens that count, in their
// order, and zeros after them. `bias` may be null.
//
// Throws jumar::Error, with `op` first in the text, before any memory is written: shapes, dtypes, a target out of range
// with its value and position.
void LinearCrossEntropy(const char* op, const TensorView& input, const TensorView& weight, const TensorView* bias,
                        const TensorView& target, const LinearCrossEntropyOptions& options, const TensorView& loss,
                        const TensorView& lse, const TensorView* logits);

// grad: shape of loss, any floating dtype. lse, logits (may be null): as the forward gave them. Results may be null.
void LinearCrossEntropyBackward(const char* op, const TensorView& grad, const TensorView& input,
                                const TensorView& weight, const TensorView* bias, const TensorView& target,
                                const TensorView& lse, const TensorView* logits,
                                const LinearCrossEntropyOptions& options, const TensorView* dinput,
                                const TensorView* dweight, const TensorView* dbias);

}  // namespace jumar
