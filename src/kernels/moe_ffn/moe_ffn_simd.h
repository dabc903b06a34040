// Between moe_ffn.cc and its SIMD code. Sums, probs and dots are in the compute type, everything else in `dtype`.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

// out = silu(gate_sums) * up_sums; the sums themselves, rounded, to saved_gate and saved_up unless those are null.
struct SwigluTile {
  DType dtype;
  int64_t rows;
  int64_t cols;
  const void* gate_sums;
  const void* up_sums;
  int64_t ld_sums;
  void* out;
  int64_t out_stride;
  void* saved_gate;
  void* saved_up;
  int64_t saved_stride;
};
void RunSwigluTile(const SwigluTile& tile);

// dots[r] = sum of sums[r] * h[r];  dgate, dup from probs[r] * sums[r];  weighted[r] = probs[r] * h[r].
struct SwigluGradTile {
  DType dtype;
  int64_t rows;
  int64_t cols;
  const void* sums;
  int64_t ld_sums;
  const void* probs;
  const void* gate;
  const void* up;
  int64_t saved_stride;
  void* dgate;
  void* dup;
  int64_t grad_stride;
  void* weighted;
  int64_t weighted_stride;
  void* dots;
};
void RunSwigluGradTile(const SwigluGradTile& tile);

// out = sum over k < count, ascending, of weights[k] * in[rows[k]], for rows[k] < limit; weights null: all ones. `in`
// and weights are in the compute type.
struct CombineRow {
  DType dtype;
  int64_t cols;
  const void* in;
  int64_t ld_in;
  const int32_t* rows;
  int64_t count;
  int64_t limit;
  const void* weights;
  void* out;
};
void RunCombineRow(const CombineRow& row);

}  // namespace jumar
