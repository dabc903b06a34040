#include "kernels/loss/targets.h"

#include "base/check.h"
#include "base/rows.h"

namespace jumar {
namespace {

std::string Position(const TensorView& view, int64_t index) {
  std::string text = "]";
  for (int i = view.rank - 1; i >= 0; --i) {
    text = (i > 0 ? ", " : "[") + std::to_string(index % view.size[i]) + text;
    index /= view.size[i];
  }
  return view.rank == 0 ? "[]" : text;
}

}  // namespace

std::vector<int64_t> ReadTargets(const char* op, const TensorView& target) {
  JUMAR_CHECK(op, target.dtype == DType::kI64 || target.dtype == DType::kI32,
              "target must hold class numbers in int64 or int32, got ", Name(target.dtype));
  std::vector<int64_t> labels(static_cast<size_t>(target.numel()));
  ScratchFrame frame;
  const RowMap rows = InputRows(target, 0, frame);
  for (int64_t i = 0; i < rows.rows; ++i) {
    labels[static_cast<size_t>(i)] = target.dtype == DType::kI64 ? *rows.Row<int64_t>(i) : *rows.Row<int32_t>(i);
  }
  return labels;
}

void CheckTargets(const char* op, const TensorView& target, const std::vector<int64_t>& labels, int64_t classes,
                  const int64_t* ignored) {
  for (size_t i = 0; i < labels.size(); ++i) {
    const int64_t label = labels[i];
    if (label >= 0 && label < classes) continue;
    if (ignored != nullptr && label == *ignored) continue;
    Fail(op, "target ", label, " at position ", Position(target, static_cast<int64_t>(i)), " is not in [0, ", classes,
         ")", ignored == nullptr ? "" : " and is not ignore_index, ",
         ignored == nullptr ? "" : std::to_string(*ignored));
  }
}

}  // namespace jumar
