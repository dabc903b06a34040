#include "kernels/moe/moe_rows_simd.h"

#include <cstring>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/moe_rows_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows lie anywhere, so that no CPU foresees the next one: its first lines are asked for while one is worked on.
constexpr int64_t kAheadLines = 4;
constexpr int64_t kLineBytes = 64;

template <typename T>
HWY_INLINE void PrefetchRow(const RowMap& map, int64_t row) {
  const char* p = reinterpret_cast<const char*>(map.Row<const T>(row));
  const int64_t bytes = map.cols * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < kAheadLines && i * kLineBytes < bytes; ++i) hwy::Prefetch(p + i * kLineBytes);
}

// The bits of n elements. kStream: past the caches; `to` is then aligned to a vector.
template <bool kStream, typename T>
HWY_INLINE void CopyRow(const T* HWY_RESTRICT from, T* HWY_RESTRICT to, size_t n) {
  const size_t bytes = n * sizeof(T);
  if constexpr (kStream) {
    const hn::ScalableTag<uint8_t> d;
    const size_t lanes = hn::Lanes(d);
    const auto* in = reinterpret_cast<const uint8_t*>(from);
    auto* out = reinterpret_cast<uint8_t*>(to);
    size_t i = 0;
    for (; i + lanes <= bytes; i += lanes) hn::Stream(hn::LoadU(d, in + i), d, out + i);
    std::memcpy(out + i, in + i, bytes - i);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// As ForEachTwo, for elementwise work and sums over all elements: which vector holds which element is up to LoadPair.
template <bool kStream, typename T, class D, class Body>
HWY_INLINE void ForEachPair(D d, size_t n, const Body& body) {
  using V = hn::Vec<D>;
  const size_t step = 2 * hn::Lanes(d);
  size_t i = 0;
  for (; i + step <= n; i += step) {
    body([&](const T* p, V& a, V& b) HWY_ATTR { LoadPair(d, p + i, a, b); },
         [&](V a, V b, T* p) HWY_ATTR { StorePair<kStream>(d, a, b, p + i); });
  }
  if (i == n) return;
  const size_t bytes = (n - i) * sizeof(T);
  body(
      [&](const T* p, V& a, V& b) HWY_ATTR {
        HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
        std::memcpy(buffer, p + i, bytes);
        LoadPair(d, buffer, a, b);
      },
      [&](V a, V b, T* p) HWY_ATTR {
        HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
        StorePair(d, a, b, buffer);
        std::memcpy(p + i, buffer, bytes);
      });
}

template <typename T, bool kStream>
void CombineT(const std::vector<CombinePart>& parts, const RowMap& out, int64_t first, int64_t last) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  using V = hn::Vec<decltype(d)>;
  const auto n = static_cast<size_t>(out.cols);
  std::vector<const T*> sources;
  std::vector<C> factors;
  for (int64_t t = first; t < last; ++t) {
    sources.clear();
    factors.clear();
    bool weighted = false;
    for (const CombinePart& part : parts) {
      const RowMap& in = part.in;
      const SlotTable& slots = part.slots;
      const C* weights = static_cast<const C*>(slots.weights);
      for (int64_t i = slots.First(t); i < slots.End(t); ++i) {
        if (!slots.Kept(i)) continue;
        sources.push_back(in.Row<const T>(slots.rows[i]));
        factors.push_back(weights == nullptr ? C(1) : weights[i]);
        weighted = weighted || weights != nullptr;
      }
      for (int64_t i = slots.End(t); t + 1 < last && i < slots.End(t + 1); ++i) {
        if (slots.Kept(i)) PrefetchRow<T>(in, slots.rows[i]);
      }
    }
    T* to = out.Row<T>(t);
    const size_t count = sources.size();
    if (count == 0) {
      std::memset(to, 0, n * sizeof(T));
    } else if (count == 1 && !weighted) {
      CopyRow<kStream>(sources[0], to, n);
    } else {
      ForEachPair<kStream, T>(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
        V a;
        V b;
        load(sources[0], a, b);
        const V w0 = hn::Set(d, factors[0]);
        V sum_a = hn::Mul(w0, a);
        V sum_b = hn::Mul(w0, b);
        for (size_t k = 1; k < count; ++k) {
          load(sources[k], a, b);
          const V w = hn::Set(d, factors[k]);
          sum_a = hn::MulAdd(w, a, sum_a);
          sum_b = hn::MulAdd(w, b, sum_b);
        }
        store(sum_a, sum_b, to);
      });
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

// kOut: 0 none, 1 copied, 2 weighted.
template <typename T, bool kStream, int kOut, bool kDots>
void SpreadT(const RowMap& in, const SlotTable& slots, const RowMap* out, const RowMap* other, void* dots,
             int64_t first, int64_t last) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  using V = hn::Vec<decltype(d)>;
  const auto n = static_cast<size_t>(in.cols);
  const C* weights = static_cast<const C*>(slots.weights);
  const int64_t end = slots.First(last);
  for (int64_t t = first; t < last; ++t) {
    const T* from = in.Row<const T>(t);
    for (int64_t i = slots.First(t); i < slots.End(t); ++i) {
      if constexpr (kDots) {
        if (i + 1 < end && slots.Kept(i + 1)) PrefetchRow<T>(*other, slots.rows[i + 1]);
      }
      if (!slots.Kept(i)) {
        if constexpr (kDots) static_cast<C*>(dots)[i] = C(0);
        continue;
      }
      T* to = kOut == 0 ? nullptr : out->Row<T>(slots.rows[i]);
      if constexpr (kOut == 1) CopyRow<kStream>(from, to, n);
      if constexpr (kOut == 2 || kDots) {
        const T* row = kDots ? other->Row<const T>(slots.rows[i]) : nullptr;
        const V w = hn::Set(d, kOut == 2 ? weights[i] : C(1));
        V sum_a = hn::Zero(d);
        V sum_b = hn::Zero(d);
        ForEachPair<kStream, T>(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
          V a;
          V b;
          load(from, a, b);
          if constexpr (kDots) {
            V p;
            V q;
            load(row, p, q);
            sum_a = hn::MulAdd(a, p, sum_a);
            sum_b = hn::MulAdd(b, q, sum_b);
          }
          if constexpr (kOut == 2) store(hn::Mul(w, a), hn::Mul(w, b), to);
        });
        if constexpr (kDots) static_cast<C*>(dots)[i] = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum_a, sum_b)));
      }
    }
  }
  if constexpr (kStream) hwy::FlushStream();
}

