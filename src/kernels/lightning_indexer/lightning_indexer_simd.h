// Arithmetic on scores in the compute type. In tiles a row is a head, or a query, and lanes are keys; in panels (those
// of simd/row_products.h) a row is a key, and lanes are heads.
#pragma once

#include <cstdint>

namespace jumar {

// Scores of rows i (heads, or queries) with keys j at tile[i * ld + j]:
//   out[i * out_stride + j] += exp(scale * tile - max[i * stat_stride]) * inverse[i]
// Rows whose inverse is 0 are skipped.
struct ProbabilityTile {
  const void* tile;
  int64_t ld;
  int64_t rows;
  int64_t n;
  double scale;
  const void* max;
  const void* inverse;
  void* out;
  int64_t out_stride;
};

// Products of heads with n keys: head h and key j at r[j * ld + h]. Rows are whole panels; weights and statistics of
// heads are padded likewise, with zeros.
struct TurnedTile {
  void* r;
  int64_t ld;
  int64_t heads;
  int64_t n;
};

struct IndexerKernel {
  int64_t width;  // of a panel
  // scores[j] = sum over h of w[h] * max(r[h * ld + j], 0)
  void (*tile_scores)(const void* r, int64_t ld, int64_t heads, int64_t n, const void* w, void* scores);
  // The same of a turned tile.
  void (*turned_scores)(const TurnedTile& r, const void* w, void* scores);
  // r becomes w[h] * di[j] where r > 0, else 0;  dw[h] += sum over j of di[j] * max(r, 0)
  void (*score_gradient)(const TurnedTile& r, const void* w, const void* di, void* dw);
  void (*tile_probabilities)(const ProbabilityTile& tile);
  // out[j] += sum over heads of exp(scale * r - max[h]) * inverse[h]. Heads whose inverse is 0 are skipped.
  void (*turned_probabilities)(const TurnedTile& r, double scale, const void* max, const void* inverse, void* out);
  // The largest of x and `start`; a NaN may be passed over.
  double (*max)(const void* x, int64_t n, double start);
  // x becomes exp(x - max); returns the sum.
  double (*exp_sum)(void* x, int64_t n, double max);
  // x[i] += y[i]
  void (*add)(void* x, const void* y, int64_t n);
  // Those of x, numbered from `first`, that are not <= threshold (all of them with `all`), in order: appended to
  // `scores` and `ids` (int32, for fp64 int64), which have room for n and a vector more. Returns how many.
  int64_t (*append)(const void* x, int64_t n, int64_t first, double threshold, bool all, void* scores, void* ids);
};

const IndexerKernel& ChooseIndexerKernel(bool f64);

}  // namespace jumar
