// What forward and backward share: checked shapes, visible keys of a panel, packed operands.
//
// Keys go in blocks of a fixed length, queries in panels of one vector pair (simd/panel.h). For each panel and
// block the keys [begin, end) that some query of the panel may see are known before anything is computed; the rest is
// skipped. Products of tiles of scores with rows skip what each of their tiles does not see.
//
// Rows of q, k, v and dy are packed as panel matrices (simd/panel_products.h), where the columns of a rope follow the
// others. What a panel of scores is multiplied from is turned besides: q and dy of its queries, [columns, width]. Where
// the CPU has dot products of bf16, scores and dp of bf16 are those: products of two bf16 are exact in fp32, and both
// operands are packed for them instead. With AMX sums over keys (out, dq) and over queries (dk, dv) are such products
// too (kernels/attention/attention_split.h): rows are packed for those, and sums over keys lie as [columns, width].
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/scratch.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_split.h"
#include "kernels/gemm/gemm_kernel.h"
#include "simd/panel.h"
#include "simd/panel_products.h"

namespace jumar {

struct AttentionShape {
  DType dtype = DType::kF32;
  DType compute = DType::kF32;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t group = 0;  // heads of q per head of k
  int64_t d = 0;      // columns of q and k
  int64_t rope = 0;   // and of their ropes
  int64_t dv = 0;
};

// Checks inputs, and results that both directions have. Throws Error.
AttentionShape CheckAttention(const char* op, const AttentionInputs& in, const TensorView& out, const TensorView& max,
                              const TensorView& sum);

// Columns as rows.
GemmOperand Turned(GemmOperand x);

// Keys [begin, end) of a block, relative to its start, for one panel.
struct PanelKeys {
  int64_t begin = 0;
  int64_t end = 0;
  bool by_position = false;  // some of them are hidden from some query by position
  bool by_mask = false;      // or by the mask
  bool any() const { return begin < end; }
};

// One call's constants and the queries and keys of one sequence.
class AttentionPlan {
 public:
  AttentionPlan(const AttentionInputs& in, const AttentionShape& shape);

  const AttentionInputs& in;
  const AttentionShape& shape;
  const GemmKernel& gemm;
  const PanelKernel& panel;
  const PanelProducts& products;
  const GemmKernel* dots;    // dot products of bf16, where q is bf16 and the CPU has them; else null
  const SplitKernel* split;  // where `dots` are those of AMX; else null
  int64_t width;             // queries of a panel
  int64_t key_block;         // keys of a block

  int64_t Low(const AttentionSequence& s, int64_t i) const { return std::clamp<int64_t>(i + s.low, 0, s.k_len); }
  int64_t High(const AttentionSequence& s, int64_t i) const {
    return std::clamp<int64_t>(std::max(i + s.high + 1, s.prefix), 0, s.k_len);
  }
  // For queries [row, row + rows) of a head and keys [key, key + n) of a sequence.
  PanelKeys Keys(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n) const;
  PanelKeys KeysByPosition(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key, int64_t n) const;

  // Rows [begin, ..) of one head of x, and of its rope; rope: rank 0 for none.
  struct Rows {
    const TensorView& x;
    const TensorView& rope;
    int64_t batch, head, begin;
  };
  // Packs rows [row, row + rows) as a panel matrix.
  void Pack(const Rows& from, int64_t row, int64_t rows, int64_t panel_stride, void* out) const;
  // Rows [row, row + rows) of bf16 as an operand, with those of a rope behind them, copied where they don't lie so.
  GemmOperand BF16Rows(const Rows& from, int64_t row, int64_t rows, ScratchFrame& frame) const;
  // The same rows of keys, at most a block of them, as Dots takes them: DotKeys() elements of the compute type.
  void PackDotKeys(const Rows& from, int64_t row, int64_t rows, void* out) const;
  int64_t DotKeys(int64_t columns) const;
  // Queries [row, row + rows), at most `width`, as Dots takes them: DotQueries() elements. `packed`: row `packed_row`
  // of this matrix, packed by Pack, is the first of them; not read if there are dot products.
  void PackDotQueries(const Rows& from, int64_t row, int64_t rows, const void* packed, int64_t panel_stride,
                      int64_t packed_row, void* out) const;
  int64_t DotQueries(int64_t columns) const;
  // Elements of a panel of a matrix of so many rows.
  int64_t PanelOf(int64_t rows) const { return RoundUp(rows * width, 64) + 64; }
  int64_t Columns() const { return shape.d + shape.rope; }
  int64_t Padded(int64_t columns) const { return RoundUp(columns, width); }

  // panel[key, query] for keys [keys.begin, keys.end) of a block and `rows` queries: their products over `depth`
  // columns. Others of the block may be written too.
  void Dots(const PanelKeys& keys, int64_t rows, int64_t depth, const void* dot_keys, const void* dot_queries,
            void* panel) const;
  // scores of keys [keys.begin, keys.end): products, mask, pse. True if scores are scaled already.
  bool Scores(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, const PanelKeys& keys,
              const void* dot_keys, const void* dot_queries, void* scores, void* work) const;
  int64_t ScoreWorkBytes() const;

