// Class labels: read, checked, and which of them count.
#pragma once

#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// Row-major. Throws Error for a dtype other than int64 and int32.
std::vector<int64_t> ReadTargets(const char* op, const TensorView& target);

// Throws Error, with value and position, for a label outside [0, classes), unless it is `*ignored`.
void CheckTargets(const char* op, const TensorView& target, const std::vector<int64_t>& labels, int64_t classes,
                  const int64_t* ignored);

}  // namespace jumar
