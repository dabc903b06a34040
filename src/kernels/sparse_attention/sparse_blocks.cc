#include "kernels/sparse_attention/sparse_blocks.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "base/indices.h"
#include "base/parallel.h"
#include "base/widen.h"
#include "jumar/runtime.h"

namespace jumar {
namespace {

void CheckShape(const char* op, const char* name, const TensorView& x, const std::vector<int64_t>& sizes, DType dtype) {
  const TensorView expected = Contiguous(nullptr, dtype, sizes);
  JUMAR_CHECK(op, SameShape(x, expected) && x.dtype == dtype, name, " must be ", Describe(expected), ", got ",
              Describe(x));
}

// A block of keys (or values) stays in the second cache, beside what a group of units keeps there.
constexpr int64_t kKeyBytes = 256 << 10;
constexpr int64_t kGroupBytes = 1 << 20;
constexpr int64_t kMaxGroup = 64;
// Below these, blocks cost more than they save: units that share one, slots that a unit has in one.
constexpr int64_t kMinGroup = 8;
constexpr int64_t kMinSlots = 64;
constexpr int64_t kMaxBlocks = 1 << 12;

bool SameMemory(const TensorView& a, const TensorView& b) {
  return a.data == b.data && SameShape(a, b) && std::equal(a.stride, a.stride + a.rank, b.stride);
}

// Below this number of heads most lanes of a tile are idle.
const TileProducts* TilesFor(const SparseShape& shape, int64_t width, int64_t few_heads) {
  const bool fit = shape.dtype == DType::kBF16 && width == 2 * kTileHeads && shape.group > few_heads;
  return fit ? ChooseTileProducts() : nullptr;
}

const PairDots* PairsFor(const SparseShape& shape, int64_t width, bool other) {
  const bool even = shape.d % 2 == 0 && shape.dr % 2 == 0 && shape.dv % 2 == 0;
  const PairDots* pairs = shape.dtype == DType::kBF16 && even && !other ? ChoosePairDots() : nullptr;
  return pairs != nullptr && pairs->gemm.nr == width ? pairs : nullptr;
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
      tiles(TilesFor(checked, panel.width, products.deep_heads)),
      pairs(PairsFor(checked, panel.width, tiles != nullptr || checked.group <= products.deep_heads)),
      width(panel.width),
      panels(CeilDiv(checked.group, panel.width)),
      half(2 * checked.group <= panel.width),
      deep(tiles == nullptr && checked.group <= products.deep_heads),
      stride(half ? panel.width / 2 : panel.width),
      block(std::min(inputs.block_size, std::max<int64_t>(checked.keys, 1))),
      queries_(static_cast<size_t>(checked.batch * checked.queries)),
      same_(SameMemory(inputs.k, inputs.v)) {
  CheckIds(op);
  const DType stored = tiles != nullptr || pairs != nullptr ? shape.dtype : shape.compute;
  const auto bytes = static_cast<int64_t>(SizeOf(shape.compute));
  // Of one unit: heads of q and their sums.
  const int64_t unit_bytes = (LanesElements(shape.d) + LanesElements(shape.dr) + LanesElements(shape.dv)) * bytes;
  group_units = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(unit_bytes, 1), 1, kMaxGroup);
  const int64_t row_bytes = std::max({shape.d + shape.dr, shape.dv, int64_t{1}}) * static_cast<int64_t>(SizeOf(stored));
  const bool few = std::min(group_units, shape.queries) < kMinGroup;
  const int64_t most = few ? 1 : std::clamp<int64_t>(MaxSlots() / kMinSlots, 1, kMaxBlocks);
  blocks = std::clamp<int64_t>(CeilDiv(shape.keys * row_bytes, kKeyBytes), 1, most);
  // A power of two, or none: the block of a row is a shift away.
  const auto rows = static_cast<uint64_t>(std::max<int64_t>(1, CeilDiv(shape.keys, blocks)));
  const uint64_t above = std::bit_ceil(rows);
  key_block = static_cast<int64_t>(2 * above > 3 * rows && blocks > 1 ? above / 2 : above);
  blocks = std::max<int64_t>(1, CeilDiv(shape.keys, key_block));
  for (const SequencePair& s : in.sequences) {
    for (int64_t i = 0; i < s.q_len; ++i) {
      Query& q = queries_[static_cast<size_t>(s.batch * shape.queries + s.q_begin + i)];
      q.k_begin = s.k_begin;
      q.limit = in.causal ? std::clamp<int64_t>(i + s.k_len - s.q_len + 1, 0, s.k_len) : s.k_len;
    }
  }
  const auto adjacent = [](const TensorView& x) { return x.rank == 0 || x.size[3] <= 1 || x.stride[3] == 1; };
  pick_ = shape.dtype != stored && units() * MaxSlots() < shape.batch * shape.keys * shape.kv_heads && adjacent(in.k) &&
          adjacent(in.v) && adjacent(in.k_rope);
  if (pick_) return;
  k_ = KeyRows(in.k, stored);
  if (!same_) v_ = KeyRows(in.v, stored);
  if (shape.dr > 0) k_rope_ = KeyRows(in.k_rope, stored);
  if (tiles == nullptr) return;
  for (const Source source : {kKey, kKeyRope, kValue}) FindNotFinite(source);
}

void SparsePlan::CheckIds(const char* op) const {
  const int64_t end = CeilDiv(shape.keys, block);
  const int64_t bad = FirstOutside(in.indices, -1, [&](int64_t) { return end; });
  JUMAR_CHECK(op, bad < 0, "sparse_indices ", IntegerAt(in.indices, bad), " at position ", PositionOf(in.indices, bad),
              " is neither -1 nor below ", end, ", the number of blocks of ", shape.keys, " keys");
}

SparseUnit SparsePlan::Unit(int64_t index) const {
  const int64_t query = index % shape.queries;
  const int64_t head = index / shape.queries % shape.kv_heads;
  const int64_t batch = index / shape.queries / shape.kv_heads;
  const Query& q = queries_[static_cast<size_t>(batch * shape.queries + query)];
  return {batch, query, head, q.k_begin, q.limit};
}

std::vector<std::pair<int64_t, int64_t>> SparsePlan::Groups(int64_t first, int64_t count) const {
  const int64_t most = std::clamp<int64_t>(count / (4 * NumThreads()), 1, group_units);
  std::vector<std::pair<int64_t, int64_t>> groups;
  for (int64_t u = first; u < first + count;) {
    const int64_t same = (u / shape.queries + 1) * shape.queries - u;
    const int64_t n = std::min({most, same, first + count - u});
    groups.emplace_back(u, n);
    u += n;
  }
  return groups;
}

int64_t SparsePlan::ListRows(const SparseUnit& unit, int32_t* rows) const {
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
    const int64_t id = IntegerOf(x, at + j * x.stride[3]);
    if (id < 0) continue;
    const int64_t end = std::min((id + 1) * block, unit.limit);
    for (int64_t t = id * block; t < end; ++t) rows[n++] = static_cast<int32_t>(unit.k_begin + t);
  }
  return n;
}

void SparsePlan::ListSlots(const SparseUnit& unit, const Slots& slots) const {
  slots.begins[0] = 0;
  if (blocks == 1) {
    slots.begins[1] = ListRows(unit, slots.rows);
    return;
  }
  ScratchFrame work;
  int32_t* rows = work.Alloc<int32_t>(MaxSlots());
  uint16_t* of = work.Alloc<uint16_t>(MaxSlots());
  const int64_t n = ListRows(unit, rows);
  std::fill_n(slots.begins, blocks + 1, 0);
  const int shift = std::countr_zero(static_cast<uint64_t>(key_block));
  for (int64_t i = 0; i < n; ++i) {
    of[i] = static_cast<uint16_t>(static_cast<uint32_t>(rows[i]) >> shift);
    ++slots.begins[of[i]];
  }
  int64_t begin = 0;
  for (int64_t b = 0; b < blocks; ++b) begin += std::exchange(slots.begins[b], begin);
  for (int64_t i = 0; i < n; ++i) slots.rows[slots.begins[of[i]]++] = rows[i];
  // Each begin has become the next one.
  std::copy_backward(slots.begins, slots.begins + blocks, slots.begins + blocks + 1);
  slots.begins[0] = 0;
}

SparsePlan::Rows SparsePlan::AllocRows(ScratchFrame& frame) const {
  const int64_t cols = pick_ ? shape.d + shape.dr + shape.dv : 0;
  const auto bytes = static_cast<int64_t>(SizeOf(shape.compute));
  Rows rows{};
  for (const void**& at : rows.at) at = frame.Alloc<const void*>(kSlotStep);
  rows.raw = frame.Alloc<char>(kSlotStep * cols * bytes);
  rows.picked = frame.Alloc<char>(kSlotStep * cols * bytes);
  return rows;
}

void SparsePlan::PickRows(const TensorView& x, const SparseUnit& unit, const int32_t* rows, int64_t n, char* raw,
                          char* out, const void** to) const {
  const auto size = static_cast<int64_t>(SizeOf(x.dtype));
  const auto wide = static_cast<int64_t>(SizeOf(shape.compute));
  const int64_t cols = x.size[3];
  const char* base = At(x.data, unit.batch * x.stride[0] + unit.kv_head * x.stride[2], size);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(raw + i * cols * size, base + rows[i] * x.stride[1] * size, static_cast<size_t>(cols * size));
    to[i] = out + i * cols * wide;
  }
  ConvertAll(Contiguous(raw, x.dtype, {n, cols}), Contiguous(out, shape.compute, {n, cols}));
}

