// Between the optimizer's drivers and their SIMD code: blocks of adjacent elements.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

// The constants of one step, as the inner loop wants them.
struct AdamWConstants {
  double sign;            // -1 to maximize
  double weight1;         // 1 - beta1
  double beta2, weight2;  // beta2, 1 - beta2
  double keep;            // 1 - lr * weight_decay
  double step_size;       // lr / correction1 * sqrt(correction2)
  double eps;             // eps * sqrt(correction2)
};

// Pointers of inputs and outputs may be equal. Null: maximum, master.
struct AdamWBlockPointers {
  const void *grad, *param, *exp_avg, *exp_avg_sq, *maximum, *master;
  void *param_out, *exp_avg_out, *exp_avg_sq_out, *master_out;
};

// All of one dtype.
void AdamWBlock(DType dtype, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n);
// fp32 moments and master, 16-bit param; grad fp32 or param's dtype. No maximum.
void AdamWMasterBlock(DType param, DType grad, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n);

// Exact to fp64 and rounded from it, n <= kBlockElements.
void WidenToF64(DType from, const void* in, double* out, int64_t n);
void NarrowFromF64(DType to, const double* in, void* out, int64_t n);

enum class Power { kOne, kTwo, kMax, kOther };
// The sum of |x|^p over n elements, or the largest |x|; NaN when one of them is NaN.
double PowerSumBlock(DType dtype, Power power, double p, const void* in, int64_t n);
void ScaleBlock(DType dtype, double factor, const void* in, void* out, int64_t n);

}  // namespace jumar
