#include <cmath>

#include "base/simd_dispatch.h"
#include "kernels/optimizer/optimizer_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimizer/grad_norm_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/f64_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <Power kPower, class D, class V>
HWY_INLINE V Accumulate(D /*d*/, V sum, V x) {
  if constexpr (kPower == Power::kTwo) {
    return hn::MulAdd(x, x, sum);
  } else if constexpr (kPower == Power::kOne) {
    return hn::Add(sum, hn::Abs(x));
  } else {
    // The sum stays NaN once it is, and becomes NaN with x: Max promises neither.
    const V a = hn::Abs(x);
    return hn::IfThenElse(hn::Or(hn::Lt(sum, a), hn::IsNaN(a)), a, sum);
  }
}

template <Power kPower, class D, class V>
HWY_INLINE V Join(D d, V a, V b) {
  if constexpr (kPower == Power::kMax) {
    return Accumulate<Power::kMax>(d, a, b);
  } else {
    return hn::Add(a, b);
  }
}

// Four chains, joined in a fixed order; lanes in order at the end.
template <typename T, Power kPower>
double SumT(const void* in, int64_t count) {
  const hn::ScalableTag<double> d;
  const size_t lanes = hn::Lanes(d);
  const auto* p = static_cast<const T*>(in);
  const auto n = static_cast<size_t>(count);
  auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = Accumulate<kPower>(d, s0, LoadF64(d, p + i));
    s1 = Accumulate<kPower>(d, s1, LoadF64(d, p + i + lanes));
    s2 = Accumulate<kPower>(d, s2, LoadF64(d, p + i + 2 * lanes));
    s3 = Accumulate<kPower>(d, s3, LoadF64(d, p + i + 3 * lanes));
  }
  if (i < n) {
    ForEachF64(d, n - i, [&](const auto& load, const auto&) HWY_ATTR { s0 = Accumulate<kPower>(d, s0, load(p + i)); });
  }
  HWY_ALIGN double lane[HWY_MAX_BYTES / sizeof(double)];
  hn::Store(Join<kPower>(d, Join<kPower>(d, s0, s1), Join<kPower>(d, s2, s3)), d, lane);
  double total = lane[0];
  for (size_t k = 1; k < lanes; ++k) {
    if constexpr (kPower == Power::kMax) {
      if (total < lane[k] || lane[k] != lane[k]) total = lane[k];
    } else {
      total += lane[k];
    }
  }
  return total;
}

// |x|^p by the library, after a vector load.
template <typename T>
double SumOther(const void* in, int64_t count, double p) {
  const hn::ScalableTag<double> d;
  double total = 0;
  int64_t left = count;
  ForEachF64(d, static_cast<size_t>(count), [&](const auto& load, const auto&) HWY_ATTR {
    HWY_ALIGN double x[HWY_MAX_BYTES / sizeof(double)];
    hn::Store(load(static_cast<const T*>(in)), d, x);
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    const int64_t now = left < lanes ? left : lanes;
    for (int64_t k = 0; k < now; ++k) {
      const double a = std::fabs(x[k]);
      total += p == 3.0 ? a * a * a : std::pow(a, p);
    }
    left -= now;
  });
  return total;
}

template <typename T>
double SumPower(Power power, double p, const void* in, int64_t n) {
  switch (power) {
    case Power::kOne:
      return SumT<T, Power::kOne>(in, n);
    case Power::kTwo:
      return SumT<T, Power::kTwo>(in, n);
    case Power::kMax:
      return SumT<T, Power::kMax>(in, n);
    default:
      return SumOther<T>(in, n, p);
  }
}

double Sum(DType dtype, Power power, double p, const void* in, int64_t n) {
  return WithFloat(dtype, [&](auto type) HWY_ATTR { return SumPower<decltype(type)>(power, p, in, n); });
}

template <typename T>
void ScaleT(double factor, const void* in, void* out, int64_t n) {
  const hn::ScalableTag<ComputeOf<T>> d;
  const auto f = hn::Set(d, static_cast<ComputeOf<T>>(factor));
  ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    store(hn::Mul(load(static_cast<const T*>(in)), f), static_cast<T*>(out));
  });
}

void Scale(DType dtype, double factor, const void* in, void* out, int64_t n) {
  WithFloat(dtype, [&](auto type) HWY_ATTR { ScaleT<decltype(type)>(factor, in, out, n); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Sum);
HWY_EXPORT(Scale);

double PowerSumBlock(DType dtype, Power power, double p, const void* in, int64_t n) {
  return JUMAR_DISPATCH(Sum)(dtype, power, p, in, n);
}
void ScaleBlock(DType dtype, double factor, const void* in, void* out, int64_t n) {
  JUMAR_DISPATCH(Scale)(dtype, factor, in, out, n);
}

}  // namespace jumar
#endif  // HWY_ONCE
