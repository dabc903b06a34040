// The k largest of a row, in order, without sorting the row.
#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "kernels/router/router.h"
#include "kernels/router/rows-inl.h"

#if !defined(JUMAR_ROUTER_TOP_K_SCRATCH)
#define JUMAR_ROUTER_TOP_K_SCRATCH
namespace jumar {

// Up to so many candidates are ordered by counting, for each one, those before it.
inline constexpr size_t kCounted = 64;

// Working memory of TopK for rows of up to `padded` elements, a multiple of `lanes`.
template <typename C>
struct TopKScratch {
  TopKScratch(ScratchFrame& frame, size_t padded, size_t lanes)
      : maxima(frame.Alloc<C>(static_cast<int64_t>(padded))),
        keys(frame.Alloc<C>(static_cast<int64_t>(padded + kCounted + lanes))),
        ranks(frame.Alloc<C>(static_cast<int64_t>(kCounted + lanes))),
        ids(frame.Alloc<int32_t>(static_cast<int64_t>(padded + kCounted + lanes))),
        order(frame.Alloc<int32_t>(static_cast<int64_t>(padded + kCounted + lanes))) {}
  C* maxima;
  C* keys;
  C* ranks;
  int32_t* ids;
  int32_t* order;
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

// A number that at least k of the first `padded` elements reach and that is not above the k-th largest: the k-th
// largest of the maxima of disjoint classes. At least 2k classes where there are so many elements, so that few others
// reach it.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE C TopKBound(D d, const C* x, size_t padded, size_t k, C* maxima) {
  const size_t lanes = hn::Lanes(d);
  const size_t classes = std::min((2 * k + lanes - 1) / lanes * lanes, padded);
  for (size_t c = 0; c < classes; c += lanes) {
    auto max = hn::LoadU(d, x + c);
    for (size_t i = c + classes; i < padded; i += classes) max = hn::Max(max, hn::LoadU(d, x + i));
    hn::StoreU(max, d, maxima + c);
  }
  if (classes > 2 * kCounted) {
    std::nth_element(maxima, maxima + k - 1, maxima + classes, std::greater<C>());
    return maxima[k - 1];
  }
  // The smallest with fewer than k above it.
  const auto one = hn::Set(d, C(1));
  const auto limit = hn::Set(d, static_cast<C>(k));
  const auto inf = hn::Set(d, std::numeric_limits<C>::infinity());
  auto bound = inf;
  for (size_t c = 0; c < classes; c += lanes) {
    const auto m = hn::LoadU(d, maxima + c);
    auto above = hn::Zero(d);
    for (size_t i = 0; i < classes; ++i) {
      above = hn::Add(above, hn::IfThenElseZero(hn::Gt(hn::Set(d, maxima[i]), m), one));
    }
    bound = hn::Min(bound, hn::IfThenElse(hn::Lt(above, limit), m, inf));
  }
  return hn::GetLane(hn::MinOfLanes(d, bound));
}

// Appends the numbers and values of those of the n elements that are at least `bound`, in order. Returns how many.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE size_t TopKCandidates(D d, const C* x, size_t n, C bound, C* keys, int32_t* ids) {
  const size_t lanes = hn::Lanes(d);
  const auto low = hn::Set(d, bound);
  size_t count = 0;
  for (size_t i = 0; i < n; i += 64) {
    uint64_t word = 0;
    for (size_t j = 0; j < 64 && i + j < n; j += lanes) {
      uint64_t bits = 0;
      uint8_t bytes[8] = {};
      hn::StoreMaskBits(d, hn::Ge(hn::LoadU(d, x + i + j), low), bytes);
      std::memcpy(&bits, bytes, sizeof(bits));
      word |= bits << j;
    }
    if (n - i < 64) word &= (uint64_t{1} << (n - i)) - 1;  // what lies behind the row may reach -infinity
    for (; word != 0; word &= word - 1) {
      const size_t at = i + static_cast<size_t>(__builtin_ctzll(word));
      ids[count] = static_cast<int32_t>(at);
      keys[count++] = x[at];
    }
  }
  return count;
}

