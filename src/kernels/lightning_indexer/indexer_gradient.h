// The chain rule through I for one query and some keys, and the sums over queries that gradients of keys are.
#pragma once

#include <functional>

#include "base/heap_buffer.h"
#include "base/key_rows.h"
#include "kernels/lightning_indexer/indexer_plan.h"
#include "simd/row_products.h"

namespace jumar {

// Heads of one query as panels for products with rows of keys.
struct PackedHeads {
  int64_t heads;
  int64_t d;
  int64_t panel;  // elements from one panel of heads to the next
  int64_t Size(int64_t width) const { return CeilDiv(heads, width) * panel; }
};

// r (+)= heads * rows, for r.n rows of d columns each.
template <typename C>
void HeadProducts(const IndexerPlan& plan, const PackedHeads& of, const C* packed, const void* const* rows,
                  const TurnedTile& r, bool accumulate);

// One query's products with keys, at most plan.key_block at a time, and from them its gradients. Keys come in the same
// order in every run.
template <typename C>
class QueryGradient {
 public:
  QueryGradient(const IndexerPlan& plan, ScratchFrame& frame);

  static int64_t ProductSize(const IndexerPlan& plan) { return plan.panels * plan.kernel.width * plan.key_block; }

  void Load(const SequencePair& s, int64_t row);
  // Products r and scores of n keys.
  void Scores(const void* const* keys, int64_t n, C* r, C* scores) const;
  // With di = gradients of the scores: dq, dw and the rows dk[j] gain what is theirs. r is overwritten.
  void Add(const void* const* keys, int64_t n, C* r, const C* di, void* const* dk);
  // Rounds dq and dw of the row to their place in the results.
  void Store(const TensorView& dq, const TensorView& dw) const;

 private:
  TurnedTile Tile(C* r, int64_t n) const { return {r, plan_.panels * plan_.kernel.width, plan_.heads, n}; }

  const IndexerPlan& plan_;
  PackedHeads form_;
  int64_t across_panel_;
  C* query_;    // panels of heads
  C* across_;   // columns of D in panels
  C* dq_;       // [N, ld_d]
  C* dw_;       // [N], padded
  C* weights_;  // [N], padded
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

// Keys `ids` of a sequence in the widened rows of all keys, and in a chunk's dk.
inline void PointToKeys(const KeyRows& keys, const SequencePair& s, const int32_t* ids, int64_t n, const void** rows) {
  const char* base = keys.Base(s.batch, 0) + s.k_begin * keys.RowBytes();
  for (int64_t i = 0; i < n; ++i) rows[i] = base + ids[i] * keys.RowBytes();
}
template <typename C>
void PointToSums(const IndexerPlan& plan, const RowChunk& chunk, const int32_t* ids, int64_t n, void** rows) {
  for (int64_t i = 0; i < n; ++i) rows[i] = static_cast<C*>(chunk.dk) + ids[i] * plan.ld_d;
}

}  // namespace jumar
