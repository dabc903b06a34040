#include "kernels/attention/attention_blocks.h"

#include <cmath>

#include "base/check.h"
#include "base/widen.h"

namespace jumar {
namespace {

void CheckShape(const char* op, const char* name, const TensorView& x, std::initializer_list<int64_t> sizes) {
  bool same = x.rank == static_cast<int>(sizes.size());
  int i = 0;
  std::string expected;
  for (const int64_t size : sizes) {
    same = same && x.size[i++] == size;
    expected += (expected.empty() ? "[" : ", ") + std::to_string(size);
  }
  JUMAR_CHECK(op, same, name, " has shape ", ShapeString(x), ", expected ", expected, "]");
}

}  // namespace

AttentionShape CheckAttention(const char* op, const AttentionInputs& in, const TensorView& out, const TensorView& max,
                              const TensorView& sum) {
  const TensorView& q = in.q;
  AttentionShape s;
  JUMAR_CHECK(op, q.rank == 4 && in.k.rank == 4 && in.v.rank == 4, "query, key and value must have 4 dimensions, got ",
              ShapeString(q), ", ", ShapeString(in.k), " and ", ShapeString(in.v));
  JUMAR_CHECK(op, IsFloating(q.dtype), "query must be floating point, got ", Name(q.dtype));
  for (const TensorView* x : {&in.k, &in.v, &out}) {
    JUMAR_CHECK(op, x->dtype == q.dtype, "query, key, value and out must have one dtype, got ", Name(q.dtype), " and ",
                Name(x->dtype));
  }
  s.dtype = q.dtype;
  s.compute = ComputeType(q.dtype);
  s.heads = q.size[1];
  s.kv_heads = in.k.size[1];
  s.d = q.size[3];
  s.dv = in.v.size[3];
  JUMAR_CHECK(op, (in.q_rope.rank == 0) == (in.k_rope.rank == 0), "query_rope and key_rope go together");
  if (in.q_rope.rank != 0) {
    s.rope = in.q_rope.size[3];
    CheckShape(op, "query_rope", in.q_rope, {q.size[0], s.heads, q.size[2], s.rope});
    CheckShape(op, "key_rope", in.k_rope, {q.size[0], s.kv_heads, in.k.size[2], s.rope});
    for (const TensorView* x : {&in.q_rope, &in.k_rope}) {
      JUMAR_CHECK(op, x->dtype == q.dtype, "query_rope and key_rope must have query's dtype ", Name(q.dtype), ", got ",
                  Name(x->dtype));
    }
  }
  JUMAR_CHECK(op, s.kv_heads > 0 ? s.heads % s.kv_heads == 0 : s.heads == 0,
              "the number of query heads must be a multiple of that of key heads, got ", s.heads, " and ", s.kv_heads);
  s.group = s.kv_heads > 0 ? s.heads / s.kv_heads : 1;
  JUMAR_CHECK(op, in.k.size[0] == q.size[0] && in.k.size[3] == s.d, "key has shape ", ShapeString(in.k),
              ", which does not go with query ", ShapeString(q));
  JUMAR_CHECK(op, in.v.size[0] == q.size[0] && in.v.size[1] == s.kv_heads && in.v.size[2] == in.k.size[2],
              "value has shape ", ShapeString(in.v), ", which does not go with key ", ShapeString(in.k));
  CheckShape(op, "out", out, {q.size[0], s.heads, q.size[2], s.dv});
  for (const TensorView* x : {&max, &sum}) {
    CheckShape(op, x == &max ? "softmax_max" : "softmax_sum", *x, {q.size[0], s.heads, q.size[2], 8});
    JUMAR_CHECK(op, x->dtype == s.compute, "softmax_max and softmax_sum must be ", Name(s.compute), ", got ",
                Name(x->dtype));
  }
  JUMAR_CHECK(op, in.k.size[2] <= (1 << 24), "at most 2^24 keys, got ", in.k.size[2]);
  JUMAR_CHECK(op, in.dropout.keep_prob > 0 && in.dropout.keep_prob <= 1, "keep_prob must be in (0, 1], got ",
              in.dropout.keep_prob);
  if (in.pse.rank != 0) {
    JUMAR_CHECK(op, in.pse.dtype == q.dtype, "pse must have query's dtype ", Name(q.dtype), ", got ",
                Name(in.pse.dtype));
    JUMAR_CHECK(op, in.pse.rank == 4, "pse must have 4 dimensions, got ", ShapeString(in.pse));
  }
  if (in.sink.rank != 0) {
    CheckShape(op, "sink", in.sink, {s.heads});
    JUMAR_CHECK(op, in.sink.dtype == s.compute, "sink must be ", Name(s.compute), ", got ", Name(in.sink.dtype));
  }
  return s;
}

namespace {

// Scores lie in panels of the kernel's columns.
const GemmKernel* DotKernel(DType dtype, int64_t width) {
  const GemmKernel& kernel = ChooseGemmKernel(dtype, dtype);
  return dtype == DType::kBF16 && kernel.packed_bytes == 2 && kernel.nr == width ? &kernel : nullptr;
}
int64_t DotRows(const AttentionPlan& plan) { return plan.dots != nullptr ? plan.dots->mr : plan.products.tile_rows; }

}  // namespace

AttentionPlan::AttentionPlan(const AttentionInputs& inputs, const AttentionShape& checked)
    : in(inputs),
      shape(checked),
      gemm(ChooseGemmKernel(checked.compute, checked.compute)),
      panel(ChoosePanelKernel(checked.compute == DType::kF64)),
      products(ChoosePanelProducts(checked.compute == DType::kF64)),
      dots(DotKernel(checked.dtype, panel.width)),
      split(dots != nullptr && dots == GemmKernelAmx(gemm) ? SplitKernelAmx() : nullptr),
      width(panel.width),
      key_block(132 / DotRows(*this) * DotRows(*this)) {
  int64_t bits = 0;
  for (const AttentionSequence& s : in.sequences) {
    bit_offset_.push_back(bits);
    bits += shape.heads * s.q_len * s.k_len;
  }
}

PanelKeys AttentionPlan::KeysByPosition(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key,
                                        int64_t n) const {
  PanelKeys keys;
  const int64_t last = row + rows - 1;
  keys.begin = std::clamp<int64_t>(Low(s, row) - key, 0, n);
  keys.end = std::clamp<int64_t>(High(s, last) - key, 0, n);
  keys.by_position = Low(s, last) > key + keys.begin || High(s, row) < key + keys.end;
  return keys;
}

PanelKeys AttentionPlan::ByMask(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key,
                                PanelKeys keys) const {
  const AttentionMask& m = in.mask;
  const uint8_t* base =
      m.data + (m.size[0] == 1 ? 0 : s.index * m.stride[0]) + (m.size[1] == 1 ? 0 : head * m.stride[1]);
  uint8_t any = 0;
  bool all = true;
  const int64_t n = keys.end - keys.begin;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* p = base + (row + r) * m.stride[2] + (key + keys.begin) * m.stride[3];
    if (r > 0 && m.stride[2] == 0) break;
    uint8_t row_any = 0;
    uint8_t row_all = 1;
    if (m.stride[3] == 1) {
      for (int64_t j = 0; j < n; ++j) {
        row_any = static_cast<uint8_t>(row_any | p[j]);
        row_all = static_cast<uint8_t>(row_all & static_cast<uint8_t>(p[j] != 0));
      }
    } else {
      for (int64_t j = 0; j < n; ++j) {
        row_any = static_cast<uint8_t>(row_any | p[j * m.stride[3]]);
        row_all = static_cast<uint8_t>(row_all & static_cast<uint8_t>(p[j * m.stride[3]] != 0));
      }
    }
    any = static_cast<uint8_t>(any | row_any);
    all = all && row_all != 0;
    if (any != 0 && !all) break;
  }
  if (all) keys.end = keys.begin;
  keys.by_mask = any != 0;
  return keys;
}

