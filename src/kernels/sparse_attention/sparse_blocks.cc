#include "kernels/sparse_attention/sparse_blocks.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "base/check.h"
#include "base/indices.h"
#include "base/parallel.h"
#include "base/widen.h"

namespace jumar {
namespace {

void CheckShape(const char* op, const char* name, const TensorView& x, const std::vector<int64_t>& sizes, DType dtype) {
  const TensorView expected = Contiguous(nullptr, dtype, sizes);
  JUMAR_CHECK(op, SameShape(x, expected) && x.dtype == dtype, name, " must be ", Describe(expected), ", got ",
              Describe(x));
}

bool SameMemory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && SameShape(a, b) && std::equal(a.stride, a.stride + a.rank, b.stride);
}

}  // namespace

SparseShape CheckSparseAttention(const char* op, const SparseAttentionInputs& in, const TensorView& out,
                                 const TensorView& max, const TensorView& sum) {
  const TensorView& q = in.q;
  JUMAR_CHECK(op, q.rank == 4 && in.k.rank == 4 && in.v.rank == 4 && in.indices.rank == 4,
              "query, key, value and sparse_indices must have one number of dimensions, got ", ShapeString(q), ", ",
              ShapeString(in.k), ", ", ShapeString(in.v), " and ", ShapeString(in.indices));
  JUMAR_CHECK(op, IsFloating(q.dtype), "query must be floating point, got ", Name(q.dtype));
  SparseShape s;
  s.dtype = q.dtype;
  s.compute = ComputeType(q.dtype);
  s.batch = q.size[0];
  s.queries = q.size[1];
  s.heads = q.size[2];
  s.d = q.size[3];
  s.keys = in.k.size[1];
  s.kv_heads = in.k.size[2];
  s.dv = in.v.size[3];
  s.ids = in.indices.size[3];
  JUMAR_CHECK(op, s.kv_heads > 0 ? s.heads % s.kv_heads == 0 : s.heads == 0,
              "the number of query heads must be a multiple of that of key heads, got ", s.heads, " and ", s.kv_heads);
  s.group = s.kv_heads > 0 ? s.heads / s.kv_heads : 0;
  CheckShape(op, "key", in.k, {s.batch, s.keys, s.kv_heads, s.d}, s.dtype);
  CheckShape(op, "value", in.v, {s.batch, s.keys, s.kv_heads, s.dv}, s.dtype);
  JUMAR_CHECK(op, (in.q_rope.rank == 0) == (in.k_rope.rank == 0), "query_rope and key_rope come together");
  if (in.q_rope.rank != 0) {
    JUMAR_CHECK(op, in.q_rope.rank == 4, "query_rope must have the dimensions of query, got ", ShapeString(in.q_rope));
    s.dr = in.q_rope.size[3];
    CheckShape(op, "query_rope", in.q_rope, {s.batch, s.queries, s.heads, s.dr}, s.dtype);
    CheckShape(op, "key_rope", in.k_rope, {s.batch, s.keys, s.kv_heads, s.dr}, s.dtype);
  }
  JUMAR_CHECK(op, in.indices.dtype == DType::kI32 || in.indices.dtype == DType::kI64,
              "sparse_indices must be int32 or int64, got ", Name(in.indices.dtype));
  CheckShape(op, "sparse_indices", in.indices, {s.batch, s.queries, s.kv_heads, s.ids}, in.indices.dtype);
  JUMAR_CHECK(op, in.block_size >= 1, "sparse_block_size must be at least 1, got ", in.block_size);
  JUMAR_CHECK(op, s.keys <= std::numeric_limits<int32_t>::max(), "at most 2^31 - 1 keys, got ", s.keys);
  if (in.sinks.rank != 0) CheckShape(op, "sinks", in.sinks, {s.heads}, s.compute);
  CheckShape(op, "out", out, {s.batch, s.queries, s.heads, s.dv}, s.dtype);
  CheckShape(op, "softmax_max", max, {s.batch, s.kv_heads, s.queries, s.group}, s.compute);
  CheckShape(op, "softmax_sum", sum, {s.batch, s.kv_heads, s.queries, s.group}, s.compute);
  return s;
}

SparsePlan::SparsePlan(const char* op, const SparseAttentionInputs& inputs, const SparseShape& checked)
    : in(inputs),
      shape(checked),
      gemm(ChooseGemmKernel(checked.compute, checked.compute)),
      panel(ChoosePanelKernel(checked.compute == DType::kF64)),
      products(ChooseRowProducts(checked.compute == DType::kF64)),
      width(panel.width),
      panels(CeilDiv(checked.group, panel.width)),
      block(std::min(inputs.block_size, std::max<int64_t>(checked.keys, 1))),
      queries_(static_cast<size_t>(checked.batch * checked.queries)),
      same_(SameMemory(inputs.k, inputs.v)) {
  CheckIds(op);
  for (const SequencePair& s : in.sequences) {
    for (int64_t i = 0; i < s.q_len; ++i) {
      Query& q = queries_[static_cast<size_t>(s.batch * shape.queries + s.q_begin + i)];
      q.k_begin = s.k_begin;
      q.limit = in.causal ? std::clamp<int64_t>(i + s.k_len - s.q_len + 1, 0, s.k_len) : s.k_len;
    }
  }
  k_ = KeyRows(in.k, shape.compute);
  if (!same_) v_ = KeyRows(in.v, shape.compute);
  if (shape.dr > 0) k_rope_ = KeyRows(in.k_rope, shape.compute);
}

