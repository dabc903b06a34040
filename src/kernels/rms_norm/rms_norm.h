// RMSNorm family. For each row x of N elements (the trailing dimensions that gamma has):
//
//   rstd = (sum x^2 / N + epsilon)^(-1/2)       xhat = x * rstd
//   y    = xhat * (offset + gamma)              offset 0: Llama style, 1: zero-centred weight (Gemma, Qwen3-Next)
//   y    = xhat * gamma * silu(gate)            gated form (Qwen3-Next), norm before gate
//
// Gradients, with u = dy * (offset + gamma) [* silu(gate)] and the mean over the N elements of a row:
//
//   dx     = rstd * (u - xhat * mean(u * xhat))
//   dgamma = sum over rows of dy * xhat [* silu(gate)]
//   dgate  = dy * xhat * gamma * s * (1 + gate * (1 - s)),  s = sigmoid(gate)
//
// Formulas: Zhang and Sennrich 2019 (arXiv:1910.07467) and their derivative.
//
// x, y, dy, dx, gate: one of fp32, bf16, fp16, fp64 (all of them the same), any strides. gamma: any of these (fp64 only
// with fp64). Everything is computed in fp32 (fp64 for fp64) and rounded once at the store. rstd and dgamma are fp32
// (fp64 for fp64). Row sums are kept in vector lanes per block of 4096 elements and added up in fp64. dgamma is summed
// in fixed chunks of rows, so it does not depend on the thread count.
//
// All functions throw jumar::Error, with `op` first in the text, before any memory is written.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

// x [a.., n..], gamma [n..]; y like x; rstd [a.., 1..] of x's rank, or any view with one element per row.
void RmsNorm(const char* op, const TensorView& x, const TensorView& gamma, double epsilon, double offset,
             const TensorView& y, const TensorView& rstd);

// dx like x, dgamma like gamma.
void RmsNormBackward(const char* op, const TensorView& dy, const TensorView& x, const TensorView& gamma,
                     const TensorView& rstd, double offset, const TensorView& dx, const TensorView& dgamma);

// sum = x1 + x2 rounded to the dtype of x1; y, rstd = RmsNorm(sum). As the vendor's golden code does.
void AddRmsNorm(const char* op, const TensorView& x1, const TensorView& x2, const TensorView& gamma, double epsilon,
                const TensorView& y, const TensorView& rstd, const TensorView& sum);

// Gradient of both x1 and x2: RmsNormBackward of dy at `sum`, plus dsum (the gradient that arrives at the returned
// sum), added before the one rounding.
void AddRmsNormBackward(const char* op, const TensorView& dy, const TensorView& dsum, const TensorView& sum,
                        const TensorView& gamma, const TensorView& rstd, const TensorView& dx,
                        const TensorView& dgamma);

// gate like x.
void RmsNormGated(const char* op, const TensorView& x, const TensorView& gate, const TensorView& gamma, double epsilon,
                  const TensorView& y, const TensorView& rstd);

void RmsNormGatedBackward(const char* op, const TensorView& dy, const TensorView& x, const TensorView& gate,
                          const TensorView& gamma, const TensorView& rstd, const TensorView& dx,
                          const TensorView& dgate, const TensorView& dgamma);

}  // namespace jumar
