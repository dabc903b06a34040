// What both losses share: a row of probabilities against another.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/lightning_indexer/indexer_plan.h"

namespace jumar {

inline constexpr double kLossFloor = 1e-8;  // of probabilities, in the logarithms only

// y = e * inverse for e in `scores`, which become y - p. Returns sum of p * (log p - log y). p = 0 counts as 0.
template <typename C>
double RowLoss(const C* p, int64_t n, C inverse, C* scores) {
  double loss = 0;
  for (int64_t j = 0; j < n; ++j) {
    const C y = scores[j] * inverse;
    scores[j] = y - p[j];
    if (p[j] == 0) continue;
    const double from = std::max(static_cast<double>(p[j]), kLossFloor);
    const double to = std::max(static_cast<double>(y), kLossFloor);
    loss += static_cast<double>(p[j]) * std::log(from / to);
  }
  return loss;
}

// Shapes, dtypes and contiguity of gradients; sets dq and dw to 0.
void CheckGradients(const IndexerPlan& plan, const IndexerGradients& gradients);

}  // namespace jumar
