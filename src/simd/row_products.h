// Products with rows that lie anywhere in memory (keys and values picked by index), read where they are: no packing.
// Panels are those of simd/panel.h and of packed B operands: element (i, lane) at i * width + lane, width = 2 vectors.
// The panels of scores may be a part of longer rows, or have rows of one vector that holds all lanes: element (i, lane)
// at i * ld + lane, where ld is not 0.
#pragma once

#include <cstdint>

namespace jumar {

// panel[i, lane] (+)= sum over k < depth of rows[i][k] * b[k, lane]. Of the panel's lanes the first `lanes` are wanted:
// up to one vector of them costs half, the other vector is 0 then, or not there where ld is less than width. Sums over
// blocks of 256 k, in order.
struct RowDots {
  const void* const* rows;
  int64_t n;
  int64_t depth;
  const void* b;  // panel [depth, width]
  int64_t lanes;
  void* panel;
  bool accumulate;
  int64_t ld = 0;  // of the panel; 0: width
};

// The same for few lanes, in float: panel[i * ld + h] (+)= sum over k < depth of rows[i][k] * q[h * ldq + k], for
// h < heads, a multiple of 4. Lanes are k, of which q has whole vectors: zeros behind depth. Sums of every lane over
// all k, then of the lanes.
struct RowDeepDots {
  const void* const* rows;
  int64_t n;
  int64_t depth;
  const void* q;
  int64_t ldq;
  int64_t heads;
  void* panel;
  int64_t ld;
  bool accumulate;
};

// out[lane, j] (+)= sum over i < n of panel[i, lane] * rows[i][j], for lanes < `lanes` and j < cols. `out` has rows of
// `ld` elements, at least cols rounded up to the panel width; those behind cols are written too. Sums over blocks of
// 128 i, in order.
struct RowSums {
  const void* const* rows;
  int64_t n;
  int64_t cols;
  const void* panel;
  int64_t lanes;
  void* out;
  int64_t ld;
  bool accumulate;
  int64_t panel_ld = 0;  // 0: width
  bool bf16 = false;     // rows are of bf16, the rest of float
};

// rows[i][j] += sum over lane < lanes of panel[i, lane] * b[j / width][lane, j % width], for j < cols, a multiple of
// width, i ascending: a row may come more than once. b: panels [lanes, width], b_panel elements apart, their rows
// b_step: a matrix of lanes by columns has b_panel = width.
struct RowUpdates {
  void* const* rows;
  int64_t n;
  int64_t cols;
  const void* panel;
  int64_t lanes;
  const void* b;
  int64_t b_panel;
  int64_t b_step;
  int64_t ld = 0;  // of the panel; 0: width
};

struct RowProducts {
  void (*dots)(const RowDots&);
  void (*sums)(const RowSums&);
  void (*updates)(const RowUpdates&);
  void (*deep_dots)(const RowDeepDots&) = nullptr;
  int64_t deep_heads = 0;  // up to so many lanes deep_dots is the faster one
};

// For float (double) elements throughout.
const RowProducts& ChooseRowProducts(bool f64);

}  // namespace jumar
