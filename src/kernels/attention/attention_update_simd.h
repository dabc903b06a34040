// Between attention_update.cc and its SIMD code: weights of blocks of rows, and rows as weighted sums. Numbers are of
// the compute type.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

// For rows [0, n): max1 and sum1 become those of both parts, max2 and sum2 their weights.
void RingWeights(bool f64, void* max1, void* sum1, void* max2, void* sum2, int64_t n);

// weights[part * n + row]: lse in, weights out. lse[row]: that of all parts.
void LseWeights(bool f64, void* weights, int64_t parts, int64_t n, void* lse);

// out[c] = sum of weights[i * stride] * rows[i][c] over the parts whose weight is not 0.
void WeightedRow(DType dtype, const void* const* rows, const void* weights, int64_t stride, int64_t parts, void* out,
                 int64_t cols);

}  // namespace jumar
