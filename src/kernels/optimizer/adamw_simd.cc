#include "base/simd_dispatch.h"
#include "kernels/optimizer/optimizer_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimizer/adamw_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "kernels/optimizer/f64_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One step for a vector of elements, in place. torch's lerp: from the nearer end, so that infinities go the same way.
template <bool kMax, class D, class V>
HWY_INLINE void Step(D d, const AdamWConstants& c, V grad, V maximum, V& param, V& exp_avg, V& exp_avg_sq) {
  const V g = hn::Mul(grad, hn::Set(d, c.sign));
  const V distance = hn::Sub(g, exp_avg);
  if (c.weight1 < 0.5) {
    exp_avg = hn::MulAdd(distance, hn::Set(d, c.weight1), exp_avg);
  } else {
    exp_avg = hn::NegMulAdd(distance, hn::Set(d, 1 - c.weight1), g);
  }
  exp_avg_sq = hn::MulAdd(hn::Mul(hn::Set(d, c.weight2), g), g, hn::Mul(exp_avg_sq, hn::Set(d, c.beta2)));
  V v = exp_avg_sq;
  if constexpr (kMax) {
    v = hn::IfThenElse(hn::Lt(v, maximum), maximum, v);
    v = hn::IfThenElse(hn::IsNaN(maximum), maximum, v);
  }
  // Both sides of the division carry sqrt(correction2): one division for two.
  const V denominator = hn::Add(hn::Sqrt(v), hn::Set(d, c.eps));
  const V update = hn::Div(hn::Mul(hn::Set(d, c.step_size), exp_avg), denominator);
  param = hn::Sub(hn::Mul(param, hn::Set(d, c.keep)), update);
}

template <typename T, bool kMax>
void BlockT(const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  const hn::ScalableTag<double> d;
  ForEachF64(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    auto param = load(static_cast<const T*>(p.param));
    auto exp_avg = load(static_cast<const T*>(p.exp_avg));
    auto exp_avg_sq = load(static_cast<const T*>(p.exp_avg_sq));
    const auto grad = load(static_cast<const T*>(p.grad));
    if constexpr (kMax) {
      Step<true>(d, c, grad, load(static_cast<const T*>(p.maximum)), param, exp_avg, exp_avg_sq);
    } else {
      Step<false>(d, c, grad, grad, param, exp_avg, exp_avg_sq);
    }
    store(param, static_cast<T*>(p.param_out));
    store(exp_avg, static_cast<T*>(p.exp_avg_out));
    store(exp_avg_sq, static_cast<T*>(p.exp_avg_sq_out));
  });
}

template <typename T, typename G>
void MasterBlockT(const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  ForEachF64(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
    const auto param = load(static_cast<const T*>(p.param));
    auto master = load(static_cast<const float*>(p.master));
    // What param holds unless someone else has written it.
    const auto narrow = hn::DemoteTo(df, master);
    auto rounded = narrow;
    if constexpr (std::is_same_v<T, BF16>) {
      rounded = WidenBF16(df, NarrowBF16(df, narrow));
    } else {
      rounded = WidenF16(df, NarrowF16(df, narrow));
    }
    master = hn::IfThenElse(hn::Eq(hn::PromoteTo(d, rounded), param), master, param);
    auto exp_avg = load(static_cast<const float*>(p.exp_avg));
    auto exp_avg_sq = load(static_cast<const float*>(p.exp_avg_sq));
    const auto grad = load(static_cast<const G*>(p.grad));
    Step<false>(d, c, grad, grad, master, exp_avg, exp_avg_sq);
    store(master, static_cast<float*>(p.master_out));
    // From the fp32 value, so that param is always the rounded master.
    store(hn::PromoteTo(d, hn::DemoteTo(df, master)), static_cast<T*>(p.param_out));
    store(exp_avg, static_cast<float*>(p.exp_avg_out));
    store(exp_avg_sq, static_cast<float*>(p.exp_avg_sq_out));
  });
}

template <typename T>
void BlockMax(const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  return p.maximum == nullptr ? BlockT<T, false>(c, p, n) : BlockT<T, true>(c, p, n);
}

void Block(DType dtype, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  switch (dtype) {
    case DType::kBF16:
      return BlockMax<BF16>(c, p, n);
    case DType::kF16:
      return BlockMax<F16>(c, p, n);
    case DType::kF64:
      return BlockMax<double>(c, p, n);
    default:
      return BlockMax<float>(c, p, n);
  }
}

void MasterBlock(DType param, DType grad, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  if (param == DType::kBF16) {
    return grad == DType::kF32 ? MasterBlockT<BF16, float>(c, p, n) : MasterBlockT<BF16, BF16>(c, p, n);
  }
  return grad == DType::kF32 ? MasterBlockT<F16, float>(c, p, n) : MasterBlockT<F16, F16>(c, p, n);
}

template <typename T>
void WidenT(const void* in, double* out, int64_t n) {
  const hn::ScalableTag<double> d;
  ForEachF64(d, static_cast<size_t>(n),
             [&](const auto& load, const auto& store) HWY_ATTR { store(load(static_cast<const T*>(in)), out); });
}

template <typename T>
void NarrowT(const double* in, void* out, int64_t n) {
  const hn::ScalableTag<double> d;
  ForEachF64(d, static_cast<size_t>(n),
             [&](const auto& load, const auto& store) HWY_ATTR { store(load(in), static_cast<T*>(out)); });
}

void Widen(DType from, const void* in, double* out, int64_t n) {
  switch (from) {
    case DType::kBF16:
      return WidenT<BF16>(in, out, n);
    case DType::kF16:
      return WidenT<F16>(in, out, n);
    case DType::kF64:
      return WidenT<double>(in, out, n);
    default:
      return WidenT<float>(in, out, n);
  }
}

void Narrow(DType to, const double* in, void* out, int64_t n) {
  switch (to) {
    case DType::kBF16:
      return NarrowT<BF16>(in, out, n);
    case DType::kF16:
      return NarrowT<F16>(in, out, n);
    case DType::kF64:
      return NarrowT<double>(in, out, n);
    default:
      return NarrowT<float>(in, out, n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Block);
HWY_EXPORT(MasterBlock);
HWY_EXPORT(Widen);
HWY_EXPORT(Narrow);

void AdamWBlock(DType dtype, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  JUMAR_DISPATCH(Block)(dtype, c, p, n);
}
void AdamWMasterBlock(DType param, DType grad, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  JUMAR_DISPATCH(MasterBlock)(param, grad, c, p, n);
}
void WidenToF64(DType from, const void* in, double* out, int64_t n) { JUMAR_DISPATCH(Widen)(from, in, out, n); }
void NarrowFromF64(DType to, const double* in, void* out, int64_t n) { JUMAR_DISPATCH(Narrow)(to, in, out, n); }

}  // namespace jumar
#endif  // HWY_ONCE
