// Tokens to the order of their experts and back, by a map of which token goes to which expert.
//
// T tokens of width H, E experts, routing_map [T, E] of bool (bytes 0 and 1), O rows on the permuted side.
//
// Without drop_and_pad every token has K = O / T experts. Slot i = t K + j is token t's j-th expert, ascending; rows
// lie expert by expert, within one token by token, and sorted_indices [O] is slot -> row:
//   permuted[sorted_indices[i]]  = tokens[t]                    permuted_probs[sorted_indices[i]] = probs[t, expert of
//   i] unpermuted[t]                = sum over j of w[t, j] permuted[sorted_indices[t K + j]]     w: probs where
//   routed, or 1
//
// With drop_and_pad every expert has C = O / E rows: its tokens ascending, cut after C; what is missing is filled with
// tokens that are not routed to it, ascending. sorted_indices [O] is row -> token:
//   permuted[r]                  = tokens[sorted_indices[r]]    permuted_probs[r] = probs[sorted_indices[r], r / C]
//   unpermuted[t]                = sum over rows r of t, ascending, of probs[t, r / C] permuted[r]
//
// Rows: one dtype of fp32, bf16, fp16, fp64; probs [T, E] any of these; indices int32 or int64; any strides. Arithmetic
// and error: those of token_permute.h, with the number of a token's rows for K. Results are the same bits for every
// thread count.
//
// Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include <optional>

#include "jumar/tensor.h"

namespace jumar {

// O: num_out_tokens (T by default), rounded down to a multiple of T, or of E with drop_and_pad.
int64_t CheckPermuteWithRoutingMap(const char* op, const TensorView& tokens, const TensorView& routing_map,
                                   const TensorView* probs, const std::optional<int64_t>& num_out_tokens,
                                   bool drop_and_pad);

// permuted [O, H], sorted_indices [O] int32; with probs also permuted_probs [O] of their dtype.
void PermuteWithRoutingMap(const char* op, const TensorView& tokens, const TensorView& routing_map,
                           const TensorView* probs, bool drop_and_pad, const TensorView& permuted,
                           const TensorView* permuted_probs, const TensorView& sorted_indices);

// grad [O, H] and probs_grad [O] -> dtokens [T, H] and dprobs [T, E] of their dtypes; both of probs or none.
void PermuteWithRoutingMapGrad(const char* op, const TensorView& grad, const TensorView* probs_grad,
                               const TensorView& sorted_indices, const TensorView& routing_map, bool drop_and_pad,
                               const TensorView& dtokens, const TensorView* dprobs);

// unpermuted [T, H]. out_index and token_ids [O] int32: with drop_and_pad the rows in the order of their tokens
// (stable) and those tokens, else both copies of sorted_indices: what the gradient takes. permuted_probs [O]: each
// row's weight, where there are probs.
void UnpermuteWithRoutingMap(const char* op, const TensorView& permuted, const TensorView& sorted_indices,
                             const TensorView* probs, const TensorView* routing_map, bool drop_and_pad,
                             const TensorView& unpermuted, const TensorView& out_index, const TensorView& token_ids,
                             const TensorView* permuted_probs);

// dpermuted [O, H]; with probs also dprobs [T, E]; both of grad's dtype.
void UnpermuteWithRoutingMapGrad(const char* op, const TensorView& grad, const TensorView& out_index,
                                 const TensorView& token_ids, const TensorView* routing_map, const TensorView* permuted,
                                 const TensorView* probs, bool drop_and_pad, const TensorView& dpermuted,
                                 const TensorView* dprobs);

}  // namespace jumar
