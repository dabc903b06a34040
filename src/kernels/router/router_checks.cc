#include "kernels/router/router_checks.h"

namespace jumar {
namespace {

template <typename T>
void Check(const char* op, const RowMap& indices, int64_t experts, bool finished) {
  for (int64_t r = 0; r < indices.rows; ++r) {
    const T* row = indices.Row<T>(r);
    bool inside = true;
    bool none = finished;
    for (int64_t j = 0; j < indices.cols; ++j) {
      inside &= row[j] >= 0 && row[j] < experts;
      none &= row[j] == experts;
    }
    if (inside || none) continue;
    for (int64_t j = 0; j < indices.cols; ++j) {
      JUMAR_CHECK(op, row[j] >= 0 && row[j] < experts, "expert ", row[j], " of row ", r, " is not in [0, ", experts,
                  ")");
    }
  }
}

}  // namespace

RowMap ContiguousRows(const TensorView& view) {
  RowMap rows;
  JUMAR_CHECK("router", IsContiguous(view) && TryRows(view, 1, &rows), "results must be contiguous");
  return rows;
}

void CheckIndices(const char* op, const RowMap& indices, int64_t experts, bool finished) {
  if (indices.dtype == DType::kI64) {
    Check<int64_t>(op, indices, experts, finished);
  } else {
    Check<int32_t>(op, indices, experts, finished);
  }
}

}  // namespace jumar
