// Integer operands (class labels, expert ids, row numbers): read once, checked, and shown in error texts.
#pragma once

#include <string>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// The elements of an int32 or int64 view of any strides, in row-major order.
std::vector<int64_t> ReadIntegers(const TensorView& view);

// As ReadIntegers. Throws Error for another dtype, and, with value and position, for an element outside
// [low, end); the largest int64 as `end` stands for no end.
std::vector<int64_t> ReadIndices(const char* op, const char* name, const TensorView& view, int64_t low, int64_t end);

// "[2, 0]": where the element of row-major number `index` is.
std::string PositionOf(const TensorView& view, int64_t index);

}  // namespace jumar
