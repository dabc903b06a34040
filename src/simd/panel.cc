#include <algorithm>
#include <cmath>
#include <limits>

#include "base/simd_dispatch.h"
#include "simd/panel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/panel.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void MaskPanel(const PanelMask& a) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const auto scale = hn::Set(d, static_cast<T>(a.scale));
  const auto hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (size_t v = 0; v < 2; ++v) {
    T* s = static_cast<T*>(a.scores) + v * lanes;
    const T* low = static_cast<const T*>(a.low);
    const T* high = static_cast<const T*>(a.high);
    const auto from = low == nullptr ? hn::Zero(d) : hn::LoadU(d, low + v * lanes);
    const auto to = low == nullptr ? hn::Zero(d) : hn::LoadU(d, high + v * lanes);
    const T* pse = static_cast<const T*>(a.pse);
    const T* hide = static_cast<const T*>(a.hide);
    for (int64_t k = 0; k < a.n; ++k) {
      const size_t at = static_cast<size_t>(k) * 2 * lanes;
      auto x = hn::LoadU(d, s + at);
      if (pse != nullptr) x = hn::Add(x, hn::LoadU(d, pse + at + v * lanes));
      x = hn::Mul(x, scale);
      if (low != nullptr) {
        const auto key = hn::Set(d, static_cast<T>(a.key + k));
        x = hn::IfThenElse(hn::And(hn::Ge(key, from), hn::Lt(key, to)), x, hidden);
      }
      if (hide != nullptr) {
        const auto visible = hn::Eq(hn::LoadU(d, hide + at + v * lanes), hn::Zero(d));
        x = hn::IfThenElse(visible, x, hidden);
      }
      hn::StoreU(x, d, s + at);
    }
  }
}

// One vector of the lanes of a panel, rows `step` elements apart. Whether its maxima stayed where they were.
template <class D, typename T>
HWY_INLINE bool SoftmaxVector(D d, const PanelSoftmax& a, size_t at, size_t step) {
  T* s = static_cast<T*>(a.scores) + at;
  T* max = static_cast<T*>(a.max) + at;
  T* sum = static_cast<T*>(a.sum) + at;
  const auto scale = hn::Set(d, static_cast<T>(a.scale));
  const auto old = hn::LoadU(d, max);
  const auto n = static_cast<size_t>(a.n);
  // A NaN that the maxima pass over comes back with its exponential.
  auto m = old;
  if (a.scale > 0) {
    // Rounding keeps the order of products: the largest score is the largest scaled one.
    auto m0 = hn::Set(d, -std::numeric_limits<T>::infinity()), m1 = m0, m2 = m0, m3 = m0;
    size_t i = 0;
    for (; i + 4 * step <= n * step; i += 4 * step) {
      m0 = hn::Max(hn::LoadU(d, s + i), m0);
      m1 = hn::Max(hn::LoadU(d, s + i + step), m1);
      m2 = hn::Max(hn::LoadU(d, s + i + 2 * step), m2);
      m3 = hn::Max(hn::LoadU(d, s + i + 3 * step), m3);
    }
    for (; i < n * step; i += step) m0 = hn::Max(hn::LoadU(d, s + i), m0);
    m = hn::Max(hn::Mul(hn::Max(hn::Max(m0, m1), hn::Max(m2, m3)), scale), old);
  } else {
    for (size_t i = 0; i < n * step; i += step) m = hn::Max(hn::Mul(hn::LoadU(d, s + i), scale), m);
  }
  const auto r = ScoreExp(d, hn::Sub(old, m));
  hn::StoreU(m, d, max);
  hn::StoreU(r, d, static_cast<T*>(a.rescale) + at);
  auto even = hn::Zero(d), odd = hn::Zero(d);
  size_t k = 0;
  for (; k + 2 <= n; k += 2, s += 2 * step) {
    const auto x = ScoreExp(d, hn::MulSub(hn::LoadU(d, s), scale, m));
    const auto y = ScoreExp(d, hn::MulSub(hn::LoadU(d, s + step), scale, m));
    even = hn::Add(even, x);
    odd = hn::Add(odd, y);
    hn::StoreU(x, d, s);
    hn::StoreU(y, d, s + step);
  }
  if (k < n) {
    const auto x = ScoreExp(d, hn::MulSub(hn::LoadU(d, s), scale, m));
    even = hn::Add(even, x);
    hn::StoreU(x, d, s);
  }
  hn::StoreU(hn::MulAdd(hn::LoadU(d, sum), r, hn::Add(even, odd)), d, sum);
  return hn::AllTrue(d, hn::Eq(r, hn::Set(d, T(1))));
}

