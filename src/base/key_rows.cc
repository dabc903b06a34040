#include "base/key_rows.h"

#include "base/convert.h"

namespace jumar {

KeyRows::KeyRows(const TensorView& x, DType compute) : view_(x), bytes_(static_cast<int64_t>(SizeOf(compute))) {
  if (x.dtype == compute && (x.stride[3] == 1 || x.size[3] <= 1)) return;
  copy_ = HeapBuffer(x.numel() * bytes_);
  view_ = Contiguous(copy_.data(), compute, {x.size[0], x.size[1], x.size[2], x.size[3]});
  ConvertAll(x, view_);
}

}  // namespace jumar