  // What a panel, [keys, width], is in a product with rows. Sums over keys take `right`, TermElements() elements of the
  // compute type, sums over queries `left`, as many. Null: not wanted. Without `split` panels are taken as they are.
  void Split(const PanelKeys& keys, const void* panel, void* left, void* right) const;
  int64_t TermElements() const { return split == nullptr ? 0 : kSplitTerms * key_block * width / 2; }

  // Rows of a block of keys for sums over them: OverKeys() elements. True if they are finite.
  bool PackOverKeys(const Rows& from, int64_t row, int64_t rows, void* out) const;
  int64_t OverKeys(int64_t columns) const;
  // Sums of `rows` queries over keys, Padded(columns) * width elements, from zeros on.
  struct KeySums {
    const AttentionSequence& s;
    int64_t row, rows;  // queries of the panel
    int64_t key;        // first key of the block
    PanelKeys keys;
    const void* panel;
    const void* terms;  // `right` of the panel
    const void* packed;
    bool finite;
    Rows from;  // what was packed from, read where it is not finite
    void* sums;
  };
  void AddOverKeys(const KeySums& x) const;
  void ScaleSums(void* sums, int64_t columns, int64_t rows, const void* factors) const;
  // Columns [col, col + out.size[3]) of sums.
  void StoreSums(const void* sums, int64_t columns, int64_t col, int64_t rows, const TensorView& out, int64_t batch,
                 int64_t head, int64_t row) const;

  // Rows of a unit of queries for sums over them: OverQueries() elements.
  void PackOverQueries(const Rows& from, int64_t row, int64_t rows, void* out) const;
  int64_t OverQueries(int64_t columns, int64_t rows) const;
  // Whether rows [row, row + rows) of all that were packed are finite.
  bool FiniteOverQueries(const void* packed, int64_t columns, int64_t all, int64_t row, int64_t rows) const;
  // Sums of keys [begin, end) of a block over queries, rows of Padded(columns).
  struct QuerySums {
    const AttentionSequence& s;
    int64_t row, rows;  // queries of the panels
    int64_t key;
    int64_t begin, end;
    const PanelKeys* keys;  // of each panel; where there is no `split`, those between [begin, end) are zeros
    const void* panels;     // key_block * width apart
    const void* terms;      // `left` of the panels, TermElements() apart
    const void* packed;
    int64_t packed_rows;  // of the unit
    int64_t packed_row;   // of them, the first of the panels
    bool finite;
    Rows from;
    void* sums;
  };
  void AddOverQueries(const QuerySums& x) const;

  void Keep(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n,
            void* keep) const;

  // Rows [row, row + rows) of a head of `out` from sums in rows of `ld`.
  void Store(const void* sums, int64_t ld, int64_t rows, const TensorView& out, int64_t batch, int64_t head,
             int64_t row) const {
    StoreColumns(sums, ld, rows, out, batch, head, row, 0, out.size[3]);
  }
  // Columns [col, col + cols) of them.
  void StoreColumns(const void* sums, int64_t ld, int64_t rows, const TensorView& out, int64_t batch, int64_t head,
                    int64_t row, int64_t col, int64_t cols) const;

  size_t ComputeBytes() const { return SizeOf(shape.compute); }
  bool drops() const { return in.dropout.keep_prob < 1; }

 private:
  // The queries [0, rows) from query `row` on, as rows of a product that sums over the keys [keys.begin, keys.end) of
  // the block at `key`: which keys each tile sees. Returns the number of tiles.
  int64_t QueryTiles(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key, const PanelKeys& keys,
                     PanelTile* tiles) const;
  // The keys [begin, end) of the block at `key`, as rows of a product that sums over the queries [row, row + rows):
  // which of them, counted from `row`, each tile sees.
  int64_t KeyTiles(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key, int64_t begin, int64_t end,
                   PanelTile* tiles) const;

  // Packs the panel's pse.
  void PackPse(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n,
               int64_t stride, void* numbers, void* out) const;
  PanelKeys ByMask(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key,
                   PanelKeys keys) const;
  std::vector<int64_t> bit_offset_;  // first bit of each sequence in dropout.bits
};

// Tiles of one product, at most.
inline constexpr int64_t kMaxTiles = 64;

// [begin, end) in as few tiles as there can be, of nearly one size: few rows do not fill the pipelines. sees(tile):
// what its sums go over.
template <typename F>
int64_t EvenTiles(int64_t begin, int64_t end, int64_t limit, PanelTile* tiles, const F& sees) {
  const EvenPanels even(end - begin, limit);
  int64_t count = 0;
  for (int64_t row = begin; row < end; ++count) {
    PanelTile& tile = tiles[count];
    tile.row = row;
    tile.rows = even.rows + (count < even.longer ? 1 : 0);
    row += tile.rows;
    std::tie(tile.begin, tile.end) = sees(tile);
  }
  return count;
}

inline char* At(void* base, int64_t elements, size_t bytes) {
  return static_cast<char*>(base) + elements * static_cast<int64_t>(bytes);
}
inline const char* At(const void* base, int64_t elements, size_t bytes) {
  return static_cast<const char*>(base) + elements * static_cast<int64_t>(bytes);
}
inline char* Element(const TensorView& x, int64_t i, int64_t j, int64_t k) {
  return At(x.data, i * x.stride[0] + j * x.stride[1] + k * x.stride[2], SizeOf(x.dtype));
}

}  // namespace jumar
