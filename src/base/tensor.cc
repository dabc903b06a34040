#include "jumar/tensor.h"

#include "base/check.h"

namespace jumar {

size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 1;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    default:
      return 8;
  }
}

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF64:
      return "float64";
    case DType::kI32:
      return "int32";
    case DType::kBool:
      return "bool";
    default:
      return "int64";
  }
}

TensorView Contiguous(void* data, DType dtype, const std::vector<int64_t>& sizes) {
  JUMAR_CHECK("tensor", sizes.size() <= static_cast<size_t>(kMaxRank), "at most ", kMaxRank, " dimensions, got ",
              sizes.size());
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<int>(sizes.size());
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.size[i] = sizes[static_cast<size_t>(i)];
    view.stride[i] = step;
    step *= view.size[i];
  }
  return view;
}

bool IsContiguous(const TensorView& view) {
  int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.size[i] != 1 && view.stride[i] != step) return view.numel() == 0;
    step *= view.size[i];
  }
  return true;
}

bool SameShape(const TensorView& a, const TensorView& b) {
  if (a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.size[i] != b.size[i]) return false;
  }
  return true;
}

std::string ShapeString(const TensorView& view) {
  std::string text = "[";
  for (int i = 0; i < view.rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(view.size[i]);
  }
  return text + "]";
}

std::string Describe(const TensorView& view) { return Name(view.dtype) + ShapeString(view); }

TensorView Narrow(const TensorView& view, int dim, int64_t begin, int64_t length) {
  TensorView part = view;
  part.size[dim] = length;
  if (view.data != nullptr) {
    part.data = static_cast<char*>(view.data) + begin * view.stride[dim] * static_cast<int64_t>(SizeOf(view.dtype));
  }
  return part;
}

}  // namespace jumar
