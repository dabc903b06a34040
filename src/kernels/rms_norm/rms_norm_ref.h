// The family in fp64, readable by eye: rows x cols, everything contiguous.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace jumar::ref {

using Doubles = std::vector<double>;

struct RmsForward {
  Doubles y;
  Doubles rstd;
};

// gate may be empty.
inline RmsForward RmsNorm(const Doubles& x, const Doubles& gate, const Doubles& gamma, double epsilon, double offset,
                          size_t rows, size_t cols) {
  RmsForward out{Doubles(rows * cols), Doubles(rows)};
  for (size_t r = 0; r < rows; ++r) {
    long double squares = 0;  // so that the oracle serves fp64 kernels too
    for (size_t i = 0; i < cols; ++i) squares += static_cast<long double>(x[r * cols + i]) * x[r * cols + i];
    out.rstd[r] = static_cast<double>(1 / std::sqrt(squares / cols + epsilon));
    for (size_t i = 0; i < cols; ++i) {
      double y = x[r * cols + i] * out.rstd[r] * (offset + gamma[i]);
      if (!gate.empty()) y *= gate[r * cols + i] / (1 + std::exp(-gate[r * cols + i]));
      out.y[r * cols + i] = y;
    }
  }
  return out;
}

struct RmsBackward {
  Doubles dx;
  Doubles dgate;
  Doubles dgamma;
};

inline RmsBackward RmsNormBackward(const Doubles& dy, const Doubles& x, const Doubles& gate, const Doubles& gamma,
                                   const Doubles& rstd, double offset, size_t rows, size_t cols) {
  RmsBackward out{Doubles(rows * cols), Doubles(gate.size()), Doubles(cols)};
  for (size_t r = 0; r < rows; ++r) {
    Doubles u(cols);
    long double mean = 0;
    for (size_t i = 0; i < cols; ++i) {
      const size_t at = r * cols + i;
      const double xhat = x[at] * rstd[r];
      double g = dy[at];
      if (!gate.empty()) {
        const double s = 1 / (1 + std::exp(-gate[at]));
        out.dgate[at] = dy[at] * xhat * gamma[i] * s * (1 + gate[at] * (1 - s));
        g *= gate[at] * s;
      }
      out.dgamma[i] += g * xhat;
      u[i] = g * (offset + gamma[i]);
      mean += static_cast<long double>(u[i]) * xhat / cols;
    }
    for (size_t i = 0; i < cols; ++i) {
      const size_t at = r * cols + i;
      out.dx[at] = static_cast<double>(rstd[r] * (u[i] - x[at] * rstd[r] * mean));
    }
  }
  return out;
}

}  // namespace jumar::ref
