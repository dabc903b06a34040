// What forward and backward share: checked shapes, the slots of a query, keys as rows in the compute type.
//
// The unit of work is one query token with the heads that share a key head. Its heads are the lanes of panels
// (simd/panel.h), its slots their rows. Keys that are picked at random come from wherever they lie, a row at a time,
// and from the last-level cache no faster than they are used. So keys go in blocks that stay in the second cache, and
// units in groups that meet a block together: a unit's slots are sorted by block.
#pragma once

#include <vector>

#include "base/key_rows.h"
#include "base/scratch.h"
#include "kernels/gemm/gemm_kernel.h"
#include "kernels/sparse_attention/pair_dots.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "kernels/sparse_attention/tile_products.h"
#include "simd/panel.h"
#include "simd/row_products.h"

namespace jumar {

inline constexpr int64_t kSlotStep = 512;

struct SparseShape {
  DType dtype = DType::kF32;
  DType compute = DType::kF32;
  int64_t batch = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t group = 0;  // heads of q per head of k
  int64_t d = 0;
  int64_t dr = 0;
  int64_t dv = 0;
  int64_t ids = 0;
};

// Checks inputs, and results that both directions have. Throws Error.
SparseShape CheckSparseAttention(const char* op, const SparseAttentionInputs& in, const TensorView& out,
                                 const TensorView& max, const TensorView& sum);

// A query token and a key head.
struct SparseUnit {
  int64_t batch;
  int64_t query;  // row of q
  int64_t kv_head;
  int64_t k_begin;  // row of k that is token 0
  int64_t limit;    // tokens below it are visible
};

class SparsePlan {
 public:
  SparsePlan(const char* op, const SparseAttentionInputs& in, const SparseShape& shape);

  const SparseAttentionInputs& in;
  const SparseShape& shape;
  const GemmKernel& gemm;
  const PanelKernel& panel;
  const RowProducts& products;
  const TileProducts* tiles;  // of bf16, where q is bf16 and the CPU has them; else null: keys are widened
  const PairDots* pairs;      // of bf16 as it lies; null with tiles, and where they do not fit
  int64_t width;              // lanes of a panel
  int64_t panels;             // that hold the heads of a unit
  bool half;                  // one vector, half a panel, holds them
  bool deep;                  // heads are so few that products of rows take columns as lanes
  int64_t stride;             // of the rows of scores: width, or half of it
  int64_t block;              // tokens that an id names, of those that exist
  int64_t key_block;          // rows of a block of keys
  int64_t blocks;
  int64_t group_units;  // the most units of a group

  // Units are numbered by batch entry, head of keys, query: in this order, neighbours meet the same keys.
  int64_t units() const { return shape.batch * shape.queries * shape.kv_heads; }
  SparseUnit Unit(int64_t index) const;
  // Groups of neighbours among units [first, first + count), as many as keep all threads busy. No result depends on it.
  std::vector<std::pair<int64_t, int64_t>> Groups(int64_t first, int64_t count) const;
  // The most slots that a unit has.
  int64_t MaxSlots() const { return shape.ids * block; }
  // The rows of k of a unit's slots, block by block: those of block b are rows[begins[b]] to rows[begins[b + 1]].
  struct Slots {
    int32_t* rows;
    int64_t* begins;
  };
  Slots AllocSlots(ScratchFrame& frame) const {
    return {frame.Alloc<int32_t>(MaxSlots()), frame.Alloc<int64_t>(blocks + 1)};
  }
  void ListSlots(const SparseUnit& unit, const Slots& slots) const;
  int64_t Count(const Slots& slots) const { return slots.begins[blocks]; }
  // Calls body(first, count) for slots [begin, end), at most kSlotStep at a time.
  template <typename Body>
  static void ForEachStep(int64_t begin, int64_t end, const Body& body) {
    for (int64_t i = begin; i < end; i += kSlotStep) body(i, std::min(kSlotStep, end - i));
  }
  // What has a row for each slot.
  enum Source { kKey, kKeyRope, kValue };
  int64_t Columns(Source source) const { return source == kKey ? shape.d : source == kValue ? shape.dv : shape.dr; }
  // Where a unit's keys and values lie, for the slots of a step: in all of them, or in `picked`, a widened copy of
  // rows. With tiles, their numbers.
  struct Rows {
    const void** at[3];
    PickedRows numbered[3];
    bool finite[3];  // of numbered rows
    int64_t n;
    char* raw;
    char* picked;
  };
  Rows AllocRows(ScratchFrame& frame) const;
  void PointTo(const SparseUnit& unit, const int32_t* rows, int64_t n, Rows* out) const;

