#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/simd_dispatch.h"
#include "kernels/router/router_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/router/router_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "kernels/router/rows-inl.h"
#include "kernels/router/top_k-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whether eps is lost beside a sum that is at least 1 / E.
HWY_INLINE bool Negligible(const RouterOptions& o, int64_t experts) {
  return o.eps * static_cast<double>(experts) < 0x1p-54;
}

// (largest, second) of both pairs.
template <typename C>
HWY_INLINE void MergeTwo(C& first, C& second, C a, C b) {
  second = std::max(std::min(first, a), std::max(second, b));
  first = std::max(first, a);
}

// The score of each group of `size` neighbours; no choice is NaN.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE void GroupScores(D d, const C* choice, size_t groups, size_t size, GroupScore kind, C* out) {
  const size_t lanes = hn::Lanes(d);
  const C inf = std::numeric_limits<C>::infinity();
  HWY_ALIGN C m1[HWY_MAX_BYTES / sizeof(C)];
  HWY_ALIGN C m2[HWY_MAX_BYTES / sizeof(C)];
  for (size_t g = 0; g < groups; ++g) {
    const C* x = choice + g * size;
    auto top = hn::Set(d, -inf);
    auto next = top;
    size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
      const auto v = hn::LoadU(d, x + i);
      next = hn::Max(next, hn::Min(top, v));
      top = hn::Max(top, v);
    }
    hn::Store(top, d, m1);
    hn::Store(next, d, m2);
    C first = m1[0];
    C second = m2[0];
    for (size_t l = 1; l < lanes; ++l) MergeTwo(first, second, m1[l], m2[l]);
    for (; i < size; ++i) MergeTwo(first, second, x[i], -inf);
    out[g] = kind == GroupScore::kMax || first == inf ? first : first + second;
  }
}

// choice = s + bias with NaN as infinity and -infinity behind the row; groups that lose become options.fill.
template <class D, typename C = hn::TFromD<D>>
void Choices(D d, const C* s, size_t n, const C* bias, const RouterOptions& o, const TopKScratch<C>& scratch,
             C* group_score, int32_t* kept, C* choice) {
  const C inf = std::numeric_limits<C>::infinity();
  const auto top = hn::Set(d, inf);
  const size_t padded = Padded(d, n);
  for (size_t i = 0; i < padded; i += hn::Lanes(d)) {
    auto c = hn::LoadU(d, s + i);
    if (bias != nullptr) c = hn::Add(c, hn::LoadU(d, bias + i));
    hn::StoreU(hn::IfThenElse(hn::IsNaN(c), top, c), d, choice + i);
  }
  std::fill(choice + n, choice + padded, -inf);
  if (o.groups == 1) return;
  const size_t groups = static_cast<size_t>(o.groups);
  const size_t size = n / groups;
  GroupScores(d, choice, groups, size, o.group_score, group_score);
  std::fill(group_score + groups, group_score + Padded(d, groups), -inf);
  const size_t keep = static_cast<size_t>(o.kept_groups);
  TopK(d, group_score, groups, keep, scratch, kept);
  std::sort(kept, kept + keep);
  for (size_t g = 0, at = 0; g < groups; ++g) {
    if (at < keep && kept[at] == static_cast<int32_t>(g)) {
      ++at;
    } else {
      std::fill_n(choice + g * size, size, static_cast<C>(o.fill));
    }
  }
}

