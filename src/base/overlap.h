// Refuses operands that are written and share memory.
#pragma once

#include <string>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// A view and its name in errors.
struct NamedView {
  std::string name;
  TensorView view;
  bool written;
};

// Throws Error when an element that is written is in memory of another view's element, or of another element of the
// same view. Linear in the number of views where their memory is disjoint; views that interleave (columns of one
// matrix) are compared byte by byte.
void CheckNoOverlap(const char* op, const std::vector<NamedView>& views);

}  // namespace jumar
