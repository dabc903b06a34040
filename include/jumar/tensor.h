// The one way kernels see memory: a typed, strided, non-owning view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jumar {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64, kI32, kI64, kBool };

size_t SizeOf(DType dtype);
const char* Name(DType dtype);  // "float32", "bfloat16", ..., "bool" (one byte an element)

inline bool IsFloating(DType d) { return d < DType::kI32; }

// bf16 and fp16 values travel as their bits; src/simd widens and narrows them.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline constexpr int kMaxRank = 12;

// Sizes and strides are in elements. A stride may be 0 (expanded) or negative-free arbitrary. `data` may be null
// when the view has no elements.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= size[i];
    return n;
  }
  template <typename T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
};

// A row-major contiguous view. Throws Error when there are more than kMaxRank sizes.
TensorView Contiguous(void* data, DType dtype, const std::vector<int64_t>& sizes);

bool IsContiguous(const TensorView& view);
bool SameShape(const TensorView& a, const TensorView& b);

// "[2, 3, 4]" and "bfloat16[2, 3, 4]", for error texts.
std::string ShapeString(const TensorView& view);
std::string Describe(const TensorView& view);

// The part [begin, begin + length) of dimension `dim`; no copy.
TensorView Narrow(const TensorView& view, int dim, int64_t begin, int64_t length);

}  // namespace jumar
