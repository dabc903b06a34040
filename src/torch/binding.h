// Between torch's stable ABI and the kernels: tensors become views, results are allocated, calls are counted.
// Bindings never compute.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "jumar/runtime.h"
#include "jumar/tensor.h"

namespace jumar::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

// A view of the tensor's memory. Throws Error "op: ..." for a dtype or a rank that no kernel takes.
TensorView View(const char* op, const Tensor& tensor);
// The same memory as elements of `dtype`, which has the size of the tensor's own.
TensorView ViewAs(const char* op, const Tensor& tensor, DType dtype);
std::vector<TensorView> ViewAll(const char* op, const Tensors& tensors);
// Rank 0 for what is absent or has no dimension.
inline TensorView ViewOrNone(const char* op, const OptionalTensor& tensor) {
  return tensor.has_value() ? View(op, *tensor) : TensorView{};
}

// The view of a tensor that may be left out.
class OptionalView {
 public:
  OptionalView(const char* op, const OptionalTensor& tensor,
               TensorView (*view)(const char* op, const Tensor& tensor) = &View) {
    if (tensor.has_value()) view_ = view(op, *tensor);
  }
  // Of a result that is undefined where it is left out.
  OptionalView(const char* op, const Tensor& result) {
    if (result.defined()) view_ = View(op, result);
  }
  const TensorView* get() const { return view_.has_value() ? &*view_ : nullptr; }

 private:
  std::optional<TensorView> view_;
};

ScalarType ToScalarType(DType dtype);
// As torch.dtype has it: "int16".
const char* NameOf(ScalarType type);
// Throws Error "op: ..." for a dtype that no kernel takes.
DType FromScalarType(const char* op, ScalarType type);

// A new contiguous tensor on the device of `like`.
Tensor Empty(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype);
Tensor Empty(const Tensor& like, const TensorView& shape, DType dtype);
// A tensor without elements stands for one that is not needed.
Tensor EmptyIf(bool needed, const Tensor& like, const TensorView& shape, DType dtype);
// The memory has the last two dimensions exchanged.
Tensor EmptyTransposed(const Tensor& like, std::vector<int64_t> sizes, DType dtype);

// One operator: its schema without a namespace, its boxed kernel, and whether torch_npu has an operator of that name.
struct OpEntry {
  const char* schema;
  void (*kernel)(StableIValue*, uint64_t, uint64_t);
  bool vendor_name;
};

}  // namespace jumar::binding

// Counts a call of the operator `name`, a string literal.
#define JUMAR_COUNT_CALL(name)               \
  do {                                       \
    static ::jumar::CallCounter calls(name); \
    calls.Add();                             \
  } while (false)
