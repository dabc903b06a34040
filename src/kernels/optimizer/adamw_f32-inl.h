// AdamW on fp32 tensors in pairs of fp32: twice the lanes of fp64 and none of its conversions.
//
// A value is hi + lo with |lo| <= half an ulp of hi. Products and sums give their rounding errors exactly (fused
// multiply-add; TwoSum), the constants are pairs too, and so every value has a relative error below 2^-34. Vectors in
// which a difference cancels so far that this could show beside the rounding of the result, or whose values leave the
// range in which rounding errors are representable, go through fp64.
#include <cmath>

#include "kernels/optimizer/optimizer_simd.h"
#include "simd/f64_io-inl.h"

#if defined(JUMAR_KERNELS_OPTIMIZER_ADAMW_F32_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_KERNELS_OPTIMIZER_ADAMW_F32_INL_H_
#undef JUMAR_KERNELS_OPTIMIZER_ADAMW_F32_INL_H_
#else
#define JUMAR_KERNELS_OPTIMIZER_ADAMW_F32_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct FloatPair {
  explicit FloatPair(double x) : hi(static_cast<float>(x)), lo(static_cast<float>(x - static_cast<double>(hi))) {}
  float hi, lo;
};

struct AdamWPairs {
  explicit AdamWPairs(const AdamWConstants& c)
      : sign(static_cast<float>(c.sign)),
        beta1(1 - c.weight1),
        weight1(c.weight1),
        beta2(c.beta2),
        weight2(c.weight2),
        step(c.step_size),
        eps(c.eps),
        keep(c.keep) {}

  // Whether pairs hold the constants to 2^-48.
  static bool Hold(const AdamWConstants& c) {
    const auto usual = [](double x) { return x == 0 || (std::abs(x) > 0x1p-60 && std::abs(x) < 0x1p60); };
    return c.eps > 0x1p-48 && usual(c.eps) && usual(c.weight1) && usual(1 - c.weight1) && usual(c.weight2) &&
           usual(c.beta2) && usual(c.step_size) && usual(c.keep);
  }

  float sign;
  FloatPair beta1, weight1, beta2, weight2, step, eps, keep;
};

// sum + error = a + b, exactly.
template <class V>
HWY_INLINE void TwoSum(V a, V b, V& sum, V& error) {
  sum = hn::Add(a, b);
  const V b_part = hn::Sub(sum, a);
  error = hn::Add(hn::Sub(a, hn::Sub(sum, b_part)), hn::Sub(b, b_part));
}

// x * constant = product + error, to 2^-48.
template <class D, class V>
HWY_INLINE V Scale(D d, const FloatPair& constant, V x, V& error) {
  const V hi = hn::Set(d, constant.hi);
  const V product = hn::Mul(hi, x);
  error = hn::MulAdd(hn::Set(d, constant.lo), x, hn::MulSub(hi, x, product));
  return product;
}

// a + a_lo + b + b_lo as a rounded value and what is left of it.
template <class V>
HWY_INLINE V AddPairs(V a, V a_lo, V b, V b_lo, V& rest) {
  V sum, error;
  TwoSum(a, b, sum, error);
  const V low = hn::Add(error, hn::Add(a_lo, b_lo));
  const V rounded = hn::Add(sum, low);
  rest = hn::Add(hn::Sub(sum, rounded), low);
  return rounded;
}

// What one vector hands from the moments to the parameter: step_size * exp_avg and exp_avg_sq, as pairs.
struct AdamWRun {
  static constexpr size_t kRun = 256;
  HWY_ALIGN float up[kRun], up_lo[kRun], v[kRun], v_lo[kRun];
  bool done[kRun];  // by vector: the parameter is already written
};

