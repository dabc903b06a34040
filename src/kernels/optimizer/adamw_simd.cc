#include "base/simd_dispatch.h"
#include "kernels/optimizer/optimizer_simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/optimizer/adamw_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "kernels/optimizer/adamw_f32-inl.h"
#include "simd/f64_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline float Float(double x) { return static_cast<float>(x); }

// Elements whose intermediate values wait in L1: one long chain of operations per element would leave the CPU idle.
constexpr size_t kRun = 256;

// update / (sqrt(v) + eps) good to 2^-44, at a third of the time of fp64's square root and division: one Newton step
// each from fp32's. With s0 = sqrt(v) (1 + e0) and h0 = 1 / (2 s0) in fp32, s = s0 + (v - s0^2) h0 = sqrt(v) (1 +
// O(e0^2)), and r = r0 (2 - x r0) is 1 / x when r0 is fp32's. False where a root is out of the range of fp32.
template <class D, class V>
HWY_INLINE hn::Mask<D> OverRoot(D d, V v, V eps, V& update) {
  const hn::Rebind<float, D> df;
  const auto low = hn::Set(d, 0x1p-100);
  const auto high = hn::Set(d, 0x1p100);
  const auto f0 = hn::Sqrt(hn::DemoteTo(df, v));
  const auto s0 = hn::PromoteTo(d, f0);
  const auto x0 = hn::Add(s0, eps);
  const auto usual = hn::And(hn::Gt(v, low), hn::Lt(v, high));
  const auto h0 = hn::PromoteTo(d, hn::Div(hn::Set(df, 0.5f), f0));
  const auto x = hn::Add(x0, hn::IfThenElseZero(usual, hn::Mul(hn::NegMulAdd(s0, s0, v), h0)));
  const auto r0 = hn::PromoteTo(d, hn::Div(hn::Set(df, 1.0f), hn::DemoteTo(df, x)));
  update = hn::Mul(update, hn::Mul(r0, hn::NegMulAdd(x, r0, hn::Set(d, 2.0))));
  return hn::And(hn::Or(usual, hn::Eq(v, hn::Zero(d))), hn::And(hn::Gt(x0, low), hn::Lt(x0, high)));
}

// The streams of the next run, which come from memory while this one is computed.
struct Ahead {
  const char *grad, *param, *avg, *avg_sq;
  size_t grad_bytes, param_bytes, moment_bytes;  // of an element

  HWY_INLINE void Fetch(size_t i) const {
    hwy::Prefetch(grad + i * grad_bytes);
    hwy::Prefetch(param + i * param_bytes);
    hwy::Prefetch(avg + i * moment_bytes);
    hwy::Prefetch(avg_sq + i * moment_bytes);
  }
};

// The same for n elements, two vectors at a time: one chain of operations alone leaves the CPU idle. v and update are
// readable, and update is writable, up to the next multiple of two vectors.
template <bool kExact>
HWY_INLINE void OverRoots(double eps, const double* HWY_RESTRICT v, size_t n, double* HWY_RESTRICT update,
                          const Ahead& ahead) {
  const hn::ScalableTag<double> d;
  const size_t lanes = hn::Lanes(d);
  const auto add = hn::Set(d, eps);
  for (size_t i = 0; i < n; i += 2 * lanes) {
    ahead.Fetch(i);
    const auto v0 = hn::Load(d, v + i), v1 = hn::Load(d, v + i + lanes);
    auto u0 = hn::Load(d, update + i), u1 = hn::Load(d, update + i + lanes);
    if constexpr (!kExact) {
      auto fast0 = u0, fast1 = u1;
      const auto good0 = OverRoot(d, v0, add, fast0), good1 = OverRoot(d, v1, add, fast1);
      if (HWY_LIKELY(hn::AllTrue(d, hn::And(good0, good1)))) {
        hn::Store(fast0, d, update + i);
        hn::Store(fast1, d, update + i + lanes);
        continue;
      }
    }
    u0 = hn::Div(u0, hn::Add(hn::Sqrt(v0), add));
    u1 = hn::Div(u1, hn::Add(hn::Sqrt(v1), add));
    hn::Store(u0, d, update + i);
    hn::Store(u1, d, update + i + lanes);
  }
}

