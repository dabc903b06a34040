// Keys and values as kernels that pick rows of them read them.
#pragma once

#include "base/heap_buffer.h"
#include "jumar/tensor.h"

namespace jumar {

// [B, S2, Nk, C] in the compute type with adjacent columns: the tensor itself, or a widened copy.
class KeyRows {
 public:
  KeyRows() = default;
  KeyRows(const TensorView& x, DType compute);
  // The first row of a batch entry and head.
  const char* Base(int64_t batch, int64_t head) const {
    return static_cast<const char*>(view_.data) + (batch * view_.stride[0] + head * view_.stride[2]) * bytes_;
  }
  int64_t RowBytes() const { return view_.stride[1] * bytes_; }
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  int64_t bytes_ = 0;
  HeapBuffer copy_;
};

}  // namespace jumar
