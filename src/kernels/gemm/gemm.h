// Packed matrix product.
//
//   C[m, n] = sum over k of A[m, k] * B[k, n]  (+ bias[n])
//
// A [M, K], B [K, N], C [M, N] are 2-D views with any strides, so a transposed operand is a view with its strides
// swapped; stride 0 (expanded) inputs are fine. Nothing is copied but the packed panels of a block at a time.
//
// dtypes: A, B, bias and C each one of fp32, bf16, fp16, in any mixture; or all of them fp64. 16-bit inputs widen
// exactly, products are summed in fp32 (fp64 for fp64) and C is rounded once (nearest even) after the bias was added.
// Each element is summed over k in ascending blocks of a length that depends on K, and on N up to 16, alone, one
// accumulator per element and block, and the block sums are added in order:
//
//   |error| <= (block + K / block) * 2^-24 * sum |a b|  + half an ulp of C's dtype,   block <= 512
//
// K is never split among threads, so results are bit-identical for every thread count. NaN and infinity propagate.
// K = 0 gives the bias or 0.
//
// bf16 x bf16 uses TDPBF16PS at level AVX3_SPR (AMX) and VDPBF16PS at level AVX3_ZEN4 on CPUs other than Intel's, where
// widening to fp32 is faster. These instructions take subnormal inputs as 0 and flush subnormal sums to 0, round to
// nearest even whatever the rounding mode, and add the products of neighbouring k in pairs. The bound above holds but
// for magnitudes under 2^-126. Cap JUMAR_SIMD at AVX3 where subnormals matter.
#pragma once

#include "jumar/tensor.h"

namespace jumar {

// `bias` may be null. C must not overlap an input; elements outside C are not written. Throws jumar::Error, with `op`
// first in the text, for a rank, shape or dtype that does not fit.
void Gemm(const char* op, const TensorView& a, const TensorView& b, const TensorView* bias, const TensorView& c);

// C += A * B, for C in fp32 (fp64 for fp64) with adjacent columns: the sums start at the elements of C.
void GemmAdd(const char* op, const TensorView& a, const TensorView& b, const TensorView& c);

// View of a matrix with its two dimensions swapped.
TensorView Transposed(const TensorView& matrix);

}  // namespace jumar
