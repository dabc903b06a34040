// Between rotary.cc, which plans, and the SIMD code, which works on blocks of rows.
//
// Rows of x that share a table row are "reduced" rows of one "kept" row. A block is kept x reduced rows; row (k, r) of
// an operand starts at element kept_offset[k] + reduced_offset[r] of its data. Elements within a row are `step` apart.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"
#include "kernels/rotary/rotary.h"

namespace jumar {

struct RowOperand {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t step = 1;
  const int64_t* kept_offset = nullptr;
  const int64_t* reduced_offset = nullptr;  // null for tables
};

struct RotaryBlock {
  int64_t kept = 0;
  int64_t reduced = 0;
  bool kept_inside = false;  // walk kept rows in the inner loop; else reduced rows
  int64_t dim = 0;           // elements per row
  int64_t width = 0;         // of them rotated
  bool stream = false;       // rows that are aligned to cache lines may be written past the caches
  RotaryMode mode = RotaryMode::kHalf;
};

// out = x * cos + R(x) * sin, or with `transpose` out = x * cos + R^T(x * sin).
void RotaryRows(const RotaryBlock& block, bool transpose, const RowOperand& x, const RowOperand& cos,
                const RowOperand& sin, const RowOperand& out);

// out = x * cos + (x matrix) * sin, with a dim x dim matrix in the compute type.
void RotaryMatrixRows(const RotaryBlock& block, const RowOperand& x, const RowOperand& cos, const RowOperand& sin,
                      const void* matrix, const RowOperand& out);

// Elements that one row of sums takes, in the compute type.
int64_t RotarySumsStride(DType dtype, int64_t width);

// Adds grad * x and grad * R(x) of all rows of kept row k to sums + k * RotarySumsStride().
void RotarySumRows(const RotaryBlock& block, const RowOperand& grad, const RowOperand& x, void* sums);

// Adds `parts` rows of sums, `part_stride` elements apart, in order, and writes them to one row of dcos and dsin
// (either may be null) of `width` elements.
void RotaryStoreSums(DType compute, RotaryMode mode, int64_t width, const void* sums, int64_t parts,
                     int64_t part_stride, const TensorView* dcos_row, const TensorView* dsin_row);

}  // namespace jumar
