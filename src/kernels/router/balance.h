// What keeps experts evenly used: the load-balancing loss, the z-loss of logits, the rule for an expert bias.
//
//   load balance, over the rows of all layers, p = softmax of a row, m = mask of a row (1 without a mask):
//     tokens[e] = sum of m over the rows that have e among their top_k largest logits / sum of m
//     loss      = E * sum over e of tokens[e] * (sum of m p[e] / sum of m)
//     dlogits   = p * (v - sum of p v),  v[e] = grad * m * E * tokens[e] / sum of m
//   z-loss:  loss = mean over rows of lse^2,  dlogits = 2 grad lse / rows * p,  lse = log of the sum of e^logits
//   bias:    bias + d, or bias + d - mean of d,  d = rate * sign(mean of tokens - tokens)
//
// logits: fp32, bf16, fp16, fp64, any strides. Softmax and products in fp32 (fp64 for fp64), sums over rows in fp64 in
// an order that depends on sizes alone. Losses are fp32 (fp64): within 1 ulp plus M + 8 roundings of fp32, M the
// largest distance of two logits of a row; gradients within half an ulp plus as many roundings of their terms'
// magnitudes. No rows: NaN, as 0 / 0. The choice of experts is the router's (router.h), ties to the lowest number.
//
// Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// layers: [rows of the layer, E] of one dtype. mask: null, or as many numbers of any dtype as each layer has rows.
// loss: one element, tokens [E], both in the compute type. top_k in [1, E].
void LoadBalanceLoss(const char* op, const std::vector<TensorView>& layers, int64_t experts, int64_t top_k,
                     const TensorView* mask, const TensorView& loss, const TensorView& tokens);

// grad: one element; tokens as the forward gave them; dlayers: contiguous, shapes and dtypes of layers.
void LoadBalanceLossBackward(const char* op, const TensorView& grad, const std::vector<TensorView>& layers,
                             const TensorView* mask, const TensorView& tokens, const std::vector<TensorView>& dlayers);

// logits [.., E]; loss: one element in the compute type.
void RouterZLoss(const char* op, const TensorView& logits, const TensorView& loss);
void RouterZLossBackward(const char* op, const TensorView& grad, const TensorView& logits, const TensorView& dlogits);

// bias, out [.., E] of one floating dtype; tokens of the same shape and any dtype but bool. Rows are layers. Computed
// in fp64, one rounding. out is contiguous.
void ExpertBiasUpdate(const char* op, const TensorView& bias, const TensorView& tokens, double rate, bool center,
                      const TensorView& out);

}  // namespace jumar
