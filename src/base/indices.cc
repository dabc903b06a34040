#include "base/indices.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/parallel.h"
#include "base/rows.h"

namespace jumar {
namespace {

constexpr int64_t kGrain = 1 << 14;

template <typename T>
void Read(const RowMap& rows, int64_t* out) {
  ParallelFor(rows.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = *rows.Row<T>(i);
  });
}

}  // namespace

std::vector<int64_t> ReadIntegers(const TensorView& view) {
  std::vector<int64_t> values(static_cast<size_t>(view.numel()));
  RowMap rows;
  TryRows(view, 0, &rows);
  view.dtype == DType::kI32 ? Read<int32_t>(rows, values.data()) : Read<int64_t>(rows, values.data());
  return values;
}

std::vector<int64_t> ReadIndices(const char* op, const char* name, const TensorView& view, int64_t low, int64_t end) {
  JUMAR_CHECK(op, view.dtype == DType::kI32 || view.dtype == DType::kI64, name, " must be int32 or int64, got ",
              Name(view.dtype));
  std::vector<int64_t> values = ReadIntegers(view);
  const bool open = end == std::numeric_limits<int64_t>::max();
  const auto bad =
      std::find_if(values.begin(), values.end(), [&](int64_t value) { return value < low || (value >= end && !open); });
  if (bad == values.end()) return values;
  const std::string position = PositionOf(view, bad - values.begin());
  if (open) {
    Fail(op, name, " must not be below ", low, ", got ", *bad, " at position ", position);
  }
  Fail(op, name, " ", *bad, " at position ", position, " is not in [", low, ", ", end, ")");
}

std::string PositionOf(const TensorView& view, int64_t index) {
  std::string text = "]";
  for (int i = view.rank - 1; i >= 0; --i) {
    text = (i > 0 ? ", " : "[") + std::to_string(index % view.size[i]) + text;
    index /= view.size[i];
  }
  return view.rank == 0 ? "[]" : text;
}

}  // namespace jumar