// New moments of a vector. torch's lerp: from the nearer end, so that infinities go the same way.
template <class D, class V>
HWY_INLINE void Moments(D d, const AdamWConstants& c, V grad, V& exp_avg, V& exp_avg_sq) {
  const V g = hn::Mul(grad, hn::Set(d, c.sign));
  const V distance = hn::Sub(g, exp_avg);
  if (c.weight1 < 0.5) {
    exp_avg = hn::MulAdd(distance, hn::Set(d, c.weight1), exp_avg);
  } else {
    exp_avg = hn::NegMulAdd(distance, hn::Set(d, 1 - c.weight1), g);
  }
  exp_avg_sq = hn::MulAdd(hn::Mul(hn::Set(d, c.weight2), g), g, hn::Mul(exp_avg_sq, hn::Set(d, c.beta2)));
}

template <class D, class V>
HWY_INLINE V Larger(D, V v, V maximum) {
  v = hn::IfThenElse(hn::Lt(v, maximum), maximum, v);
  return hn::IfThenElse(hn::IsNaN(maximum), maximum, v);
}

// Moments in memory, of type M, and the update of each element to `update`. `maximum` may be null.
template <typename P, typename M, typename G>
HWY_INLINE void Updates(const AdamWConstants& c, const AdamWBlockPointers& p, size_t at, size_t n,
                        double* HWY_RESTRICT update) {
  constexpr bool kExact = std::is_same_v<M, double>;
  const hn::ScalableTag<double> d;
  HWY_ALIGN double v[kRun];
  // Whole pairs of vectors are read.
  for (size_t i = n; i < HWY_MIN(kRun, n + 2 * hn::Lanes(d)); ++i) v[i] = update[i] = 1;
  const G* grad = static_cast<const G*>(p.grad) + at;
  const M* avg = static_cast<const M*>(p.exp_avg) + at;
  const M* avg_sq = static_cast<const M*>(p.exp_avg_sq) + at;
  M* avg_out = static_cast<M*>(p.exp_avg_out) + at;
  M* avg_sq_out = static_cast<M*>(p.exp_avg_sq_out) + at;
  ForEachF64(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
    auto exp_avg = load(avg);
    auto exp_avg_sq = load(avg_sq);
    Moments(d, c, load(grad), exp_avg, exp_avg_sq);
    store(exp_avg, avg_out);
    store(exp_avg_sq, avg_sq_out);
    store(hn::Mul(hn::Set(d, c.step_size), exp_avg), update);
    store(exp_avg_sq, &v[0]);
  });
  if (p.maximum != nullptr) {
    const M* maximum = static_cast<const M*>(p.maximum) + at;
    ForEachF64(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
      store(Larger(d, load(&v[0]), load(maximum)), &v[0]);
    });
  }
  // Both sides of the division carry sqrt(correction2): one division for two.
  const auto next = [](const auto* x) { return reinterpret_cast<const char*>(x + kRun); };
  OverRoots<kExact>(c.eps, v, n, update,
                    {next(grad), next(static_cast<const P*>(p.param) + at), next(avg), next(avg_sq), sizeof(G),
                     sizeof(P), sizeof(M)});
}

template <typename T>
void BlockT(const AdamWConstants& c, const AdamWBlockPointers& p, size_t n) {
  const hn::ScalableTag<double> d;
  HWY_ALIGN double update[kRun];
  for (size_t at = 0; at < n; at += kRun) {
    const size_t run = HWY_MIN(kRun, n - at);
    Updates<T, T, T>(c, p, at, run, update);
    const T* param = static_cast<const T*>(p.param) + at;
    T* param_out = static_cast<T*>(p.param_out) + at;
    ForEachF64(d, run, [&](const auto& load, const auto& store) HWY_ATTR {
      store(hn::MulSub(load(param), hn::Set(d, c.keep), load(&update[0])), param_out);
    });
  }
}

// Pointers `i` elements of type T further on.
template <typename T>
AdamWBlockPointers Further(const AdamWBlockPointers& p, size_t i) {
  AdamWBlockPointers q{};
  q.grad = static_cast<const T*>(p.grad) + i;
  q.param = static_cast<const T*>(p.param) + i;
  q.exp_avg = static_cast<const T*>(p.exp_avg) + i;
  q.exp_avg_sq = static_cast<const T*>(p.exp_avg_sq) + i;
  q.param_out = static_cast<T*>(p.param_out) + i;
  q.exp_avg_out = static_cast<T*>(p.exp_avg_out) + i;
  q.exp_avg_sq_out = static_cast<T*>(p.exp_avg_sq_out) + i;
  return q;
}

