// The definition of ulp_error.h, one element at a time, with library functions only.
#pragma once

#include <cmath>
#include <limits>

#include "jumar/tensor.h"

namespace jumar::ref {

inline double UlpError(DType dtype, double actual, double expected, double slack) {
  const int digits = dtype == DType::kBF16 ? 8 : dtype == DType::kF16 ? 11 : dtype == DType::kF32 ? 24 : 53;
  const int max_exp = dtype == DType::kF16 ? 15 : dtype == DType::kF64 ? 1023 : 127;
  const int min_exp = 1 - max_exp;
  const double infinity = std::numeric_limits<double>::infinity();
  if (std::isnan(actual) || std::isnan(expected)) return std::isnan(actual) && std::isnan(expected) ? 0 : infinity;
  if (std::isinf(actual) || std::isinf(expected)) {
    if (actual == expected) return 0;
    // The largest finite value plus half an ulp; beyond double's range for double itself.
    const double edge = std::ldexp(2.0 - std::ldexp(1.0, -digits), max_exp);
    return std::isinf(actual) && !std::isinf(expected) && std::abs(expected) >= edge &&
                   std::signbit(actual) == std::signbit(expected)
               ? 0
               : infinity;
  }
  const int exponent = expected == 0 ? min_exp : std::min(std::max(std::ilogb(expected), min_exp), max_exp);
  return std::abs(actual - expected) / (std::ldexp(1.0, exponent - digits + 1) + slack);
}

}  // namespace jumar::ref
