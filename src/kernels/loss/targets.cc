#include "kernels/loss/targets.h"

#include "base/check.h"
#include "base/indices.h"

namespace jumar {

std::vector<int64_t> ReadTargets(const char* op, const TensorView& target) {
  JUMAR_CHECK(op, target.dtype == DType::kI64 || target.dtype == DType::kI32,
              "target must hold class numbers in int64 or int32, got ", Name(target.dtype));
  return ReadIntegers(target);
}

void CheckTargets(const char* op, const TensorView& target, const std::vector<int64_t>& labels, int64_t classes,
                  const int64_t* ignored) {
  for (size_t i = 0; i < labels.size(); ++i) {
    const int64_t label = labels[i];
    if (label >= 0 && label < classes) continue;
    if (ignored != nullptr && label == *ignored) continue;
    Fail(op, "target ", label, " at position ", PositionOf(target, static_cast<int64_t>(i)), " is not in [0, ", classes,
         ")", ignored == nullptr ? "" : " and is not ignore_index, ",
         ignored == nullptr ? "" : std::to_string(*ignored));
  }
}

}  // namespace jumar
