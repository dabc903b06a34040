// Integer operands (class labels, expert ids, row numbers): read once, checked, and shown in error texts.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// The elements of an int32 or int64 view of any strides, in row-major order.
std::vector<int64_t> ReadIntegers(const TensorView& view);

// As ReadIntegers. Throws Error for another dtype, and, with value and position, for an element outside
// [low, end); the largest int64 as `end` stands for no end.
std::vector<int64_t> ReadIndices(const char* op, const char* name, const TensorView& view, int64_t low, int64_t end);

// The row-major number of the first element outside [low, end(row)), or -1; rows are those of the last dimension, and
// one whose end is the largest int64 is not looked at. For int32 and int64 of any strides.
int64_t FirstOutside(const TensorView& view, int64_t low, const std::function<int64_t(int64_t)>& end);

// The element `offset` elements behind the first.
inline int64_t IntegerOf(const TensorView& view, int64_t offset) {
  return view.dtype == DType::kI32 ? view.ptr<const int32_t>()[offset] : view.ptr<const int64_t>()[offset];
}
// The element of row-major number `index`.
int64_t IntegerAt(const TensorView& view, int64_t index);

// "[2, 0]": where the element of row-major number `index` is.
std::string PositionOf(const TensorView& view, int64_t index);

}  // namespace jumar
