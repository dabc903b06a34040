// One row in plain fp64: the oracle of the test.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace jumar::ref {

inline std::vector<double> MaskedSoftmax(const std::vector<double>& x, const std::vector<bool>& hidden, double scale) {
  std::vector<double> y(x.size());
  for (size_t j = 0; j < x.size(); ++j) y[j] = hidden[j] ? -10000 : scale * x[j];
  const double max = *std::max_element(y.begin(), y.end());
  double sum = 0;
  for (double& t : y) sum += t = std::exp(t - max);
  for (double& t : y) t /= sum;
  return y;
}

// From the y that is given. size[j]: the magnitudes of the terms of dx[j].
inline std::vector<double> MaskedSoftmaxGrad(const std::vector<double>& dy, const std::vector<double>& y,
                                             const std::vector<bool>& hidden, double scale, std::vector<double>* size) {
  double total = 0, terms = 0;
  for (size_t j = 0; j < y.size(); ++j) {
    total += dy[j] * y[j];
    terms += std::abs(dy[j] * y[j]);
  }
  std::vector<double> dx(y.size(), 0);
  size->assign(y.size(), 0);
  for (size_t j = 0; j < y.size(); ++j) {
    if (hidden[j]) continue;
    dx[j] = scale * y[j] * (dy[j] - total);
    (*size)[j] = std::abs(scale * y[j]) * (std::abs(dy[j]) + terms);
  }
  return dx;
}

}  // namespace jumar::ref
