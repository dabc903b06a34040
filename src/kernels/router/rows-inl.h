// Rows of any stored dtype in the compute type, and their softmax.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/rows.h"
#include "simd/math-inl.h"

#if defined(JUMAR_ROUTER_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_ROUTER_ROWS_INL_H_
#undef JUMAR_ROUTER_ROWS_INL_H_
#else
#define JUMAR_ROUTER_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE const void* RowOf(const RowMap& map, int64_t row) {
  return static_cast<const char*>(map.data) + map.Offset(row) * static_cast<int64_t>(SizeOf(map.dtype));
}
HWY_INLINE void* OutRowOf(const RowMap& map, int64_t row) { return const_cast<void*>(RowOf(map, row)); }

// Lanes(d) divides the result.
template <class D>
HWY_INLINE size_t Padded(D d, size_t n) {
  return (n + hn::Lanes(d) - 1) / hn::Lanes(d) * hn::Lanes(d);
}

// The row in the compute type, followed by `pad` up to Padded(), or a vector of it: in place where it is so already.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE const C* Wide(D d, const RowMap& map, int64_t row, C pad, C* buffer) {
  const size_t n = static_cast<size_t>(map.cols);
  const void* x = RowOf(map, row);
  if (n == 0) hn::StoreU(hn::Set(d, pad), d, buffer);
  if (SizeOf(map.dtype) == sizeof(C) && n > 0 && n % hn::Lanes(d) == 0) return static_cast<const C*>(x);
  WithStored<C>(map.dtype, [&](auto type) HWY_ATTR {
    const auto* from = static_cast<const decltype(type)*>(x);
    size_t i = 0;
    for (; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) hn::StoreU(LoadWide(d, from + i), d, buffer + i);
    if (i < n) {
      hn::StoreU(LoadWideN(d, from + i, n - i), d, buffer + i);
      for (size_t j = n; j < Padded(d, n); ++j) buffer[j] = pad;
    }
  });
  return buffer;
}

// Largest element; NaN when one is NaN.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE C MaxOrNaN(D d, const C* x, size_t padded) {
  auto max = hn::LoadU(d, x);
  auto nan = hn::VecFromMask(d, hn::IsNaN(max));
  for (size_t i = hn::Lanes(d); i < padded; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + i);
    max = hn::Max(max, v);
    nan = hn::Or(nan, hn::VecFromMask(d, hn::IsNaN(v)));
  }
  if (!hn::AllFalse(d, hn::MaskFromVec(nan))) return std::numeric_limits<C>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

// Where a softmax has no NaN. With -infinity alone it would be 0 / 0.
template <typename C>
HWY_INLINE bool Finite(C max) {
  return max - max == 0;
}

// e = e^(x - max) for a finite max, 0 behind the row; returns their sum.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE C Exponentials(D d, const C* x, C max, C* e, size_t padded) {
  const size_t lanes = hn::Lanes(d);
  const auto top = hn::Set(d, max);
  auto s0 = hn::Zero(d);
  auto s1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * lanes <= padded; i += 2 * lanes) {
    const auto a = ExpNegAbs(d, hn::Sub(hn::LoadU(d, x + i), top));
    const auto b = ExpNegAbs(d, hn::Sub(hn::LoadU(d, x + i + lanes), top));
    hn::StoreU(a, d, e + i);
    hn::StoreU(b, d, e + i + lanes);
    s0 = hn::Add(s0, a);
    s1 = hn::Add(s1, b);
  }
  if (i < padded) {
    const auto a = ExpNegAbs(d, hn::Sub(hn::LoadU(d, x + i), top));
    hn::StoreU(a, d, e + i);
    s0 = hn::Add(s0, a);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, s1)));
}

template <class D, typename C = hn::TFromD<D>>
HWY_INLINE void Scale(D d, C* x, C factor, size_t padded) {
  const auto f = hn::Set(d, factor);
  for (size_t i = 0; i < padded; i += hn::Lanes(d)) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), f), d, x + i);
}

// p = softmax, NaN throughout where it has one; 0 behind the row. Returns log of the sum of e^x.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE double Softmax(D d, const C* x, C* p, size_t n) {
  const size_t padded = Padded(d, n);
  const C max = MaxOrNaN(d, x, padded);
  if (!Finite(max)) {
    std::fill_n(p, padded, std::numeric_limits<C>::quiet_NaN());
    return static_cast<double>(max);
  }
  const C sum = Exponentials(d, x, max, p, padded);
  Scale(d, p, C(1) / sum, padded);
  return static_cast<double>(max) + std::log(static_cast<double>(sum));
}

// Row of `to` = x, rounded once.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE void Narrow(D d, const C* x, DType dtype, void* to, size_t n) {
  WithStored<C>(dtype, [&](auto type) HWY_ATTR {
    auto* out = static_cast<decltype(type)*>(to);
    ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(load(x), out); });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
