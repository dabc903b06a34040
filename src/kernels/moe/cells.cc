#include "kernels/moe/cells.h"

#include <cstring>

#include "base/rows.h"

namespace jumar {
namespace {

// Calls f with a value of the unsigned type of an element's size.
template <typename F>
void WithBits(DType dtype, const F& f) {
  switch (SizeOf(dtype)) {
    case 2:
      return f(uint16_t());
    case 4:
      return f(uint32_t());
    default:
      return f(uint64_t());
  }
}

int64_t OffsetOf(const TensorView& matrix, const Cells& cells, int64_t i) {
  return cells.token[static_cast<size_t>(i)] * matrix.stride[0] +
         cells.expert[static_cast<size_t>(i)] * matrix.stride[1];
}

}  // namespace

void GatherCells(const TensorView& from, const Cells& cells, const int32_t* to_index, const TensorView& to) {
  WithBits(from.dtype, [&](auto bits) {
    using T = decltype(bits);
    for (int64_t i = 0; i < cells.size(); ++i) {
      to.ptr<T>()[(to_index == nullptr ? i : to_index[i]) * to.stride[0]] = from.ptr<T>()[OffsetOf(from, cells, i)];
    }
  });
}

void ZeroElements(const TensorView& view) {
  if (IsContiguous(view)) {
    std::memset(view.data, 0, static_cast<size_t>(view.numel()) * SizeOf(view.dtype));
    return;
  }
  RowMap rows;
  TryRows(view, 0, &rows);
  WithBits(view.dtype, [&](auto bits) {
    for (int64_t i = 0; i < rows.rows; ++i) *rows.Row<decltype(bits)>(i) = 0;
  });
}

void ScatterCells(const TensorView& from, const int32_t* from_index, const Cells& cells, const TensorView& to) {
  ZeroElements(to);
  WithBits(from.dtype, [&](auto bits) {
    using T = decltype(bits);
    for (int64_t i = 0; i < cells.size(); ++i) {
      to.ptr<T>()[OffsetOf(to, cells, i)] = from.ptr<T>()[(from_index == nullptr ? i : from_index[i]) * from.stride[0]];
    }
  });
}

}  // namespace jumar
