// The experts of a mixture in one operator: what permute, grouped gate and up products, SwiGLU, grouped down product
// and weighted un-permute compute one after another.
//
//   g = hidden[t] * gate[e],  u = hidden[t] * up[e],  h = silu(g) * u,  e = ids[t, k]
//   y[t] = sum over k ascending of probs[t, k] * (h[t, k] * down[e])
//
// hidden, y [T, H]; ids [T, K], int32 or int64 in [0, E]: E is no expert, whose slot contributes nothing and has no
// gradient; probs [T, K], any floating dtype; gate, up [H, I] and down [I, H] for each of E experts, of hidden's dtype.
// Any strides, nothing of them is copied.
//
// Numbers: products as in gemm.h, in fp32 (fp64). SwiGLU takes the unrounded sums; h is rounded to hidden's dtype;
// down's sums stay in fp32, are weighted, summed over k and rounded once. `saved` [T * K, 2 * I] of hidden's dtype gets
// g and u, rounded, one row a slot in the order of experts (zeros after the last): that is all that the backward needs
// beside the arguments. No result depends on the thread count.
//
// Backward, with d = dy[t] * down[e]^T from gathered rows of dy, and h, g, u from `saved`:
//
//   dprobs[t, k] = sum of d * h,   dh = probs[t, k] * d
//   ddown[e]     = sum over its slots of round(probs[t, k] * h)^T * dy[t]
//   dg, du       = round(dh * derivatives of silu(g) * u)
//   dgate[e], dup[e] = sum over its slots of hidden[t]^T * dg, du
//   dhidden[t]   = sum over k ascending of dg * gate[e]^T + du * up[e]^T, fp32 until the one rounding
//
// Memory: no permuted copy of hidden or dy is made. Beside arguments and results, forward holds h and at most 64 MB of
// fp32 sums; backward holds dg, du and probs * h (3 I values a slot) and the same 64 MB.
//
// All functions throw jumar::Error, with `op` first in the text, before any memory is written.
#pragma once

#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// One entry an expert. `up` is empty where `gate` holds both, [H, 2 * I], gate first.
struct ExpertWeights {
  std::vector<TensorView> gate;
  std::vector<TensorView> up;
  std::vector<TensorView> down;
};

// `saved` may be null.
void MoeFfn(const char* op, const TensorView& hidden, const TensorView& ids, const TensorView& probs,
            const ExpertWeights& weights, const TensorView& y, const TensorView* saved);

// dhidden and dprobs may be null; lists of `grads` that are empty are not computed.
void MoeFfnBackward(const char* op, const TensorView& dy, const TensorView& hidden, const TensorView& ids,
                    const TensorView& probs, const ExpertWeights& weights, const TensorView& saved,
                    const TensorView* dhidden, const TensorView* dprobs, const ExpertWeights& grads);

}  // namespace jumar
