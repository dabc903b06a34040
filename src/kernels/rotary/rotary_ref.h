// The operator in plain arithmetic on one row; j is an index within the rotary width.
#pragma once

#include <cstdint>

#include "kernels/rotary/rotary.h"

namespace jumar::ref {

// R(x)[j] = sign * x[from].
struct Rotated {
  int64_t from;
  int sign;
};

inline Rotated RotateAt(RotaryMode mode, int64_t width, int64_t j) {
  if (mode == RotaryMode::kInterleave) {
    if (j % 2 == 0) return {j + 1, -1};
    return {j - 1, 1};
  }
  const int64_t half = width / 2;
  if (j < half) return {j + half, -1};
  return {j - half, 1};
}

// y[j] = x[j] cos[j] + R(x)[j] sin[j]
template <typename F>
F RotaryMul(RotaryMode mode, int64_t width, const F* x, const F* cos, const F* sin, int64_t j) {
  const Rotated r = RotateAt(mode, width, j);
  return x[j] * cos[j] + r.sign * x[r.from] * sin[j];
}

// dx[j] = g[j] cos[j] + R^T(g sin)[j]. The transpose has the same pairs with the opposite sign.
template <typename F>
F RotaryDx(RotaryMode mode, int64_t width, const F* g, const F* cos, const F* sin, int64_t j) {
  const Rotated r = RotateAt(mode, width, j);
  return g[j] * cos[j] - r.sign * g[r.from] * sin[r.from];
}

}  // namespace jumar::ref
