// Softmax attention over views, forward and backward, without a matrix of scores.
//
//   s[i, j] = scale * (q[i] . k[j] + q_rope[i] . k_rope[j] + pse[i, j])    p = softmax of a row over the keys it sees
//   out[i]  = sum over j of drop(p[i, j]) v[j]         head h of q reads head h / (Nq / Nkv) of k and v
//
// q [B, Nq, Sq, D], k [B, Nkv, Skv, D], v [B, Nkv, Skv, Dv], out [B, Nq, Sq, Dv]: any strides, so that every layout is
// a view. q_rope [B, Nq, Sq, Dr] and k_rope [B, Nkv, Skv, Dr], both or neither, are more columns of q and k that lie
// elsewhere; what is said of D below counts them. One dtype of fp32, bf16, fp16, fp64. A list of sequences says which
// queries meet which keys: the batch entries of padded tensors, or ranges of one packed row of tokens.
//
// A key is hidden from a query by its position (AttentionSequence) or by the mask. Hidden keys are skipped: NaN and
// infinity in their k and v reach neither results nor gradients. A row that sees no key gives 0, and 0 as its gradient.
//
// Everything between the loads and the one rounding at the store is fp32 (fp64 for fp64). Scores are summed over D with
// one accumulator; rows are summed over blocks of at most 144 keys, block sums in ascending order. With u = 2^-24:
//
//   |error of out[i]| <= ((D + 6) u max_j sum_d |scale q k| * 2 + (160 + Skv / 120) u) * sum_j p |v|  + half an ulp
//
// Results are bit-identical for every thread count. Working memory is linear in Sq + Skv.
//
// Statistics: max[i] = max_j s (with the sink, if any), sum[i] = sum_j exp(s - max) before dropout, fp32 (fp64 for
// fp64), each written 8 times: views [B, Nq, Sq, 8]. A row without keys has kLowestScore and 0.
#pragma once

#include <cstdint>
#include <vector>

#include "jumar/tensor.h"
#include "simd/panel.h"

namespace jumar {

inline constexpr int64_t kUnboundedBand = int64_t{1} << 40;

// Bytes; a value other than 0 hides the key. Size 1 along batch or heads serves all of them.
struct AttentionMask {
  const uint8_t* data = nullptr;
  int64_t size[4] = {};  // [B | 1, Nq | 1, Sq, Skv]
  int64_t stride[4] = {};
};

// Queries [q_begin, q_begin + q_len) and keys [k_begin, k_begin + k_len) of batch entry `batch`. Query i of the
// sequence sees key j of it if  i + low <= j  and  (j <= i + high  or  j < prefix). `index` is its place in the mask,
// in pse and in the dropout pattern.
struct AttentionSequence {
  int64_t batch = 0;
  int64_t index = 0;
  int64_t q_begin = 0;
  int64_t q_len = 0;
  int64_t k_begin = 0;
  int64_t k_len = 0;
  int64_t low = -kUnboundedBand;
  int64_t high = kUnboundedBand;
  int64_t prefix = 0;
};

// Probabilities are kept with probability keep_prob and divided by it. Which ones is a function of seed, offset, the
// sequence's index, head, query and key alone (Philox 4x32-10), the same in forward and backward. `bits` replaces the
// generator: one bit per element, lowest bit first, 1 = keep, in blocks [Nq, q_len, k_len], one per sequence.
struct AttentionDropout {
  double keep_prob = 1;
  uint64_t seed = 0;
  uint64_t offset = 0;
  const uint8_t* bits = nullptr;
};

struct AttentionInputs {
  TensorView q, k, v;
  TensorView q_rope, k_rope;  // rank 0: none
  double scale = 1;
  std::vector<AttentionSequence> sequences;  // together they cover all queries and keys, each once
  AttentionDropout dropout;
  AttentionMask mask;  // data null: none
  // [B | 1, Nq | 1, rows, Skv], stride 0 where it repeats; rank 0: none. Row r serves query pse_first + r of each
  // sequence. Queries before pse_first, if any, read row 0 shifted: pse[0, j + pse_first - i], for a bias of i - j
  // alone.
  TensorView pse;
  int64_t pse_first = 0;
  TensorView sink;  // [Nq] fp32 (or q's dtype): one more score per head, without a value; rank 0: none
};

// Throws Error, `op` first, for shapes and dtypes that do not go together.
void Attention(const char* op, const AttentionInputs& in, const TensorView& out, const TensorView& max,
               const TensorView& sum);

// dq, dk, dv are written whole, and with ropes dq_rope and dk_rope. dpse: shape and dtype of in.pse, summed over what
// repeats; rank 0: not wanted. dsink: [Nq], fp32 (fp64); rank 0: not wanted.
struct AttentionGrads {
  TensorView dq, dk, dv, dq_rope, dk_rope, dpse, dsink;
};

// Gradients of out. out, max, sum may be those of a larger attention of which these keys are a part.
void AttentionBackward(const char* op, const AttentionInputs& in, const TensorView& dy, const TensorView& out,
                       const TensorView& max, const TensorView& sum, const AttentionGrads& grads);

}  // namespace jumar
