#include "kernels/lightning_indexer/lightning_indexer_simd.h"

#include <algorithm>
#include <type_traits>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/lightning_indexer/lightning_indexer_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// max(x, 0) that keeps NaN.
template <class D, class V>
HWY_INLINE V ReluOf(D d, V x) {
  return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x);
}

template <typename T>
void TileScores(const void* r, int64_t ld, int64_t heads, int64_t n, const void* w, void* scores) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* weights = static_cast<const T*>(w);
  const T* rows = static_cast<const T*>(r);
  T* out = static_cast<T*>(scores);
  int64_t j = 0;
  // Four sums at a time: one waits for the other heads otherwise.
  for (; j + 4 * lanes <= n; j += 4 * lanes) {
    auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
    const T* x = rows + j;
    for (int64_t h = 0; h < heads; ++h, x += ld) {
      const auto weight = hn::Set(d, weights[h]);
      s0 = hn::MulAdd(weight, ReluOf(d, hn::LoadU(d, x)), s0);
      s1 = hn::MulAdd(weight, ReluOf(d, hn::LoadU(d, x + lanes)), s1);
      s2 = hn::MulAdd(weight, ReluOf(d, hn::LoadU(d, x + 2 * lanes)), s2);
      s3 = hn::MulAdd(weight, ReluOf(d, hn::LoadU(d, x + 3 * lanes)), s3);
    }
    hn::StoreU(s0, d, out + j);
    hn::StoreU(s1, d, out + j + lanes);
    hn::StoreU(s2, d, out + j + 2 * lanes);
    hn::StoreU(s3, d, out + j + 3 * lanes);
  }
  ForEachVector(d, static_cast<size_t>(n - j), [&](const auto& load, const auto& store) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (int64_t h = 0; h < heads; ++h) {
      sum = hn::MulAdd(hn::Set(d, weights[h]), ReluOf(d, load(rows + h * ld + j)), sum);
    }
    store(sum, out + j);
  });
}

// body(column, first head, mask): each vector of the heads, lanes behind the last head masked off.
template <class D, class Body>
HWY_INLINE void ForEachHead(D d, const TurnedTile& r, const Body& body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t h = 0; h < r.heads; h += lanes) {
    body(static_cast<hn::TFromD<D>*>(r.r) + h, h, hn::FirstN(d, static_cast<size_t>(std::min(lanes, r.heads - h))));
  }
}

template <typename T>
void TurnedScores(const TurnedTile& r, const void* w, void* scores) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = r.heads / lanes * lanes;
  const auto rest = hn::FirstN(d, static_cast<size_t>(r.heads - whole));
  const T* weights = static_cast<const T*>(w);
  const T* row = static_cast<const T*>(r.r);
  T* out = static_cast<T*>(scores);
  for (int64_t j = 0; j < r.n; ++j, row += r.ld) {
    const auto add = [&](int64_t h, auto sum) HWY_ATTR {
      return hn::MulAdd(hn::LoadU(d, weights + h), ReluOf(d, hn::LoadU(d, row + h)), sum);
    };
    auto even = hn::Zero(d), odd = hn::Zero(d);
    int64_t h = 0;
    for (; h + 2 * lanes <= whole; h += 2 * lanes) {
      even = add(h, even);
      odd = add(h + lanes, odd);
    }
    if (h < whole) even = add(h, even);
    if (whole < r.heads) {
      const auto last = hn::IfThenElseZero(rest, ReluOf(d, hn::LoadU(d, row + whole)));
      odd = hn::MulAdd(hn::LoadU(d, weights + whole), last, odd);
    }
    out[j] = hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
  }
}

template <typename T>
void ScoreGradient(const TurnedTile& r, const void* w, const void* di, void* dw) {
  const hn::ScalableTag<T> d;
  const T* weights = static_cast<const T*>(w);
  const T* slopes = static_cast<const T*>(di);
  T* out = static_cast<T*>(dw);
  const auto zero = hn::Zero(d);
  ForEachHead(d, r, [&](T* x, int64_t h, auto valid) HWY_ATTR {
    const auto weight = hn::LoadU(d, weights + h);
    auto even = zero, odd = zero;
    const auto one = [&](int64_t j, auto sum) HWY_ATTR {
      const auto score = hn::LoadU(d, x + j * r.ld);
      const auto slope = hn::Set(d, slopes[j]);
      hn::StoreU(hn::IfThenElseZero(hn::Gt(score, zero), hn::Mul(weight, slope)), d, x + j * r.ld);
      return hn::MulAdd(slope, ReluOf(d, score), sum);
    };
    int64_t j = 0;
    for (; j + 2 <= r.n; j += 2) {
      even = one(j, even);
      odd = one(j + 1, odd);
    }
    if (j < r.n) even = one(j, even);
    const auto sum = hn::IfThenElseZero(valid, hn::Add(even, odd));
    hn::StoreU(hn::Add(hn::LoadU(d, out + h), sum), d, out + h);
  });
}

template <typename T>
void TurnedProbabilities(const TurnedTile& r, double scale, const void* max, const void* inverse, void* out) {
  const hn::ScalableTag<T> d;
  const auto factor = hn::Set(d, static_cast<T>(scale));
  T* p = static_cast<T*>(out);
  ForEachHead(d, r, [&](const T* x, int64_t h, auto valid) HWY_ATTR {
    const auto shift = hn::LoadU(d, static_cast<const T*>(max) + h);
    const auto share = hn::LoadU(d, static_cast<const T*>(inverse) + h);
    const auto counts = hn::AndNot(hn::Eq(share, hn::Zero(d)), valid);
    for (int64_t j = 0; j < r.n; ++j) {
      const auto e = hn::Mul(ExpOf(d, hn::MulSub(hn::LoadU(d, x + j * r.ld), factor, shift)), share);
      p[j] += hn::GetLane(hn::SumOfLanes(d, hn::IfThenElseZero(counts, e)));
    }
  });
}

