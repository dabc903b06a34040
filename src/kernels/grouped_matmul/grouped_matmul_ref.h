// fp64 oracle: plain loops over values as double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/grouped_matmul/grouped_matmul.h"

namespace jumar::reference {

// Values and, for each, the sum of the magnitudes of its terms.
struct Sums {
  explicit Sums(int64_t n) : value(static_cast<size_t>(n)), size(static_cast<size_t>(n)) {}
  void Add(int64_t at, double term) {
    value[static_cast<size_t>(at)] += term;
    size[static_cast<size_t>(at)] += std::abs(term);
  }
  std::vector<double> value;
  std::vector<double> size;
};

// All arguments row by row; x [rows, k], dy [rows, n], w [groups, k, n], bias [groups, n].
struct GroupedOracle {
  Sums y, dx, dw, db;

  GroupedOracle(const RowGroups& groups, int64_t rows, int64_t k, int64_t n, const std::vector<double>& x,
                const std::vector<double>& dy, const std::vector<double>& w, const std::vector<double>& bias)
      : y(rows * n), dx(rows * k), dw(groups.count() * k * n), db(groups.count() * n) {
    const auto at = [](const std::vector<double>& v, int64_t i) { return v[static_cast<size_t>(i)]; };
    for (int64_t g = 0; g < groups.count(); ++g) {
      const RowGroups::Range& range = groups.ranges[static_cast<size_t>(g)];
      for (int64_t t = range.begin; t < range.end; ++t) {
        for (int64_t j = 0; j < n; ++j) {
          y.Add(t * n + j, at(bias, g * n + j));
          db.Add(g * n + j, at(dy, t * n + j));
        }
        for (int64_t p = 0; p < k; ++p) {
          for (int64_t j = 0; j < n; ++j) {
            const int64_t e = (g * k + p) * n + j;
            y.Add(t * n + j, at(x, t * k + p) * at(w, e));
            dx.Add(t * k + p, at(dy, t * n + j) * at(w, e));
            dw.Add(e, at(x, t * k + p) * at(dy, t * n + j));
          }
        }
      }
    }
  }
};

}  // namespace jumar::reference
