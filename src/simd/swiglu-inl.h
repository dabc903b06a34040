// silu(x) * up and its derivatives, for results that are stored as T.
#include <type_traits>

#include "simd/math-inl.h"

#if defined(JUMAR_SIMD_SWIGLU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_SIMD_SWIGLU_INL_H_
#undef JUMAR_SIMD_SWIGLU_INL_H_
#else
#define JUMAR_SIMD_SWIGLU_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^-x for a result that is stored as T (2 bytes). bf16 needs fewer terms than fp16.
template <typename T, class D, class V>
HWY_INLINE V CoarseExp(D d, V x) {
  return CoarseExpNeg < std::is_same_v<T, BF16> ? 4 : 5 > (d, x);
}

// x / (1 + e^-x) * up. For results of 4 and 8 bytes through e = e^-|x|, which keeps what is below -88 too.
template <typename T, class D, class V>
HWY_INLINE V SwigluOf(D d, V x, V up) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  if constexpr (sizeof(T) == 2) {
    return hn::Mul(hn::Div(x, hn::Add(one, CoarseExp<T>(d, x))), up);
  } else {
    const V e = ExpNegAbs(d, x);
    const V numerator = hn::Mul(x, hn::IfNegativeThenElse(x, e, one));
    return hn::Mul(hn::Div(numerator, hn::Add(one, e)), up);
  }
}

// s = sigmoid(x), c = 1 - s. For results of 4 and 8 bytes both come from the quotient 1 / (1 + e), which keeps c exact
// where s is near 1.
template <typename T, class D, class V>
HWY_INLINE void SwigluGradOf(D d, V grad, V x, V up, V& dgate, V& dup) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  V s = one;
  V c = one;
  if constexpr (sizeof(T) == 2) {
    s = hn::Div(one, hn::Add(one, CoarseExp<T>(d, x)));
    c = hn::Sub(one, s);
  } else {
    const V e = ExpNegAbs(d, x);
    const V r = hn::Div(one, hn::Add(one, e));
    const V er = hn::Mul(e, r);
    s = hn::IfNegativeThenElse(x, er, r);
    c = hn::IfNegativeThenElse(x, r, er);
  }
  dgate = hn::Mul(hn::Mul(hn::Mul(s, hn::MulAdd(x, c, one)), up), grad);
  dup = hn::Mul(hn::Mul(x, s), grad);
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