template <typename T>
void TileProbabilities(const ProbabilityTile& t) {
  const hn::ScalableTag<T> d;
  const T* max = static_cast<const T*>(t.max);
  const T* inverse = static_cast<const T*>(t.inverse);
  const auto scale = hn::Set(d, static_cast<T>(t.scale));
  for (int64_t i = 0; i < t.rows; ++i) {
    if (inverse[i] == 0) continue;
    const T* x = static_cast<const T*>(t.tile) + i * t.ld;
    T* p = static_cast<T*>(t.out) + i * t.out_stride;
    const auto shift = hn::Set(d, max[i]);
    const auto factor = hn::Set(d, inverse[i]);
    ForEachVector(d, static_cast<size_t>(t.n), [&](const auto& load, const auto& store) HWY_ATTR {
      const auto e = ExpOf(d, hn::MulSub(load(x), scale, shift));
      store(hn::MulAdd(e, factor, load(p)), p);
    });
  }
}

template <typename T>
double Max(const void* x, int64_t n, double start) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* p = static_cast<const T*>(x);
  auto max = hn::Set(d, static_cast<T>(start));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) max = hn::Max(hn::LoadU(d, p + i), max);
  T result = hn::GetLane(hn::MaxOfLanes(d, max));
  for (; i < n; ++i) result = std::max(result, p[i]);
  return result;
}

template <typename T>
double ExpSum(void* x, int64_t n, double max) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  T* p = static_cast<T*>(x);
  const auto shift = hn::Set(d, static_cast<T>(max));
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto e = ExpOf(d, hn::Sub(hn::LoadU(d, p + i), shift));
    sum = hn::Add(sum, e);
    hn::StoreU(e, d, p + i);
  }
  T total = hn::GetLane(hn::SumOfLanes(d, sum));
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    const auto e = ExpOf(d, hn::Sub(LoadWideN(d, p + i, rest), shift));
    StoreNarrowN(d, e, p + i, rest);
    for (; i < n; ++i) total += p[i];
  }
  return total;
}

template <typename T>
void AddAll(void* x, const void* y, int64_t n) {
  const hn::ScalableTag<T> d;
  T* p = static_cast<T*>(x);
  const T* q = static_cast<const T*>(y);
  ForEachVector(d, static_cast<size_t>(n),
                [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Add(load(p), load(q)), p); });
}

template <typename T>
int64_t Append(const void* x, int64_t n, int64_t first, double threshold, bool all, void* scores, void* ids) {
  const hn::ScalableTag<T> d;
  const hn::RebindToSigned<decltype(d)> di;
  using Id = hn::TFromD<decltype(di)>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const T* p = static_cast<const T*>(x);
  T* kept = static_cast<T*>(scores);
  Id* numbers = static_cast<Id*>(ids);
  const auto low = hn::Set(d, static_cast<T>(threshold));
  int64_t count = 0;
  int64_t i = 0;
  for (; all && i + lanes <= n; i += lanes, count += lanes) {
    hn::StoreU(hn::LoadU(d, p + i), d, kept + i);
    hn::StoreU(hn::Iota(di, static_cast<Id>(first + i)), di, numbers + i);
  }
  for (; i < n; i += lanes) {
    const int64_t have = std::min(lanes, n - i);
    const auto v = have == lanes ? hn::LoadU(d, p + i) : LoadWideN(d, p + i, static_cast<size_t>(have));
    auto wanted = hn::FirstN(d, static_cast<size_t>(have));
    if (!all) wanted = hn::AndNot(hn::Le(v, low), wanted);
    if (hn::AllFalse(d, wanted)) continue;
    const auto id = hn::Iota(di, static_cast<Id>(first + i));
    const size_t more = hn::CompressStore(v, wanted, d, kept + count);
    hn::CompressStore(id, hn::RebindMask(di, wanted), di, numbers + count);
    count += static_cast<int64_t>(more);
  }
  return count;
}

template <typename T>
IndexerKernel MakeKernel() {
  IndexerKernel kernel;
  kernel.width = static_cast<int64_t>(2 * hn::Lanes(hn::ScalableTag<T>()));
  kernel.tile_scores = &TileScores<T>;
  kernel.turned_scores = &TurnedScores<T>;
  kernel.score_gradient = &ScoreGradient<T>;
  kernel.tile_probabilities = &TileProbabilities<T>;
  kernel.turned_probabilities = &TurnedProbabilities<T>;
  kernel.max = &Max<T>;
  kernel.exp_sum = &ExpSum<T>;
  kernel.add = &AddAll<T>;
  kernel.append = &Append<T>;
  return kernel;
}

}  // namespace

const IndexerKernel* IndexerKernelOf(bool f64) {
  static const IndexerKernel k32 = MakeKernel<float>();
  static const IndexerKernel k64 = MakeKernel<double>();
  return f64 ? &k64 : &k32;
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(IndexerKernelOf);

const IndexerKernel& ChooseIndexerKernel(bool f64) { return *JUMAR_DISPATCH(IndexerKernelOf)(f64); }

}  // namespace jumar
#endif  // HWY_ONCE