void SparsePlan::PointTo(const SparseUnit& unit, const int32_t* rows, int64_t n, Rows* out) const {
  out->n = n;
  if (pick_) {
    const int64_t step = kSlotStep * static_cast<int64_t>(SizeOf(shape.compute));
    PickRows(in.k, unit, rows, n, out->raw, out->picked, out->at[kKey]);
    PickRows(in.v, unit, rows, n, out->raw, out->picked + step * shape.d, out->at[kValue]);
    if (shape.dr > 0) {
      PickRows(in.k_rope, unit, rows, n, out->raw, out->picked + step * (shape.d + shape.dv), out->at[kKeyRope]);
    }
    return;
  }
  for (const Source source : {kKey, kValue, kKeyRope}) {
    if (source == kKeyRope && shape.dr == 0) continue;
    const KeyRows& x = Keys(source);
    const char* base = x.Base(unit.batch, unit.kv_head);
    if (tiles != nullptr) {
      out->numbered[source] = {base, x.view().stride[1], rows, n, Columns(source)};
      const std::vector<uint8_t>& flags = not_finite_[source];
      const uint8_t* flag = flags.data() + (unit.batch * shape.kv_heads + unit.kv_head) * shape.keys;
      out->finite[source] = flags.empty() || std::none_of(rows, rows + n, [&](int32_t row) { return flag[row] != 0; });
      continue;
    }
    const int64_t step = x.RowBytes();
    const void** to = out->at[source];
    for (int64_t i = 0; i < n; ++i) to[i] = base + rows[i] * step;
  }
  if (tiles != nullptr) return;
  // The sums go over columns, and want the first ones of all rows at once.
  for (int64_t i = 0; i < n; ++i) __builtin_prefetch(out->at[kValue][i], 0, 2);
}

