// What benchmarks share: their operands.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "jumar/tensor.h"

namespace jumar::testing {

// Element i = value; 16-bit dtypes get its upper half, which is a bf16.
inline void SetValue(DType dtype, void* data, int64_t i, float value) {
  char* to = static_cast<char*>(data) + i * static_cast<int64_t>(SizeOf(dtype));
  if (dtype == DType::kF64) {
    const double wide = value;
    std::memcpy(to, &wide, 8);
  } else if (dtype == DType::kF32) {
    std::memcpy(to, &value, 4);
  } else {
    std::memcpy(to, reinterpret_cast<const char*>(&value) + 2, 2);
  }
}

// n elements, each value_of(random 32 bits).
template <typename F>
std::vector<char> RandomValues(DType dtype, int64_t n, const F& value_of) {
  std::vector<char> data(static_cast<size_t>(n) * SizeOf(dtype));
  uint32_t state = 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    SetValue(dtype, data.data(), i, value_of(state));
  }
  return data;
}

// Multiples of 1/32 from -3/32 to 4/32: short sums of their products are exact.
inline std::vector<char> SmallValues(DType dtype, int64_t n) {
  return RandomValues(dtype, n,
                      [](uint32_t random) { return static_cast<float>(static_cast<int>(random >> 29) - 3) / 32; });
}

}  // namespace jumar::testing
