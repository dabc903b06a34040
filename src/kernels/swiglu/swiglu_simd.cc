#include "kernels/swiglu/swiglu_simd.h"

#include <cstring>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/swiglu/swiglu_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "simd/swiglu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// How far ahead of its use memory is asked for: the exponential keeps the CPU from looking that far by itself.
constexpr size_t kAheadBytes = 1024;

// Calls body(load, store) over [0, n) two vectors at a time: load(p, a, b) reads at p + i, store(a, b, p) writes at
// p + i. The first `head` elements and the rest at the end go through buffers.
template <typename T, bool kStream, class D, class Body>
HWY_INLINE void ForEachPair(D d, int64_t n, int64_t head, const Body& body) {
  using V = hn::Vec<D>;
  const auto step = static_cast<int64_t>(2 * hn::Lanes(d));
  const auto partial = [&](int64_t i, int64_t count) HWY_ATTR {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    body(
        [&](const T* p, V& a, V& b) HWY_ATTR {
          HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
          std::memcpy(buffer, p + i, bytes);
          LoadPair(d, buffer, a, b);
        },
        [&](V a, V b, T* p) HWY_ATTR {
          HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
          StorePair<false, true>(d, a, b, buffer);
          std::memcpy(p + i, buffer, bytes);
        });
  };
  int64_t i = 0;
  if (head > 0) {
    i = head < n ? head : n;
    partial(0, i);
  }
  for (; i + step <= n; i += step) {
    body(
        [&](const T* p, V& a, V& b) HWY_ATTR {
          hwy::Prefetch(p + i + kAheadBytes / sizeof(T));
          LoadPair(d, p + i, a, b);
        },
        [&](V a, V b, T* p) HWY_ATTR { StorePair<kStream, true>(d, a, b, p + i); });
  }
  if (i < n) partial(i, n - i);
}

template <typename T, bool kStream>
void ForwardRun(const T* gate, const T* up, T* out, int64_t n, int64_t head) {
  const hn::ScalableTag<ComputeOf<T>> d;
  ForEachPair<T, kStream>(d, n, head, [&](const auto& load, const auto& store) HWY_ATTR {
    auto g0 = hn::Zero(d), g1 = hn::Zero(d), u0 = hn::Zero(d), u1 = hn::Zero(d);
    load(gate, g0, g1);
    load(up, u0, u1);
    store(SwigluOf<T>(d, g0, u0), SwigluOf<T>(d, g1, u1), out);
  });
}

template <typename T, bool kStream>
void BackwardRun(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n, int64_t head) {
  const hn::ScalableTag<ComputeOf<T>> d;
  ForEachPair<T, kStream>(d, n, head, [&](const auto& load, const auto& store) HWY_ATTR {
    auto y0 = hn::Zero(d), y1 = hn::Zero(d), g0 = hn::Zero(d), g1 = hn::Zero(d), u0 = hn::Zero(d), u1 = hn::Zero(d);
    auto dg0 = hn::Zero(d), dg1 = hn::Zero(d), du0 = hn::Zero(d), du1 = hn::Zero(d);
    load(grad, y0, y1);
    load(gate, g0, g1);
    load(up, u0, u1);
    SwigluGradOf<T>(d, y0, g0, u0, dg0, du0);
    SwigluGradOf<T>(d, y1, g1, u1, dg1, du1);
    store(dg0, dg1, dgate);
    store(du0, du1, dup);
  });
}

// Elements before the first one of p that is aligned to a vector.
template <typename T>
int64_t HeadOf(const T* p) {
  const size_t bytes = hn::Lanes(hn::ScalableTag<uint8_t>());
  return static_cast<int64_t>((bytes - reinterpret_cast<uintptr_t>(p) % bytes) % bytes / sizeof(T));
}

template <typename T>
void ForwardT(const void* gate, const void* up, void* out, int64_t n, bool stream) {
  const auto* g = static_cast<const T*>(gate);
  const auto* u = static_cast<const T*>(up);
  auto* o = static_cast<T*>(out);
  if (stream) {
    ForwardRun<T, true>(g, u, o, n, HeadOf(o));
  } else {
    ForwardRun<T, false>(g, u, o, n, 0);
  }
}

template <typename T>
void BackwardT(const void* grad, const void* gate, const void* up, void* dgate, void* dup, int64_t n, bool stream) {
  const auto* y = static_cast<const T*>(grad);
  const auto* g = static_cast<const T*>(gate);
  const auto* u = static_cast<const T*>(up);
  auto* dg = static_cast<T*>(dgate);
  auto* du = static_cast<T*>(dup);
  if (stream && HeadOf(dg) == HeadOf(du)) {
    BackwardRun<T, true>(y, g, u, dg, du, n, HeadOf(dg));
  } else {
    BackwardRun<T, false>(y, g, u, dg, du, n, 0);
  }
}

void Forward(DType dtype, const void* gate, const void* up, void* out, int64_t n, bool stream) {
  WithFloat(dtype, [&](auto type) HWY_ATTR { ForwardT<decltype(type)>(gate, up, out, n, stream); });
}

void Backward(DType dtype, const void* grad, const void* gate, const void* up, void* dgate, void* dup, int64_t n,
              bool stream) {
  WithFloat(dtype, [&](auto type) HWY_ATTR { BackwardT<decltype(type)>(grad, gate, up, dgate, dup, n, stream); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);

void SwigluBlock(DType dtype, const void* gate, const void* up, void* out, int64_t n, bool stream) {
  JUMAR_DISPATCH(Forward)(dtype, gate, up, out, n, stream);
}

void SwigluBackwardBlock(DType dtype, const void* grad, const void* gate, const void* up, void* dgate, void* dup,
                         int64_t n, bool stream) {
  JUMAR_DISPATCH(Backward)(dtype, grad, gate, up, dgate, dup, n, stream);
}

void StreamFence() { hwy::FlushStream(); }

}  // namespace jumar
#endif  // HWY_ONCE