void SparsePlan::PairScores(int64_t p, const Rows& rows, Source source, const void* heads, void* scores,
                            bool accumulate) const {
  const int64_t columns = Columns(source);
  const void* panel_heads = static_cast<const float*>(heads) + p * PairElements(columns);
  const bool two = 2 * LanesOf(p) > width;
  pairs->dots({rows.at[source], rows.n, columns, panel_heads, two, static_cast<float*>(scores), stride, accumulate});
}

void SparsePlan::TileScores(int64_t p, const PickedRows& rows, const void* heads, void* scores, bool accumulate) const {
  const void* first = static_cast<const float*>(heads) + p * (width / kTileHeads) * TileElements(rows.cols);
  float* panel_out = static_cast<float*>(scores);
  const int64_t count = HeadTiles(p);
  tiles->dots({rows, first, count, panel_out, stride, accumulate});
  if (count * kTileHeads == stride || accumulate) return;
  for (int64_t i = 0; i < rows.n; ++i) std::fill_n(panel_out + i * stride + kTileHeads, kTileHeads, 0.0f);
}

namespace {

float Widened(const void* x, int64_t i) {
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(x)[i]} << 16);
}

}  // namespace

void SparsePlan::FindNotFinite(Source source) {
  const int64_t columns = Columns(source);
  if (columns == 0) return;
  const KeyRows& x = Keys(source);
  std::vector<uint8_t>& flags = not_finite_[source];
  flags.resize(static_cast<size_t>(shape.batch * shape.kv_heads * shape.keys));
  std::atomic<bool> any{false};
  ParallelFor(static_cast<int64_t>(flags.size()), 256, [&](int64_t begin, int64_t end) {
    bool found = false;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / shape.keys;
      const char* row = x.Base(head / shape.kv_heads, head % shape.kv_heads) + i % shape.keys * x.RowBytes();
      const bool bad = !tiles->finite(row, columns);
      flags[static_cast<size_t>(i)] = bad ? 1 : 0;
      found = found || bad;
    }
    if (found) any = true;
  });
  if (!any) flags.clear();
}