void SparsePlan::CheckIds(const char* op) const {
  const TensorView& x = in.indices;
  const int64_t end = CeilDiv(shape.keys, block);
  std::atomic<int64_t> bad{std::numeric_limits<int64_t>::max()};
  ParallelFor(
      shape.batch * shape.queries * shape.kv_heads, CeilDiv(1 << 15, shape.ids + 1), [&](int64_t begin, int64_t stop) {
        for (int64_t r = begin; r < stop; ++r) {
          const int64_t h = r % shape.kv_heads;
          const int64_t t = r / shape.kv_heads;
          const int64_t at = t / shape.queries * x.stride[0] + t % shape.queries * x.stride[1] + h * x.stride[2];
          for (int64_t j = 0; j < shape.ids; ++j) {
            const int64_t id = Id(at + j * x.stride[3]);
            if (id >= -1 && id < end) continue;
            int64_t first = bad;
            while (r * shape.ids + j < first && !bad.compare_exchange_weak(first, r * shape.ids + j)) {
            }
            return;
          }
        }
      });
  if (bad == std::numeric_limits<int64_t>::max()) return;
  int64_t rest = bad;
  int64_t offset = 0;
  for (int i = 3; i >= 0; --i) {
    offset += rest % x.size[i] * x.stride[i];
    rest /= x.size[i];
  }
  Fail(op, "sparse_indices ", Id(offset), " at position ", PositionOf(x, bad), " is neither -1 nor below ", end,
       ", the number of blocks of ", shape.keys, " keys");
}

SparseUnit SparsePlan::Unit(int64_t index) const {
  const int64_t token = index / shape.kv_heads;
  const Query& q = queries_[static_cast<size_t>(token)];
  return {token / shape.queries, token % shape.queries, index % shape.kv_heads, q.k_begin, q.limit};
}

int64_t SparsePlan::ListSlots(const SparseUnit& unit, int32_t* rows) const {
  const TensorView& x = in.indices;
  const int64_t at = unit.batch * x.stride[0] + unit.query * x.stride[1] + unit.kv_head * x.stride[2];
  int64_t n = 0;
  if (block == 1 && x.dtype == DType::kI32) {
    // Without a branch: what is no slot is overwritten.
    const int32_t* ids = x.ptr<const int32_t>() + at;
    for (int64_t j = 0; j < shape.ids; ++j) {
      const int64_t id = ids[j * x.stride[3]];
      rows[n] = static_cast<int32_t>(unit.k_begin + id);
      n += static_cast<int64_t>(static_cast<uint64_t>(id) < static_cast<uint64_t>(unit.limit));
    }
    return n;
  }
  for (int64_t j = 0; j < shape.ids; ++j) {
    const int64_t id = Id(at + j * x.stride[3]);
    if (id < 0) continue;
    const int64_t end = std::min((id + 1) * block, unit.limit);
    for (int64_t t = id * block; t < end; ++t) rows[n++] = static_cast<int32_t>(unit.k_begin + t);
  }
  return n;
}

void SparsePlan::Pointers(const KeyRows& x, const SparseUnit& unit, const int32_t* rows, int64_t n,
                          const void** out) const {
  const char* base = x.Base(unit.batch, unit.kv_head);
  const int64_t step = x.RowBytes();
  for (int64_t i = 0; i < n; ++i) out[i] = base + rows[i] * step;
}

GemmOperand SparsePlan::Along(const TensorView& x, const SparseUnit& unit) const {
  const int64_t at = unit.batch * x.stride[0] + unit.query * x.stride[1] + unit.kv_head * shape.group * x.stride[2];
  return {
      At(x.data, at, static_cast<int64_t>(SizeOf(x.dtype))), x.dtype, shape.group, x.size[3], x.stride[2], x.stride[3]};
}

GemmOperand SparsePlan::Across(const TensorView& x, const SparseUnit& unit) const {
  const GemmOperand along = Along(x, unit);
  return {along.data, along.dtype, along.k, along.rows, along.k_stride, along.row_stride};
}

void SparsePlan::PackLanes(const TensorView& x, const SparseUnit& unit, int64_t p, void* out) const {
  const GemmOperand operand = Along(x, unit);
  gemm.pack_b({&operand, p * width, LanesOf(p), 0, x.size[3], PanelElements(x.size[3]), out});
}

void SparsePlan::Scores(const SparseUnit& unit, int64_t p, int64_t n, const void* const* k, const void* const* k_rope,
                        void* work, void* scores) const {
  PackLanes(in.q, unit, p, work);
  products.dots({k, n, shape.d, work, LanesOf(p), scores, false});
  if (shape.dr == 0) return;
  PackLanes(in.q_rope, unit, p, work);
  products.dots({k_rope, n, shape.dr, work, LanesOf(p), scores, true});
}

void SparsePlan::StoreHeads(const void* acc, int64_t ld, const TensorView& x, const SparseUnit& unit) const {
  const GemmOperand to = Along(x, unit);
  GemmStore store{};
  store.acc = acc;
  store.ld_acc = ld;
  store.m = shape.group;
  store.n = x.size[3];
  store.out = const_cast<void*>(to.data);
  store.dtype = x.dtype;
  store.row_stride = x.stride[2];
  store.col_stride = x.stride[3];
  gemm.store(store);
}

}  // namespace jumar
