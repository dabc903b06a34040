#include "base/rows.h"

#include <cstring>

#include "base/parallel.h"

namespace jumar {
namespace {

template <typename T>
void CopyTyped(const TensorView& src, const TensorView& dst) {
  if (src.numel() == 0) return;
  if (src.rank == 0) {
    *dst.ptr<T>() = *src.ptr<T>();
    return;
  }
  const int last = src.rank - 1;
  const int64_t n = src.size[last];
  const int64_t rows = src.numel() / n;
  ParallelFor(rows, 1 + 32768 / n, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      int64_t rest = r;
      int64_t from = 0;
      int64_t to = 0;
      for (int i = last - 1; i >= 0; --i) {
        const int64_t index = rest % src.size[i];
        rest /= src.size[i];
        from += index * src.stride[i];
        to += index * dst.stride[i];
      }
      const T* s = src.ptr<T>() + from;
      T* d = dst.ptr<T>() + to;
      const int64_t ss = src.stride[last];
      const int64_t ds = dst.stride[last];
      if (ss == 1 && ds == 1) {
        std::memcpy(d, s, static_cast<size_t>(n) * sizeof(T));
      } else {
        for (int64_t i = 0; i < n; ++i) d[i * ds] = s[i * ss];
      }
    }
  });
}

}  // namespace

void CopyStrided(const TensorView& src, const TensorView& dst) {
  switch (SizeOf(src.dtype)) {
    case 1:
      return CopyTyped<uint8_t>(src, dst);
    case 2:
      return CopyTyped<uint16_t>(src, dst);
    case 4:
      return CopyTyped<uint32_t>(src, dst);
    default:
      return CopyTyped<uint64_t>(src, dst);
  }
}

bool TryRows(const TensorView& view, int inner_dims, RowMap* rows) {
  const int outer = view.rank - inner_dims;
  int64_t cols = 1;
  for (int i = view.rank - 1; i >= outer; --i) {
    if (view.size[i] != 1 && view.stride[i] != cols) return false;
    cols *= view.size[i];
  }
  RowMap map;
  map.data = view.data;
  map.dtype = view.dtype;
  map.cols = cols;
  map.rows = 1;
  for (int i = 0; i < outer; ++i) {
    map.rows *= view.size[i];
    if (view.size[i] == 1) continue;
    if (map.rank > 0 && map.stride[map.rank - 1] == view.stride[i] * view.size[i]) {
      map.size[map.rank - 1] *= view.size[i];
      map.stride[map.rank - 1] = view.stride[i];
    } else {
      map.size[map.rank] = view.size[i];
      map.stride[map.rank] = view.stride[i];
      ++map.rank;
    }
  }
  *rows = map;
  return true;
}

namespace {

TensorView ContiguousLike(const TensorView& view, ScratchFrame& frame) {
  TensorView copy = view;
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    copy.stride[i] = step;
    step *= view.size[i];
  }
  copy.data = frame.AllocBytes(static_cast<size_t>(step) * SizeOf(view.dtype));
  return copy;
}

}  // namespace

RowMap InputRows(const TensorView& view, int inner_dims, ScratchFrame& frame) {
  RowMap map;
  if (TryRows(view, inner_dims, &map)) return map;
  const TensorView copy = ContiguousLike(view, frame);
  CopyStrided(view, copy);
  TryRows(copy, inner_dims, &map);
  return map;
}

OutputRows::OutputRows(const TensorView& view, int inner_dims, ScratchFrame& frame)
    : view_(view), direct_(TryRows(view, inner_dims, &rows_)) {
  if (direct_) return;
  buffer_ = ContiguousLike(view, frame);
  TryRows(buffer_, inner_dims, &rows_);
}

void OutputRows::Finish() const {
  if (!direct_) CopyStrided(buffer_, view_);
}

}  // namespace jumar
