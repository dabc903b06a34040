#include "base/indices.h"

#include <algorithm>
#include <atomic>
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

template <typename T>
bool Outside(const T* row, int64_t n, int64_t stride, int64_t low, int64_t end) {
  if (stride == 1) {
    // Vectors of them.
    T least = row[0];
    T most = row[0];
    for (int64_t i = 1; i < n; ++i) {
      least = std::min(least, row[i]);
      most = std::max(most, row[i]);
    }
    return least < low || most >= end;
  }
  bool outside = false;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t value = row[i * stride];
    outside |= value < low || value >= end;
  }
  return outside;
}

// Where row-major element `index` lies.
int64_t OffsetOf(const TensorView& view, int64_t index) {
  int64_t offset = 0;
  for (int i = view.rank - 1; i >= 0; --i) {
    offset += index % view.size[i] * view.stride[i];
    index /= view.size[i];
  }
  return offset;
}

}  // namespace

int64_t IntegerAt(const TensorView& view, int64_t index) { return IntegerOf(view, OffsetOf(view, index)); }

int64_t FirstOutside(const TensorView& view, int64_t low, const std::function<int64_t(int64_t)>& end) {
  if (view.numel() == 0) return -1;
  const int64_t n = view.size[view.rank - 1];
  const int64_t stride = view.stride[view.rank - 1];
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first{kNone};
  ParallelFor(view.numel() / n, std::max<int64_t>(kGrain / n, 1), [&](int64_t begin, int64_t stop) {
    for (int64_t row = begin; row < stop; ++row) {
      const int64_t limit = end(row);
      if (limit == kNone) continue;
      const int64_t at = OffsetOf(view, row * n);
      if (!(view.dtype == DType::kI32 ? Outside(view.ptr<const int32_t>() + at, n, stride, low, limit)
                                      : Outside(view.ptr<const int64_t>() + at, n, stride, low, limit))) {
        continue;
      }
      int64_t found = row * n;
      const auto wrong = [&](int64_t value) { return value < low || value >= limit; };
      while (!wrong(IntegerAt(view, found))) ++found;
      // Other threads have rows of their own: the lowest of what they find is the first.
      int64_t best = first;
      while (found < best && !first.compare_exchange_weak(best, found)) {
      }
      return;
    }
  });
  return first == kNone ? -1 : first.load();
}

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
