#include "kernels/moe/moe_operands.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/convert.h"
#include "base/indices.h"
#include "base/widen.h"

namespace jumar {

void CheckDims(const char* op, const char* name, const TensorView& view, int rank) {
  JUMAR_CHECK(op, view.rank == rank, "The dims of input ", name, " should be ", rank, " dimensional, got ",
              ShapeString(view));
}

void CheckFloating(const char* op, const char* name, const TensorView& view) {
  JUMAR_CHECK(op, IsFloating(view.dtype), name, " must be float32, bfloat16, float16 or float64, got ",
              Name(view.dtype));
}

void CheckDType(const char* op, const char* name, const TensorView& view, DType dtype) {
  JUMAR_CHECK(op, view.dtype == dtype, name, " must be ", Name(dtype), ", got ", Name(view.dtype));
}

void CheckNoPadding(const char* op, bool padded_mode) {
  JUMAR_CHECK(op, !padded_mode, "padded_mode=True is not supported");
}

void CheckSlots(const char* op, int64_t slots) {
  JUMAR_CHECK(op, slots <= std::numeric_limits<int32_t>::max(), "at most 2^31 - 1 slots, got ", slots);
}

std::vector<int32_t> ReadRows(const char* op, const char* name, const TensorView& view, int64_t rows) {
  return ReadRowsBelow(op, name, view, std::max(view.numel(), rows));
}

std::vector<int32_t> ReadRowsBelow(const char* op, const char* name, const TensorView& view, int64_t end) {
  CheckSlots(op, std::max(view.numel(), end));
  const std::vector<int64_t> values = ReadIndices(op, name, view, 0, end);
  return std::vector<int32_t>(values.begin(), values.end());
}

void* InComputeType(const TensorView& view, DType rows_dtype, ScratchFrame& frame) {
  TensorView copy = view;
  copy.dtype = ComputeType(rows_dtype);
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    copy.stride[i] = step;
    step *= view.size[i];
  }
  copy.data = frame.AllocBytes(static_cast<size_t>(step) * SizeOf(copy.dtype));
  ConvertAll(view, copy);
  return copy.data;
}

}  // namespace jumar
