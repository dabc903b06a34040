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

// e^-|x|, within 1.5 ulp (1.25 with FMA) where the result is normal, correctly scaled below; exactly 0 from |x| = 104
// (float) on. The result for NaN is unspecified (but no NaN need come out): callers multiply by x anyway.
//
// Float: |x| = t - n ln2 with an integer n <= 0 and |t| <= ln2 / 2, e^-|x| = 2^n e^-t. Adding 1.5 * 2^23 rounds to an
// integer that sits in the low mantissa bits, ready to be added to the exponent; ln2 is split so that n * (first part)
// is exact. The polynomial is the minimax one of degree 6 (relative error 2.6e-9). The exponent is first raised by 64
// and the result multiplied by 2^-64, which rounds once when it is subnormal.
template <class D, class V>
HWY_INLINE V ExpNegAbs(D d, V x) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return ExpOf(d, hn::Neg(hn::Abs(x)));
  } else {
    const hn::RebindToUnsigned<D> du;
    const V ax = hn::Min(hn::Abs(x), hn::Set(d, 104.0f));
    const V magic = hn::Set(d, 12582912.0f + 64.0f);
    const V z = hn::NegMulAdd(ax, hn::Set(d, 1.44269504f), magic);
    const V n = hn::Sub(z, magic);
    const V t = hn::MulAdd(n, hn::Set(d, -2.12194440e-4f), hn::MulAdd(n, hn::Set(d, 0.693359375f), ax));
    V p = hn::MulAdd(t, hn::Set(d, 0.00140616044f), hn::Set(d, -0.00837910693f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.0416647693f));
    p = hn::MulAdd(p, t, hn::Set(d, -0.166663642f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.500000044f));
    p = hn::MulAdd(p, t, hn::Set(d, -1.0f));
    p = hn::MulAdd(p, t, hn::Set(d, 1.0f));
    const auto scaled = hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, z)));
    return hn::Mul(hn::BitCast(d, scaled), hn::Set(d, 0x1p-64f));
  }
}

// e^x within 1.5 ulp where the result is normal, rounded once below and 0 from -104 on; e^70 above 70, which no score
// reaches over the maximum of its row; NaN for NaN. As ExpNegAbs: x = n ln2 + t. Without scalef, the polynomial gives
// 2^-25 e^t and is multiplied by 2^(n + 25), a normal number down to the smallest result.
//
// Scores of hidden keys are minus infinity, and there are many: a product that underflows takes x86 a microcode assist,
// more than ten times as long as the rest. scalef needs none far below the range; elsewhere x stops where the number
// that stands for 2^(n + 25) is 0.
template <class D, class V>
HWY_INLINE V ScoreExp(D d, V x) {
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return ExpOf(d, x);
  } else {
    const V log2e = hn::Set(d, 1.44269504f);
    // Of two operands of which one is NaN, x86 returns the second; Highway's on Arm (fmaxnm, fminnm) return the number.
    const auto clamp = [&](float low) HWY_ATTR { return hn::Min(hn::Set(d, 70.0f), hn::Max(hn::Set(d, low), x)); };
    const auto polynomial = [&](V n, V y, float scale) HWY_ATTR {
      const V t = hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), hn::NegMulAdd(n, hn::Set(d, 0.693359375f), y));
      V p = hn::MulAdd(t, hn::Set(d, 0.00140616044f * scale), hn::Set(d, 0.00837910693f * scale));
      p = hn::MulAdd(p, t, hn::Set(d, 0.0416647693f * scale));
      p = hn::MulAdd(p, t, hn::Set(d, 0.166663642f * scale));
      p = hn::MulAdd(p, t, hn::Set(d, 0.500000044f * scale));
      p = hn::MulAdd(p, t, hn::Set(d, 1.0f * scale));
      return hn::MulAdd(p, t, hn::Set(d, 1.0f * scale));
    };
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
    if constexpr (hn::MaxLanes(D()) == 16) {
      const V y = clamp(-400.0f);
      const V magic = hn::Set(d, 12582912.0f);
      const V n = hn::Sub(hn::MulAdd(y, log2e, magic), magic);
      return V{_mm512_scalef_ps(polynomial(n, y, 1.0f).raw, n.raw)};
    }
#endif
    const V y = clamp(-105.36f);                       // n = -152
    const V magic = hn::Set(d, 12582912.0f + 152.0f);  // n + 25 and the bias of exponents
    const V z = hn::MulAdd(y, log2e, magic);
    const hn::RebindToUnsigned<D> du;
    const V power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, z)));
    const V e = hn::Mul(polynomial(hn::Sub(z, magic), y, 0x1p-25f), power);
#if HWY_ARCH_X86
    return e;
#else
    return hn::IfThenElse(hn::IsNaN(x), x, e);
#endif
  }
}

// e^-x for an 1 / (1 + e^-x) that is rounded to 16 bits afterwards: within 12 ulp of float (96 without FMA), with
// kDegree 4 instead of 5 within 64 (128); infinity below x = -88.7, less than 2^-57 above 40, unspecified for NaN.
// As ExpNegAbs, but without a case for the sign: x is clamped and the exponent may go either way.
template <int kDegree, class D, class V>
HWY_INLINE V CoarseExpNeg(D d, V x) {
  static_assert(kDegree == 4 || kDegree == 5);
  const hn::RebindToUnsigned<D> du;
  const V y = hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 40.0f));
  const V magic = hn::Set(d, 12582912.0f - 64.0f);
  const V z = hn::NegMulAdd(y, hn::Set(d, 1.44269504f), magic);
  const V n = hn::Sub(z, magic);
  const V t = hn::MulAdd(n, hn::Set(d, 0.693147181f), y);
  V p = hn::Zero(d);
  if constexpr (kDegree == 5) {
    p = hn::MulAdd(t, hn::Set(d, -0.00695334435f), hn::Set(d, 0.0418756896f));
    p = hn::MulAdd(p, t, hn::Set(d, -0.166876972f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.499993730f));
    p = hn::MulAdd(p, t, hn::Set(d, -0.999993699f));
  } else {
    p = hn::MulAdd(t, hn::Set(d, 0.0423820609f), hn::Set(d, -0.168089344f));
    p = hn::MulAdd(p, t, hn::Set(d, 0.499959456f));
    p = hn::MulAdd(p, t, hn::Set(d, -0.999951352f));
  }
  p = hn::MulAdd(p, t, hn::Set(d, 1.0f));
  const auto scaled = hn::Add(hn::BitCast(du, p), hn::ShiftLeft<23>(hn::BitCast(du, z)));
  return hn::Mul(hn::BitCast(d, scaled), hn::Set(d, 0x1p64f));
}

// 1 / (1 + e^-x), through e^-|x| so that nothing overflows:  x >= 0: 1 / (1 + e),  x < 0: e / (1 + e).
// Within 2.5 ulp where the result is normal; 0 and 1 in the limits; NaN for NaN.
template <class D, class V>
HWY_INLINE V SigmoidOf(D d, V x) {
  const V one = hn::Set(d, hn::TFromD<D>(1));
  const V e = ExpNegAbs(d, x);
  const V numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Div(numerator, hn::Add(one, e)));
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
