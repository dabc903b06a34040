#include "kernels/moe_ffn/moe_ffn_simd.h"

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe_ffn/moe_ffn_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/float_io-inl.h"
#include "simd/swiglu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void ForwardAs(const SwigluTile& t) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  for (int64_t r = 0; r < t.rows; ++r) {
    const C* gate = static_cast<const C*>(t.gate_sums) + r * t.ld_sums;
    const C* up = static_cast<const C*>(t.up_sums) + r * t.ld_sums;
    T* out = static_cast<T*>(t.out) + r * t.out_stride;
    T* saved_gate = static_cast<T*>(t.saved_gate) + (t.saved_gate == nullptr ? 0 : r * t.saved_stride);
    T* saved_up = static_cast<T*>(t.saved_up) + (t.saved_up == nullptr ? 0 : r * t.saved_stride);
    ForEachVector(d, static_cast<size_t>(t.cols), [&](const auto& load, const auto& store) HWY_ATTR {
      const auto g = load(gate);
      const auto u = load(up);
      store(SwigluOf<T>(d, g, u), out);
      if (saved_gate != nullptr) {
        store(g, saved_gate);
        store(u, saved_up);
      }
    });
  }
}

template <typename T>
void BackwardAs(const SwigluGradTile& t) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  for (int64_t r = 0; r < t.rows; ++r) {
    const C* sums = static_cast<const C*>(t.sums) + r * t.ld_sums;
    const T* gate = static_cast<const T*>(t.gate) + r * t.saved_stride;
    const T* up = static_cast<const T*>(t.up) + r * t.saved_stride;
    T* dgate = static_cast<T*>(t.dgate) + r * t.grad_stride;
    T* dup = static_cast<T*>(t.dup) + r * t.grad_stride;
    T* weighted = static_cast<T*>(t.weighted) + r * t.weighted_stride;
    const auto p = hn::Set(d, static_cast<const C*>(t.probs)[r]);
    auto dot = hn::Zero(d);
    ForEachVector(d, static_cast<size_t>(t.cols), [&](const auto& load, const auto& store) HWY_ATTR {
      const auto g = load(gate);
      const auto u = load(up);
      const auto dh = load(sums);
      auto dg = hn::Zero(d);
      auto du = hn::Zero(d);
      SwigluGradOf<T>(d, hn::Mul(p, dh), g, u, dg, du);
      store(dg, dgate);
      store(du, dup);
      const auto h = SwigluOf<T>(d, g, u);
      dot = hn::MulAdd(dh, h, dot);
      store(hn::Mul(p, h), weighted);
    });
    static_cast<C*>(t.dots)[r] = hn::GetLane(hn::SumOfLanes(d, dot));
  }
}

template <typename T>
void CombineAs(const CombineRow& c) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const C* in = static_cast<const C*>(c.in);
  const C* weights = static_cast<const C*>(c.weights);
  ForEachVector(d, static_cast<size_t>(c.cols), [&](const auto& load, const auto& store) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (int64_t k = 0; k < c.count; ++k) {
      if (c.rows[k] >= c.limit) continue;
      const auto x = load(in + c.rows[k] * c.ld_in);
      sum = weights == nullptr ? hn::Add(sum, x) : hn::MulAdd(hn::Set(d, weights[k]), x, sum);
    }
    store(sum, static_cast<T*>(c.out));
  });
}

void Forward(const SwigluTile& t) {
  WithFloat(t.dtype, [&](auto type) HWY_ATTR { ForwardAs<decltype(type)>(t); });
}
void Backward(const SwigluGradTile& t) {
  WithFloat(t.dtype, [&](auto type) HWY_ATTR { BackwardAs<decltype(type)>(t); });
}
void Combine(const CombineRow& c) {
  WithFloat(c.dtype, [&](auto type) HWY_ATTR { CombineAs<decltype(type)>(c); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(Forward);
HWY_EXPORT(Backward);
HWY_EXPORT(Combine);

void RunSwigluTile(const SwigluTile& tile) { JUMAR_DISPATCH(Forward)(tile); }
void RunSwigluGradTile(const SwigluGradTile& tile) { JUMAR_DISPATCH(Backward)(tile); }
void RunCombineRow(const CombineRow& row) { JUMAR_DISPATCH(Combine)(row); }

}  // namespace jumar
#endif  // HWY_ONCE
