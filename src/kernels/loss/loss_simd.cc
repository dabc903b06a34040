#include <algorithm>
#include <cmath>
#include <limits>

#include "base/simd_dispatch.h"
#include "kernels/loss/loss_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/loss/loss_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Elements whose sum stays in vector lanes before it goes to fp64.
constexpr size_t kBlock = 2048;

template <class D, class V>
HWY_INLINE double LaneSum(D d, V v) {
  return static_cast<double>(hn::GetLane(hn::SumOfLanes(d, v)));
}

// e^v for v <= 0 but for rounding. In fp32 what is less than 2^-100 is 2^-100, or 0 with kZero: it changes no sum with
// a 1 in it, and subnormal numbers, here or in the products that follow, cost a hundred times a normal one.
template <bool kZero, class D, class V>
HWY_INLINE V SoftmaxExp(D d, V v) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return ExpNegAbs(d, v);
  } else {
    const V low = hn::Set(d, -69.3147f);
    const V e = ExpNegAbs(d, hn::Max(v, low));
    return kZero ? hn::IfThenElseZero(hn::Gt(v, low), e) : e;
  }
}

// The tail of a row is completed with copies of its first element, which change no maximum.
template <class D, typename T>
double RowMax(D d, const T* x, size_t n) {
  const size_t lanes = hn::Lanes(d);
  auto m0 = hn::Set(d, -std::numeric_limits<hn::TFromD<D>>::infinity());
  auto m1 = m0;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    m0 = hn::Max(m0, LoadWide(d, x + i));
    m1 = hn::Max(m1, LoadWide(d, x + i + lanes));
  }
  for (; i + lanes <= n; i += lanes) m0 = hn::Max(m0, LoadWide(d, x + i));
  if (i < n) {
    T buffer[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
    std::fill_n(buffer, lanes, x[i]);
    std::copy(x + i, x + n, buffer);
    m1 = hn::Max(m1, LoadWide(d, buffer));
  }
  return static_cast<double>(hn::GetLane(hn::MaxOfLanes(d, hn::Max(m0, m1))));
}

template <typename T>
RowStats Stats(const T* x, size_t n) {
  const hn::ScalableTag<ComputeOf<T>> d;
  using C = ComputeOf<T>;
  const size_t lanes = hn::Lanes(d);
  RowStats stats{RowMax(d, x, n), 0.0, 0.0};
  const bool none = stats.max == -std::numeric_limits<double>::infinity();
  const auto max = hn::Set(d, none ? C(0) : static_cast<C>(stats.max));
  for (size_t block = 0; block < n; block += kBlock) {
    const size_t end = std::min<size_t>(block + kBlock, n);
    auto e0 = hn::Zero(d);
    auto e1 = hn::Zero(d);
    auto s0 = hn::Zero(d);
    auto s1 = hn::Zero(d);
    size_t i = block;
    for (; i + 2 * lanes <= end; i += 2 * lanes) {
      const auto a = LoadWide(d, x + i);
      const auto b = LoadWide(d, x + i + lanes);
      e0 = hn::Add(e0, SoftmaxExp<false>(d, hn::Sub(a, max)));
      e1 = hn::Add(e1, SoftmaxExp<false>(d, hn::Sub(b, max)));
      s0 = hn::Add(s0, a);
      s1 = hn::Add(s1, b);
    }
    for (; i < end; i += lanes) {
      const size_t rest = std::min(lanes, end - i);
      const auto a = LoadWideN(d, x + i, rest);
      const auto in = hn::FirstN(d, rest);
      e0 = hn::Add(e0, hn::IfThenElseZero(in, SoftmaxExp<false>(d, hn::Sub(a, max))));
      s0 = hn::Add(s0, a);
    }
    stats.sum_exp += LaneSum(d, hn::Add(e0, e1));
    stats.sum += LaneSum(d, hn::Add(s0, s1));
  }
  // A maximum may have passed NaN over, and e^-|NaN| is anything; their sum is NaN.
  if (std::isnan(stats.sum) || stats.max == std::numeric_limits<double>::infinity()) {
    stats.sum_exp = std::numeric_limits<double>::quiet_NaN();
  } else if (none) {
    stats.sum_exp = 0;
  }
  return stats;
}

template <typename T>
double WeightedSum(const T* x, const ComputeOf<T>* w, size_t n) {
  const hn::ScalableTag<ComputeOf<T>> d;
  const size_t lanes = hn::Lanes(d);
  double total = 0;
  for (size_t block = 0; block < n; block += kBlock) {
    const size_t end = std::min<size_t>(block + kBlock, n);
    auto sum = hn::Zero(d);
    size_t i = block;
    for (; i + lanes <= end; i += lanes) sum = hn::MulAdd(LoadWide(d, x + i), LoadWide(d, w + i), sum);
    if (i < end) sum = hn::MulAdd(LoadWideN(d, x + i, end - i), LoadWideN(d, w + i, end - i), sum);
    total += LaneSum(d, sum);
  }
  return total;
}

template <typename T>
void LogProb(const T* x, double lse, T* out, size_t n) {
  const hn::ScalableTag<ComputeOf<T>> d;
  const auto shift = hn::Set(d, static_cast<ComputeOf<T>>(lse));
  ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Sub(load(x), shift), out); });
}

