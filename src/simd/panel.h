// Arithmetic on panels: tiles of scores of `n` keys by one panel of queries. Element (key, query) of a panel is at
// key * width + query, so that a query is a vector lane: maxima and sums of rows need no horizontal step, and a panel
// of probabilities is a packed B operand of the matrix kernel as it stands.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

// The maximum of a row without scores: finite, so that no difference of maxima is NaN.
inline constexpr double kLowestScore = -3.4028234663852886e38;

// scores = scale * (scores + pse), or minus infinity where the key is hidden. Null: absent.
struct PanelMask {
  void* scores;
  int64_t n;
  int64_t key;  // position of the first key
  double scale;
  const void* low;  // per query: sees keys [low, high), in the compute type
  const void* high;
  const void* hide;  // panel: other than 0 hides
  const void* pse;   // panel
};

// One step of the online softmax: scores become exp(scale * s - max); max and sum per query are updated and
// rescale = exp(old max - new max). True if some rescale is not 1.
struct PanelSoftmax {
  void* scores;
  int64_t n;
  double scale;
  void* max;
  void* sum;
  void* rescale;
  bool half = false;  // rows of one vector, which holds all queries
};

// scores -> p, and dp -> p * (dp - delta), with p = exp(scale * s - max) * inverse_sum. With `keep`, dp is multiplied
// by it first and p at the end. `masked`: scores of minus infinity give exactly 0 in both, whatever dp holds.
struct PanelGradient {
  void* scores;
  void* dp;
  int64_t n;
  double scale;
  const void* max;
  const void* inverse_sum;
  const void* delta;
  const void* keep;
  bool masked;
  bool half = false;  // as of PanelSoftmax
};

// keep[key, query] = 1 / keep_prob or 0. Query lane r has counter words (key / 4, row + r, stream, offset).
struct PanelKeep {
  void* keep;
  int64_t n;
  int64_t key;
  int64_t row;
  uint32_t stream;
  uint64_t seed;
  uint64_t offset;
  double keep_prob;
};

struct PanelKernel {
  int64_t width;
  void (*mask)(const PanelMask&);
  bool (*softmax)(const PanelSoftmax&);
  void (*gradient)(const PanelGradient&);
  void (*keep)(const PanelKeep&);
  // x[row, query] *= y[query]
  void (*scale_lanes)(void* x, int64_t rows, const void* y);
  // x[row * ld + column] *= y[row], for column < cols
  void (*scale_rows)(void* x, int64_t ld, int64_t rows, int64_t cols, const void* y);
  // x[i] *= y[i]
  void (*multiply)(void* x, int64_t count, const void* y);
  // x[i] += y[i]
  void (*add)(void* x, int64_t count, const void* y);
  // x[i] *= y
  void (*scale)(void* x, int64_t count, double y);
  bool (*finite)(const void* x, int64_t count);
  // dots[query] = sum over rows of x[row, query] * y[row, query]
  void (*dot_lanes)(const void* x, const void* y, int64_t rows, void* dots);
  // delta of `rows` rows: sum over columns of dy * out, both of `dtype`, with adjacent columns
  void (*dot_rows)(DType dtype, const void* dy, int64_t dy_stride, const void* out, int64_t out_stride, int64_t rows,
                   int64_t cols, void* delta);
};

const PanelKernel& ChoosePanelKernel(bool f64);

}  // namespace jumar
