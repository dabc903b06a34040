// The arithmetic, compiled once per SIMD target; foreach_target.h includes this file again for each.
#include "squared_relu_glu_simd.h"

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "squared_relu_glu_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar::example {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using jumar::HWY_NAMESPACE::ForEachVector;
using jumar::HWY_NAMESPACE::WithFloat;

// max(x, 0) that keeps NaN, which hn::Max does not promise.
template <class D, class V>
HWY_INLINE V Relu(D d, V x) {
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);
}

template <typename T>
void Forward(const void* input, const void* gate, void* y, int64_t n) {
  const hn::ScalableTag<ComputeOf<T>> d;
  ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    const auto r = Relu(d, load(static_cast<const T*>(input)));
    store(hn::Mul(hn::Mul(r, r), load(static_cast<const T*>(gate))), static_cast<T*>(y));
  });
}

template <typename T>
void Backward(const void* dy, const void* input, const void* gate, void* dinput, void* dgate, int64_t n) {
  const hn::ScalableTag<ComputeOf<T>> d;
  ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    const auto g = load(static_cast<const T*>(dy));
    const auto r = Relu(d, load(static_cast<const T*>(input)));
    const auto slope = hn::Add(r, r);
    store(hn::Mul(hn::Mul(slope, load(static_cast<const T*>(gate))), g), static_cast<T*>(dinput));
    store(hn::Mul(hn::Mul(r, r), g), static_cast<T*>(dgate));
  });
}

void ForwardAny(DType dtype, const void* input, const void* gate, void* y, int64_t n) {
  WithFloat(dtype, [&](auto type) HWY_ATTR { Forward<decltype(type)>(input, gate, y, n); });
}

void BackwardAny(DType dtype, const void* dy, const void* input, const void* gate, void* dinput, void* dgate,
                 int64_t n) {
  WithFloat(dtype, [&](auto type) HWY_ATTR { Backward<decltype(type)>(dy, input, gate, dinput, dgate, n); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar::example
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar::example {
HWY_EXPORT(ForwardAny);
HWY_EXPORT(BackwardAny);

void ForwardBlock(DType dtype, const void* input, const void* gate, void* y, int64_t n) {
  JUMAR_DISPATCH(ForwardAny)(dtype, input, gate, y, n);
}

void BackwardBlock(DType dtype, const void* dy, const void* input, const void* gate, void* dinput, void* dgate,
                   int64_t n) {
  JUMAR_DISPATCH(BackwardAny)(dtype, dy, input, gate, dinput, dgate, n);
}

}  // namespace jumar::example
#endif  // HWY_ONCE
