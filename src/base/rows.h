// Any strided view as rows of unit inner stride, the form in which row kernels work.
#pragma once

#include "base/scratch.h"
#include "jumar/tensor.h"

namespace jumar {

// Row r starts at element Offset(r) of the view's data; its `cols` elements are adjacent.
struct RowMap {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int rank = 0;  // of the row index, after merging dimensions that are adjacent in memory
  int64_t size[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};

  int64_t Offset(int64_t row) const {
    if (rank <= 1) return rank == 0 ? 0 : row * stride[0];
    int64_t offset = 0;
    for (int i = rank - 1; i > 0; --i) {
      offset += row % size[i] * stride[i];
      row /= size[i];
    }
    return offset + row * stride[0];
  }
  template <typename T>
  T* Row(int64_t row) const {
    return static_cast<T*>(data) + Offset(row);
  }
};

// The last `inner_dims` dimensions become the columns. Returns false when they are not adjacent in memory.
bool TryRows(const TensorView& view, int inner_dims, RowMap* rows);

// For inputs: as TryRows, or else rows of a contiguous copy that lives in `frame`.
RowMap InputRows(const TensorView& view, int inner_dims, ScratchFrame& frame);

// dst[i] = src[i] for equal shapes and dtypes, any strides. Multithreaded.
void CopyStrided(const TensorView& src, const TensorView& dst);

// A kernel's output in rows: the view itself when its inner dimensions are adjacent, else a contiguous buffer in
// `frame` that Finish() copies to the view.
class OutputRows {
 public:
  OutputRows(const TensorView& view, int inner_dims, ScratchFrame& frame);
  const RowMap& rows() const { return rows_; }
  void Finish() const;

 private:
  TensorView view_;
  TensorView buffer_;
  RowMap rows_;
  bool direct_;
};

}  // namespace jumar
