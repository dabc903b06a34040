// What benchmarks share: their operands and sizes.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
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

// Memory that begins on a cache line, as that of torch's tensors does.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  LineAllocator() = default;
  template <typename U>
  explicit LineAllocator(const LineAllocator<U>& /*other*/) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t /*n*/) { ::operator delete(p, kLine); }
  bool operator==(const LineAllocator& /*other*/) const { return true; }
};
using Memory = std::vector<char, LineAllocator<char>>;

// n elements, each value_of(random 32 bits).
template <typename F>
Memory RandomValues(DType dtype, int64_t n, const F& value_of) {
  Memory data(static_cast<size_t>(n) * SizeOf(dtype));
  uint32_t state = 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    SetValue(dtype, data.data(), i, value_of(state));
  }
  return data;
}

// Multiples of 1/32 from -3/32 to 4/32: short sums of their products are exact.
inline Memory SmallValues(DType dtype, int64_t n) {
  return RandomValues(dtype, n,
                      [](uint32_t random) { return static_cast<float>(static_cast<int>(random >> 29) - 3) / 32; });
}

// The sizes of mixtures of experts: balanced or Zipf's shares, experts, tokens, dtype.
struct Mixture {
  bool zipf;
  int64_t experts;
  int64_t tokens;
  DType dtype;
  std::string Text() const {
    return std::string(Name(dtype)) + "/" + std::to_string(experts) + "x" + std::to_string(tokens) +
           (zipf ? "/zipf" : "/balanced");
  }
};
inline std::vector<Mixture> Mixtures() {
  std::vector<Mixture> all;
  for (const bool zipf : {false, true}) {
    for (const int64_t experts : {8, 64, 128}) {
      for (const int64_t tokens : {512, 2048, 8192}) {
        for (const DType dtype : {DType::kBF16, DType::kF32}) all.push_back({zipf, experts, tokens, dtype});
      }
    }
  }
  return all;
}

}  // namespace jumar::testing
