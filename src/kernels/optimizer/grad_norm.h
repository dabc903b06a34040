// Norms of gradients and their scaling, over any number of tensors in one multithreaded pass each.
#pragma once

#include <cstdint>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// Per group of tensors: the sum of |x|^p over all their elements, or max |x| for p = infinity. groups[i] in
// [0, group_count) is the group of tensors[i]; an empty group gives 0. 1, 2, 3 and other p > 0 are accepted.
//
// fp64 throughout, squares of fp32 and narrower are exact; the sum over blocks of 4096 adjacent elements has a fixed
// order. Relative error below 2^-44 for 2^30 elements; the same for every thread count. NaN in, NaN out.
std::vector<double> GradPowerSums(const char* op, const std::vector<TensorView>& tensors,
                                  const std::vector<int64_t>& groups, int64_t group_count, double p);

// x <- x * factor for all elements, in place: in fp32 with one rounding (fp64 for fp64). Any strides without overlap.
void ScaleAll(const char* op, const std::vector<TensorView>& tensors, double factor);

}  // namespace jumar
