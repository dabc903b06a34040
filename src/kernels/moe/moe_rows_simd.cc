#include "kernels/moe/moe_rows_simd.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

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

constexpr size_t kLineBytes = 64;

// The lines that two pairs of vectors hold.
template <class D, typename T>
HWY_INLINE void PrefetchStep(D d, const T* p) {
  const size_t bytes = 4 * hn::Lanes(d) * sizeof(T);
  for (size_t line = 0; line < bytes; line += kLineBytes) hwy::Prefetch(reinterpret_cast<const char*>(p) + line);
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
// body(two, i, load, store) works at element i, on two pairs where `two` is true, else on one: load(p, a, b, e, f),
// store(a, b, e, f, p), the second pair being e and f.
template <bool kStream, typename T, class D, class Body>
HWY_INLINE void ForEachPair(D d, size_t n, const Body& body) {
  using V = hn::Vec<D>;
  // All that is stored comes from widened numbers and clean factors.
  constexpr bool kClean = true;
  const size_t step = 2 * hn::Lanes(d);
  size_t i = 0;
  for (; i + 2 * step <= n; i += 2 * step) {
    body(
        std::true_type(), i,
        [&](const T* p, V& a, V& b, V& e, V& f) HWY_ATTR {
          LoadPair(d, p + i, a, b);
          LoadPair(d, p + i + step, e, f);
        },
        [&](V a, V b, V e, V f, T* p) HWY_ATTR {
          StorePair<kStream, kClean>(d, a, b, p + i);
          StorePair<kStream, kClean>(d, e, f, p + i + step);
        });
  }
  for (; i < n; i += step) {
    const size_t bytes = std::min(step, n - i) * sizeof(T);
    body(
        std::false_type(), i,
        [&](const T* p, V& a, V& b, V& /*e*/, V& /*f*/) HWY_ATTR {
          HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
          std::memcpy(buffer, p + i, bytes);
          LoadPair(d, buffer, a, b);
        },
        [&](V a, V b, V /*e*/, V /*f*/, T* p) HWY_ATTR {
          HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
          StorePair<false, kClean>(d, a, b, buffer);
          std::memcpy(p + i, buffer, bytes);
        });
  }
}

// A factor whose NaN is that of the CPU (see RoundToBF16Bits).
template <typename C>
HWY_INLINE C Clean(C factor) {
  return factor == factor ? factor : std::numeric_limits<C>::quiet_NaN();
}

// The rows of one token and their factors.
template <typename T>
struct Terms {
  std::vector<const T*> rows;
  std::vector<ComputeOf<T>> factors;
  bool weighted = false;

  void Collect(const std::vector<CombinePart>& parts, int64_t t) {
    rows.clear();
    factors.clear();
    weighted = false;
    for (const CombinePart& part : parts) {
      const SlotTable& slots = part.slots;
      const auto* weights = static_cast<const ComputeOf<T>*>(slots.weights);
      for (int64_t i = slots.First(t); i < slots.End(t); ++i) {
        if (!slots.Kept(i)) continue;
        rows.push_back(part.in.Row<const T>(slots.rows[i]));
        factors.push_back(weights == nullptr ? ComputeOf<T>(1) : Clean(weights[i]));
        weighted = weighted || weights != nullptr;
      }
    }
  }
};

template <typename T, bool kStream>
void CombineT(const std::vector<CombinePart>& parts, const RowMap& out, int64_t first, int64_t last) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  using V = hn::Vec<decltype(d)>;
  const auto n = static_cast<size_t>(out.cols);
  Terms<T> now;
  Terms<T> then;
  then.Collect(parts, first);
  for (int64_t t = first; t < last; ++t) {
    std::swap(now, then);
    if (t + 1 < last) then.Collect(parts, t + 1);
    T* to = out.Row<T>(t);
    const size_t count = now.rows.size();
    if (count == 0) {
      std::memset(to, 0, n * sizeof(T));
      continue;
    }
    if (count == 1 && !now.weighted) {
      CopyRow<kStream>(now.rows[0], to, n);
      continue;
    }
    // Rows lie anywhere, so that no CPU foresees the next ones: those of the next token come nearer in step.
    const size_t ahead = std::min(count, then.rows.size());
    ForEachPair<kStream, T>(d, n, [&](auto two, size_t at, const auto& load, const auto& store) HWY_ATTR {
      V x0 = hn::Zero(d);
      V x1 = x0;
      V x2 = x0;
      V x3 = x0;
      load(now.rows[0], x0, x1, x2, x3);
      const V w0 = hn::Set(d, now.factors[0]);
      V s0 = hn::Mul(w0, x0);
      V s1 = hn::Mul(w0, x1);
      V s2 = hn::Mul(w0, x2);
      V s3 = hn::Mul(w0, x3);
      for (size_t k = 1; k < count; ++k) {
        load(now.rows[k], x0, x1, x2, x3);
        const V w = hn::Set(d, now.factors[k]);
        s0 = hn::MulAdd(w, x0, s0);
        s1 = hn::MulAdd(w, x1, s1);
        if constexpr (decltype(two)::value) {
          s2 = hn::MulAdd(w, x2, s2);
          s3 = hn::MulAdd(w, x3, s3);
        }
      }
      store(s0, s1, s2, s3, to);
      if constexpr (decltype(two)::value) {
        for (size_t k = 0; k < ahead; ++k) PrefetchStep(d, then.rows[k] + at);
      }
    });
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
      if (!slots.Kept(i)) {
        if constexpr (kDots) static_cast<C*>(dots)[i] = C(0);
        continue;
      }
      T* to = kOut == 0 ? nullptr : out->Row<T>(slots.rows[i]);
      if constexpr (kOut == 1) CopyRow<kStream>(from, to, n);
      if constexpr (kOut == 2 || kDots) {
        const T* row = kDots ? other->Row<const T>(slots.rows[i]) : nullptr;
        const T* next = kDots && i + 1 < end && slots.Kept(i + 1) ? other->Row<const T>(slots.rows[i + 1]) : row;
        const V w = hn::Set(d, kOut == 2 ? Clean(weights[i]) : C(1));
        V sum0 = hn::Zero(d);
        V sum1 = sum0;
        ForEachPair<kStream, T>(d, n, [&](auto two, size_t at, const auto& load, const auto& store) HWY_ATTR {
          V x0 = hn::Zero(d);
          V x1 = x0;
          V x2 = x0;
          V x3 = x0;
          load(from, x0, x1, x2, x3);
          if constexpr (kDots) {
            V y0 = hn::Zero(d);
            V y1 = y0;
            V y2 = y0;
            V y3 = y0;
            load(row, y0, y1, y2, y3);
            sum0 = hn::MulAdd(x0, y0, sum0);
            sum1 = hn::MulAdd(x1, y1, sum1);
            if constexpr (decltype(two)::value) {
              sum0 = hn::MulAdd(x2, y2, sum0);
              sum1 = hn::MulAdd(x3, y3, sum1);
              PrefetchStep(d, next + at);
            }
          }
          if constexpr (kOut == 2) store(hn::Mul(w, x0), hn::Mul(w, x1), hn::Mul(w, x2), hn::Mul(w, x3), to);
        });
        if constexpr (kDots) static_cast<C*>(dots)[i] = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
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
