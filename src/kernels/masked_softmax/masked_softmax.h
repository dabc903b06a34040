// Softmax of scaled scores under a mask that fills with a finite number.
//
//   t = scale * x, or -10000 where the mask is not 0      y = softmax of t along the last dimension
//   dx = scale * y * (dy - sum of dy * y along the row), 0 where the mask is not 0
//
// A row that is hidden whole is uniform, 1 / n, and its dx is 0. x, y, dy, dx: one shape of at least one dimension, one
// dtype of fp32, bf16, fp16, fp64, any strides. mask: bytes (bool), of a shape that broadcasts to x's. Computed in fp32
// (fp64 for fp64), one rounding at the store. With u = 2^-24 (2^-53), beside half an ulp:
//   |error of y| <= (12 + 2 max_j |scale x_j| + n / 8) u y
//   |error of dx| <= (6 + n / 8) u |scale| y (|dy| + sum |dy y|)
// NaN that the mask leaves makes its row NaN; hidden NaN is not read. Results do not depend on the thread count.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

void ScaledMaskedSoftmax(const char* op, const TensorView& x, const TensorView& mask, double scale,
                         const TensorView& y);
void ScaledMaskedSoftmaxBackward(const char* op, const TensorView& dy, const TensorView& y, const TensorView& mask,
                                 double scale, const TensorView& dx);

}  // namespace jumar
