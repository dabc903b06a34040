// From one floating dtype to another.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

// dst[i] = src[i] in dst's dtype, rounded once (from fp64 to 16 bits at most 0.5 + 2^-14 ulp off). Equal shapes,
// floating dtypes, any strides. Multithreaded.
void ConvertAll(const TensorView& src, const TensorView& dst);

}  // namespace jumar