// fp32 tensors. Runs wait in L1 between moments and parameters: one chain of operations a vector would leave the CPU
// idle.
void Block32(const AdamWConstants& constants, const AdamWBlockPointers& p, size_t n) {
  const AdamWConstants exact = constants;
  const AdamWPairs c(exact);
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const float* grad = static_cast<const float*>(p.grad);
  const float* param = static_cast<const float*>(p.param);
  const float* avg = static_cast<const float*>(p.exp_avg);
  const float* avg_sq = static_cast<const float*>(p.exp_avg_sq);
  float* avg_out = static_cast<float*>(p.exp_avg_out);
  float* avg_sq_out = static_cast<float*>(p.exp_avg_sq_out);
  float* param_out = static_cast<float*>(p.param_out);
  AdamWRun run;
  size_t at = 0;
  while (at + lanes <= n) {
    const size_t count = HWY_MIN(AdamWRun::kRun, n - at) / lanes * lanes;
    for (size_t i = 0; i < count; i += lanes) {
      const size_t k = at + i;
      hwy::Prefetch(grad + k + AdamWRun::kRun);
      hwy::Prefetch(avg + k + AdamWRun::kRun);
      hwy::Prefetch(avg_sq + k + AdamWRun::kRun);
      const bool good = MomentsF32(d, c, grad + k, avg + k, avg_sq + k, avg_out + k, avg_sq_out + k, i, run);
      run.done[i / lanes] = !good;
      if (HWY_UNLIKELY(!good)) BlockT<float>(exact, Further<float>(p, k), lanes);
    }
    for (size_t i = 0; i < count; i += lanes) {
      hwy::Prefetch(param + at + i + AdamWRun::kRun);
      if (!run.done[i / lanes]) ParamF32(d, c, exact, run, i, param + at + i, param_out + at + i);
    }
    at += count;
  }
  if (at < n) BlockT<float>(exact, Further<float>(p, at), n - at);
}

// 16-bit tensors in fp32. A vector goes through fp64 instead where an error could show: a difference (lerp, or param -
// update) below kShare of its operands, or roots out of the range of fp32. The error before rounding is then below
// 2^-6 ulp. False for those.
template <typename T, class D, class V>
HWY_INLINE hn::Mask<D> Step16(D d, const AdamWConstants& c, const AdamWBlockPointers& p, size_t i, V& param, V& avg,
                              V& v) {
  constexpr float kShare = std::is_same_v<T, BF16> ? 0x1p-8f : 0x1p-5f;
  const auto g = hn::Mul(LoadWide(d, static_cast<const T*>(p.grad) + i), hn::Set(d, Float(c.sign)));
  const auto old_avg = LoadWide(d, static_cast<const T*>(p.exp_avg) + i);
  const auto distance = hn::Sub(g, old_avg);
  const auto weight1 = hn::Set(d, Float(c.weight1));
  avg = hn::MulAdd(distance, weight1, old_avg);
  const auto old_v = LoadWide(d, static_cast<const T*>(p.exp_avg_sq) + i);
  v = hn::MulAdd(hn::Mul(hn::Set(d, Float(c.weight2)), g), g, hn::Mul(old_v, hn::Set(d, Float(c.beta2))));
  const auto root = hn::Add(hn::Sqrt(v), hn::Set(d, Float(c.eps)));
  const auto update = hn::Div(hn::Mul(hn::Set(d, Float(c.step_size)), avg), root);
  const auto old_param = LoadWide(d, static_cast<const T*>(p.param) + i);
  param = hn::MulSub(old_param, hn::Set(d, Float(c.keep)), update);

  const auto low_root = hn::Set(d, 0x1p-100f), high_root = hn::Set(d, 0x1p100f), share = hn::Set(d, kShare);
  const auto v_good = hn::Or(hn::And(hn::Gt(v, low_root), hn::Lt(v, high_root)), hn::Eq(v, hn::Zero(d)));
  const auto root_good = hn::And(hn::Gt(root, low_root), hn::Lt(root, high_root));
  const auto avg_good = hn::Ge(hn::Abs(avg), hn::Mul(share, hn::Abs(hn::Mul(distance, weight1))));
  const auto param_good = hn::Ge(hn::Abs(param), hn::Mul(share, hn::Abs(update)));
  return hn::And(hn::And(v_good, root_good), hn::And(avg_good, param_good));
}

// Rounds to nearest even; v holds no NaN.
template <class D, typename T>
HWY_INLINE void StoreNumbers(D d, hn::Vec<D> v, T* p) {
  if constexpr (std::is_same_v<T, BF16>) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFFu)), odd));
    hn::StoreU(hn::TruncateTo(du16, rounded), du16, reinterpret_cast<uint16_t*>(p));
  } else {
    StoreNarrow(d, v, p);
  }
}

template <typename T, class D, class V>
HWY_INLINE void Store16(D d, const AdamWBlockPointers& p, size_t i, V param, V avg, V v) {
  StoreNumbers(d, param, static_cast<T*>(p.param_out) + i);
  StoreNumbers(d, avg, static_cast<T*>(p.exp_avg_out) + i);
  StoreNumbers(d, v, static_cast<T*>(p.exp_avg_sq_out) + i);
}

