// Between masked_softmax.cc and its SIMD code: one row of n adjacent elements. hide, work: numbers of the compute type;
// hide other than 0 hides.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

void MaskedSoftmaxRow(DType dtype, const void* x, const void* hide, double scale, void* work, void* y, int64_t n);
void MaskedSoftmaxBackwardRow(DType dtype, const void* dy, const void* y, const void* hide, double scale, void* dx,
                              int64_t n);

}  // namespace jumar