PanelKeys AttentionPlan::Keys(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key,
                              int64_t n) const {
  const PanelKeys keys = KeysByPosition(s, row, rows, key, n);
  if (!keys.any() || in.mask.data == nullptr) return keys;
  return ByMask(s, head, row, rows, key, keys);
}

void AttentionPlan::Pack(const Rows& from, int64_t row, int64_t rows, int64_t panel_stride, void* out) const {
  PanelRows p{};
  p.rows = rows;
  p.out = out;
  p.panel = panel_stride;
  for (const TensorView* x : {&from.x, &from.rope}) {
    if (x->rank == 0) continue;
    p.dtype = x->dtype;
    p.x = Element(*x, from.batch, from.head, from.begin + row);
    p.row_stride = x->stride[2];
    p.col_stride = x->stride[3];
    p.cols = x->size[3];
    products.pack(p);
    p.col += p.cols;
  }
}

int64_t AttentionPlan::ScoreWorkBytes() const {
  const int64_t tile = gemm.PanelStride(static_cast<int>(width), key_block);
  return (3 * tile + 2 * width) * static_cast<int64_t>(ComputeBytes());
}

bool AttentionPlan::Scores(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key,
                           const PanelKeys& keys, const void* dot_keys, const void* dot_queries, void* scores,
                           void* work) const {
  const size_t bytes = ComputeBytes();
  const int64_t n = keys.end - keys.begin;
  Dots(keys, rows, Columns(), dot_keys, dot_queries, scores);
  if (!keys.by_position && !keys.by_mask && in.pse.rank == 0) return false;

  const int64_t tile = gemm.PanelStride(static_cast<int>(width), key_block);
  PanelMask m{};
  m.scores = At(scores, keys.begin * width, bytes);
  m.n = n;
  m.key = key + keys.begin;
  m.scale = in.scale;
  if (keys.by_position) {
    void* low = At(work, 2 * tile, bytes);
    void* high = At(work, 2 * tile + width, bytes);
    for (int64_t r = 0; r < width; ++r) {
      const int64_t i = row + std::min(r, rows - 1);
      const auto from = static_cast<double>(Low(s, i));
      const auto to = static_cast<double>(High(s, i));
      if (bytes == 8) {
        static_cast<double*>(low)[r] = from;
        static_cast<double*>(high)[r] = to;
      } else {
        static_cast<float*>(low)[r] = static_cast<float>(from);
        static_cast<float*>(high)[r] = static_cast<float>(to);
      }
    }
    m.low = low;
    m.high = high;
    if (!keys.by_mask && in.pse.rank == 0 && in.scale > 0) {
      // Minus infinity stays what it is when scores are scaled: only keys that some query does not see are touched.
      m.scale = 1;
      const auto hide = [&](int64_t from, int64_t to) {
        from = std::max(from, m.key);
        to = std::min(to, m.key + n);
        if (from >= to) return;
        PanelMask part = m;
        part.scores = At(m.scores, (from - m.key) * width, bytes);
        part.n = to - from;
        part.key = from;
        panel.mask(part);
      };
      const int64_t seen_from = Low(s, row + rows - 1);
      const int64_t seen_to = std::max(High(s, row), seen_from);
      hide(m.key, seen_from);
      hide(seen_to, m.key + n);
      return false;
    }
  }
  GemmPack p{};
  p.rows = rows;
  p.k = 0;
  p.kc = n;
  p.panel = tile;
  if (in.pse.rank != 0) {
    PackPse(s, head, row, rows, key + keys.begin, n, tile, At(work, 2 * tile + 2 * width, bytes), work);
    m.pse = work;
  }
  if (keys.by_mask) {
    // Bytes become numbers row by row, then a panel like any other operand.
    const AttentionMask& x = in.mask;
    const uint8_t* from = x.data + (x.size[0] == 1 ? 0 : s.index * x.stride[0]) +
                          (x.size[1] == 1 ? 0 : head * x.stride[1]) + row * x.stride[2] +
                          (key + keys.begin) * x.stride[3];
    void* numbers = At(work, 2 * tile + 2 * width, bytes);
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* bits = from + r * x.stride[2];
      if (bytes == 8) {
        double* to = static_cast<double*>(numbers) + r * n;
        for (int64_t j = 0; j < n; ++j) to[j] = bits[j * x.stride[3]] != 0 ? 1 : 0;
      } else if (x.stride[3] == 1) {
        float* to = static_cast<float*>(numbers) + r * n;
        for (int64_t j = 0; j < n; ++j) to[j] = bits[j] != 0 ? 1.0f : 0.0f;
      } else {
        float* to = static_cast<float*>(numbers) + r * n;
        for (int64_t j = 0; j < n; ++j) to[j] = bits[j * x.stride[3]] != 0 ? 1.0f : 0.0f;
      }
    }
    const GemmOperand operand{numbers, shape.compute, rows, n, n, 1};
    p.operand = &operand;
    p.out = At(work, tile, bytes);
    gemm.pack_b(p);
    m.hide = p.out;
  }
  panel.mask(m);
  return true;
}

