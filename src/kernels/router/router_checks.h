// Checks that the routers and their losses share.
#pragma once

#include "base/check.h"
#include "base/rows.h"
#include "jumar/tensor.h"

namespace jumar {

inline void CheckLogits(const char* op, const char* name, const TensorView& logits) {
  JUMAR_CHECK(op, logits.rank >= 1, name, " must be [.., experts], got ", ShapeString(logits));
  JUMAR_CHECK(op, IsFloating(logits.dtype), name, " must be float32, bfloat16, float16 or float64, got ",
              Name(logits.dtype));
}

// Whether `view` is [..] for logits [.., E].
inline bool RowsMatch(const TensorView& view, const TensorView& logits) {
  bool match = view.rank == logits.rank - 1;
  for (int i = 0; match && i < view.rank; ++i) match = view.size[i] == logits.size[i];
  return match;
}

// `view` must be [.., cols] for logits [.., E].
inline void CheckRows(const char* op, const char* name, const TensorView& view, const TensorView& logits,
                      int64_t cols) {
  TensorView rows = view;
  rows.rank = view.rank - 1;
  JUMAR_CHECK(op, view.rank >= 1 && RowsMatch(rows, logits) && view.size[view.rank - 1] == cols, name, " ",
              ShapeString(view), " does not match ", ShapeString(logits), ", expected [.., ", cols, "]");
}

inline void CheckIndexType(const char* op, const TensorView& indices) {
  JUMAR_CHECK(op, indices.dtype == DType::kI64 || indices.dtype == DType::kI32, "indices must be int64 or int32, got ",
              Name(indices.dtype));
}

// Rows of a contiguous view.
RowMap ContiguousRows(const TensorView& view);

// Every index is in [0, experts), or, with `finished`, its row holds `experts` alone.
void CheckIndices(const char* op, const RowMap& indices, int64_t experts, bool finished);

}  // namespace jumar
