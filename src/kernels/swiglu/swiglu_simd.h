// Between swiglu.cc and its SIMD code: blocks of adjacent elements.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

// stream: write past the caches. Call StreamFence() on the same thread before the results are handed over.
void SwigluBlock(DType dtype, const void* gate, const void* up, void* out, int64_t n, bool stream);
void SwigluBackwardBlock(DType dtype, const void* grad, const void* gate, const void* up, void* dgate, void* dup,
                         int64_t n, bool stream);
void StreamFence();

}  // namespace jumar
