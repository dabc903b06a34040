// What forward and backward share: checked shapes, the slots of a query, keys as rows in the compute type.
//
// The unit of work is one query token with the heads that share a key head. Its heads are the lanes of panels
// (simd/panel.h), its slots their rows.
#pragma once

#include <vector>

#include "base/key_rows.h"
#include "base/scratch.h"
#include "kernels/gemm/gemm_kernel.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "simd/panel.h"
#include "simd/row_products.h"

namespace jumar {

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
  int64_t width;   // lanes of a panel
  int64_t panels;  // that hold the heads of a unit
  int64_t block;   // tokens that an id names, of those that exist

  int64_t units() const { return shape.batch * shape.queries * shape.kv_heads; }
  SparseUnit Unit(int64_t index) const;
  // The most slots that a unit has.
  int64_t MaxSlots() const { return shape.ids * block; }
  // Writes the rows of k of the unit's slots, returns their number.
  int64_t ListSlots(const SparseUnit& unit, int32_t* rows) const;
  const KeyRows& k() const { return k_; }
  const KeyRows& k_rope() const { return k_rope_; }
  const KeyRows& v() const { return same_ ? k_ : v_; }
  void Pointers(const KeyRows& x, const SparseUnit& unit, const int32_t* rows, int64_t n, const void** out) const;

  int64_t LanesOf(int64_t p) const { return std::min(width, shape.group - p * width); }
  // Heads of a unit as an operand: index = head, k = column (`across`: the other way).
  GemmOperand Along(const TensorView& x, const SparseUnit& unit) const;
  GemmOperand Across(const TensorView& x, const SparseUnit& unit) const;
  // Columns of the heads of panel p of x, [columns, width].
  void PackLanes(const TensorView& x, const SparseUnit& unit, int64_t p, void* out) const;
  // scores [n, width] of panel p, before the scale. `work`: a panel of max(d, dr) columns.
  void Scores(const SparseUnit& unit, int64_t p, int64_t n, const void* const* k, const void* const* k_rope, void* work,
              void* scores) const;
  // Rows of `acc`, one head each, to x.
  void StoreHeads(const void* acc, int64_t ld, const TensorView& x, const SparseUnit& unit) const;
  int64_t PanelElements(int64_t columns) const { return gemm.PanelStride(gemm.nr, columns); }

 private:
  struct Query {
    int64_t k_begin = 0;
    int64_t limit = 0;
  };
  void CheckIds(const char* op) const;
  int64_t Id(int64_t offset) const {
    return in.indices.dtype == DType::kI32 ? in.indices.ptr<const int32_t>()[offset]
                                           : in.indices.ptr<const int64_t>()[offset];
  }

  std::vector<Query> queries_;  // [B, S1]
  KeyRows k_, k_rope_, v_;
  bool same_;  // value is key
};

inline char* At(void* base, int64_t elements, int64_t bytes) { return static_cast<char*>(base) + elements * bytes; }

}  // namespace jumar