void AttentionPlan::PackPse(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n,
                            int64_t stride, void* numbers, void* out) const {
  const TensorView& x = in.pse;
  const size_t bytes = SizeOf(x.dtype);
  const int64_t b = x.size[0] == 1 ? 0 : s.index;
  const int64_t h = x.size[1] == 1 ? 0 : head;
  const auto pack = [&](const GemmOperand& operand) { gemm.pack_b({&operand, 0, rows, 0, n, stride, out}); };
  if (row >= in.pse_first) {
    const char* from = At(Element(x, b, h, row - in.pse_first), key * x.stride[3], bytes);
    pack({from, x.dtype, rows, n, x.stride[2], x.stride[3]});
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t shift = std::max<int64_t>(0, in.pse_first - row - r);
    const char* from = Element(x, b, h, std::max<int64_t>(0, row + r - in.pse_first));
    char* to = At(numbers, r * n, bytes);
    for (int64_t j = 0; j < n; ++j) {
      // What lies past the end belongs to hidden keys.
      const int64_t column = std::min(key + j + shift, x.size[3] - 1);
      std::copy_n(At(from, column * x.stride[3], bytes), bytes, At(to, j, bytes));
    }
  }
  pack({numbers, x.dtype, rows, n, n, 1});
}

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kStreamBytes = 2 << 20;  // results of this size have left the nearest caches before they are read