template <typename T>
void Block16(const AdamWConstants& constants, const AdamWBlockPointers& pointers, size_t n) {
  // Copies, which no store can change.
  const AdamWConstants c = constants;
  const AdamWBlockPointers p = pointers;
  const hn::ScalableTag<float> d;
  const size_t pair = 2 * hn::Lanes(d);
  size_t i = 0;
  for (; i + pair <= n; i += pair) {
    auto param0 = hn::Zero(d), avg0 = hn::Zero(d), v0 = hn::Zero(d);
    auto param1 = hn::Zero(d), avg1 = hn::Zero(d), v1 = hn::Zero(d);
    const auto good0 = Step16<T>(d, c, p, i, param0, avg0, v0);
    const auto good1 = Step16<T>(d, c, p, i + pair / 2, param1, avg1, v1);
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::And(good0, good1)))) {
      BlockT<T>(c, Further<T>(p, i), pair);
      continue;
    }
    Store16<T>(d, p, i, param0, avg0, v0);
    Store16<T>(d, p, i + pair / 2, param1, avg1, v1);
  }
  if (i < n) BlockT<T>(c, Further<T>(p, i), n - i);
}

template <typename T, typename G>
void MasterBlockT(const AdamWConstants& c, const AdamWBlockPointers& p, size_t n) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  HWY_ALIGN double update[kRun];
  for (size_t at = 0; at < n; at += kRun) {
    const size_t run = HWY_MIN(kRun, n - at);
    Updates<T, float, G>(c, p, at, run, update);
    const T* params = static_cast<const T*>(p.param) + at;
    const float* masters = static_cast<const float*>(p.master) + at;
    T* param_out = static_cast<T*>(p.param_out) + at;
    float* master_out = static_cast<float*>(p.master_out) + at;
    ForEachF64(d, run, [&](const auto& load, const auto& store) HWY_ATTR {
      const auto param = load(params);
      auto master = load(masters);
      // What param holds unless someone else has written it.
      const auto narrow = hn::DemoteTo(df, master);
      auto rounded = narrow;
      if constexpr (std::is_same_v<T, BF16>) {
        rounded = WidenBF16(df, NarrowBF16(df, narrow));
      } else {
        rounded = WidenF16(df, NarrowF16(df, narrow));
      }
      master = hn::IfThenElse(hn::Eq(hn::PromoteTo(d, rounded), param), master, param);
      master = hn::MulSub(master, hn::Set(d, c.keep), load(&update[0]));
      store(master, master_out);
      // From the fp32 value, so that param is always the rounded master.
      store(hn::PromoteTo(d, hn::DemoteTo(df, master)), param_out);
    });
  }
}

void Block(DType dtype, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  const auto count = static_cast<size_t>(n);
  // Without fused multiply-add, products are rounded before the difference.
  constexpr bool kFused = HWY_TARGET != HWY_SSE4;
  // A second moment that fp32 takes for 0 has a root below 2^-74, which must not show beside eps.
  const bool fast = kFused && p.maximum == nullptr && c.weight1 < 0.5 && c.eps > 0x1p-48;
  switch (dtype) {
    case DType::kBF16:
      return fast ? Block16<BF16>(c, p, count) : BlockT<BF16>(c, p, count);
    case DType::kF16:
      return fast ? Block16<F16>(c, p, count) : BlockT<F16>(c, p, count);
    case DType::kF64:
      return BlockT<double>(c, p, count);
    default:
      return kFused && p.maximum == nullptr && AdamWPairs::Hold(c) ? Block32(c, p, count) : BlockT<float>(c, p, count);
  }
}

void MasterBlock(DType param, DType grad, const AdamWConstants& c, const AdamWBlockPointers& p, int64_t n) {
  const auto count = static_cast<size_t>(n);
  if (param == DType::kBF16) {
    return grad == DType::kF32 ? MasterBlockT<BF16, float>(c, p, count) : MasterBlockT<BF16, BF16>(c, p, count);
  }
  return grad == DType::kF32 ? MasterBlockT<F16, float>(c, p, count) : MasterBlockT<F16, F16>(c, p, count);
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
  WithFloat(from, [&](auto type) HWY_ATTR { WidenT<decltype(type)>(in, out, n); });
}

void Narrow(DType to, const double* in, void* out, int64_t n) {
  WithFloat(to, [&](auto type) HWY_ATTR { NarrowT<decltype(type)>(in, out, n); });
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
