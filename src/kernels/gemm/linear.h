// Linear layer on the packed matrix product.
//
//   y[.., o]  = sum over i of x[.., i] * weight[o, i]  + bias[o]
//   dx[.., i] = sum over o of dy[.., o] * weight[o, i]
//   dw[o, i]  = sum over tokens of dy[t, o] * x[t, i]
//   db[o]     = sum over tokens of dy[t, o]
//
// x [.., I] and dy [.., O] have rank >= 1 and any strides (leading dimensions that are no arithmetic sequence in memory
// are copied first); weight [O, I], bias [O], any strides. Numbers, dtypes and determinism: see gemm.h. Every result is
// a view given by the caller and is rounded once to its own dtype.
//
// All functions throw jumar::Error, with `op` first in the text, before any memory is written.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

// `bias` may be null. y [.., O].
void Linear(const char* op, const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& y);

// dx [.., I].
void LinearDgrad(const char* op, const TensorView& dy, const TensorView& weight, const TensorView& dx);

// dw [O, I].
void LinearWgrad(const char* op, const TensorView& dy, const TensorView& x, const TensorView& dw);

// db [O].
void LinearBiasGrad(const char* op, const TensorView& dy, const TensorView& db);

}  // namespace jumar