// Whether columns [col, col + cols) of rows of `out` go past the caches. A row lies far from the next one of its head:
// without it the store of each waits until its lines have come from memory, all of which it overwrites.
bool Streams(const TensorView& out, int64_t col, int64_t cols) {
  const auto size = static_cast<int64_t>(SizeOf(out.dtype));
  if (out.numel() * size < kStreamBytes || out.stride[3] != 1) return false;
  if (reinterpret_cast<uintptr_t>(out.data) % kLine != 0) return false;
  if (col * size % kLine != 0 || cols * size % kLine != 0) return false;
  return std::all_of(out.stride, out.stride + 3, [&](int64_t stride) { return stride * size % kLine == 0; });
}

}  // namespace

void AttentionPlan::StoreColumns(const void* sums, int64_t ld, int64_t rows, const TensorView& out, int64_t batch,
                                 int64_t head, int64_t row, int64_t col, int64_t cols) const {
  GemmStore store{};
  store.acc = sums;
  store.ld_acc = ld;
  store.m = rows;
  store.n = cols;
  store.out = At(Element(out, batch, head, row), col * out.stride[3], SizeOf(out.dtype));
  store.dtype = out.dtype;
  store.row_stride = out.stride[2];
  store.col_stride = out.stride[3];
  store.stream = Streams(out, col, cols);
  gemm.store(store);
}

void AttentionPlan::Keep(const AttentionSequence& s, int64_t head, int64_t row, int64_t rows, int64_t key, int64_t n,
                         void* keep) const {
  const AttentionDropout& drop = in.dropout;
  if (drop.bits == nullptr) {
    PanelKeep k{};
    k.keep = keep;
    k.n = n;
    k.key = key;
    k.row = row;
    k.stream = static_cast<uint32_t>(s.index * shape.heads + head);
    k.seed = drop.seed;
    k.offset = drop.offset;
    k.keep_prob = drop.keep_prob;
    panel.keep(k);
    return;
  }
  const auto sequence = static_cast<size_t>(&s - in.sequences.data());
  for (int64_t r = 0; r < width; ++r) {
    const int64_t i = row + std::min(r, rows - 1);
    const int64_t first = bit_offset_[sequence] + (head * s.q_len + i) * s.k_len + key;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t bit = first + j;
      const double value = (drop.bits[bit / 8] >> (bit % 8) & 1) != 0 ? 1 / drop.keep_prob : 0;
      if (ComputeBytes() == 8) {
        static_cast<double*>(keep)[j * width + r] = value;
      } else {
        static_cast<float*>(keep)[j * width + r] = static_cast<float>(value);
      }
    }
  }
}

}  // namespace jumar
