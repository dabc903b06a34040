// The k largest of a row, in order, without sorting the row.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>

#include "base/scratch.h"
#include "kernels/router/router.h"
#include "kernels/router/rows-inl.h"

#if !defined(JUMAR_ROUTER_TOP_K_SCRATCH)
#define JUMAR_ROUTER_TOP_K_SCRATCH
namespace jumar {

// Up to so many candidates are ordered by counting, for each one, those before it.
inline constexpr size_t kCounted = 64;
// Candidates that are listed at a time.
inline constexpr size_t kAtOnce = 8;

template <typename C>
using SignedOf = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;

// Room for the k chosen ones, and for the candidates that are ordered there.
inline int32_t* AllocChosen(ScratchFrame& frame, int64_t k, size_t lanes) {
  return frame.Alloc<int32_t>(std::max(k, static_cast<int64_t>(kCounted + lanes)));
}

// Working memory of TopK for rows of up to `padded` elements, a multiple of `lanes`.
template <typename C>
struct TopKScratch {
  TopKScratch(ScratchFrame& frame, size_t padded, size_t lanes)
      : maxima(frame.Alloc<C>(static_cast<int64_t>(padded))),
        keys(frame.Alloc<C>(static_cast<int64_t>(padded + kCounted + lanes))),
        ranks(frame.Alloc<SignedOf<C>>(static_cast<int64_t>(kCounted + lanes))),
        ids(frame.Alloc<int32_t>(static_cast<int64_t>(padded + kCounted + lanes))) {}
  C* maxima;
  C* keys;
  SignedOf<C>* ranks;
  int32_t* ids;
};

}  // namespace jumar
#endif

#if defined(JUMAR_ROUTER_TOP_K_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_ROUTER_TOP_K_INL_H_
#undef JUMAR_ROUTER_TOP_K_INL_H_
#else
#define JUMAR_ROUTER_TOP_K_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// counts + 1 where the mask is true.
template <class D, class V, class M>
HWY_INLINE V CountTrue(D d, V counts, M mask) {
  const hn::RebindToSigned<D> di;
  return hn::Sub(counts, hn::BitCast(di, hn::VecFromMask(d, mask)));
}

// A number that at least k of the first `padded` elements reach and that is not above the k-th largest: the k-th
// largest of the maxima of disjoint classes. At least 2k classes where there are so many elements, so that few others
// reach it.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE C TopKBound(D d, const C* x, size_t padded, size_t k, C* maxima) {
  const size_t lanes = hn::Lanes(d);
  const size_t classes = std::min((2 * k + lanes - 1) / lanes * lanes, padded);
  auto nan = hn::Zero(d);
  for (size_t c = 0; c < classes; c += lanes) {
    auto max = hn::LoadU(d, x + c);
    nan = hn::Or(nan, hn::VecFromMask(d, hn::IsNaN(max)));
    for (size_t i = c + classes; i < padded; i += classes) {
      const auto v = hn::LoadU(d, x + i);
      max = hn::Max(max, v);
      nan = hn::Or(nan, hn::VecFromMask(d, hn::IsNaN(v)));
    }
    hn::StoreU(max, d, maxima + c);
  }
  if (!hn::AllFalse(d, hn::MaskFromVec(nan))) return std::numeric_limits<C>::quiet_NaN();
  if (classes > 2 * kCounted) {
    std::nth_element(maxima, maxima + k - 1, maxima + classes, std::greater<C>());
    return maxima[k - 1];
  }
  // The smallest with fewer than k above it.
  const hn::RebindToSigned<D> di;
  const auto limit = hn::Set(di, static_cast<SignedOf<C>>(k));
  const auto inf = hn::Set(d, std::numeric_limits<C>::infinity());
  auto bound = inf;
  const auto take = [&](auto m, auto above) HWY_ATTR {
    bound = hn::Min(bound, hn::IfThenElse(hn::RebindMask(d, hn::Lt(above, limit)), m, inf));
  };
  size_t c = 0;
  for (; c + 2 * lanes <= classes; c += 2 * lanes) {
    const auto m0 = hn::LoadU(d, maxima + c);
    const auto m1 = hn::LoadU(d, maxima + c + lanes);
    auto above0 = hn::Zero(di);
    auto above1 = above0;
    for (size_t i = 0; i < classes; ++i) {
      const auto other = hn::Set(d, maxima[i]);
      above0 = CountTrue(d, above0, hn::Gt(other, m0));
      above1 = CountTrue(d, above1, hn::Gt(other, m1));
    }
    take(m0, above0);
    take(m1, above1);
  }
  if (c < classes) {
    const auto m = hn::LoadU(d, maxima + c);
    auto above = hn::Zero(di);
    for (size_t i = 0; i < classes; ++i) above = CountTrue(d, above, hn::Gt(hn::Set(d, maxima[i]), m));
    take(m, above);
  }
  return hn::GetLane(hn::MinOfLanes(d, bound));
}

