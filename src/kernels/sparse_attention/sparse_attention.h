// Attention of each query to keys of its own choice, forward and backward.
//
//   slots(i) = tokens id * block_size + o, 0 <= o < block_size, of the ids of row i that are not -1, in their order,
//              without tokens >= k_len and, if causal, tokens > i + k_len - q_len
//   s[i, t]  = scale * (q[i] . k[t] + q_rope[i] . k_rope[t])      p = softmax of a row over its slots
//   out[i]   = sum over slots t of p[i, t] v[t]
//
// q [B, S1, N, D], k [B, S2, Nk, D], v [B, S2, Nk, Dv], q_rope [B, S1, N, Dr], k_rope [B, S2, Nk, Dr], out
// [B, S1, N, Dv], indices [B, S1, Nk, K] int32 or int64: any strides, one dtype of fp32, bf16, fp16, fp64. Head h of q
// reads head h / (N / Nk) of k, v and indices. A token that comes twice counts twice. An id below -1, or one whose
// tokens all lie behind S2, is an error. Keys that are no slot are not read: NaN in them reaches nothing. A row without
// slots gives 0, and 0 as its gradient.
//
// Everything between the loads and the one rounding at the store is fp32 (fp64 for fp64). Scores are summed over D (and
// Dr) in blocks of 256, of few heads in a vector of sums; out over blocks of at most 128 slots with the online softmax,
// keys in blocks whose number m depends on sizes alone, of fewer than 16 queries in m <= 16 parts; dk, dv over queries
// in ascending order with one accumulator per block of Highway's 2 vectors of heads. With u = 2^-24, n slots:
//
//   |error of out[i]| <= (4 E + (n + 8 m + 16) u) * sum p |v| + half an ulp,
//   E = (D + Dr + 16) u max_t sum_d |scale q k|
//
// where m <= max(1, n / 64, 16). Results are bit-identical for every thread count. Working memory: the widened keys
// (none for fp32 and fp64 with adjacent columns, and none where fewer rows than these are picked), in backward their
// gradients once more in fp32, and a few megabytes.
//
// bf16 of more than 8 heads a key head goes through AMX where the CPU has it (tile_products.h), and where AVX512-BF16
// is faster than fp32 and columns are of even number, scores and the products of values with dy through that
// (pair_dots.h): the same bounds, there for normal numbers, and keys are not widened.
//
// Statistics, fp32 (fp64), [B, Nk, S1, N / Nk]: max over slots of s (and the sink), sum of exp(s - max). A row without
// slots has kLowestScore and 0. sinks [N] fp32 (fp64): one more score per head, without a value.
#pragma once

#include <cstdint>
#include <vector>

#include "base/sequences.h"
#include "jumar/tensor.h"

namespace jumar {

struct SparseAttentionInputs {
  TensorView q, k, v;
  TensorView q_rope, k_rope;  // both of rank 0: none
  TensorView indices;
  TensorView sinks;  // rank 0: none
  double scale = 1;
  int64_t block_size = 1;
  bool causal = true;
  std::vector<SequencePair> sequences;  // queries of none give 0
};

struct SparseAttentionGradients {
  TensorView dq, dk, dv;
  TensorView dq_rope, dk_rope;  // rank 0 without ropes
  TensorView dsinks;            // like sinks; rank 0: not wanted
};

// Throws Error, `op` first, for shapes, dtypes and ids that do not fit.
void SparseAttention(const char* op, const SparseAttentionInputs& in, const TensorView& out, const TensorView& max,
                     const TensorView& sum);

// Gradients of out, written whole. out, max, sum may be those of a larger attention of which these slots are a part.
void SparseAttentionBackward(const char* op, const SparseAttentionInputs& in, const TensorView& dy,
                             const TensorView& out, const TensorView& max, const TensorView& sum,
                             const SparseAttentionGradients& gradients);

}  // namespace jumar
