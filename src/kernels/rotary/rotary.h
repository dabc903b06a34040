// Rotary position embedding:  out = x * cos + R(x) * sin  along the last dimension, with
//
//   half:        R(x) = concat(-x[h:], x[:h])                  h = width / 2
//   interleave:  R(x)[2i] = -x[2i + 1],  R(x)[2i + 1] = x[2i]
//
// cos and sin are any tables (cos^2 + sin^2 = 1 and equal halves are not assumed) of the same rank as x and of one
// shape: each dimension is 1 or that of x, the last one is the rotary width: even and at most x's. When it is smaller,
// the remaining elements of each row are copied (partial rotary). Gradients, with R^T the transpose of R:
//
//   dx   = grad * cos + R^T(grad * sin)       dcos = sum grad * x       dsin = sum grad * R(x)
//
// where the sums run over the dimensions in which cos has size 1 and x has not.
//
// x, out, grad, dx: one of fp32, bf16, fp16, fp64, any strides, rank 2 to 8. cos, sin: fp32, bf16 or fp16 (fp32 tables
// are used as they are, whatever x is); fp64 goes with fp64 only. Computed in fp32 (fp64 for fp64), one rounding at the
// store. The sums of dcos and dsin are kept in fp32 (fp64) in an order that depends on sizes and strides alone, so
// every result is the same for every thread count. Outputs must not overlap inputs.
#pragma once

#include <string>

#include "jumar/tensor.h"

namespace jumar {

enum class RotaryMode { kHalf, kInterleave };

// Throws Error "`op`: The rotary_mode of npu_rotary_mul should be half or interleave, but got ..." for other names.
RotaryMode ParseRotaryMode(const char* op, const std::string& name);

// Errors begin with "npu_rotary_mul".
void RotaryMul(const TensorView& x, const TensorView& cos, const TensorView& sin, RotaryMode mode,
               const TensorView& out);

// out = x * cos + (x matrix) * sin for a floating [D, D] matrix; no partial rotary. Forward only.
void RotaryMulMatrix(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& matrix,
                     const TensorView& out);

// dcos and dsin may be null; they have the shape of cos and any floating dtype of their own. x is read only for them.
// Errors begin with "npu_rotary_mul_backward".
void RotaryMulBackward(const TensorView& grad, const TensorView& x, const TensorView& cos, const TensorView& sin,
                       RotaryMode mode, const TensorView& dx, const TensorView* dcos, const TensorView* dsin);

}  // namespace jumar