// The numbers and values of those of the n elements that are at least `bound`, in order; at the end there may be some
// of the -infinities behind them. Returns how many.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE size_t TopKCandidates(D d, const C* x, size_t n, C bound, C* keys, int32_t* ids) {
  const size_t lanes = hn::Lanes(d);
  const auto low = hn::Set(d, bound);
  size_t count = 0;
  for (size_t i = 0; i < n; i += 64) {
    uint64_t word = 0;
    for (size_t j = 0; j < 64 && i + j < n; j += lanes) {
      uint64_t bits = 0;
      uint8_t bytes[8];
      hn::StoreMaskBits(d, hn::Ge(hn::LoadU(d, x + i + j), low), bytes);
      std::memcpy(&bits, bytes, (lanes + 7) / 8);
      word |= bits << j;
    }
    // kAtOnce at a time, though there be fewer: no CPU foresees the end of a loop of as many steps as there are bits.
    const auto found = static_cast<size_t>(std::popcount(word));
    for (size_t f = 0; f < found; f += kAtOnce) {
      for (size_t j = 0; j < kAtOnce; ++j, word &= word - 1) {
        const size_t at = i + (static_cast<size_t>(std::countr_zero(word)) & 63);
        ids[count + f + j] = static_cast<int32_t>(at);
        keys[count + f + j] = x[at];
      }
    }
    count += found;
  }
  return count;
}

// ranks[i] = how many of the n keys come before keys[i]: greater ones, and equal ones that stand before it. n is a
// multiple of the vector.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE void TopKRanks(D d, const C* keys, size_t n, SignedOf<C>* ranks) {
  const hn::RebindToSigned<D> di;
  const size_t lanes = hn::Lanes(d);
  const auto position = hn::Iota(di, 0);
  for (size_t v = 0; v < n; v += lanes) {
    const auto own = hn::LoadU(d, keys + v);
    auto before = hn::Zero(di);
    size_t i = 0;
    for (; i < v; ++i) before = CountTrue(d, before, hn::Ge(hn::Set(d, keys[i]), own));
    for (; i < v + lanes; ++i) {
      const auto other = hn::Set(d, keys[i]);
      const auto behind = hn::RebindMask(d, hn::Gt(position, hn::Set(di, static_cast<SignedOf<C>>(i - v))));
      before = CountTrue(d, before, hn::Or(hn::Gt(other, own), hn::And(behind, hn::Eq(other, own))));
    }
    for (; i < n; ++i) before = CountTrue(d, before, hn::Gt(hn::Set(d, keys[i]), own));
    hn::StoreU(before, di, ranks + v);
  }
}

// chosen[j], of AllocChosen, = number of the j-th largest of the n elements of x; equal ones in ascending order. What
// stands behind the k is arbitrary. x goes on with -infinity up to a multiple of the vector. False, and nothing chosen,
// when an element is NaN. 0 < k <= n.
template <class D, typename C = hn::TFromD<D>>
bool TopK(D d, const C* x, size_t n, size_t k, const TopKScratch<C>& scratch, int32_t* chosen) {
  const size_t lanes = hn::Lanes(d);
  const C bound = TopKBound(d, x, (n + lanes - 1) / lanes * lanes, k, scratch.maxima);
  if (std::isnan(bound)) return false;
  const size_t count = TopKCandidates(d, x, n, bound, scratch.keys, scratch.ids);
  if (count <= kCounted) {
    // Filled up to whole vectors, so that these loops too end after as many steps for most rows.
    hn::StoreU(hn::Set(d, -std::numeric_limits<C>::infinity()), d, scratch.keys + count);
    const size_t whole = (count + lanes - 1) / lanes * lanes;
    TopKRanks(d, scratch.keys, whole, scratch.ranks);
    for (size_t i = 0; i < whole; ++i) chosen[scratch.ranks[i]] = scratch.ids[i];
    return true;
  }
  std::partial_sort_copy(scratch.ids, scratch.ids + count, chosen, chosen + k,
                         [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  return true;
}

template <typename C>
constexpr C kZeroBelow = sizeof(C) == 4 ? C(104) : C(746);  // e^-kZeroBelow rounds to 0

// The k experts of a row of logits (softmax, neither bias nor groups). Returns the largest logit, NaN when one is NaN.
template <class D, typename C = hn::TFromD<D>>
C ChooseByLogits(D d, const C* x, size_t n, const RouterOptions& o, const TopKScratch<C>& scratch, C* copy,
                 int32_t* chosen) {
  const size_t k = static_cast<size_t>(o.k);
  const size_t padded = Padded(d, n);
  const C inf = std::numeric_limits<C>::infinity();
  if (k == 0) return MaxOrNaN(d, x, padded);
  const C max = TopK(d, x, n, k, scratch, chosen) ? x[chosen[0]] : std::numeric_limits<C>::quiet_NaN();
  if (o.all_by_logits) {
    if (!std::isnan(max)) return max;
    for (size_t i = 0; i < padded; ++i) copy[i] = std::isnan(x[i]) ? inf : x[i];
    TopK(d, copy, n, k, scratch, chosen);
  } else if (!Finite(max)) {
    for (size_t j = 0; j < k; ++j) chosen[j] = static_cast<int32_t>(j);
  } else if (x[chosen[k - 1]] < max - kZeroBelow<C>) {
    for (size_t i = 0; i < n; ++i) copy[i] = std::max(x[i], max - kZeroBelow<C>);
    for (size_t i = n; i < padded; ++i) copy[i] = -inf;
    TopK(d, copy, n, k, scratch, chosen);
  }
  return max;
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