template <typename T>
bool SoftmaxPanel(const PanelSoftmax& a) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  if (a.half) return !SoftmaxVector<decltype(d), T>(d, a, 0, lanes);
  const bool first = SoftmaxVector<decltype(d), T>(d, a, 0, 2 * lanes);
  const bool second = SoftmaxVector<decltype(d), T>(d, a, lanes, 2 * lanes);
  return !(first && second);
}

template <typename T, bool kMasked, bool kKeep>
void GradientPanelAs(const PanelGradient& a) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const auto scale = hn::Set(d, static_cast<T>(a.scale));
  const auto hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  const auto zero = hn::Zero(d);
  const size_t step = a.half ? lanes : 2 * lanes;
  for (size_t v = 0; v < step / lanes; ++v) {
    T* s = static_cast<T*>(a.scores) + v * lanes;
    T* dp = static_cast<T*>(a.dp) + v * lanes;
    const T* keep = static_cast<const T*>(a.keep) + (kKeep ? v * lanes : 0);
    const auto max = hn::LoadU(d, static_cast<const T*>(a.max) + v * lanes);
    const auto inverse = hn::LoadU(d, static_cast<const T*>(a.inverse_sum) + v * lanes);
    const auto delta = hn::LoadU(d, static_cast<const T*>(a.delta) + v * lanes);
    const auto row = [&](size_t i) HWY_ATTR {
      const auto x = hn::LoadU(d, s + i);
      auto p = hn::Mul(ScoreExp(d, hn::MulSub(x, scale, max)), inverse);
      auto g = hn::LoadU(d, dp + i);
      auto k = zero;
      if constexpr (kKeep) {
        k = hn::LoadU(d, keep + i);
        g = hn::Mul(g, k);
      }
      auto ds = hn::Mul(p, hn::Sub(g, delta));
      if constexpr (kKeep) p = hn::Mul(p, k);
      if constexpr (kMasked) {
        const auto gone = hn::Eq(x, hidden);
        p = hn::IfThenZeroElse(gone, p);
        ds = hn::IfThenZeroElse(gone, ds);
      }
      hn::StoreU(p, d, s + i);
      hn::StoreU(ds, d, dp + i);
    };
    const auto n = static_cast<size_t>(a.n);
    size_t i = 0;
    for (; i + 2 * step <= n * step; i += 2 * step) {
      row(i);
      row(i + step);
    }
    if (i < n * step) row(i);
  }
}

template <typename T>
void GradientPanel(const PanelGradient& a) {
  if (a.keep != nullptr) {
    a.masked ? GradientPanelAs<T, true, true>(a) : GradientPanelAs<T, false, true>(a);
  } else {
    a.masked ? GradientPanelAs<T, true, false>(a) : GradientPanelAs<T, false, false>(a);
  }
}

// Philox 4x32-10 on vectors: the upper and lower halves of 32 x 32-bit products.
template <class DU, class V>
HWY_INLINE void MulHiLo(DU du, V x, uint32_t m, V& high, V& low) {
  const auto factor = hn::Set(du, m);
  const auto even = hn::BitCast(du, hn::MulEven(x, factor));
  const auto odd = hn::BitCast(du, hn::MulEven(hn::Reverse2(du, x), factor));
  high = hn::OddEven(odd, hn::Reverse2(du, even));
  low = hn::OddEven(hn::Reverse2(du, odd), even);
}

