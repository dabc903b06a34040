// The operator in plain arithmetic, one element at a time. F is double, or long double to judge the fp64 kernels.
#pragma once

#include <cmath>

namespace jumar::ref {

template <typename F>
F Sigmoid(F x) {
  return 1 / (1 + std::exp(-x));
}

template <typename F>
F Swiglu(F gate, F up) {
  return gate * Sigmoid(gate) * up;
}

template <typename F>
F SwigluDup(F grad, F gate) {
  return grad * gate * Sigmoid(gate);
}

// d(x sigmoid(x))/dx = s (1 + x (1 - s)), with 1 - s = sigmoid(-x).
template <typename F>
F SwigluDgate(F grad, F gate, F up) {
  return grad * up * Sigmoid(gate) * (1 + gate * Sigmoid(-gate));
}

// The two terms of dgate added as magnitudes: near gate = -1.278 they cancel and rounding errors are relative to this.
template <typename F>
F SwigluDgateSize(F grad, F gate, F up) {
  return std::abs(grad * up * Sigmoid(gate)) * (1 + std::abs(gate * Sigmoid(-gate)));
}

}  // namespace jumar::ref