// Moments of one vector, stored where they are good; false where fp64 must do it.
template <class D>
HWY_INLINE bool MomentsF32(D d, const AdamWPairs& c, const float* grad, const float* exp_avg, const float* exp_avg_sq,
                           float* avg_out, float* avg_sq_out, size_t at, AdamWRun& run) {
  const auto g = hn::Mul(hn::LoadU(d, grad), hn::Set(d, c.sign));
  const auto m = hn::LoadU(d, exp_avg);
  const auto old_v = hn::LoadU(d, exp_avg_sq);

  auto keep_lo = g, gain_lo = g, avg_lo = g;
  const auto keep = Scale(d, c.beta1, m, keep_lo);
  const auto gain = Scale(d, c.weight1, g, gain_lo);
  const auto avg = AddPairs(keep, keep_lo, gain, gain_lo, avg_lo);

  auto v_keep_lo = g, v_gain_lo = g, v_lo = g;
  const auto square = hn::Mul(g, g);
  const auto square_lo = hn::MulSub(g, g, square);
  const auto v_keep = Scale(d, c.beta2, old_v, v_keep_lo);
  const auto v_gain = Scale(d, c.weight2, square, v_gain_lo);
  v_gain_lo = hn::MulAdd(hn::Set(d, c.weight2.hi), square_lo, v_gain_lo);
  const auto v = AddPairs(v_keep, v_keep_lo, v_gain, v_gain_lo, v_lo);

  auto up_lo = g;
  const auto up = Scale(d, c.step, avg, up_lo);
  up_lo = hn::MulAdd(hn::Set(d, c.step.hi), avg_lo, up_lo);

  const auto zero = hn::Zero(d);
  const auto larger = hn::Max(hn::Abs(keep), hn::Abs(gain));
  const auto size = hn::Abs(avg);
  const auto avg_good = hn::And(hn::Ge(size, hn::Mul(larger, hn::Set(d, 0x1p-12f))),
                                hn::Or(hn::Gt(size, hn::Set(d, 0x1p-60f)), hn::Eq(larger, zero)));
  const auto v_good = hn::Or(hn::And(hn::Gt(v, hn::Set(d, 0x1p-80f)), hn::Lt(v, hn::Set(d, 0x1p80f))),
                             hn::Eq(hn::Max(v_keep, hn::Abs(g)), zero));
  if (HWY_UNLIKELY(!hn::AllTrue(d, hn::And(avg_good, v_good)))) return false;
  hn::StoreU(avg, d, avg_out);
  hn::StoreU(v, d, avg_sq_out);
  hn::Store(up, d, run.up + at);
  hn::Store(up_lo, d, run.up_lo + at);
  hn::Store(v, d, run.v + at);
  hn::Store(v_lo, d, run.v_lo + at);
  return true;
}

// Parameters of one vector whose moments are good.
template <class D>
HWY_INLINE void ParamF32(D d, const AdamWPairs& c, const AdamWConstants& exact, const AdamWRun& run, size_t at,
                         const float* param, float* param_out) {
  const auto v = hn::Load(d, run.v + at);
  const auto up = hn::Load(d, run.up + at);
  const auto root = hn::Sqrt(v);
#if HWY_ARCH_X86
  const auto inverse = hn::ApproximateReciprocal(root);  // 2^-11
#else
  const auto inverse = hn::Div(hn::Set(d, 1.0f), root);
#endif
  // sqrt(v + v_lo) = root + (v + v_lo - root^2) / (2 root)
  const auto missing = hn::Add(hn::NegMulAdd(root, root, v), hn::Load(d, run.v_lo + at));
  const auto root_lo = hn::IfThenElseZero(hn::Gt(v, hn::Zero(d)), hn::Mul(hn::Mul(missing, inverse), hn::Set(d, 0.5f)));
  auto x = v, x_lo = v;
  TwoSum(root, hn::Set(d, c.eps.hi), x, x_lo);
  x_lo = hn::Add(x_lo, hn::Add(root_lo, hn::Set(d, c.eps.lo)));
  // (up + up_lo) / (x + x_lo) = update + (up + up_lo - update * (x + x_lo)) / x
  const auto over = hn::Div(hn::Set(d, 1.0f), x);
  const auto update = hn::Mul(up, over);
  const auto rest = hn::Add(hn::NegMulAdd(update, x, up), hn::NegMulAdd(update, x_lo, hn::Load(d, run.up_lo + at)));
  const auto update_lo = hn::Mul(rest, over);

  auto kept_lo = v, left = v;
  const auto kept = Scale(d, c.keep, hn::LoadU(d, param), kept_lo);
  const auto result = AddPairs(kept, kept_lo, hn::Neg(update), hn::Neg(update_lo), left);
  const auto size = hn::Abs(result);
  const auto larger = hn::Max(hn::Abs(kept), hn::Abs(update));
  const auto good = hn::And(hn::Ge(size, hn::Mul(larger, hn::Set(d, 0x1p-4f))),
                            hn::Or(hn::Gt(size, hn::Set(d, 0x1p-60f)), hn::Eq(larger, hn::Zero(d))));
  if (HWY_LIKELY(hn::AllTrue(d, good))) {
    hn::StoreU(result, d, param_out);
    return;
  }
  const hn::Repartition<double, D> d64;
  for (size_t i = 0; i < hn::Lanes(d); i += hn::Lanes(d64)) {
    const auto pair = [&](const float* hi, const float* lo)
                          HWY_ATTR { return hn::Add(LoadF64(d64, hi + at + i), LoadF64(d64, lo + at + i)); };
    const auto over_root =
        hn::Div(pair(run.up, run.up_lo), hn::Add(hn::Sqrt(pair(run.v, run.v_lo)), hn::Set(d64, exact.eps)));
    StoreF64(d64, hn::MulSub(LoadF64(d64, param + i), hn::Set(d64, exact.keep), over_root), param_out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
