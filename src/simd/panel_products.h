// Products whose left operand lies as panels do, so that neither it nor its transpose is packed.
//
// A panel matrix [rows, cols] is cut into panels of `width` columns, two vectors: element (r, c) is at
// c / width * panel + r * width + c % width. Tiles of scores (simd/panel.h) are such matrices of keys by queries, and
// so are packed B operands of the matrix kernel, of k by columns.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

// Rows [row, row + rows) of a product, at most PanelProducts::tile_rows, sum the k of [begin, end).
struct PanelTile {
  int64_t row;
  int64_t rows;
  int64_t begin;
  int64_t end;
};

// c[i, j] (+)= sum over the k of i's tile of a(i, k) * b(k, j): one accumulator an element, k ascending. b is a panel
// matrix [k, n]. c has rows of `ldc` elements, and n rounded up to the width of them are written.
struct PanelProduct {
  const void* a;
  int64_t a_panel;
  const void* b;
  int64_t b_panel;
  int64_t n;
  void* c;
  int64_t ldc;
  bool accumulate;
};

// Rows [0, rows) of `x`, widened, become those of a panel matrix, in columns from `col` on; the rest of the last panel
// is filled with zeros.
struct PanelRows {
  DType dtype;
  const void* x;
  int64_t row_stride;
  int64_t col_stride;
  int64_t rows;
  int64_t cols;
  int64_t col;
  void* out;
  int64_t panel;
};

struct PanelProducts {
  int64_t width;
  int64_t tile_rows;
  // a is a panel matrix [i, k].
  void (*by_rows)(const PanelProduct&, const PanelTile* tiles, int64_t count);
  // a is a panel [k, i] with i < width: its transpose is the left operand. a_panel is not used.
  void (*by_columns)(const PanelProduct&, const PanelTile* tiles, int64_t count);
  void (*pack)(const PanelRows&);
};

// For float (double) elements throughout.
const PanelProducts& ChoosePanelProducts(bool f64);

}  // namespace jumar
