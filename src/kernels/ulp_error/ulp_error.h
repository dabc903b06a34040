// How far a result is from an fp64 oracle, element by element, in ulps of the result's own dtype:
//
//   error[i] = |actual[i] - expected[i]| / (ulp(expected[i]) + slack[i])
//
// ulp(v) is the distance between neighbouring values of actual's dtype in the binade of v; below the smallest normal it
// is the subnormal spacing. A correctly rounded result has error <= 0.5. `slack` is what the accumulation of terms that
// cancel may cost in absolute terms (a small multiple of the compute type's epsilon times the sum of the terms'
// magnitudes); without it the unit is the plain ulp.
//
//   NaN against NaN: 0. NaN against anything else: infinity. Infinity against the same infinity: 0.
//   Infinity against a finite value that the dtype rounds to that infinity: 0. Any other infinity: infinity.
#pragma once

#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

struct UlpErrorResult {
  double max_ulp = 0;
  int64_t index = -1;  // of the first element with the largest error, row-major; -1 when there are no elements
  int64_t nan_mismatches = 0;
};

// actual: fp32, bf16, fp16 or fp64; expected: fp64 of the same shape; slack: fp64 of the same shape, not negative, or
// null (elements that are not finite count as 0). Any strides. Multithreaded; the result does not depend on the thread
// count. Throws Error "op: ..." for other dtypes or shapes.
UlpErrorResult UlpError(const char* op, const TensorView& actual, const TensorView& expected, const TensorView* slack);

}  // namespace jumar
