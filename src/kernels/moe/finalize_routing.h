// The results of experts back to their tokens, with what is added to them.
//
//   out[t] = skip1[t] + skip2[t] + sum over k of scales[t, k] (rows[m(t, k)] + bias[e(t, k)])
//
//   m(t, k) = row_idx[k n + t], or row_idx[t K + k] where `by_row`; -1: no row, the bias counts all the same
//   e = expert ids [n, K]
//
//   drows[m(t, k)] = scales[t, k] grad[t];  rows that nothing names: 0        dscales[t, k] = <grad[t], rows[m] +
//   bias[e]> dbias[i] = sum over t, k with e(t, k) = i, ascending, of scales[t, k] grad[t]
//
// rows [.., H], skip1, skip2 [n, H], bias [E, H]: one dtype of fp32, bf16, fp16, fp64; scales [n, K] any of these, ones
// without; row_idx [n K], e int32 or int64; any strides. Computed in fp32 (fp64 for fp64 rows) in the order skip1,
// skip2, rows by k, bias by k; one rounding. Error: 0.51 ulp for 16 bits, else 1 ulp, plus 2 K + 2 eps of the sum of
// the terms' magnitudes (gradients: eps times the number of terms). The same bits for every thread count.
//
// Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

struct FinalizeOperands {
  TensorView rows;
  TensorView row_idx;
  const TensorView* bias = nullptr;
  const TensorView* scales = nullptr;
  const TensorView* experts = nullptr;
  bool by_row = false;
  int64_t top_k = 1;  // where there are no scales
};

// n of out [n, H].
int64_t CheckFinalizeRouting(const char* op, const FinalizeOperands& operands, const TensorView* skip1,
                             const TensorView* skip2);
void FinalizeRouting(const char* op, const FinalizeOperands& operands, const TensorView* skip1, const TensorView* skip2,
                     const TensorView& out);

// grad [n, H]. drows like rows, dscales like scales, dbias like bias; the latter two where there are such.
void FinalizeRoutingGrad(const char* op, const TensorView& grad, const FinalizeOperands& operands,
                         const TensorView& drows, const TensorView* dscales, const TensorView* dbias);

}  // namespace jumar
