// The vendor's npu_sparse_flash_attention in terms of sparse_attention.h.
//
//   layout BSND: query [B, S1, N, D], key [B, S2, Nk, D], sparse_indices [B, S1, Nk, K], statistics [B, Nk, S1, N / Nk]
//   layout TND:  query [T1, N, D], key [T2, Nk, D], sparse_indices [T1, Nk, K], statistics [Nk, T1, N / Nk]
//
// Ids count within a sequence. Lengths (int32 or int64): BSND one per batch entry, none for full ones; TND ends of the
// packed sequences, needed. sparse_mode 0: all keys of the sequence are visible; 3: causal from the lower right.
#pragma once

#include <string>
#include <vector>

#include "kernels/sparse_attention/sparse_attention.h"

namespace jumar {

// Optional tensors have rank 0 where they are absent, the lengths are null.
struct SparseFlashTensors {
  TensorView query, key, value, indices;
  const TensorView* q_lengths = nullptr;
  const TensorView* k_lengths = nullptr;
  TensorView query_rope, key_rope, sinks;
};

struct SparseFlashOptions {
  double scale = 1;
  int64_t block_size = 1;
  std::string layout = "BSND";
  int64_t sparse_mode = 3;
  // Of the lengths in errors.
  const char* q_name = "actual_seq_lengths_query";
  const char* k_name = "actual_seq_lengths_kv";
};

class SparseFlashAttention {
 public:
  // Throws Error, `op` first, for what SparseAttention does not check.
  SparseFlashAttention(const char* op, const SparseFlashTensors& tensors, const SparseFlashOptions& options);

  const SparseAttentionInputs& inputs() const { return inputs_; }
  std::vector<int64_t> OutSizes() const;
  std::vector<int64_t> StatisticsSizes() const;
  // Tensors of the caller's layout as SparseAttention takes them; rank 0 stays rank 0.
  TensorView Tokens(const char* name, const TensorView& x) const;
  TensorView Statistics(const char* name, const TensorView& x) const;

 private:
  TensorView WithBatch(const char* name, const TensorView& x) const;

  const char* op_;
  bool packed_;
  SparseAttentionInputs inputs_;
};

}  // namespace jumar
