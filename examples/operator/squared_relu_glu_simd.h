// What the SIMD file gives to the operator: blocks of n adjacent elements of one dtype.
#pragma once

#include "jumar/tensor.h"

namespace jumar::example {

void ForwardBlock(DType dtype, const void* input, const void* gate, void* y, int64_t n);
void BackwardBlock(DType dtype, const void* dy, const void* input, const void* gate, void* dinput, void* dgate,
                   int64_t n);

}  // namespace jumar::example
