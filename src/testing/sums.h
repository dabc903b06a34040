// Integer and strided operands, aligned memory, and sums that are judged by the magnitudes of their terms.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "testing/test_util.h"

namespace jumar::testing {

inline Buffer IntBuffer(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& values) {
  Buffer buffer(dtype, sizes);
  buffer.Fill([&](int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); });
  return buffer;
}

// Layout 0: contiguous; 1: padded rows; 2: transposed memory; 3: every second element.
inline Buffer Matrix(DType dtype, int64_t rows, int64_t cols, int layout) {
  switch (layout) {
    case 1:
      return Buffer(dtype, {rows, cols}, {cols + 3, 1});
    case 2:
      return Buffer(dtype, {rows, cols}, {1, rows});
    case 3:
      return Buffer(dtype, {rows, cols}, {2 * cols, 2});
    default:
      return Buffer(dtype, {rows, cols});
  }
}

// Aligned memory, as torch hands it out: what may be written past the caches.
class Aligned {
 public:
  Aligned(DType dtype, const std::vector<int64_t>& sizes) : view_(Contiguous(nullptr, dtype, sizes)) {
    const size_t bytes = static_cast<size_t>(view_.numel()) * SizeOf(dtype);
    memory_.assign(bytes + 64, 0xFF);
    view_.data = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64);
  }
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  std::vector<uint8_t> memory_;
};

// `expected` has value and terms, the sums and those of their terms' magnitudes. Within half an ulp and a bit of the
// dtype (1 ulp for 32 and 64 bits) plus `terms` eps of the magnitudes, where eps is that of what rows of dtype `rows`
// are computed in.
template <typename Sums>
void ExpectSums(const Buffer& actual, const Sums& expected, double terms, const std::string& what, DType rows) {
  const DType dtype = actual.view().dtype;
  const bool wide = rows == DType::kF64;
  ASSERT_EQ(actual.numel(), static_cast<int64_t>(expected.value.size())) << what;
  for (int64_t i = 0; i < actual.numel(); ++i) {
    const double right = expected.value[static_cast<size_t>(i)];
    const double slack = terms * (wide ? 0x1p-53 : 0x1p-24) * expected.terms[static_cast<size_t>(i)];
    const double bound = (SizeOf(dtype) == 2 ? 0.51 : 1.0) * UlpSize(dtype, right) + slack;
    ASSERT_LE(std::abs(actual.Get(i) - right), bound)
        << what << " element " << i << ": got " << actual.Get(i) << ", expected " << right;
  }
}

}  // namespace jumar::testing