void Combine(const std::vector<CombinePart>& parts, const RowMap& out, bool stream, int64_t first, int64_t last) {
  WithFloat(out.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    stream ? CombineT<T, true>(parts, out, first, last) : CombineT<T, false>(parts, out, first, last);
  });
}

template <typename T, bool kStream>
void SpreadAs(const RowMap& in, const SlotTable& slots, const RowMap* out, const RowMap* other, void* dots,
              int64_t first, int64_t last) {
  if (out == nullptr) return SpreadT<T, false, 0, true>(in, slots, out, other, dots, first, last);
  if (slots.weights == nullptr) {
    return other == nullptr ? SpreadT<T, kStream, 1, false>(in, slots, out, other, dots, first, last)
                            : SpreadT<T, kStream, 1, true>(in, slots, out, other, dots, first, last);
  }
  return other == nullptr ? SpreadT<T, kStream, 2, false>(in, slots, out, other, dots, first, last)
                          : SpreadT<T, kStream, 2, true>(in, slots, out, other, dots, first, last);
}

void Spread(const RowMap& in, const SlotTable& slots, const RowMap* out, const RowMap* other, void* dots, bool stream,
            int64_t first, int64_t last) {
  WithFloat(in.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    stream ? SpreadAs<T, true>(in, slots, out, other, dots, first, last)
           : SpreadAs<T, false>(in, slots, out, other, dots, first, last);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Combine);
HWY_EXPORT(Spread);

void CombineRange(const std::vector<CombinePart>& parts, const RowMap& out, bool stream, int64_t first, int64_t last) {
  JUMAR_DISPATCH(Combine)(parts, out, stream, first, last);
}

void SpreadRange(const RowMap& in, const SlotTable& slots, const RowMap* out, const RowMap* other, void* dots,
                 bool stream, int64_t first, int64_t last) {
  JUMAR_DISPATCH(Spread)(in, slots, out, other, dots, stream, first, last);
}

}  // namespace jumar
#endif  // HWY_ONCE