template <typename T>
void KeepPanel(const PanelKeep& a) {
  const hn::ScalableTag<uint32_t> du;
  using V = hn::Vec<decltype(du)>;
  const auto width = 2 * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  const auto lanes = static_cast<int64_t>(hn::Lanes(du));
  // Kept below this; 2^32 * keep_prob, at most the largest 32-bit number.
  const double limit = std::min(a.keep_prob * 4294967296.0, 4294967295.0);
  const auto threshold = static_cast<uint32_t>(limit);
  const T factor = static_cast<T>(1.0 / a.keep_prob);
  T* keep = static_cast<T*>(a.keep);
  HWY_ALIGN uint32_t words[4][HWY_MAX_BYTES / sizeof(uint32_t)];
  for (int64_t q = 0; q < width; q += lanes) {
    for (int64_t group = a.key / 4; group * 4 < a.key + a.n; ++group) {
      V c0 = hn::Set(du, static_cast<uint32_t>(group));
      V c1 = hn::Iota(du, static_cast<uint32_t>(a.row + q));
      V c2 = hn::Set(du, a.stream);
      V c3 = hn::Set(du, static_cast<uint32_t>(a.offset));
      auto k0 = static_cast<uint32_t>(a.seed);
      auto k1 = static_cast<uint32_t>(a.seed >> 32) ^ static_cast<uint32_t>(a.offset >> 32);
      for (int round = 0; round < 10; ++round) {
        V high0 = c0, low0 = c0, high1 = c0, low1 = c0;
        MulHiLo(du, c0, 0xD2511F53u, high0, low0);
        MulHiLo(du, c2, 0xCD9E8D57u, high1, low1);
        c0 = hn::Xor(hn::Xor(high1, c1), hn::Set(du, k0));
        c1 = low1;
        c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(du, k1));
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      hn::StoreU(c0, du, words[0]);
      hn::StoreU(c1, du, words[1]);
      hn::StoreU(c2, du, words[2]);
      hn::StoreU(c3, du, words[3]);
      for (int64_t w = 0; w < 4; ++w) {
        const int64_t k = group * 4 + w - a.key;
        if (k < 0 || k >= a.n) continue;
        for (int64_t r = 0; r < std::min(lanes, width - q); ++r) {
          keep[k * width + q + r] = words[w][r] < threshold ? factor : T(0);
        }
      }
    }
  }
}

template <typename T>
void ScaleLanes(void* x, int64_t rows, const void* y) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  T* p = static_cast<T*>(x);
  const auto y0 = hn::LoadU(d, static_cast<const T*>(y));
  const auto y1 = hn::LoadU(d, static_cast<const T*>(y) + lanes);
  for (int64_t r = 0; r < rows; ++r, p += 2 * lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, p), y0), d, p);
    hn::StoreU(hn::Mul(hn::LoadU(d, p + lanes), y1), d, p + lanes);
  }
}

template <typename T>
void ScaleRows(void* x, int64_t ld, int64_t rows, int64_t cols, const void* y) {
  const hn::ScalableTag<T> d;
  for (int64_t r = 0; r < rows; ++r) {
    const T factor = static_cast<const T*>(y)[r];
    if (factor == 1) continue;
    T* p = static_cast<T*>(x) + r * ld;
    const auto f = hn::Set(d, factor);
    ForEachVector(d, static_cast<size_t>(cols),
                  [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(p), f), p); });
  }
}

template <typename T>
void MultiplyAll(void* x, int64_t count, const void* y) {
  const hn::ScalableTag<T> d;
  T* p = static_cast<T*>(x);
  const T* q = static_cast<const T*>(y);
  ForEachVector(d, static_cast<size_t>(count),
                [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(p), load(q)), p); });
}

template <typename T>
void AddAll(void* x, int64_t count, const void* y) {
  const hn::ScalableTag<T> d;
  T* p = static_cast<T*>(x);
  const T* q = static_cast<const T*>(y);
  ForEachVector(d, static_cast<size_t>(count),
                [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Add(load(p), load(q)), p); });
}

template <typename T>
void ScaleAll(void* x, int64_t count, double y) {
  const hn::ScalableTag<T> d;
  T* p = static_cast<T*>(x);
  const auto factor = hn::Set(d, static_cast<T>(y));
  ForEachVector(d, static_cast<size_t>(count),
                [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(p), factor), p); });
}

