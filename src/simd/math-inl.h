// Functions of a vector with stated error bounds, in ulps of the vector's type, tested in math_test.cc.
#include "hwy/contrib/math/math-inl.h"
#include "simd/float_io-inl.h"

#if defined(JUMAR_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_SIMD_MATH_INL_H_
#undef JUMAR_SIMD_MATH_INL_H_
#else
#define JUMAR_SIMD_MATH_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^x. Within 1 ulp where the result is normal; 0 below the range, infinity above it, NaN for NaN.
template <class D, class V>
HWY_INLINE V ExpOf(D d, V x) {
  using T = hn::TFromD<D>;
  constexpr T kHigh = sizeof(T) == 4 ? T(88.7228394) : T(709.782712893384);
  const V y = hn::Exp(d, hn::Min(x, hn::Set(d, kHigh)));
  const V inf = hn::Set(d, std::numeric_limits<T>::infinity());
  const V bounded = hn::IfThenElse(hn::Gt(x, hn::Set(d, kHigh)), inf, y);
  return hn::IfThenElse(hn::IsNaN(x), x, bounded);
}

// 1 / (1 + e^-x), through e^-|x| so that nothing overflows:  x >= 0: 1 / (1 + e),  x < 0: e / (1 + e).
// Within 2.5 ulp where the result is normal; 0 and 1 in the limits; NaN for NaN.
template <class D, class V>
HWY_INLINE V SigmoidOf(D d, V x) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  const V e = ExpOf(d, hn::Neg(hn::Abs(x)));
  const V numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

// 1 / sqrt(x). Within 1.5 ulp (half from the root, which the reciprocal may double, and half of its own); infinity for
// 0.
template <class D, class V>
HWY_INLINE V RsqrtOf(D d, V x) {
  return hn::Div(hn::Set(d, hn::TFromD<D>(1)), hn::Sqrt(x));
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
