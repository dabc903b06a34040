// Scores and dp: products of keys with queries over columns, and how their operands are packed.
#include "kernels/attention/attention_blocks.h"

namespace jumar {

GemmOperand Turned(GemmOperand x) {
  std::swap(x.rows, x.k);
  std::swap(x.row_stride, x.k_stride);
  return x;
}

GemmOperand AttentionPlan::BF16Rows(const Rows& from, int64_t row, int64_t rows, ScratchFrame& frame) const {
  const auto operand = [&](const TensorView& x) {
    return GemmOperand{
        Element(x, from.batch, from.head, from.begin + row), x.dtype, rows, x.size[3], x.stride[2], x.stride[3]};
  };
  GemmOperand all = operand(from.x);
  if (from.rope.rank == 0) return all;
  // Side by side: packed columns go in steps.
  const GemmOperand parts[2] = {all, operand(from.rope)};
  all = {nullptr, all.dtype, rows, Columns(), Columns(), 1};
  uint16_t* joined = frame.Alloc<uint16_t>(rows * all.k);
  all.data = joined;
  for (const GemmOperand& part : parts) {
    const uint16_t* x = static_cast<const uint16_t*>(part.data);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < part.k; ++k) joined[r * all.k + k] = x[r * part.row_stride + k * part.k_stride];
    }
    joined += part.k;
  }
  return all;
}

int64_t AttentionPlan::DotKeys(int64_t columns) const {
  if (dots == nullptr) return Padded(columns) / width * PanelOf(key_block);
  return RoundUp(key_block / dots->mr * dots->PanelStride(dots->mr, columns) / 2, 64);
}

int64_t AttentionPlan::DotQueries(int64_t columns) const {
  if (dots == nullptr) return RoundUp(columns * width, 64);
  return RoundUp(dots->PanelStride(dots->nr, columns) / 2, 64);
}

void AttentionPlan::PackDotKeys(const Rows& from, int64_t row, int64_t rows, void* out) const {
  if (dots == nullptr) return Pack(from, row, rows, PanelOf(key_block), out);
  ScratchFrame frame;
  const GemmOperand x = BF16Rows(from, row, rows, frame);
  dots->pack_a({&x, 0, rows, 0, x.k, dots->PanelStride(dots->mr, x.k), out});
}

void AttentionPlan::PackDotQueries(const Rows& from, int64_t row, int64_t rows, const void* packed,
                                   int64_t panel_stride, int64_t packed_row, void* out) const {
  if (dots != nullptr) {
    ScratchFrame frame;
    const GemmOperand x = BF16Rows(from, row, rows, frame);
    return dots->pack_b({&x, 0, rows, 0, x.k, dots->PanelStride(dots->nr, x.k), out});
  }
  const int64_t columns = from.x.size[3] + (from.rope.rank == 0 ? 0 : from.rope.size[3]);
  for (int64_t c = 0; c < columns; c += width) {
    const void* first = At(packed, c / width * panel_stride + packed_row * width, ComputeBytes());
    const GemmOperand operand{first, shape.compute, rows, width, width, 1};
    const int64_t cols = std::min(width, columns - c);
    gemm.pack_b({&operand, 0, rows, 0, cols, width * width, At(out, c * width, ComputeBytes())});
  }
}

void AttentionPlan::Dots(const PanelKeys& keys, int64_t rows, int64_t depth, const void* dot_keys,
                         const void* dot_queries, void* panel_out) const {
  if (dots == nullptr) {
    PanelTile tiles[kMaxTiles];
    const int64_t count = EvenTiles(keys.begin, keys.end, products.tile_rows, tiles,
                                    [&](const PanelTile&) { return std::pair<int64_t, int64_t>(0, depth); });
    products.by_rows({dot_keys, PanelOf(key_block), dot_queries, 0, rows, panel_out, width, false}, tiles, count);
    return;
  }
  // Whole panels of keys: a block is a multiple of them.
  const int64_t begin = keys.begin / dots->mr * dots->mr;
  GemmBlock block{};
  block.m = RoundUp(keys.end - begin, dots->mr);
  block.n = width;
  block.kc = depth;
  block.a_panel = dots->PanelStride(dots->mr, depth);
  block.a = At(dot_keys, begin / dots->mr * block.a_panel, 2);
  block.b = dot_queries;
  block.c = At(panel_out, begin * width, ComputeBytes());
  block.ldc = width;
  dots->multiply_near(block);
}

}  // namespace jumar
