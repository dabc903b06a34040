// The indexer and its losses in plain fp64 loops, from the formulas of lightning_indexer.h: the oracle of the test.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/lightning_indexer/lightning_indexer.h"

namespace jumar::ref {

// get(x, {i, j, ..}): an element of a view as double.
using IndexerReader = std::function<double(const TensorView&, std::initializer_list<int64_t>)>;

struct IndexerRow {
  std::vector<double> scores, sizes;  // of all keys of the sequence; sums of magnitudes
  int64_t limit = 0;                  // keys that the row sees
};

inline int64_t IndexerLimit(const IndexerInputs& in, const SequencePair& s, int64_t i) {
  return in.causal ? std::clamp<int64_t>(i + s.k_len - s.q_len + 1, 0, s.k_len) : s.k_len;
}

inline double IndexerDot(const IndexerInputs& in, const SequencePair& s, int64_t i, int64_t h, int64_t t,
                         const IndexerReader& get, bool magnitudes = false) {
  double sum = 0;
  for (int64_t c = 0; c < in.query.size[3]; ++c) {
    const double x = get(in.query, {s.batch, s.q_begin + i, h, c}) * get(in.key, {s.batch, s.k_begin + t, 0, c});
    sum += magnitudes ? std::abs(x) : x;
  }
  return sum;
}

inline IndexerRow IndexerScores(const IndexerInputs& in, const SequencePair& s, int64_t i, const IndexerReader& get) {
  IndexerRow row;
  row.limit = IndexerLimit(in, s, i);
  for (int64_t t = 0; t < s.k_len; ++t) {
    double score = 0, size = 0;
    for (int64_t h = 0; h < in.query.size[2]; ++h) {
      const double w = get(in.weights, {s.batch, s.q_begin + i, h});
      score += w * std::max(IndexerDot(in, s, i, h, t, get), 0.0);
      size += std::abs(w) * IndexerDot(in, s, i, h, t, get, true);
    }
    row.scores.push_back(score);
    row.sizes.push_back(size);
  }
  return row;
}

// The positions of the `count` best of the keys that a row sees: NaN first, the larger first, the lower position first.
inline std::vector<int64_t> IndexerChoice(const IndexerRow& row, int64_t count) {
  std::vector<int64_t> order;
  for (int64_t t = 0; t < row.limit; ++t) order.push_back(t);
  const auto rank = [&](int64_t t) {
    const double x = row.scores[static_cast<size_t>(t)];
    return std::isnan(x) ? std::numeric_limits<double>::infinity() : x;
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rank(a) > rank(b); });
  if (static_cast<int64_t>(order.size()) > count) order.resize(static_cast<size_t>(count));
  return order;
}

// Gradients with the magnitudes of what they sum.
struct IndexerGradientSums {
  explicit IndexerGradientSums(const IndexerInputs& in)
      : dq(static_cast<size_t>(in.query.numel())),
        dk(static_cast<size_t>(in.key.numel())),
        dw(static_cast<size_t>(in.weights.numel())),
        dq_size(dq),
        dk_size(dk),
        dw_size(dw) {}
  std::vector<double> dq, dk, dw, dq_size, dk_size, dw_size;
  double loss = 0, loss_size = 0;
};

// Row i with key t, whose score has the gradient `slope`; `size`: the magnitude of what that is a difference of.
inline void AddSlope(const IndexerInputs& in, const SequencePair& s, int64_t i, int64_t t, double slope, double size,
                     const IndexerReader& get, IndexerGradientSums& out) {
  const int64_t heads = in.query.size[2], d = in.query.size[3];
  const int64_t row = s.batch * in.query.size[1] + s.q_begin + i;
  const int64_t key = s.batch * in.key.size[1] + s.k_begin + t;
  for (int64_t h = 0; h < heads; ++h) {
    const double r = IndexerDot(in, s, i, h, t, get);
    const double w = get(in.weights, {s.batch, s.q_begin + i, h});
    out.dw[static_cast<size_t>(row * heads + h)] += slope * std::max(r, 0.0);
    out.dw_size[static_cast<size_t>(row * heads + h)] += size * IndexerDot(in, s, i, h, t, get, true);
    if (!(r > 0)) continue;
    for (int64_t c = 0; c < d; ++c) {
      const double q = get(in.query, {s.batch, s.q_begin + i, h, c});
      const double k = get(in.key, {s.batch, s.k_begin + t, 0, c});
      const auto at = static_cast<size_t>((row * heads + h) * d + c);
      const auto to = static_cast<size_t>(key * d + c);
      out.dq[at] += slope * w * k;
      out.dq_size[at] += size * std::abs(w * k);
      out.dk[to] += slope * w * q;
      out.dk_size[to] += size * std::abs(w * q);
    }
  }
}

// Mean over heads of the attention's probability of key t.
inline double TeacherShare(const IndexerTeacher& teacher, const SequencePair& s, int64_t i, int64_t t,
                           const IndexerReader& get) {
  const int64_t heads = teacher.query.size[2];
  const int64_t group = heads / teacher.key.size[2];
  double share = 0;
  for (int64_t h = 0; h < heads; ++h) {
    double dot = 0;
    for (const auto& [q, k] : {std::pair(&teacher.query, &teacher.key), {&teacher.query_rope, &teacher.key_rope}}) {
      for (int64_t c = 0; c < (q->rank == 0 ? 0 : q->size[3]); ++c) {
        dot += get(*q, {s.batch, s.q_begin + i, h, c}) * get(*k, {s.batch, s.k_begin + t, h / group, c});
      }
    }
    const double sum = get(teacher.sum, {s.batch, s.q_begin + i, h});
    if (sum == 0) continue;
    share += std::exp(teacher.scale * dot - get(teacher.max, {s.batch, s.q_begin + i, h})) / sum;
  }
  return share / static_cast<double>(heads);
}

// One row: keys `at`, p of the attention and y of the indexer.
inline void AddLoss(const IndexerInputs& in, const SequencePair& s, int64_t i, const std::vector<int64_t>& at,
                    const std::vector<double>& p, const std::vector<double>& y, const IndexerReader& get,
                    IndexerGradientSums& out) {
  for (size_t j = 0; j < at.size(); ++j) {
    AddSlope(in, s, i, at[j], y[j] - p[j], y[j] + p[j], get, out);
    if (p[j] == 0) continue;
    const double log_p = std::log(std::max(p[j], 1e-8));
    const double log_y = std::log(std::max(y[j], 1e-8));
    out.loss += p[j] * (log_p - log_y);
    out.loss_size += p[j] * (1 + std::abs(log_p) + std::abs(log_y));
  }
}

}  // namespace jumar::ref
