// SwiGLU: out = silu(gate) * up, with silu(x) = x * sigmoid(x), and its gradients.
//
// Every tensor of one call has one floating dtype and may have any strides (expanded ones too). fp32, bf16 and fp16 are
// computed in fp32, fp64 in fp64, with one rounding at the store. Each element is computed on its own, so results do
// not depend on the number of threads. Inputs are never written; outputs must not overlap inputs.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

// out = silu(gate) * up. Shapes are equal. Errors begin with `op`.
void Swiglu(const char* op, const TensorView& gate, const TensorView& up, const TensorView& out);

// With s = sigmoid(gate):  dgate = grad * up * s * (1 + gate * (1 - s)),  dup = grad * gate * s.
void SwigluBackward(const char* op, const TensorView& grad, const TensorView& gate, const TensorView& up,
                    const TensorView& dgate, const TensorView& dup);

// The packed forms: `input` holds gate in the first half of dimension `dim` (negative: from the end) and up in the
// second; `out` and `grad` have half its size there, `dinput` the shape of `input`.
void SwigluPacked(const TensorView& input, int64_t dim, const TensorView& out);
void SwigluPackedBackward(const TensorView& grad, const TensorView& input, int64_t dim, const TensorView& dinput);

// `dim` counted from the front, after all checks of the packed form; for callers that must allocate the output first.
int CheckSwigluPacked(const char* op, const TensorView& input, int64_t dim);

}  // namespace jumar
