// Tokens to the order of their experts and back, by a list of expert ids.
//
// T tokens of width H, K experts a token, P = T K slots, slot i = t K + k, O rows on the permuted side.
//
//   order            = the slots by expert id, ascending, stable
//   permuted[r]      = tokens[order[r] / K]                                          for r < O
//   sorted_indices   = the inverse of order: slot -> row, length P, also for slots whose row >= O (dropped)
//   unpermuted[t]    = sum over k of probs[t, k] permuted[sorted_indices[t K + k]]   without probs K is 1
//
//   dtokens[t]                      = sum over k of grad[sorted_indices[t K + k]]
//   dpermuted[sorted_indices[t K + k]] = probs[t, k] grad[t];  rows that no slot has: 0
//   dprobs[t, k]                    = <grad[t], permuted[sorted_indices[t K + k]]>
//
// Dropped slots contribute nothing. Rows: one dtype of fp32, bf16, fp16, fp64; probs any of these. Computed in fp32
// (fp64 for fp64 rows), k ascending, one rounding; rows that are only moved keep their bits. Any strides. indices and
// sorted_indices are int32 or int64; where two slots have one row, its gradient is their sum.
//
// Error: dtokens and unpermuted 0.51 ulp for 16 bits, else 1 ulp, plus K eps of the sum of the terms' magnitudes;
// dprobs likewise with H for K (eps: half an ulp of 1 in the compute type). Results are the same bits for every thread
// count.
//
// Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include <optional>

#include "jumar/tensor.h"

namespace jumar {

struct PermuteSizes {
  int64_t top_k = 0;
  int64_t slots = 0;
  int64_t rows = 0;  // O
};

// Checks shapes and num_out_tokens: none or 0 keeps all slots, n > 0 the first min(n, P) rows, n < 0 all but the last
// -n.
PermuteSizes CheckTokenPermute(const char* op, const TensorView& tokens, const TensorView& indices,
                               const std::optional<int64_t>& num_out_tokens, bool padded_mode);

// permuted [O, H], sorted_indices [P] int32.
void TokenPermute(const char* op, const TensorView& tokens, const TensorView& indices, const TensorView& permuted,
                  const TensorView& sorted_indices);

// grad [O, H], dtokens [T, H]; sorted_indices has T * top_k elements.
void TokenPermuteGrad(const char* op, const TensorView& grad, const TensorView& sorted_indices, int64_t top_k,
                      bool padded_mode, const TensorView& dtokens);

// T of unpermuted [T, H].
int64_t CheckTokenUnpermute(const char* op, const TensorView& permuted, const TensorView& sorted_indices,
                            const TensorView* probs, bool padded_mode);

void TokenUnpermute(const char* op, const TensorView& permuted, const TensorView& sorted_indices,
                    const TensorView* probs, const TensorView& unpermuted);

// dpermuted [O, H]. With probs [T, K]: permuted [O, H] and dprobs [T, K] of probs' dtype; without both are null.
void TokenUnpermuteGrad(const char* op, const TensorView& grad, const TensorView& sorted_indices,
                        const TensorView* probs, const TensorView* permuted, bool padded_mode,
                        const TensorView& dpermuted, const TensorView* dprobs);

// How many elements of indices, any shape, are each of [0, experts); `experts` itself stands for no expert. counts
// [experts] int64.
void ExpertCounts(const char* op, const TensorView& indices, const TensorView& counts);

}  // namespace jumar
