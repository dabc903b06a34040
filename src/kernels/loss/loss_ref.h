// The losses in fp64, readable by eye; everything contiguous.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace jumar::ref {

using Doubles = std::vector<double>;

inline double LogSumExpOf(const double* x, size_t n) {
  double max = -INFINITY;
  for (size_t i = 0; i < n; ++i) max = std::max(max, x[i]);
  long double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += std::exp(static_cast<long double>(x[i]) - max);
  return static_cast<double>(max + std::log(sum));
}

struct LinearLoss {
  Doubles logits;  // N x V
  Doubles lse;
  Doubles loss;  // of each token
  Doubles dx;    // N x V, per unit of incoming gradient
  int64_t count = 0;
};

// bias may be empty.
inline LinearLoss LinearCrossEntropy(const Doubles& input, const Doubles& weight, const Doubles& bias,
                                     const std::vector<int64_t>& target, size_t width, size_t classes,
                                     int64_t ignore_index, double smoothing, double z) {
  const size_t tokens = target.size();
  LinearLoss out{Doubles(tokens * classes), Doubles(tokens), Doubles(tokens), Doubles(tokens * classes)};
  for (size_t n = 0; n < tokens; ++n) {
    double* x = out.logits.data() + n * classes;
    for (size_t v = 0; v < classes; ++v) {
      long double sum = bias.empty() ? 0 : bias[v];
      for (size_t h = 0; h < width; ++h) {
        sum += static_cast<long double>(input[n * width + h]) * weight[v * width + h];
      }
      x[v] = static_cast<double>(sum);
    }
    if (target[n] == ignore_index) continue;
    ++out.count;
    const double lse = LogSumExpOf(x, classes);
    const double share = smoothing / static_cast<double>(classes);
    const auto label = static_cast<size_t>(target[n]);
    out.lse[n] = lse;
    out.loss[n] = (1 - smoothing) * (lse - x[label]) + z * lse * lse;
    for (size_t v = 0; v < classes; ++v) {
      out.loss[n] += share * (lse - x[v]);
      out.dx[n * classes + v] = (1 + 2 * z * lse) * std::exp(x[v] - lse) - share - (v == label ? 1 - smoothing : 0.0);
    }
  }
  return out;
}

struct VendorLoss {
  Doubles log_prob;  // N x C
  Doubles loss;      // of each row
  double divisor = 0;
};

inline VendorLoss CrossEntropy(const Doubles& input, const std::vector<int64_t>& target, const Doubles& weight,
                               int64_t ignore_index, double smoothing) {
  const size_t rows = target.size();
  const size_t classes = weight.size();
  VendorLoss out{Doubles(rows * classes), Doubles(rows)};
  for (size_t n = 0; n < rows; ++n) {
    const double lse = LogSumExpOf(input.data() + n * classes, classes);
    double q = 0;
    for (size_t c = 0; c < classes; ++c) {
      out.log_prob[n * classes + c] = input[n * classes + c] - lse;
      q -= weight[c] * out.log_prob[n * classes + c];
    }
    if (ignore_index >= 0 && target[n] == ignore_index) continue;
    const auto label = static_cast<size_t>(target[n]);
    out.divisor += weight[label];
    out.loss[n] = -(1 - smoothing) * weight[label] * out.log_prob[n * classes + label] +
                  smoothing / static_cast<double>(classes) * q;
  }
  return out;
}

// Per unit of incoming gradient, for log_prob as it was stored.
inline Doubles CrossEntropyGrad(const Doubles& log_prob, const std::vector<int64_t>& target, const Doubles& weight,
                                int64_t ignore_index, double smoothing) {
  const size_t classes = weight.size();
  Doubles dx(log_prob.size());
  double sum = 0;
  for (const double w : weight) sum += w;
  for (size_t n = 0; n < target.size(); ++n) {
    if (ignore_index >= 0 && target[n] == ignore_index) continue;
    const auto label = static_cast<size_t>(target[n]);
    for (size_t c = 0; c < classes; ++c) {
      const double p = std::exp(log_prob[n * classes + c]);
      dx[n * classes + c] = (1 - smoothing) * weight[label] * (p - (c == label ? 1.0 : 0.0)) +
                            smoothing / static_cast<double>(classes) * (p * sum - weight[c]);
    }
  }
  return dx;
}

}  // namespace jumar::ref
