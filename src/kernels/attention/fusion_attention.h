// The vendor's npu_fusion_attention in terms of attention.h: layouts become strided views, sparse modes become
// positions that a query sees, lists of lengths become sequences.
//
// Layouts (N heads of query, Nk of key and value; upper or lower case):
//   BSH [B, S, N * D]   SBH [S, B, N * D]   BNSD [B, N, S, D]   BSND [B, S, N, D]   TND [T, N, D]
// TND packs sequences one after another; actual_seq_qlen and actual_seq_kvlen are the ends of them (cumulative, without
// a leading 0). A repeated end is an empty sequence, trailing zeros are ignored, the last end must be T.
//
// sparse_mode, with i and j counted within a sequence and d = Skv - Sq; without atten_mask every mode is full
// attention:
//   0  hidden: mask[i, j], j > i + next_tokens, j < i - pre_tokens       full mask
//   1  hidden: mask[i, j]                                                full mask
//   2  hidden: j > i                                                     compressed mask [2048, 2048]
//   3  hidden: j > i + d                                                 compressed
//   4  hidden: j > i + d + next_tokens, j < i + d - pre_tokens           compressed
//   5  hidden: mask[i, j] (built with a prefix)                          full mask, not TND
//   6  hidden: j > i + d and j >= prefix[b]                              compressed with prefix [3072, 2048]
//   7  TND: as 3; the last sequence that has queries as 4                compressed
//   8  TND: as 2; the first sequence that has queries as 4               compressed
// A full mask is [B, N, Sq, Skv], [B, 1, Sq, Skv], [1, 1, Sq, Skv] or [Sq, Skv], and may have size 1 wherever it
// repeats; for TND [Sq, Skv] of at least the longest sequences, of which each reads the upper left corner. A compressed
// mask must be what its mode says: ones above the diagonal (mode 6: 1024 more rows, zeros left and ones right).
#pragma once

#include <string>
#include <vector>

#include "kernels/attention/attention.h"

namespace jumar {

struct FusionAttentionOptions {
  int64_t head_num = 0;
  std::string layout;
  double scale = 1;
  int64_t pre_tokens = 2147483647;
  int64_t next_tokens = 2147483647;
  std::vector<int64_t> prefix;
  std::vector<int64_t> q_ends;
  std::vector<int64_t> k_ends;
  int64_t sparse_mode = 0;
  std::string softmax_layout;  // of the statistics of TND: "TND" [T, N, 8], "" the same shape with N as its outer order
  AttentionDropout dropout;
};

// Optional tensors have rank 0 where they are absent. The mask is of bytes, whatever its dtype says. pse: [B | 1, N, Sq
// | 1, Skv], or compressed to the last 1024 rows of a bias of i - j alone, [B | 1, N, 1024, Skv]: for causal attention
// of sequences with as many keys as queries, TND (Skv at least the longest) or more than 1024 rows. query_rope and
// key_rope: more columns of query and key, in their layout.
struct FusionAttentionTensors {
  TensorView query, key, value, pse, atten_mask, sink, query_rope, key_rope;
};

// [1, N, T, 8] of the statistics [T, N, 8] of layout TND. heads_first: their memory is that of [N, T, 8], as with
// softmax_layout "".
TensorView PackedStatistics(const char* op, const char* name, const TensorView& x, bool heads_first);

class FusionAttention {
 public:
  // Checks everything. Throws Error, `op` first.
  FusionAttention(const char* op, const FusionAttentionTensors& tensors, const FusionAttentionOptions& options);

  const AttentionInputs& inputs() const { return inputs_; }
  std::vector<int64_t> OutSizes() const;
  std::vector<int64_t> StatisticsSizes() const;
  // Views [B, N, S, ..] of tensors in the caller's layout: of out, dy and dq by the heads of query, of dk and dv by
  // those of key.
  TensorView QueryHeads(const char* name, const TensorView& x) const;
  TensorView KeyHeads(const char* name, const TensorView& x) const;
  TensorView Statistics(const char* name, const TensorView& x) const;
  // Elements of the dropout pattern: sum over sequences of N * q_len * k_len.
  int64_t Elements() const;

 private:
  TensorView Heads(const char* name, const TensorView& x, int64_t heads) const;
  void SetSequences(const FusionAttentionOptions& o);
  void SetRules(const TensorView& mask, const FusionAttentionOptions& o);
  void SetMask(const TensorView& mask, bool compressed, bool with_prefix);
  void SetPse(const TensorView& pse);
  void SetCompressedPse(const TensorView& pse);

  const char* op_;
  std::string layout_;
  std::string softmax_layout_;
  int64_t heads_ = 0;
  TensorView query_;
  int64_t value_cols_ = 0;
  AttentionInputs inputs_;
};

}  // namespace jumar
