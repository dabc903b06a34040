#include "kernels/attention/attention_update_simd.h"

#include <limits>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_update_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename C>
void RingWeightsAs(C* max1, C* sum1, C* max2, C* sum2, int64_t n) {
  const hn::ScalableTag<C> d;
  const auto zero = hn::Zero(d);
  ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    const auto m1 = load(max1);
    const auto m2 = load(max2);
    const auto l1 = load(sum1);
    const auto l2 = load(sum2);
    const auto m = hn::Max(m1, m2);
    // A part without keys has no say, whatever its maximum is.
    const auto a = hn::IfThenElse(hn::Eq(l1, zero), zero, hn::Mul(l1, ScoreExp(d, hn::Sub(m1, m))));
    const auto b = hn::IfThenElse(hn::Eq(l2, zero), zero, hn::Mul(l2, ScoreExp(d, hn::Sub(m2, m))));
    const auto l = hn::Add(a, b);
    const auto none = hn::Eq(l, zero);
    store(m, max1);
    store(l, sum1);
    store(hn::IfThenElse(none, zero, hn::Div(a, l)), max2);
    store(hn::IfThenElse(none, zero, hn::Div(b, l)), sum2);
  });
}

template <typename C>
void LseWeightsAs(C* weights, int64_t parts, int64_t n, C* lse) {
  const hn::ScalableTag<C> d;
  const auto zero = hn::Zero(d);
  const auto lowest = hn::Set(d, -std::numeric_limits<C>::infinity());
  ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    auto m = lowest;
    for (int64_t i = 0; i < parts; ++i) m = hn::Max(m, load(weights + i * n));
    auto sum = zero;
    for (int64_t i = 0; i < parts; ++i) {
      const auto x = load(weights + i * n);
      const auto e = hn::IfThenElse(hn::Eq(x, lowest), zero, ScoreExp(d, hn::Sub(x, m)));
      sum = hn::Add(sum, e);
      store(e, weights + i * n);
    }
    const auto none = hn::Eq(sum, zero);
    const auto safe = hn::IfThenElse(none, hn::Set(d, C(1)), sum);
    for (int64_t i = 0; i < parts; ++i) store(hn::Div(load(weights + i * n), safe), weights + i * n);
    store(hn::IfThenElse(none, lowest, hn::Add(m, hn::Log(d, safe))), lse);
  });
}

template <typename T>
void WeightedRowAs(const void* const* rows, const void* weights, int64_t stride, int64_t parts, void* out,
                   int64_t cols) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const C* w = static_cast<const C*>(weights);
  ForEachVector(d, static_cast<size_t>(cols), [&](const auto& load, const auto& store) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (int64_t i = 0; i < parts; ++i) {
      if (w[i * stride] == 0) continue;
      sum = hn::MulAdd(load(static_cast<const T*>(rows[i])), hn::Set(d, w[i * stride]), sum);
    }
    store(sum, static_cast<T*>(out));
  });
}

void RingWeightsOf(bool f64, void* max1, void* sum1, void* max2, void* sum2, int64_t n) {
  const auto as = [&](auto type) HWY_ATTR {
    using C = decltype(type);
    RingWeightsAs(static_cast<C*>(max1), static_cast<C*>(sum1), static_cast<C*>(max2), static_cast<C*>(sum2), n);
  };
  f64 ? as(double()) : as(float());
}

void LseWeightsOf(bool f64, void* weights, int64_t parts, int64_t n, void* lse) {
  const auto as = [&](auto type) HWY_ATTR {
    using C = decltype(type);
    LseWeightsAs(static_cast<C*>(weights), parts, n, static_cast<C*>(lse));
  };
  f64 ? as(double()) : as(float());
}

void WeightedRowOf(DType dtype, const void* const* rows, const void* weights, int64_t stride, int64_t parts, void* out,
                   int64_t cols) {
  WithFloat(dtype, [&](auto type) HWY_ATTR { WeightedRowAs<decltype(type)>(rows, weights, stride, parts, out, cols); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(RingWeightsOf);
HWY_EXPORT(LseWeightsOf);
HWY_EXPORT(WeightedRowOf);

void RingWeights(bool f64, void* max1, void* sum1, void* max2, void* sum2, int64_t n) {
  JUMAR_DISPATCH(RingWeightsOf)(f64, max1, sum1, max2, sum2, n);
}

void LseWeights(bool f64, void* weights, int64_t parts, int64_t n, void* lse) {
  JUMAR_DISPATCH(LseWeightsOf)(f64, weights, parts, n, lse);
}

void WeightedRow(DType dtype, const void* const* rows, const void* weights, int64_t stride, int64_t parts, void* out,
                 int64_t cols) {
  JUMAR_DISPATCH(WeightedRowOf)(dtype, rows, weights, stride, parts, out, cols);
}

}  // namespace jumar
#endif  // HWY_ONCE