template <class D, typename C = hn::TFromD<D>>
HWY_INLINE C Sum(D d, const C* x, size_t padded) {
  auto sum = hn::LoadU(d, x);
  for (size_t i = hn::Lanes(d); i < padded; i += hn::Lanes(d)) sum = hn::Add(sum, hn::LoadU(d, x + i));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// w[j] = x[chosen[j]], `pad` behind them.
template <typename C>
HWY_INLINE void Gather(const C* x, const int32_t* chosen, size_t k, size_t padded, C pad, C* w) {
  for (size_t j = 0; j < k; ++j) w[j] = x[chosen[j]];
  for (size_t j = k; j < padded; ++j) w[j] = pad;
}

HWY_INLINE void StoreIndices(const RowMap& map, int64_t row, const int32_t* chosen, size_t k, int64_t finished) {
  if (map.dtype == DType::kI64) {
    int64_t* out = static_cast<int64_t*>(OutRowOf(map, row));
    for (size_t j = 0; j < k; ++j) out[j] = finished >= 0 ? finished : chosen[j];
  } else {
    int32_t* out = static_cast<int32_t*>(OutRowOf(map, row));
    for (size_t j = 0; j < k; ++j) out[j] = finished >= 0 ? static_cast<int32_t>(finished) : chosen[j];
  }
}

HWY_INLINE void LoadIndices(const RowMap& map, int64_t row, size_t k, int32_t* chosen) {
  if (map.dtype == DType::kI64) {
    const int64_t* from = static_cast<const int64_t*>(RowOf(map, row));
    for (size_t j = 0; j < k; ++j) chosen[j] = static_cast<int32_t>(from[j]);
  } else {
    const int32_t* from = static_cast<const int32_t*>(RowOf(map, row));
    for (size_t j = 0; j < k; ++j) chosen[j] = from[j];
  }
}

template <typename C>
void Route(const RouteBatch& b, int64_t begin, int64_t end) {
  const hn::ScalableTag<C> d;
  const RouterOptions& o = b.options;
  const size_t n = static_cast<size_t>(b.logits.cols);
  const size_t k = static_cast<size_t>(o.k);
  const size_t padded = Padded(d, n);
  const size_t padded_k = Padded(d, std::max<size_t>(k, 1));
  const C inf = std::numeric_limits<C>::infinity();
  ScratchFrame frame;
  const TopKScratch<C> scratch(frame, padded, hn::Lanes(d));
  C* buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* s = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* choice = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* group_score = frame.Alloc<C>(static_cast<int64_t>(Padded(d, static_cast<size_t>(o.groups))));
  C* w = frame.Alloc<C>(static_cast<int64_t>(padded_k));
  int32_t* kept = AllocChosen(frame, o.groups, hn::Lanes(d));
  int32_t* chosen = AllocChosen(frame, o.k, hn::Lanes(d));
  C* bias = nullptr;
  if (b.bias != nullptr) {
    bias = frame.Alloc<C>(static_cast<int64_t>(padded));
    std::memcpy(bias, b.bias, n * sizeof(C));
    std::fill(bias + n, bias + padded, C(0));
  }
  const bool softmax = o.scoring == Scoring::kSoftmax;
  const bool by_logits = softmax && b.bias == nullptr && o.groups == 1;
  // The weights come from the chosen logits alone.
  const bool chosen_only = by_logits && o.renorm && b.scores == nullptr && Negligible(o, b.logits.cols);
  for (int64_t row = begin; row < end; ++row) {
    const C* x = Wide(d, b.logits, row, -inf, buffer);
    C max = 0;
    if (by_logits) {
      max = ChooseByLogits(d, x, n, o, scratch, choice, chosen);
    } else if (softmax) {
      max = MaxOrNaN(d, x, padded);
    }
    if (!softmax) {
      for (size_t i = 0; i < padded; i += hn::Lanes(d)) hn::StoreU(SigmoidOf(d, hn::LoadU(d, x + i)), d, s + i);
    } else if (!Finite(max)) {
      std::fill_n(s, padded, std::numeric_limits<C>::quiet_NaN());
    } else if (!chosen_only) {
      const C sum = Exponentials(d, x, max, s, padded);
      Scale(d, s, C(1) / sum, padded);
    }
    if (!by_logits && k > 0) {
      Choices(d, s, n, bias, o, scratch, group_score, kept, choice);
      TopK(d, choice, n, k, scratch, chosen);
    }
    if (chosen_only && Finite(max)) {
      Gather(x, chosen, k, padded_k, -inf, w);
      const C sum = Exponentials(d, w, max, w, padded_k);
      Scale(d, w, static_cast<C>(o.scale) / sum, padded_k);
    } else {
      Gather(s, chosen, k, padded_k, C(0), w);
      const C over = o.renorm ? Sum(d, w, padded_k) + static_cast<C>(o.eps) : C(1);
      Scale(d, w, static_cast<C>(o.scale) / over, padded_k);
    }
    Narrow(d, w, b.weights.dtype, OutRowOf(b.weights, row), k);
    const bool finished = b.finished != nullptr && *static_cast<const uint8_t*>(RowOf(*b.finished, row)) != 0;
    StoreIndices(b.indices, row, chosen, k, finished ? b.logits.cols : -1);
    if (b.scores != nullptr) std::memcpy(OutRowOf(*b.scores, row), s, n * sizeof(C));
  }
}

// s (1 - s) = e / (1 + e)^2 with e = e^-|z|, s the sigmoid of z.
template <class D, class V>
HWY_INLINE V SigmoidSlope(D d, V z) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  const V e = ExpNegAbs(d, z);
  const V t = hn::Div(one, hn::Add(one, e));
  return hn::IfThenElse(hn::IsNaN(z), z, hn::Mul(hn::Mul(e, t), t));
}

