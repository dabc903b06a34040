// The chain rule through I for one query and a block of keys, and the sums over queries that gradients of keys are.
#pragma once

#include <functional>

#include "base/heap_buffer.h"
#include "kernels/lightning_indexer/indexer_plan.h"

namespace jumar {

// Products of one query's heads with blocks of at most plan.key_block keys, and from them its gradients. Blocks come in
// the same order in every run.
template <typename C>
class QueryGradient {
 public:
  // Packed operands that queries of a thread share.
  struct Work {
    Work(const IndexerPlan& plan, ScratchFrame& frame);
    int64_t slope_panel, turned_panel;
    C* slopes;
    C* turned;
  };

  QueryGradient(const IndexerPlan& plan, ScratchFrame& frame);

  void Load(const SequencePair& s, int64_t row);
  // r [N, key_block] of n keys that are packed as columns.
  void Products(const C* keys, int64_t n, C* r) const;
  void Scores(const C* r, int64_t n, C* scores) const;
  // With di = gradients of the scores: dq and dw gain what is theirs, dk [n, ld_d] is set to dr^T * q, or gains it.
  // `across`: the keys packed with D as columns. r is overwritten.
  void Add(const C* across, int64_t n, C* r, const C* di, C* dk, bool accumulate, const Work& work);
  // Rounds dq and dw of the row to their place in the results.
  void Store(const TensorView& dq, const TensorView& dw) const;

 private:
  const IndexerPlan& plan_;
  int64_t head_panel_;
  C* query_;   // heads as rows
  C* across_;  // D as columns
  C* dq_;      // [N, ld_d]
  C* dw_;      // [N]
  const C* weights_ = nullptr;
  int64_t row_ = 0;
};

// Rows of one sequence whose part in the gradient of keys is summed on its own.
struct RowChunk {
  const SequencePair* sequence;
  int64_t begin;
  int64_t rows;
  int64_t keys;    // the first ones of the sequence, to which the chunk may add
  void* dk;        // [keys, ld_d], zeros at first
  double* losses;  // one per row
};

// Calls body(chunk) for chunks that cover all rows of all sequences, in parallel, then adds up their dk in order and
// rounds them to `dk`. With `all_keys` a row may add to keys that it does not see. Returns the sum of all losses, in
// order.
template <typename C>
double SumOverChunks(const IndexerPlan& plan, bool all_keys, const TensorView& dk,
                     const std::function<void(const RowChunk&)>& body);

}  // namespace jumar