template <typename T>
bool Finite(const void* x, int64_t count) {
  const hn::ScalableTag<T> d;
  const T* p = static_cast<const T*>(x);
  auto bad = hn::Zero(d);
  // x * 0 is NaN for infinity and NaN, else 0.
  ForEachVector(d, static_cast<size_t>(count),
                [&](const auto& load, const auto&) HWY_ATTR { bad = hn::MulAdd(load(p), hn::Zero(d), bad); });
  return hn::AllFalse(d, hn::IsNaN(bad));
}

template <typename T>
void DotLanes(const void* x, const void* y, int64_t rows, void* dots) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t v = 0; v < 2; ++v) {
    const T* p = static_cast<const T*>(x) + v * lanes;
    const T* q = static_cast<const T*>(y) + v * lanes;
    auto even = hn::Zero(d), odd = hn::Zero(d);
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2, p += 4 * lanes, q += 4 * lanes) {
      even = hn::MulAdd(hn::LoadU(d, p), hn::LoadU(d, q), even);
      odd = hn::MulAdd(hn::LoadU(d, p + 2 * lanes), hn::LoadU(d, q + 2 * lanes), odd);
    }
    if (r < rows) even = hn::MulAdd(hn::LoadU(d, p), hn::LoadU(d, q), even);
    hn::StoreU(hn::Add(even, odd), d, static_cast<T*>(dots) + v * lanes);
  }
}

template <typename T>
void DotRowsAs(const void* dy, int64_t dy_stride, const void* out, int64_t out_stride, int64_t rows, int64_t cols,
               void* delta) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const T* x = static_cast<const T*>(dy);
  const T* y = static_cast<const T*>(out);
  constexpr int64_t kRowsAhead = 8;  // as of rows that are packed
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(T));
  for (int64_t r = 0; r < rows; ++r, x += dy_stride, y += out_stride) {
    for (int64_t c = 0; c < cols && r + kRowsAhead < rows; c += kLine) {
      __builtin_prefetch(x + kRowsAhead * dy_stride + c, 0, 2);
      __builtin_prefetch(y + kRowsAhead * out_stride + c, 0, 2);
    }
    auto sum = hn::Zero(d);
    ForEachVector(d, static_cast<size_t>(cols),
                  [&](const auto& load, const auto&) HWY_ATTR { sum = hn::MulAdd(load(x), load(y), sum); });
    static_cast<C*>(delta)[r] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

void DotRows(DType dtype, const void* dy, int64_t dy_stride, const void* out, int64_t out_stride, int64_t rows,
             int64_t cols, void* delta) {
  WithFloat(dtype,
            [&](auto type) HWY_ATTR { DotRowsAs<decltype(type)>(dy, dy_stride, out, out_stride, rows, cols, delta); });
}

template <typename T>
PanelKernel MakePanelKernel() {
  PanelKernel kernel;
  kernel.width = 2 * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  kernel.mask = &MaskPanel<T>;
  kernel.softmax = &SoftmaxPanel<T>;
  kernel.gradient = &GradientPanel<T>;
  kernel.keep = &KeepPanel<T>;
  kernel.scale_lanes = &ScaleLanes<T>;
  kernel.scale_rows = &ScaleRows<T>;
  kernel.multiply = &MultiplyAll<T>;
  kernel.add = &AddAll<T>;
  kernel.scale = &ScaleAll<T>;
  kernel.finite = &Finite<T>;
  kernel.dot_lanes = &DotLanes<T>;
  kernel.dot_rows = &DotRows;
  return kernel;
}

const PanelKernel* KernelOf(bool f64) {
  static const PanelKernel k32 = MakePanelKernel<float>();
  static const PanelKernel k64 = MakePanelKernel<double>();
  return f64 ? &k64 : &k32;
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(KernelOf);

const PanelKernel& ChoosePanelKernel(bool f64) { return *JUMAR_DISPATCH(KernelOf)(f64); }

}  // namespace jumar
#endif  // HWY_ONCE
