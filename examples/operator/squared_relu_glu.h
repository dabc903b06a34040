// Gated squared ReLU (So et al. 2021, arXiv:2109.08668, as a gated unit). With r = max(input, 0), per element:
//
//   y      = r^2 * gate
//   dinput = dy * gate * 2r
//   dgate  = dy * r^2
//
// input, gate, y, dy, dinput, dgate: one shape, one dtype of fp32, bf16, fp16, fp64, any strides. Computed in fp32
// (fp64 for fp64), one rounding at the store. Within 0.51 ulp for 16-bit dtypes, 2 ulp for fp32 and fp64 where no
// product leaves the range of normal numbers. NaN in input or gate gives NaN. Results do not depend on the thread
// count.
//
// Throws jumar::Error, with `op` first in the text, before any memory is written.
#pragma once

#include "jumar/tensor.h"

namespace jumar::example {

void SquaredReluGlu(const char* op, const TensorView& input, const TensorView& gate, const TensorView& y);

void SquaredReluGluBackward(const char* op, const TensorView& dy, const TensorView& input, const TensorView& gate,
                            const TensorView& dinput, const TensorView& dgate);

}  // namespace jumar::example
