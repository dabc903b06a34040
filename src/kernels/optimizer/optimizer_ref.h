// The definitions of adamw.h and grad_norm.h, one element at a time, in long double.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/optimizer/adamw.h"

namespace jumar::ref {

struct AdamWState {
  long double param, exp_avg, exp_avg_sq;
};

// maximum: negative for none.
inline AdamWState AdamW(const AdamWNumbers& n, long double grad, AdamWState s, long double maximum = -1) {
  const long double g = n.maximize ? -grad : grad;
  const long double beta1 = n.beta1, beta2 = n.beta2;
  s.exp_avg = beta1 * s.exp_avg + (1 - beta1) * g;
  s.exp_avg_sq = beta2 * s.exp_avg_sq + (1 - beta2) * g * g;
  const long double v = maximum > s.exp_avg_sq ? maximum : s.exp_avg_sq;
  const long double denominator = std::sqrt(v) / std::sqrt(static_cast<long double>(n.correction2)) + n.eps;
  s.param = s.param * (1 - static_cast<long double>(n.lr) * n.weight_decay) -
            n.lr / static_cast<long double>(n.correction1) * s.exp_avg / denominator;
  return s;
}

inline long double PowerSum(const std::vector<double>& x, long double p) {
  long double sum = 0;
  for (const double v : x) {
    const long double a = std::fabs(static_cast<long double>(v));
    sum = std::isinf(p) ? std::max(sum, a) : sum + std::pow(a, p);
  }
  return sum;
}

}  // namespace jumar::ref
