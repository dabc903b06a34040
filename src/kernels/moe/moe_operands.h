// Checks and conversions that the operators of this family share.
#pragma once

#include <vector>

#include "base/scratch.h"
#include "jumar/tensor.h"

namespace jumar {

// Throws unless `view` has so many dimensions. Texts as the vendor's: "The dims of input tokens should be 2
// dimensional".
void CheckDims(const char* op, const char* name, const TensorView& view, int rank);
void CheckFloating(const char* op, const char* name, const TensorView& view);
void CheckDType(const char* op, const char* name, const TensorView& view, DType dtype);
void CheckNoPadding(const char* op, bool padded_mode);
// Slots and rows are numbered in int32.
void CheckSlots(const char* op, int64_t slots);

// Row numbers of slots; values in [0, max(elements, rows)).
std::vector<int32_t> ReadRows(const char* op, const char* name, const TensorView& view, int64_t rows);
// Values in [0, end).
std::vector<int32_t> ReadRowsBelow(const char* op, const char* name, const TensorView& view, int64_t end);

// The elements of a floating view, row-major, in the compute type of `rows_dtype`.
void* InComputeType(const TensorView& view, DType rows_dtype, ScratchFrame& frame);

}  // namespace jumar
