// fp64 references of this family, in plain loops. Matrices are row-major vectors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace jumar::testing {

using Doubles = std::vector<double>;
using Ints = std::vector<int64_t>;

// row -> slot
inline Ints StableOrder(const Ints& ids) {
  Ints order(ids.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return ids[static_cast<size_t>(a)] < ids[static_cast<size_t>(b)]; });
  return order;
}

inline Ints Inverse(const Ints& order) {
  Ints inverse(order.size());
  for (size_t r = 0; r < order.size(); ++r) inverse[static_cast<size_t>(order[r])] = static_cast<int64_t>(r);
  return inverse;
}

// A sum and the sum of its terms' magnitudes.
struct Sums {
  Doubles value;
  Doubles terms;
};

// out[t] = sum over k of w[t, k] in[rows[t K + k]] for rows below `limit`; no weights: ones.
inline Sums Combined(const Doubles& in, const Ints& rows, int64_t limit, int64_t top_k, const Doubles& weights,
                     int64_t width) {
  const auto slots = static_cast<int64_t>(rows.size());
  Sums out;
  out.value.resize(static_cast<size_t>(top_k == 0 ? 0 : slots / top_k * width));
  out.terms = out.value;
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t r = rows[static_cast<size_t>(i)];
    if (r >= limit) continue;
    const double w = weights.empty() ? 1.0 : weights[static_cast<size_t>(i)];
    for (int64_t h = 0; h < width; ++h) {
      const auto to = static_cast<size_t>(i / top_k * width + h);
      const double term = w * in[static_cast<size_t>(r * width + h)];
      out.value[to] += term;
      out.terms[to] += std::abs(term);
    }
  }
  return out;
}

// out[rows[t K + k]] += w[t, k] in[t]
inline Sums Spread(const Doubles& in, const Ints& rows, int64_t limit, int64_t top_k, const Doubles& weights,
                   int64_t width) {
  Sums out;
  out.value.resize(static_cast<size_t>(limit * width));
  out.terms = out.value;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= limit) continue;
    for (int64_t h = 0; h < width; ++h) {
      const auto to = static_cast<size_t>(rows[i] * width + h);
      const double term =
          (weights.empty() ? 1.0 : weights[i]) * in[static_cast<size_t>(static_cast<int64_t>(i) / top_k * width + h)];
      out.value[to] += term;
      out.terms[to] += std::abs(term);
    }
  }
  return out;
}

// <in[t], other[rows[t K + k]]>
inline Sums Dots(const Doubles& in, const Doubles& other, const Ints& rows, int64_t limit, int64_t top_k,
                 int64_t width) {
  Sums out;
  for (size_t i = 0; i < rows.size(); ++i) {
    double sum = 0;
    double terms = 0;
    for (int64_t h = 0; h < width && rows[i] < limit; ++h) {
      const double term = in[static_cast<size_t>(static_cast<int64_t>(i) / top_k * width + h)] *
                          other[static_cast<size_t>(rows[i] * width + h)];
      sum += term;
      terms += std::abs(term);
    }
    out.value.push_back(sum);
    out.terms.push_back(terms);
  }
  return out;
}

}  // namespace jumar::testing
