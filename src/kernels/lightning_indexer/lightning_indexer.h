// The lightning indexer of DeepSeek sparse attention: which keys each query attends to, and how the choice is trained.
//
//   r[s, h, t] = query[s, h] . key[t]           I[s, t] = sum over h of weights[s, h] * max(r[s, h, t], 0)
//
// query [B, S1, N, D], key [B, S2, 1, D]: one dtype of fp32, bf16, fp16, fp64; weights [B, S1, N] of that dtype or fp32
// (fp64). Inputs have any strides, results are contiguous. There is no scale: it is in the weights. Query i of a
// sequence sees key j of it if j < k_len and, when causal, j <= i + k_len - q_len. Rows that belong to no sequence, and
// those that see no key, get index -1, value -infinity, statistics kLowestIndexScore and 0, and gradients of 0.
//
// Everything between the loads and one rounding at the store is fp32 (fp64 for fp64): r is summed over D, I over heads
// in ascending order with one accumulator each. With u = 2^-24 (2^-53):
//
//   |error of I| <= (D + N + 1) u * sum over h, d of |w q k|
//
// Results are bit-identical for every thread count: gradients of keys are summed over chunks of rows that depend on
// sizes alone, in order. Working memory grows with S1 + S2: a matrix of scores never exists. Keys that a query does not
// see are skipped: NaN in them does not reach it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/sequences.h"
#include "jumar/tensor.h"

namespace jumar {

inline constexpr double kLowestIndexScore = -3.4028234663852886e38;

struct IndexerInputs {
  TensorView query, key, weights;
  std::vector<SequencePair> sequences;
  bool causal = true;
};

// indices int32 [B, S1, 1, K]: positions within the sequence of the K largest scores, the larger first, of equal ones
// the lower position; -1 beyond the visible keys. values [B, S1, 1, K] in query's dtype: the scores, -infinity beside
// -1; null: not wanted. NaN counts as larger than every number; a visible key whose score is -infinity keeps its index.
// The scores go through a running choice of 2 K candidates a row.
void LightningIndexer(const char* op, const IndexerInputs& in, const TensorView& indices, const TensorView* values);

// Gradients of `values`. dy, indices (int32 or int64) [B, S1, K]; slots of -1 are skipped whatever dy holds, others are
// used as they stand, duplicates separately. With k' = key[indices], r = query . k':
//   dw[h] = sum over slots of dy * max(r, 0)     dr = w[h] * dy where r > 0, else 0
//   dq[h] = sum over slots of dr * k'            dk[t] = sum over slots with index t, and heads, of dr * query
void LightningIndexerGrad(const char* op, const IndexerInputs& in, const TensorView& dy, const TensorView& indices,
                          const TensorView& dq, const TensorView& dk, const TensorView& dw);

// max[s] = max of I, sum[s] = sum of exp(I - max) over the keys that a row sees; [B, S1], fp32 (fp64).
void IndexerSoftmax(const char* op, const IndexerInputs& in, const TensorView& max, const TensorView& sum);

// The attention whose distribution the indexer learns. query [B, S1, Nq, Da], key [B, S2, Nk, Da], query_rope [.., Dr],
// key_rope [.., Dr] (rank 0: none): dtype of the indexer's query. max, sum [B, S1, Nq] in fp32 (fp64).
struct IndexerTeacher {
  TensorView query, key, query_rope, key_rope, max, sum;
  double scale = 1;
};

struct IndexerGradients {
  TensorView dq, dk, dw;  // of the indexer's query, key and weights: shapes and dtypes of these
};

// The distance from the attention's distribution p to the indexer's y, summed over rows, and its gradients:
//   loss = sum over rows and keys of p * (log max(p, eps) - log max(y, eps)),  eps = 1e-8        dI = y - p
//   p = mean over heads of exp(scale * (query . key + query_rope . key_rope) - max) / sum
// then as in LightningIndexerGrad with dI in place of dy. Heads whose sum is 0 count as 0. Returns the loss.
//
// Sparse: over the slots of `indices` [B, S1, K], skipping -1 and keys that the row does not see wherever they stand;
// duplicates count separately. p is divided by its sum, so that statistics may be those of more keys; y is the softmax
// of I. Nk = 1.
double SparseIndexerLoss(const char* op, const IndexerInputs& in, const IndexerTeacher& teacher,
                         const TensorView& indices, const IndexerGradients& gradients);

// Dense: over all keys that the row sees. y = exp(I - max_index) / sum_index with [B, S1] of IndexerSoftmax; p is not
// divided by its sum. Nq is a multiple of Nk.
double DenseIndexerLoss(const char* op, const IndexerInputs& in, const IndexerTeacher& teacher,
                        const TensorView& max_index, const TensorView& sum_index, const IndexerGradients& gradients);

}  // namespace jumar
