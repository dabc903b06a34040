// Sums of rows with p and ds as factors: over keys (out, dq) and over queries (dk, dv).
#include "kernels/attention/attention_blocks.h"

namespace jumar {
namespace {

// x.c += a * b as PanelProducts does it with `accumulate`, without the products whose factor in a is 0: what lies
// beside a hidden key may be NaN. c has columns `col_stride` apart.
template <typename T>
void SkipZeros(int64_t width, bool by_rows, const PanelProduct& x, int64_t col_stride, const PanelTile& tile) {
  const T* a = static_cast<const T*>(x.a);
  const T* b = static_cast<const T*>(x.b);
  T* c = static_cast<T*>(x.c);
  for (int64_t i = tile.row; i < tile.row + tile.rows; ++i) {
    for (int64_t j = 0; j < x.n; ++j) {
      T sum = 0;
      for (int64_t k = tile.begin; k < tile.end; ++k) {
        const T left = by_rows ? a[k / width * x.a_panel + i * width + k % width] : a[k * width + i];
        if (left != 0) sum += left * b[j / width * x.b_panel + k * width + j % width];
      }
      c[i * x.ldc + j * col_stride] += sum;
    }
  }
}

void MultiplySkippingZeros(const AttentionPlan& plan, bool by_rows, const PanelProduct& x, int64_t col_stride,
                           const PanelTile* tiles, int64_t count) {
  const auto skip = plan.shape.compute == DType::kF64 ? &SkipZeros<double> : &SkipZeros<float>;
  for (int64_t t = 0; t < count; ++t) skip(plan.width, by_rows, x, col_stride, tiles[t]);
}

// Whether rows [row, row + rows) of a panel matrix are finite.
bool FiniteRows(const AttentionPlan& plan, const void* packed, int64_t panel_stride, int64_t row, int64_t rows,
                int64_t cols) {
  for (int64_t c = 0; c < cols; c += plan.width) {
    const void* first = At(packed, c / plan.width * panel_stride + row * plan.width, plan.ComputeBytes());
    if (!plan.panel.finite(first, rows * plan.width)) return false;
  }
  return true;
}

// Steps [begin, end) of `cols` columns that the bf16 kernel has packed. Of its left operands it fills whole halves of
// panels.
bool FiniteSteps(const AttentionPlan& plan, bool left, const void* packed, int64_t panel_stride, int64_t begin,
                 int64_t end, int64_t cols) {
  for (int64_t c = 0; c < cols; c += kSplitStep) {
    const auto* panel = static_cast<const uint16_t*>(packed) + c / kSplitStep * panel_stride;
    const int64_t rows = left ? std::min(kSplitStep, RoundUp(cols - c, kSplitStep / 2)) : kSplitStep;
    for (int64_t s = begin; s < end; ++s) {
      if (!plan.split->finite(panel + s * kSplitBlock, rows * kSplitStep)) return false;
    }
  }
  return true;
}

SplitSteps StepsOf(const PanelKeys& keys) {
  if (!keys.any()) return {};
  return {keys.begin / kSplitStep, CeilDiv(keys.end, kSplitStep)};
}

int64_t ColumnsOf(const AttentionPlan::Rows& from) {
  return from.x.size[3] + (from.rope.rank == 0 ? 0 : from.rope.size[3]);
}

}  // namespace

int64_t AttentionPlan::QueryTiles(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key,
                                  const PanelKeys& keys, PanelTile* tiles) const {
  return EvenTiles(0, rows, products.tile_rows, tiles, [&](const PanelTile& t) {
    return std::pair(std::max(keys.begin, Low(s, row + t.row) - key),
                     std::min(keys.end, High(s, row + t.row + t.rows - 1) - key));
  });
}

int64_t AttentionPlan::KeyTiles(const AttentionSequence& s, int64_t row, int64_t rows, int64_t key, int64_t begin,
                                int64_t end, PanelTile* tiles) const {
  return EvenTiles(begin, end, products.tile_rows, tiles, [&](const PanelTile& t) {
    const int64_t first = key + t.row;
    const int64_t last = first + t.rows - 1;
    // Query i sees keys from i + low on, up to i + high or the prefix.
    const int64_t from = first < s.prefix ? 0 : first - s.high;
    return std::pair(std::max<int64_t>(0, from - row), std::min(rows, last - s.low + 1 - row));
  });
}

void AttentionPlan::Split(const PanelKeys& keys, const void* panel_in, void* left, void* right) const {
  if (split == nullptr) return;
  split->split({static_cast<const float*>(panel_in), keys.begin, keys.end, static_cast<uint16_t*>(left),
                static_cast<uint16_t*>(right)});
}

int64_t AttentionPlan::OverKeys(int64_t columns) const {
  if (split == nullptr) return Padded(columns) / width * PanelOf(key_block);
  return Padded(columns) / width * dots->PanelStride(dots->mr, key_block) / 2;
}

bool AttentionPlan::PackOverKeys(const Rows& from, int64_t row, int64_t rows, void* out) const {
  const int64_t columns = ColumnsOf(from);
  if (split == nullptr) {
    Pack(from, row, rows, PanelOf(key_block), out);
    return FiniteRows(*this, out, PanelOf(key_block), 0, rows, columns);
  }
  const int64_t stride = dots->PanelStride(dots->mr, key_block);
  ScratchFrame frame;
  const GemmOperand turned = Turned(BF16Rows(from, row, rows, frame));
  dots->pack_a({&turned, 0, columns, 0, rows, stride, out});
  return FiniteSteps(*this, true, out, stride, 0, CeilDiv(rows, kSplitStep), columns);
}

void AttentionPlan::AddOverKeys(const KeySums& x) const {
  const int64_t columns = ColumnsOf(x.from);
  if (split != nullptr && x.finite) {
    split->multiply_right({static_cast<const uint16_t*>(x.packed), dots->PanelStride(dots->mr, key_block), columns,
                           static_cast<const uint16_t*>(x.terms), StepsOf(x.keys), static_cast<float*>(x.sums)});
    return;
  }
  PanelTile tiles[kMaxTiles];
  const int64_t count = QueryTiles(x.s, x.row, x.rows, x.key, x.keys, tiles);
  const int64_t ld = Padded(columns);
  PanelProduct product{x.panel, 0, x.packed, PanelOf(key_block), columns, x.sums, ld, true};
  if (x.finite || (split == nullptr && !x.keys.by_mask && !x.keys.by_position)) {
    products.by_columns(product, tiles, count);
    return;
  }
  if (split == nullptr) return MultiplySkippingZeros(*this, false, product, 1, tiles, count);
  ScratchFrame frame;
  float* wide = frame.Alloc<float>(ld / width * product.b_panel);
  Pack(x.from, x.key, x.keys.end, product.b_panel, wide);
  product.b = wide;
  product.ldc = 1;
  MultiplySkippingZeros(*this, false, product, width, tiles, count);
}

void AttentionPlan::ScaleSums(void* sums, int64_t columns, int64_t rows, const void* factors) const {
  if (split != nullptr) return panel.scale_lanes(sums, columns, factors);
  panel.scale_rows(sums, Padded(columns), rows, Padded(columns), factors);
}

void AttentionPlan::StoreSums(const void* sums, int64_t columns, int64_t col, int64_t rows, const TensorView& out,
                              int64_t batch, int64_t head, int64_t row) const {
  if (split == nullptr) return Store(At(sums, col, ComputeBytes()), Padded(columns), rows, out, batch, head, row);
  ScratchFrame frame;
  const int64_t cols = out.size[3];
  const int64_t ld = Padded(cols);
  // Turned panel by panel of columns, each of which has rows of `width`.
  float* turned = frame.Alloc<float>(width * ld);
  for (int64_t c = 0; c < cols; c += width) {
    const int64_t n = std::min(width, cols - c);
    const GemmOperand operand{At(sums, (col + c) * width, 4), DType::kF32, n, rows, width, 1};
    gemm.pack_b({&operand, 0, n, 0, rows, width * ld, turned});
    StoreColumns(turned, width, rows, out, batch, head, row, c, n);
  }
}

int64_t AttentionPlan::OverQueries(int64_t columns, int64_t rows) const {
  if (split == nullptr) return Padded(columns) / width * PanelOf(rows);
  return Padded(columns) / width * dots->PanelStride(dots->nr, rows) / 2;
}

void AttentionPlan::PackOverQueries(const Rows& from, int64_t row, int64_t rows, void* out) const {
  if (split == nullptr) return Pack(from, row, rows, PanelOf(rows), out);
  ScratchFrame frame;
  const GemmOperand turned = Turned(BF16Rows(from, row, rows, frame));
  dots->pack_b({&turned, 0, turned.rows, 0, rows, dots->PanelStride(dots->nr, rows), out});
}

bool AttentionPlan::FiniteOverQueries(const void* packed, int64_t columns, int64_t all, int64_t row,
                                      int64_t rows) const {
  if (split == nullptr) return FiniteRows(*this, packed, PanelOf(all), row, rows, columns);
  const int64_t end = CeilDiv(row + rows, kSplitStep);
  return FiniteSteps(*this, false, packed, dots->PanelStride(dots->nr, all), row / kSplitStep, end, columns);
}

void AttentionPlan::AddOverQueries(const QuerySums& x) const {
  const int64_t columns = ColumnsOf(x.from);
  const int64_t ld = Padded(columns);
  if (split != nullptr && x.finite) {
    SplitSteps steps[kMaxTiles];
    const int64_t count = CeilDiv(x.rows, width);
    for (int64_t t = 0; t < count; ++t) steps[t] = StepsOf(x.keys[t]);
    const auto* packed = static_cast<const uint16_t*>(x.packed) + x.packed_row / kSplitStep * kSplitBlock;
    split->multiply_left({static_cast<const uint16_t*>(x.terms), 2 * TermElements(), steps, count, packed,
                          dots->PanelStride(dots->nr, x.packed_rows), columns, static_cast<float*>(x.sums), ld});
    return;
  }
  PanelTile tiles[kMaxTiles];
  const int64_t count = KeyTiles(x.s, x.row, x.rows, x.key, x.begin, x.end, tiles);
  PanelProduct product{x.panels, key_block * width, nullptr, PanelOf(x.packed_rows), columns, x.sums, ld, true};
  product.b = At(x.packed, x.packed_row * width, ComputeBytes());
  if (x.finite) return products.by_rows(product, tiles, count);
  ScratchFrame frame;
  if (split != nullptr) {
    product.b_panel = PanelOf(x.rows);
    float* wide = frame.Alloc<float>(ld / width * product.b_panel);
    Pack(x.from, x.row, x.rows, product.b_panel, wide);
    product.b = wide;
  }
  MultiplySkippingZeros(*this, true, product, 1, tiles, count);
}

}  // namespace jumar
