// Attention over all keys from attention over parts of them.
//
//   RingAttentionUpdate, of two parts with statistics:
//     m = max(m1, m2)   a = l1 exp(m1 - m)   b = l2 exp(m2 - m)   l = a + b   out = o1 a / l + o2 b / l
//   AttentionUpdate, of any number of parts with lse = m + log l:
//     lse = log sum_i exp(lse_i)             out = sum_i exp(lse_i - lse) o_i
//
// A part that saw no key of a row (l = 0, or lse of minus infinity) has no weight, and what its out holds is not read:
// no NaN comes of it. Where no part saw one, out is 0, with m = kLowestScore where the parts have it and l = 0, or lse
// = minus infinity.
//
// out: fp32, bf16, fp16 or fp64; statistics and lse: fp32 (fp64 for fp64), any strides. Everything is computed in the
// type of the statistics; out is rounded once. With u = 2^-24 (2^-53) and n parts, beside half an ulp of out's dtype:
//   |error of out| <= (8 + n) u sum_i w_i |o_i|       |error of l| <= 5 u l       |error of lse| <= 1 ulp + 4 u
#pragma once

#include <string>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// Of one part, or of the result. With layout SBH: out [S, B, N * D], statistics [B, N, S, 8]; TND: [T, N, D], [T, N,
// 8].
struct AttentionPart {
  TensorView out, max, sum;
};

// Statistics hold each number eight times; the first is read, all are written. softmax_layout: as that of
// npu_fusion_attention for TND, "" or "TND"; for SBH "" or "SBH". The result must be contiguous.
void RingAttentionUpdate(const char* op, const AttentionPart& previous, const AttentionPart& current,
                         const std::string& layout, const std::string& softmax_layout, const AttentionPart& result);

// lse [M], parts [M, D] and out [M, D] contiguous; lse_out [M] or null.
void AttentionUpdate(const char* op, const std::vector<TensorView>& lse, const std::vector<TensorView>& parts,
                     const TensorView& out, const TensorView* lse_out);

}  // namespace jumar
