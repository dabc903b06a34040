// AdamW over any number of tensors in one multithreaded pass.
//
// With g = grad, or -grad to maximize, and step t counted from 1:
//   exp_avg    <- exp_avg + (1 - beta1) * (g - exp_avg)
//   exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * g^2
//   v          =  exp_avg_sq, or max(max_exp_avg_sq, exp_avg_sq) where a maximum is given (it is not written)
//   param      <- param * (1 - lr * weight_decay)
//                 - lr / (1 - beta1^t) * exp_avg / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Every result is rounded once, from a value within 0.01 ulp of the fp64 result, cancellation included: computed in
// fp64 (root and quotient to 2^-44, except for fp64 tensors), or, where all tensors have one 16-bit dtype, in fp32
// wherever that is good enough. Tensors of one entry have one shape, any dtype of fp32, bf16, fp16, fp64 each, any
// strides. Every element is computed on its own, so results do not depend on the number of threads. NaN and infinities
// go where torch's formula sends them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// The numbers of one step. correction1 = 1 - beta1^t, correction2 = 1 - beta2^t.
struct AdamWNumbers {
  double lr, beta1, beta2, eps, weight_decay;
  bool maximize;
  double correction1, correction2;
};

struct AdamWTensors {
  TensorView param, grad, exp_avg, exp_avg_sq;
  std::optional<TensorView> max_exp_avg_sq;
  // An fp32 copy of a 16-bit param, which is stepped instead and then rounded to param. Where it does not round to what
  // param holds, param was changed elsewhere, and the step starts from param. Both moments are fp32 then.
  std::optional<TensorView> master;
  AdamWNumbers numbers;
};

// Checks every entry, then updates all. Throws Error, with nothing written: dtypes or shapes that do not fit, an entry
// that overlaps itself, or two of which one is written. Names of entries in errors are "param[3]".
void AdamW(const char* op, const std::vector<AdamWTensors>& tensors);

}  // namespace jumar
