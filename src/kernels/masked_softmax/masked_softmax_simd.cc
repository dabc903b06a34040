#include "kernels/masked_softmax/masked_softmax_simd.h"

#include <limits>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/masked_softmax/masked_softmax_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void ForwardAs(const T* x, const void* hide, double scale_of_x, void* work, T* y, int64_t n) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const auto count = static_cast<size_t>(n);
  const C* h = static_cast<const C*>(hide);
  C* t = static_cast<C*>(work);
  const auto scale = hn::Set(d, static_cast<C>(scale_of_x));
  const auto fill = hn::Set(d, C(-10000));
  ForEachVector(d, count, [&](const auto& load, const auto& store) HWY_ATTR {
    store(hn::IfThenElse(hn::Eq(load(h), hn::Zero(d)), hn::Mul(load(x), scale), fill), t);
  });
  C max = t[0];
  size_t i = 0;
  if (count >= hn::Lanes(d)) {
    auto m = hn::LoadU(d, t);
    for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) m = hn::Max(m, hn::LoadU(d, t + i));
    max = hn::GetLane(hn::MaxOfLanes(d, m));
  }
  for (; i < count; ++i) max = t[i] > max ? t[i] : max;
  const auto most = hn::Set(d, max);
  ForEachVector(d, count,
                [&](const auto& load, const auto& store) HWY_ATTR { store(ScoreExp(d, hn::Sub(load(t), most)), t); });
  // Read back, so that what pads the last vector is 0.
  auto sum = hn::Zero(d);
  ForEachVector(d, count, [&](const auto& load, const auto&) HWY_ATTR { sum = hn::Add(sum, load(t)); });
  const auto inverse = hn::Div(hn::Set(d, C(1)), hn::SumOfLanes(d, sum));
  ForEachVector(d, count, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(t), inverse), y); });
}

template <typename T>
void BackwardAs(const T* dy, const T* y, const void* hide, double scale_of_x, T* dx, int64_t n) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const auto count = static_cast<size_t>(n);
  const C* h = static_cast<const C*>(hide);
  const auto scale = hn::Set(d, static_cast<C>(scale_of_x));
  auto dot = hn::Zero(d);
  ForEachVector(d, count, [&](const auto& load, const auto&) HWY_ATTR { dot = hn::MulAdd(load(dy), load(y), dot); });
  const auto total = hn::SumOfLanes(d, dot);
  ForEachVector(d, count, [&](const auto& load, const auto& store) HWY_ATTR {
    const auto g = hn::Mul(hn::Mul(scale, load(y)), hn::Sub(load(dy), total));
    store(hn::IfThenElse(hn::Eq(load(h), hn::Zero(d)), g, hn::Zero(d)), dx);
  });
}

void Forward(DType dtype, const void* x, const void* hide, double scale, void* work, void* y, int64_t n) {
  WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    ForwardAs(static_cast<const T*>(x), hide, scale, work, static_cast<T*>(y), n);
  });
}

void Backward(DType dtype, const void* dy, const void* y, const void* hide, double scale, void* dx, int64_t n) {
  WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    BackwardAs(static_cast<const T*>(dy), static_cast<const T*>(y), hide, scale, static_cast<T*>(dx), n);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

void MaskedSoftmaxRow(DType dtype, const void* x, const void* hide, double scale, void* work, void* y, int64_t n) {
  JUMAR_DISPATCH(Forward)(dtype, x, hide, scale, work, y, n);
}

void MaskedSoftmaxBackwardRow(DType dtype, const void* dy, const void* y, const void* hide, double scale, void* dx,
                              int64_t n) {
  JUMAR_DISPATCH(Backward)(dtype, dy, y, hide, scale, dx, n);
}

}  // namespace jumar
#endif  // HWY_ONCE