  int64_t LanesOf(int64_t p) const { return std::min(width, shape.group - p * width); }
  // Heads of a unit as an operand: index = head, k = column (`across`: the other way).
  GemmOperand Along(const TensorView& x, const SparseUnit& unit) const;
  GemmOperand Across(const TensorView& x, const SparseUnit& unit) const;
  // The heads of x as panels [columns, width]; if deep, as rows of whole vectors; or as the tiles want them.
  void PackLanes(const TensorView& x, const SparseUnit& unit, void* out) const;
  int64_t LanesElements(int64_t columns) const {
    if (tiles != nullptr) return HeadTiles(0) * panels * TileElements(columns);
    if (pairs != nullptr) return panels * PairElements(columns);
    return deep ? RoundUp(shape.group, 4) * RoundUp(columns, width) : panels * PanelElements(columns);
  }
  // scores [n, stride] of panel p (+)= rows * heads, packed by PackLanes.
  template <typename C>
  void Dots(int64_t p, const Rows& rows, Source source, const C* heads, C* scores, bool accumulate) const {
    const int64_t columns = Columns(source);
    const void* const* at = rows.at[source];
    if (tiles != nullptr) {
      TileScores(p, rows.numbered[source], heads, scores, accumulate);
    } else if (pairs != nullptr) {
      PairScores(p, rows, source, heads, scores, accumulate);
    } else if (deep) {
      if (!accumulate) std::fill_n(scores, rows.n * stride, C(0));
      products.deep_dots(
          {at, rows.n, columns, heads, RoundUp(columns, width), RoundUp(shape.group, 4), scores, stride, accumulate});
    } else {
      products.dots({at, rows.n, columns, heads + p * PanelElements(columns), LanesOf(p), scores, accumulate, stride});
    }
  }
  // scores [n, stride] of panel p, before the scale, of the packed heads of q and q_rope.
  template <typename C>
  void Scores(int64_t p, const Rows& rows, const C* q, const C* q_rope, C* scores) const {
    Dots(p, rows, kKey, q, scores, false);
    if (shape.dr > 0) Dots(p, rows, kKeyRope, q_rope, scores, true);
  }
  // Sums [heads, Ld(columns)] of all panels: those of panel p (+)= factors [n, stride] * rows.
  template <typename C>
  void Sums(int64_t p, const Rows& rows, Source source, const C* factors, C* sums, bool accumulate) const {
    const int64_t ld = Ld(Columns(source));
    sums += p * width * ld;
    if (tiles != nullptr) {
      TileSum(p, rows.numbered[source], rows.finite[source], factors, sums, accumulate);
    } else {
      products.sums({rows.at[source], rows.n, Columns(source), factors, LanesOf(p), sums, ld, accumulate, stride,
                     pairs != nullptr});
    }
  }
  int64_t Ld(int64_t columns) const { return RoundUp(columns, tiles != nullptr ? kTileSumColumns : width); }
  int64_t SumElements(int64_t columns) const { return RoundUp(shape.group, kTileHeads) * Ld(columns); }
  // Adds the factors [n, stride] of panel p times its heads, packed by pack_across, to numbered rows of fp32.
  void TileUpdate(int64_t p, const PickedRows& rows, const void* factors, const void* heads, bool finite) const;
  // Of 16 columns of these heads.
  int64_t AcrossBlock() const { return stride * kTileHeads * 2; }
  // Tiles that hold the heads of panel p.
  int64_t HeadTiles(int64_t p) const { return CeilDiv(LanesOf(p), kTileHeads); }
  // Rows of `acc`, one head each, to x.
  void StoreHeads(const void* acc, int64_t ld, const TensorView& x, const SparseUnit& unit) const;
  int64_t PanelElements(int64_t columns) const { return gemm.PanelStride(gemm.nr, columns); }

 private:
  struct Query {
    int64_t k_begin = 0;
    int64_t limit = 0;
  };
  void CheckIds(const char* op) const;
  void TileScores(int64_t p, const PickedRows& rows, const void* heads, void* scores, bool accumulate) const;
  void PairScores(int64_t p, const Rows& rows, Source source, const void* heads, void* scores, bool accumulate) const;
  void TileSum(int64_t p, const PickedRows& rows, bool finite, const void* factors, void* sums, bool accumulate) const;
  void FindNotFinite(Source source);
  // Of the compute type, for the packed heads of a tile.
  static int64_t TileElements(int64_t columns) { return TileProducts::HeadElements(columns) / 2; }
  // The same for those of a panel, for pairs.
  int64_t PairElements(int64_t columns) const { return pairs->gemm.PanelStride(pairs->gemm.nr, columns) / 2; }
  int64_t ListRows(const SparseUnit& unit, int32_t* rows) const;
  void PickRows(const TensorView& x, const SparseUnit& unit, const int32_t* rows, int64_t n, char* raw, char* out,
                const void** to) const;

  std::vector<Query> queries_;  // [B, S1]
  const KeyRows& Keys(Source source) const { return source == kKeyRope ? k_rope_ : source == kKey || same_ ? k_ : v_; }
  // Keys and values in the compute type; with tiles or pairs, or where fewer rows than these are picked, as they are.
  KeyRows k_, k_rope_, v_;
  std::vector<uint8_t> not_finite_[3];  // with tiles, [B, Nk, S2]; empty where all are
  bool same_;                           // value is key
  bool pick_;
};

inline char* At(void* base, int64_t elements, int64_t bytes) { return static_cast<char*>(base) + elements * bytes; }

}  // namespace jumar
