// Between the checks of the backward, its units and what one unit does.
#pragma once

#include "kernels/attention/attention_blocks.h"

namespace jumar {

inline constexpr int64_t kBackwardUnitRows = 512;

struct AttentionGradients {
  const AttentionPlan& plan;
  const TensorView& dy;
  const TensorView& out;
  const TensorView& max;
  const TensorView& sum;
  const TensorView& delta;  // [B, Nq, Sq], contiguous: sum over columns of dy * out, written by the units
  const AttentionGrads& grads;
  // [sequences, Nq, rows, Skv], adjacent columns, zeros, or null. Rows are those of pse and, for queries before
  // pse_first, one more for each kBackwardUnitRows of them. Stride 0 where queries share a row.
  const TensorView* dpse;

  bool shares_pse() const { return dpse != nullptr && dpse->stride[2] == 0; }
};

// Writes delta, the gradients of q, k, v and ropes; adds to dpse.
void AttentionBackwardTasks(const AttentionGradients& gradients);

// delta of rows [row, row + rows) of a head.
void FillDelta(const AttentionGradients& gradients, int64_t batch, int64_t head, int64_t row, int64_t rows);

// Rows [row, row + rows) of `heads` heads of the group from `head` on, and the key blocks that they may see.
struct BackwardUnitShape {
  int64_t head, heads, row, rows;
  int64_t begin, end;
  bool Touches(int64_t block) const { return begin <= block && block < end; }
};

// One unit: it packs its queries once, and takes one block of keys after the other.
template <typename C>
class BackwardUnit {
 public:
  BackwardUnit(const AttentionGradients& gradients, const AttentionSequence& s, int64_t kv_head,
               const BackwardUnitShape& shape, ScratchFrame& frame);

  // One block: its part of dq is added, and the unit's part of dk, dv and of a shared dpse computed. False, and nothing
  // computed, if no query sees a key of it.
  bool Keys(int64_t block);
  void StoreQueries();

  // Of the last block: [keys, ld_k()], not yet scaled, and [keys, ld_v()].
  C* dk() { return dk_; }
  C* dv() { return dv_; }
  static int64_t LdK(const AttentionPlan& plan) { return plan.Padded(plan.Columns()); }
  static int64_t LdV(const AttentionPlan& plan) { return plan.Padded(plan.shape.dv); }
  // The part of the shared row of dpse of the i-th head; null if there is none.
  C* dpse(int64_t i) { return dpse_ == nullptr ? nullptr : dpse_ + i * plan_.key_block; }
  int64_t HeadAt(int64_t i) const { return first_head_ + i; }

 private:
  // Queries [row, row + rows) of the unit's rows of its i-th head, whose probabilities are kept at a time.
  struct Block {
    int64_t i;
    int64_t row;
    int64_t rows;
  };

  int64_t PanelAt(int64_t i, int64_t row) const { return i * panels_ + row / width_; }
  AttentionPlan::Rows QueriesOf(int64_t head) const;
  AttentionPlan::Rows GradientsOf(int64_t head) const;
  AttentionPlan::Rows KeysOf() const;
  void PackQueries(int64_t i);
  void Statistics(int64_t i);
  void PackKeys(int64_t key, int64_t n);
  bool Queries(const Block& b, int64_t key, int64_t n);
  void Panel(const Block& b, int64_t t, int64_t key, const PanelKeys& keys);
  void AddPse(const Block& b, int64_t key, const PanelKeys& keys, const C* ds);

  const AttentionGradients& g_;
  const AttentionPlan& plan_;
  const AttentionSequence& s_;
  const BackwardUnitShape& unit_;
  int64_t kv_head_, first_head_;
  int64_t width_, query_rows_, panels_;  // panels of a head
  int64_t ld_k_, ld_v_, tile_;           // tile: elements of a panel of scores
  int64_t query_panel_;                  // panel stride of packed queries
  int64_t q_stride_, dy_stride_;         // from one head's packed queries to the next's
  int64_t qt_stride_, dyt_stride_;       // from one turned panel to the next
  bool packed_ = false;                  // the current block of keys
  bool finite_keys_ = true;
  // Of all panels of all heads: statistics [width]; sums of dq.
  C *max_, *inverse_, *delta_, *dq_;
  C *q_, *dy_;         // rows for sums over queries, per head
  C *qt_, *dyt_;       // as scores and dp take them, per panel
  bool* finite_;       // q and dy of a block of queries, [heads, blocks, 2]
  C* k_;               // the block of keys for sums over it
  C *dot_k_, *dot_v_;  // and as scores and dp take them
  C *p_, *ds_, *keep_;
  C *p_terms_, *ds_terms_;  // of all panels of a block of queries, as sums over queries take them
  C* terms_;                // ds of one panel, as sums over keys take it
  C *dk_, *dv_, *dpse_;
  void* work_;
};

}  // namespace jumar
