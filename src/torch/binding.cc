#include "torch/binding.h"

#include <utility>

#include "base/check.h"
#include "base/huge_pages.h"

namespace jumar::binding {

const char* NameOf(ScalarType type) {
  switch (type) {
#define JUMAR_NAME(scalar, name) \
  case ScalarType::scalar:       \
    return name;
    JUMAR_NAME(Byte, "uint8")
    JUMAR_NAME(Char, "int8")
    JUMAR_NAME(Short, "int16")
    JUMAR_NAME(Int, "int32")
    JUMAR_NAME(Long, "int64")
    JUMAR_NAME(UInt16, "uint16")
    JUMAR_NAME(UInt32, "uint32")
    JUMAR_NAME(UInt64, "uint64")
    JUMAR_NAME(Bool, "bool")
    JUMAR_NAME(Half, "float16")
    JUMAR_NAME(BFloat16, "bfloat16")
    JUMAR_NAME(Float, "float32")
    JUMAR_NAME(Double, "float64")
    JUMAR_NAME(ComplexHalf, "complex32")
    JUMAR_NAME(ComplexFloat, "complex64")
    JUMAR_NAME(ComplexDouble, "complex128")
    JUMAR_NAME(Float8_e5m2, "float8_e5m2")
    JUMAR_NAME(Float8_e4m3fn, "float8_e4m3fn")
    JUMAR_NAME(Float8_e5m2fnuz, "float8_e5m2fnuz")
    JUMAR_NAME(Float8_e4m3fnuz, "float8_e4m3fnuz")
    JUMAR_NAME(Float8_e8m0fnu, "float8_e8m0fnu")
#undef JUMAR_NAME
    default:
      return torch::headeronly::toString(type);
  }
}

DType FromScalarType(const char* op, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::Double:
      return DType::kF64;
    case ScalarType::Int:
      return DType::kI32;
    case ScalarType::Long:
      return DType::kI64;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      Fail(op, "unsupported dtype ", NameOf(type),
           "; float32, bfloat16, float16, float64, int32, int64 and bool are known");
  }
}

TensorView View(const char* op, const Tensor& tensor) {
  return ViewAs(op, tensor, FromScalarType(op, tensor.scalar_type()));
}

TensorView ViewAs(const char* op, const Tensor& tensor, DType dtype) {
  TensorView view;
  view.dtype = dtype;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  JUMAR_CHECK(op, sizes.size() <= static_cast<size_t>(kMaxRank), "at most ", kMaxRank, " dimensions, got ",
              sizes.size());
  view.rank = static_cast<int>(sizes.size());
  for (int i = 0; i < view.rank; ++i) {
    view.size[i] = sizes[static_cast<size_t>(i)];
    view.stride[i] = strides[static_cast<size_t>(i)];
  }
  view.data = tensor.data_ptr();
  return view;
}

std::vector<TensorView> ViewAll(const char* op, const Tensors& tensors) {
  std::vector<TensorView> views;
  for (const Tensor& tensor : tensors) views.push_back(View(op, tensor));
  return views;
}

ScalarType ToScalarType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ScalarType::Float;
    case DType::kBF16:
      return ScalarType::BFloat16;
    case DType::kF16:
      return ScalarType::Half;
    case DType::kF64:
      return ScalarType::Double;
    case DType::kI32:
      return ScalarType::Int;
    case DType::kBool:
      return ScalarType::Bool;
    default:
      return ScalarType::Long;
  }
}

Tensor Empty(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype) {
  Tensor tensor = torch::stable::new_empty(like, sizes, ToScalarType(dtype));
  const size_t bytes = static_cast<size_t>(tensor.numel()) * SizeOf(dtype);
  if (bytes >= kOwnMapping) AdviseHugePages(tensor.data_ptr(), bytes);
  return tensor;
}

Tensor Empty(const Tensor& like, const TensorView& shape, DType dtype) {
  return Empty(like, std::vector<int64_t>(shape.size, shape.size + shape.rank), dtype);
}

Tensor EmptyIf(bool needed, const Tensor& like, const TensorView& shape, DType dtype) {
  return needed ? Empty(like, shape, dtype) : Empty(like, std::vector<int64_t>{0}, dtype);
}

Tensor EmptyTransposed(const Tensor& like, std::vector<int64_t> sizes, DType dtype) {
  std::swap(sizes[sizes.size() - 1], sizes[sizes.size() - 2]);
  return torch::stable::transpose(Empty(like, sizes, dtype), -2, -1);
}

}  // namespace jumar::binding