// ranks[i] = how many of the n keys come before keys[i]: greater ones, and equal ones that stand before it. keys has
// room for a vector more.
template <class D, typename C = hn::TFromD<D>>
HWY_INLINE void TopKRanks(D d, C* keys, size_t n, C* ranks) {
  const size_t lanes = hn::Lanes(d);
  std::fill_n(keys + n, lanes, -std::numeric_limits<C>::infinity());
  const auto one = hn::Set(d, C(1));
  for (size_t v = 0; v < n; v += lanes) {
    const auto own = hn::LoadU(d, keys + v);
    auto before = hn::Zero(d);
    size_t i = 0;
    for (; i < v; ++i) before = hn::Add(before, hn::IfThenElseZero(hn::Ge(hn::Set(d, keys[i]), own), one));
    const auto position = hn::Iota(d, C(0));
    for (; i < std::min(v + lanes, n); ++i) {
      const auto other = hn::Set(d, keys[i]);
      const auto first = hn::Gt(position, hn::Set(d, static_cast<C>(i - v)));
      const auto counts = hn::Or(hn::Gt(other, own), hn::And(first, hn::Eq(other, own)));
      before = hn::Add(before, hn::IfThenElseZero(counts, one));
    }
    for (; i < n; ++i) before = hn::Add(before, hn::IfThenElseZero(hn::Gt(hn::Set(d, keys[i]), own), one));
    hn::StoreU(before, d, ranks + v);
  }
}

// chosen[j] = number of the j-th largest of the n elements of x; equal ones in ascending order. x has no NaN and goes
// on with -infinity up to a multiple of the vector. 0 <= k <= n.
template <class D, typename C = hn::TFromD<D>>
void TopK(D d, const C* x, size_t n, size_t k, const TopKScratch<C>& scratch, int32_t* chosen) {
  if (k == 0) return;
  const size_t lanes = hn::Lanes(d);
  const C bound = TopKBound(d, x, (n + lanes - 1) / lanes * lanes, k, scratch.maxima);
  const size_t count = TopKCandidates(d, x, n, bound, scratch.keys, scratch.ids);
  if (count <= kCounted) {
    TopKRanks(d, scratch.keys, count, scratch.ranks);
    for (size_t i = 0; i < count; ++i) scratch.order[static_cast<size_t>(scratch.ranks[i])] = scratch.ids[i];
    std::copy_n(scratch.order, k, chosen);
    return;
  }
  std::partial_sort_copy(scratch.ids, scratch.ids + count, chosen, chosen + k,
                         [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
}

template <typename C>
constexpr C kZeroBelow = sizeof(C) == 4 ? C(104) : C(746);  // e^-kZeroBelow rounds to 0

// The k experts of a row of logits (softmax, neither bias nor groups), whose largest element is max.
template <class D, typename C = hn::TFromD<D>>
void ChooseByLogits(D d, const C* x, C max, size_t n, const RouterOptions& o, const TopKScratch<C>& scratch, C* copy,
                    int32_t* chosen) {
  const size_t k = static_cast<size_t>(o.k);
  const C inf = std::numeric_limits<C>::infinity();
  if (!Finite(max)) {
    if (!o.all_by_logits) {
      for (size_t j = 0; j < k; ++j) chosen[j] = static_cast<int32_t>(j);
      return;
    }
    for (size_t i = 0; i < Padded(d, n); ++i) copy[i] = std::isnan(x[i]) ? inf : x[i];
    return TopK(d, copy, n, k, scratch, chosen);
  }
  TopK(d, x, n, k, scratch, chosen);
  const C low = max - kZeroBelow<C>;
  if (k > 0 && !o.all_by_logits && x[chosen[k - 1]] < low) {
    for (size_t i = 0; i < n; ++i) copy[i] = std::max(x[i], low);
    for (size_t i = n; i < Padded(d, n); ++i) copy[i] = -inf;
    TopK(d, copy, n, k, scratch, chosen);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