void SparsePlan::TileSum(int64_t p, const PickedRows& rows, bool finite, const void* factors, void* sums,
                         bool accumulate) const {
  const auto* panel_in = static_cast<const float*>(factors);
  auto* out = static_cast<float*>(sums);
  const int64_t ld = Ld(rows.cols);
  if (finite) return tiles->sums({rows, panel_in, stride, LanesOf(p), out, ld, accumulate});
  for (int64_t h = 0; h < LanesOf(p); ++h) {
    for (int64_t c = 0; c < rows.cols; ++c) {
      float sum = accumulate ? out[h * ld + c] : 0;
      for (int64_t i = 0; i < rows.n; ++i) {
        sum += panel_in[i * stride + h] * Widened(rows.base, rows.rows[i] * rows.stride + c);
      }
      out[h * ld + c] = sum;
    }
  }
}

void SparsePlan::TileUpdate(int64_t p, const PickedRows& rows, const void* factors, const void* heads,
                            bool finite) const {
  const auto* panel_in = static_cast<const float*>(factors);
  const int64_t block_step = AcrossBlock();
  if (finite) return tiles->updates({rows, panel_in, stride, LanesOf(p), heads, block_step});
  auto* base = static_cast<float*>(const_cast<void*>(rows.base));
  for (int64_t i = 0; i < rows.n; ++i) {
    for (int64_t c = 0; c < rows.cols; ++c) {
      float sum = 0;
      for (int64_t h = 0; h < LanesOf(p); ++h) {
        // Of a block, 16 columns of a head follow those of the one before, each twice.
        const int64_t at = c / kTileHeads * block_step + (h * kTileHeads + c % kTileHeads) * 2;
        sum += panel_in[i * stride + h] * Widened(heads, at);
      }
      base[rows.rows[i] * rows.stride + c] += sum;
    }
  }
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

void SparsePlan::PackLanes(const TensorView& x, const SparseUnit& unit, void* out) const {
  if (deep) {
    const int64_t ld = RoundUp(x.size[3], width);
    TensorView to = Contiguous(out, shape.compute, {RoundUp(shape.group, 4), ld});
    std::memset(out, 0, static_cast<size_t>(to.numel()) * SizeOf(to.dtype));
    to.size[0] = shape.group;
    to.size[1] = x.size[3];
    TensorView from = to;
    from.dtype = x.dtype;
    from.data = const_cast<void*>(Along(x, unit).data);
    from.stride[0] = x.stride[2];
    from.stride[1] = x.stride[3];
    ConvertAll(from, to);
    return;
  }
  const GemmOperand operand = Along(x, unit);
  if (tiles != nullptr) return tiles->pack_heads(operand, out);
  if (pairs != nullptr) {
    return pairs->gemm.pack_b({&operand, 0, shape.group, 0, x.size[3], 2 * PairElements(x.size[3]), out});
  }
  gemm.pack_b({&operand, 0, shape.group, 0, x.size[3], PanelElements(x.size[3]), out});
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