// For chosen expert j: p[j] is its score, slope[j] is p for a softmax and p (1 - p) for a sigmoid; u, zero outside of
// the loop's body, collects what arrives at the experts.
template <typename C>
void RouteGrad(const RouteGradBatch& b, int64_t begin, int64_t end) {
  const hn::ScalableTag<C> d;
  const RouterOptions& o = b.options;
  const size_t n = static_cast<size_t>(b.source.cols);
  const size_t k = static_cast<size_t>(o.k);
  const size_t padded = Padded(d, n);
  const size_t padded_k = Padded(d, std::max<size_t>(k, 1));
  const C inf = std::numeric_limits<C>::infinity();
  const bool softmax = o.scoring == Scoring::kSoftmax;
  const bool lost = Negligible(o, b.source.cols);
  // Without these the gradient is 0 but for the chosen experts.
  const bool dense = b.grad_scores != nullptr || (softmax && !(o.renorm && lost));
  ScratchFrame frame;
  const TopKScratch<C> scratch(frame, padded, hn::Lanes(d));
  C* buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* s_buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* g_buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* u = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* p = frame.Alloc<C>(static_cast<int64_t>(padded_k));
  C* slope = frame.Alloc<C>(static_cast<int64_t>(padded_k));
  C* grad_buffer = frame.Alloc<C>(static_cast<int64_t>(padded_k));
  int32_t* chosen = AllocChosen(frame, o.k, hn::Lanes(d));
  std::fill_n(u, padded, C(0));
  std::fill_n(grad_buffer, padded_k, C(0));
  for (int64_t row = begin; row < end; ++row) {
    const C* x = Wide(d, b.source, row, b.from_scores ? C(0) : -inf, buffer);
    const bool whole_softmax = softmax && !b.from_scores;
    const C max = whole_softmax ? MaxOrNaN(d, x, padded) : C(0);
    LoadIndices(b.indices, row, k, chosen);
    if (k > 0 && chosen[0] == static_cast<int32_t>(n)) ChooseByLogits(d, x, n, o, scratch, s_buffer, chosen);
    if (!Finite(max)) {
      std::fill_n(s_buffer, padded, std::numeric_limits<C>::quiet_NaN());
      Narrow(d, s_buffer, b.dlogits.dtype, OutRowOf(b.dlogits, row), n);
      continue;
    }
    // Of a sigmoid only the chosen experts' scores are needed, of a softmax often the whole row.
    const C* s = x;
    if (dense && whole_softmax) {
      const C sum = Exponentials(d, x, max, s_buffer, padded);
      Scale(d, s_buffer, C(1) / sum, padded);
      s = s_buffer;
    }
    const bool known = b.from_scores || (dense && softmax);
    Gather(known ? s : x, chosen, k, padded_k, known ? C(0) : -inf, p);
    if (!known && softmax) {
      const C sum = Exponentials(d, p, max, p, padded_k);
      Scale(d, p, C(1) / sum, padded_k);
    }
    if (softmax) {
      std::copy(p, p + padded_k, slope);
    } else if (b.from_scores) {
      for (size_t j = 0; j < padded_k; ++j) slope[j] = p[j] * (C(1) - p[j]);
    } else {
      Gather(x, chosen, k, padded_k, C(0), slope);
      for (size_t j = 0; j < padded_k; j += hn::Lanes(d)) {
        const auto z = hn::LoadU(d, slope + j);
        hn::StoreU(SigmoidSlope(d, z), d, slope + j);
        if (!known) hn::StoreU(SigmoidOf(d, z), d, p + j);
      }
      std::fill(p + k, p + padded_k, C(0));
    }
    // u = the gradient that arrives at the chosen scores; `through` = sum of s (u + ds).
    C through = 0;
    if (b.grad_weights != nullptr) {
      const C* g = Wide(d, *b.grad_weights, row, C(0), grad_buffer);
      auto dot = hn::Zero(d);
      for (size_t j = 0; j < padded_k; j += hn::Lanes(d)) {
        dot = hn::MulAdd(hn::LoadU(d, g + j), hn::LoadU(d, p + j), dot);
      }
      const C scale = static_cast<C>(o.scale);
      const C sum_dp = scale * hn::GetLane(hn::SumOfLanes(d, dot));
      C over = 1;
      C mean = 0;
      through = sum_dp;
      if (o.renorm) {
        over = Sum(d, p, padded_k) + static_cast<C>(o.eps);
        mean = sum_dp / over;
        through = lost ? C(0) : mean / over * static_cast<C>(o.eps);
      }
      const auto minus = hn::Set(d, mean);
      const auto inverse = hn::Set(d, C(1) / over);
      for (size_t j = 0; j < padded_k; j += hn::Lanes(d)) {
        const auto arrives = hn::Mul(hn::MulSub(hn::Set(d, scale), hn::LoadU(d, g + j), minus), inverse);
        hn::StoreU(dense ? arrives : hn::Mul(arrives, hn::LoadU(d, slope + j)), d, slope + j);
      }
      for (size_t j = 0; j < k; ++j) u[chosen[j]] += slope[j];
    }
    if (!dense) {
      Narrow(d, u, b.dlogits.dtype, OutRowOf(b.dlogits, row), n);
    } else {
      const C* g = u;
      if (b.grad_scores != nullptr) {
        const C* ds = Wide(d, *b.grad_scores, row, C(0), g_buffer);
        auto dot = hn::Zero(d);
        for (size_t i = 0; i < padded; i += hn::Lanes(d)) {
          const auto v = hn::LoadU(d, ds + i);
          if (softmax) dot = hn::MulAdd(v, hn::LoadU(d, s + i), dot);
          hn::StoreU(hn::Add(v, hn::LoadU(d, u + i)), d, g_buffer + i);
        }
        through += hn::GetLane(hn::SumOfLanes(d, dot));
        g = g_buffer;
      }
      const auto c = hn::Set(d, through);
      const auto one = hn::Set(d, C(1));
      WithStored<C>(b.dlogits.dtype, [&](auto type) HWY_ATTR {
        auto* out = static_cast<decltype(type)*>(OutRowOf(b.dlogits, row));
        if (softmax) {
          ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
            store(hn::Mul(load(s), hn::Sub(load(g), c)), out);
          });
        } else {
          ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
            const auto v = load(x);
            store(hn::Mul(b.from_scores ? hn::Mul(v, hn::Sub(one, v)) : SigmoidSlope(d, v), load(g)), out);
          });
        }
      });
    }
    for (size_t j = 0; j < k; ++j) u[chosen[j]] = 0;
  }
}

void RouteOf(const RouteBatch& b, int64_t begin, int64_t end) {
  if (b.logits.dtype == DType::kF64) {
    Route<double>(b, begin, end);
  } else {
    Route<float>(b, begin, end);
  }
}

void RouteGradOf(const RouteGradBatch& b, int64_t begin, int64_t end) {
  if (b.source.dtype == DType::kF64) {
    RouteGrad<double>(b, begin, end);
  } else {
    RouteGrad<float>(b, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
namespace {

HWY_EXPORT(RouteOf);
HWY_EXPORT(RouteGradOf);

}  // namespace

void RouteRows(const RouteBatch& batch, int64_t begin, int64_t end) { JUMAR_DISPATCH(RouteOf)(batch, begin, end); }
void RouteGradRows(const RouteGradBatch& batch, int64_t begin, int64_t end) {
  JUMAR_DISPATCH(RouteGradOf)(batch, begin, end);
}

}  // namespace jumar
#endif  // HWY_ONCE