template <typename T, typename Out>
void Narrowed(const T* x, Out* out, size_t n) {
  const hn::ScalableTag<T> d;
  ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(load(x), out); });
}

// NaN: e^-|NaN| is anything, but a row with a NaN has lse = NaN, and callers make `scale` NaN then.
template <typename T, typename Out>
void GradRow(const SoftmaxGrad& a) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const T* x = static_cast<const T*>(a.x);
  Out* out = static_cast<Out*>(a.out);
  const C* w = static_cast<const C*>(a.w);
  const auto lse = hn::Set(d, static_cast<C>(a.lse));
  const auto scale = hn::Set(d, static_cast<C>(a.scale));
  const auto shift = hn::Set(d, static_cast<C>(a.shift));
  if (w == nullptr) {
    ForEachVector(d, static_cast<size_t>(a.n), [&](const auto& load, const auto& store) HWY_ATTR {
      store(hn::MulSub(scale, SoftmaxExp<true>(d, hn::Sub(load(x), lse)), shift), out);
    });
  } else {
    ForEachVector(d, static_cast<size_t>(a.n), [&](const auto& load, const auto& store) HWY_ATTR {
      const auto minus = hn::Mul(shift, load(w));
      store(hn::MulSub(scale, SoftmaxExp<true>(d, hn::Sub(load(x), lse)), minus), out);
    });
  }
}

RowStats StatsOf(DType dtype, const void* x, int64_t n) {
  return WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    return Stats(static_cast<const T*>(x), static_cast<size_t>(n));
  });
}

double WeightedSumOf(DType dtype, const void* x, const void* w, int64_t n) {
  return WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    return WeightedSum(static_cast<const T*>(x), static_cast<const ComputeOf<T>*>(w), static_cast<size_t>(n));
  });
}

void LogProbOf(DType dtype, const void* x, double lse, void* out, int64_t n) {
  WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    LogProb(static_cast<const T*>(x), lse, static_cast<T*>(out), static_cast<size_t>(n));
  });
}

void GradOf(const SoftmaxGrad& a) {
  if (a.dtype == DType::kF64) return GradRow<double, double>(a);
  WithStored<float>(a.dtype, [&](auto in) HWY_ATTR {
    WithStored<float>(a.out_dtype, [&](auto out) HWY_ATTR { GradRow<decltype(in), decltype(out)>(a); });
  });
}

void NarrowOf(DType from, const void* x, DType to, void* out, int64_t n) {
  if (from == DType::kF64) {
    return Narrowed(static_cast<const double*>(x), static_cast<double*>(out), static_cast<size_t>(n));
  }
  WithStored<float>(to, [&](auto type) HWY_ATTR {
    Narrowed(static_cast<const float*>(x), static_cast<decltype(type)*>(out), static_cast<size_t>(n));
  });
}

double LoadOf(DType dtype, const void* data, int64_t index) {
  return WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const hn::ScalableTag<ComputeOf<T>> d;
    return static_cast<double>(hn::GetLane(LoadWideN(d, static_cast<const T*>(data) + index, 1)));
  });
}

void StoreOf(DType dtype, void* data, int64_t index, double value) {
  WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const hn::ScalableTag<ComputeOf<T>> d;
    StoreNarrowN(d, hn::Set(d, static_cast<ComputeOf<T>>(value)), static_cast<T*>(data) + index, 1);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
namespace {

HWY_EXPORT(StatsOf);
HWY_EXPORT(WeightedSumOf);
HWY_EXPORT(LogProbOf);
HWY_EXPORT(GradOf);
HWY_EXPORT(NarrowOf);
HWY_EXPORT(LoadOf);
HWY_EXPORT(StoreOf);

}  // namespace

RowStats LossRowStats(DType dtype, const void* x, int64_t n) { return JUMAR_DISPATCH(StatsOf)(dtype, x, n); }
double LossWeightedSum(DType dtype, const void* x, const void* w, int64_t n) {
  return JUMAR_DISPATCH(WeightedSumOf)(dtype, x, w, n);
}
void LogProbRow(DType dtype, const void* x, double lse, void* out, int64_t n) {
  JUMAR_DISPATCH(LogProbOf)(dtype, x, lse, out, n);
}
void SoftmaxGradRow(const SoftmaxGrad& row) { JUMAR_DISPATCH(GradOf)(row); }
void NarrowRow(DType from, const void* x, DType to, void* out, int64_t n) {
  JUMAR_DISPATCH(NarrowOf)(from, x, to, out, n);
}
double LossLoad(DType dtype, const void* data, int64_t index) { return JUMAR_DISPATCH(LoadOf)(dtype, data, index); }
void LossStore(DType dtype, void* data, int64_t index, double value) {
  JUMAR_DISPATCH(StoreOf)(dtype, data, index, value);
}

// Sums of e^(x - max) are 0 or NaN where max is -infinity.
void LogSumExp::Add(const RowStats& part) {
  const double max = std::max(max_, part.max);
  const auto scaled = [&](double sum, double own_max) {
    return std::isinf(own_max) && own_max < 0 ? sum : sum * std::exp(own_max - max);
  };
  sum_ = scaled(sum_, max_) + scaled(part.sum_exp, part.max);
  max_ = max;
}

double LogSumExp::Value() const { return std::isnan(sum_) ? sum_ : max_ + std::log(sum_); }

}  // namespace jumar
#endif  // HWY_ONCE
