// What forward and backward share: checked shapes, visible keys of a panel, packed operands.
//
// Keys go in blocks of a fixed length, queries in panels of one vector pair (simd/panel.h). For each panel and
// block the keys [begin, end) that some query of the panel may see are known before anything is computed; the rest is
// skipped.
#pragma once

#include <algorithm>

#include "base/scratch.h"
#include "kernels/attention/attention.h"
#include "kernels/gemm/gemm_kernel.h"
#include "simd/panel.h"

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
  int64_t width;      // queries of a panel
  int64_t key_block;  // keys of a block, a multiple of gemm.mr

  int64_t Low(const AttentionSequence& s, int64_t i) const { return std::clamp<int64_t>(i + s.low, 0, s.k_len); }
  int64_t High(const AttentionSequence& s, int64_t i) const {
    return std::clamp<int64_t>(std::max(i + s.high + 1, s.prefix), 0, s.k_len);
  }
  // For queries [row, row + rows) of a head and keys [key, key + n) of a sequence.
  PanelKeys Keys(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n) const;
  PanelKeys KeysByPosition(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key, int64_t n) const;

  // Packs rows [row, row + rows) of the `length` rows of one head that begin at row `begin` of it, by gemm.pack_a or
  // pack_b. Along: panels of rows, the columns of x and then those of `rope` are k. Across: panels of columns, those of
  // `rope` begin a panel of their own; rows are k. rope: rank 0 for none.
  struct Rows {
    const TensorView& x;
    const TensorView& rope;
    int64_t batch, head, begin, length;
  };
  void PackAlong(bool a, const Rows& from, int64_t row, int64_t rows, int64_t stride, void* out) const;
  void PackAcross(bool a, const Rows& from, int64_t row, int64_t rows, int64_t stride, void* out) const;
  // Columns of q and k with their ropes where each begins a panel of `panel_width`.
  int64_t PaddedColumns(int64_t panel_width) const {
    return RoundUp(shape.d, panel_width) + RoundUp(shape.rope, panel_width);
  }

  // scores of keys [keys.begin, keys.end): product, mask, pse. `hide` and `pse` are work space of key_block * width.
  // True if scores are scaled already.
  bool Scores(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, const PanelKeys& keys,
              const void* k_packed, int64_t k_stride, const void* q_packed, void* scores, void* work) const;
  int64_t ScoreWorkBytes() const;
  void Keep(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n,
            void* keep) const;

  // out rows [row, row + rows) of a head from `acc` [columns of out, width], one query a lane.
  void StoreLanes(const void* acc, int64_t rows, const TensorView& out, int64_t batch, int64_t head, int64_t row) const;

  size_t ComputeBytes() const { return SizeOf(shape.compute); }
  bool drops() const { return in.dropout.keep_prob < 1; }

 private:
  // Packs the panel's pse.
  void PackPse(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n,
               int64_t stride, void* numbers, void* out) const;
  PanelKeys ByMask(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key,
                   PanelKeys keys) const;
  GemmOperand Along(const Rows& from, const TensorView& x) const;
  GemmOperand Across(const Rows& from, const TensorView& x, int64_t last) const;
  std::vector<int64_t> bit_offset_;  // first bit of each sequence in dropout.bits
};

// c += a * b of a block as GemmKernel::multiply does it with accumulate, without the products whose factor in b (in a,
// with `zero_in_a`) is 0: what lies beside a hidden key may be NaN.
void MultiplySkippingZeros(const GemmKernel& kernel, const GemmBlock& block, bool zero_in_a);

// Whether the first kc values of all `panels` packed panels are finite.
bool FinitePanels(const AttentionPlan& plan, const void* packed, int64_t panels, int64_t stride, int64_t width,
                  int64_t kc);

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
