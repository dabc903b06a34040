// Routers and their losses in fp64, readable by eye; rows are contiguous.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/router/router.h"

namespace jumar::ref {

using Doubles = std::vector<double>;
using Ids = std::vector<int64_t>;

// The k largest, descending; equal ones by number; NaN as infinity.
inline Ids TopK(const Doubles& values, int64_t k) {
  Ids order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int64_t i) {
    const double v = values[static_cast<size_t>(i)];
    return std::isnan(v) ? INFINITY : v;
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) > key(b); });
  order.resize(static_cast<size_t>(k));
  return order;
}

inline Doubles Scores(const Doubles& x, Scoring scoring) {
  Doubles s(x.size());
  if (scoring == Scoring::kSigmoid) {
    std::transform(x.begin(), x.end(), s.begin(), [](double v) { return 1 / (1 + std::exp(-v)); });
    return s;
  }
  const double max = *std::max_element(x.begin(), x.end());
  const bool bad = std::any_of(x.begin(), x.end(), [](double v) { return std::isnan(v); }) || std::isinf(max);
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += s[i] = bad ? NAN : std::exp(x[i] - max);
  for (double& v : s) v /= sum;
  return s;
}

struct Routed {
  Doubles scores;
  Ids indices;
  Doubles weights;
};

// One row; bias may be empty.
inline Routed Route(const Doubles& x, const Doubles& bias, const RouterOptions& o) {
  Routed r;
  r.scores = Scores(x, o.scoring);
  Doubles choice = r.scores;
  if (bias.empty() && o.groups == 1 && o.scoring == Scoring::kSoftmax && !std::isnan(r.scores[0])) choice = x;
  for (size_t i = 0; i < bias.size(); ++i) choice[i] += bias[i];
  if (o.groups > 1) {
    const size_t size = x.size() / static_cast<size_t>(o.groups);
    Doubles group;
    for (size_t g = 0; g < static_cast<size_t>(o.groups); ++g) {
      Doubles own(choice.begin() + static_cast<int64_t>(g * size),
                  choice.begin() + static_cast<int64_t>((g + 1) * size));
      std::sort(own.begin(), own.end(), std::greater<double>());
      group.push_back(o.group_score == GroupScore::kMax ? own[0] : own[0] + own[1]);
    }
    const Ids kept = TopK(group, o.kept_groups);
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::find(kept.begin(), kept.end(), static_cast<int64_t>(i / size)) == kept.end()) choice[i] = o.fill;
    }
  }
  r.indices = TopK(choice, o.k);
  double sum = o.eps;
  for (const int64_t e : r.indices) sum += r.scores[static_cast<size_t>(e)];
  for (const int64_t e : r.indices) {
    r.weights.push_back(o.scale * r.scores[static_cast<size_t>(e)] / (o.renorm ? sum : 1.0));
  }
  return r;
}

// dlogits of one row: Jacobian by Jacobian. grad_scores may be empty.
inline Doubles RouteGrad(const Routed& r, const Doubles& grad_weights, const Doubles& grad_scores,
                         const RouterOptions& o) {
  Doubles ds(r.scores.size(), 0.0);
  double sum = o.eps;
  double dot = 0;
  for (size_t j = 0; j < grad_weights.size(); ++j) {
    const double s = r.scores[static_cast<size_t>(r.indices[j])];
    sum += s;
    dot += o.scale * grad_weights[j] * s;
  }
  for (size_t j = 0; j < grad_weights.size(); ++j) {
    const double d = o.scale * grad_weights[j];
    ds[static_cast<size_t>(r.indices[j])] += o.renorm ? d / sum - dot / (sum * sum) : d;
  }
  for (size_t i = 0; i < grad_scores.size(); ++i) ds[i] += grad_scores[i];
  double mean = 0;
  for (size_t i = 0; i < ds.size(); ++i) mean += r.scores[i] * ds[i];
  Doubles dx(ds.size());
  for (size_t i = 0; i < ds.size(); ++i) {
    const double s = r.scores[i];
    dx[i] = o.scoring == Scoring::kSoftmax ? s * (ds[i] - mean) : s * (1 - s) * ds[i];
  }
  return dx;
}

// log of the sum of e^x.
inline double LogSumExp(const Doubles& x) {
  const double max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

struct Balanced {
  double loss;
  Doubles tokens;
  double total;
};

// rows: of all layers; mask: one for each of them.
inline Balanced LoadBalance(const std::vector<Doubles>& rows, const Doubles& mask, size_t experts, int64_t top_k) {
  Balanced out{0, Doubles(experts, 0.0), 0};
  Doubles probs(experts, 0.0);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (mask[r] == 0) continue;
    out.total += mask[r];
    const Doubles p = Scores(rows[r], Scoring::kSoftmax);
    for (const int64_t e : TopK(rows[r], top_k)) out.tokens[static_cast<size_t>(e)] += mask[r];
    for (size_t e = 0; e < experts; ++e) probs[e] += mask[r] * p[e];
  }
  for (size_t e = 0; e < experts; ++e) {
    out.tokens[e] /= out.total;
    out.loss += static_cast<double>(experts) * out.tokens[e] * probs[e] / out.total;
  }
  return out;
}

}  // namespace jumar::ref
