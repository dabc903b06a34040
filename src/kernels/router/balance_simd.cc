#include <cmath>
#include <cstring>
#include <limits>

#include "base/simd_dispatch.h"
#include "kernels/router/router_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/router/balance_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "kernels/router/rows-inl.h"
#include "kernels/router/top_k-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows whose sum stays in the compute type before it goes to fp64.
constexpr int64_t kSummed = 64;

// An element of any dtype.
inline double At(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::kBool:
      return static_cast<const uint8_t*>(data)[index] != 0 ? 1 : 0;
    case DType::kI32:
      return static_cast<const int32_t*>(data)[index];
    case DType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    default:
      break;
  }
  return WithFloat(dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const hn::ScalableTag<ComputeOf<T>> d;
    return static_cast<double>(hn::GetLane(LoadWideN(d, static_cast<const T*>(data) + index, 1)));
  });
}

inline double MaskAt(const RowMap* mask, int64_t row) {
  return mask == nullptr ? 1 : At(mask->dtype, RowOf(*mask, row), 0);
}

double MaskSumOf(const RowMap& mask) {
  double sum = 0;
  for (int64_t row = 0; row < mask.rows; ++row) sum += MaskAt(&mask, row);
  return sum;
}

void BiasRowOf(const RowMap& bias, const RowMap& tokens, double rate, bool center, const RowMap& to, int64_t row) {
  const int64_t n = bias.cols;
  const double count = static_cast<double>(n);
  const auto tokens_of = [&](int64_t e) { return At(tokens.dtype, RowOf(tokens, row), e); };
  double total = 0;
  for (int64_t e = 0; e < n; ++e) total += tokens_of(e);
  const auto step = [&](int64_t e) {
    const double below = total / count - tokens_of(e);
    return std::isnan(below) ? below : rate * ((below > 0) - (below < 0));
  };
  double mean = 0;
  for (int64_t e = 0; center && e < n; ++e) mean += step(e) / count;
  WithFloat(bias.dtype, [&](auto type) HWY_ATTR {
    using T = decltype(type);
    const hn::ScalableTag<ComputeOf<T>> d;
    for (int64_t e = 0; e < n; ++e) {
      const double value = At(bias.dtype, RowOf(bias, row), e) + (step(e) - mean);
      StoreNarrowN(d, hn::Set(d, static_cast<ComputeOf<T>>(value)), static_cast<T*>(OutRowOf(to, row)) + e, 1);
    }
  });
}

template <typename C>
void Balance(const RowMap& logits, const RowMap* mask, int64_t top_k, int64_t begin, int64_t end, double* tokens,
             double* probs) {
  const hn::ScalableTag<C> d;
  const size_t n = static_cast<size_t>(logits.cols);
  const size_t k = static_cast<size_t>(top_k);
  const size_t padded = Padded(d, n);
  ScratchFrame frame;
  const TopKScratch<C> scratch(frame, padded, hn::Lanes(d));
  C* buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* p = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* sums = frame.Alloc<C>(static_cast<int64_t>(padded));
  int32_t* chosen = AllocChosen(frame, top_k, hn::Lanes(d));
  RouterOptions options;
  options.k = top_k;
  for (int64_t block = begin; block < end; block += kSummed) {
    std::fill_n(sums, padded, C(0));
    for (int64_t row = block; row < std::min(block + kSummed, end); ++row) {
      const double m = MaskAt(mask, row);
      if (m == 0) continue;
      const C* x = Wide(d, logits, row, -std::numeric_limits<C>::infinity(), buffer);
      const C max = ChooseByLogits(d, x, n, options, scratch, p, chosen);
      for (size_t j = 0; j < k; ++j) tokens[chosen[j]] += m;
      C share = std::numeric_limits<C>::quiet_NaN();
      if (Finite(max)) {
        share = static_cast<C>(m) / Exponentials(d, x, max, p, padded);
      } else {
        std::fill_n(p, padded, share);
      }
      const auto f = hn::Set(d, share);
      for (size_t i = 0; i < padded; i += hn::Lanes(d)) {
        hn::StoreU(hn::MulAdd(hn::LoadU(d, p + i), f, hn::LoadU(d, sums + i)), d, sums + i);
      }
    }
    for (size_t i = 0; i < n; ++i) probs[i] += static_cast<double>(sums[i]);
  }
}

template <typename C>
void BalanceGrad(const RowMap& logits, const RowMap* mask, const C* v, const RowMap& dlogits, int64_t begin,
                 int64_t end) {
  const hn::ScalableTag<C> d;
  const size_t n = static_cast<size_t>(logits.cols);
  const size_t padded = Padded(d, n);
  ScratchFrame frame;
  C* buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* p = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* values = frame.Alloc<C>(static_cast<int64_t>(padded));
  std::copy_n(v, n, values);
  std::fill(values + n, values + padded, C(0));
  for (int64_t row = begin; row < end; ++row) {
    const C m = static_cast<C>(MaskAt(mask, row));
    void* to = OutRowOf(dlogits, row);
    if (m == 0) {
      std::memset(to, 0, n * SizeOf(dlogits.dtype));
      continue;
    }
    Softmax(d, Wide(d, logits, row, -std::numeric_limits<C>::infinity(), buffer), p, n);
    auto dot = hn::Zero(d);
    for (size_t i = 0; i < padded; i += hn::Lanes(d)) {
      dot = hn::MulAdd(hn::LoadU(d, p + i), hn::LoadU(d, values + i), dot);
    }
    const auto mean = hn::Set(d, hn::GetLane(hn::SumOfLanes(d, dot)));
    const auto factor = hn::Set(d, m);
    WithStored<C>(dlogits.dtype, [&](auto type) HWY_ATTR {
      auto* out = static_cast<decltype(type)*>(to);
      ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
        store(hn::Mul(hn::Mul(factor, load(p)), hn::Sub(load(values), mean)), out);
      });
    });
  }
}

template <typename C>
double ZLoss(const RowMap& logits, int64_t begin, int64_t end) {
  const hn::ScalableTag<C> d;
  const size_t padded = Padded(d, static_cast<size_t>(logits.cols));
  ScratchFrame frame;
  C* buffer = frame.Alloc<C>(static_cast<int64_t>(padded));
  C* e = frame.Alloc<C>(static_cast<int64_t>(padded));
  double total = 0;
  for (int64_t row = begin; row < end; ++row) {
    const C* x = Wide(d, logits, row, -std::numeric_limits<C>::infinity(), buffer);
    const C max = MaxOrNaN(d, x, padded);
    double lse = static_cast<double>(max);
    if (Finite(max)) lse += std::log(static_cast<double>(Exponentials(d, x, max, e, padded)));
    total += lse * lse;
  }
  return total;
}

template <typename C>
void ZLossGrad(const RowMap& logits, double scale, const RowMap& dlogits, int64_t begin, int64_t end) {
  const hn::ScalableTag<C> d;
  const size_t n = static_cast<size_t>(logits.cols);
  ScratchFrame frame;
  C* buffer = frame.Alloc<C>(static_cast<int64_t>(Padded(d, n)));
  C* p = frame.Alloc<C>(static_cast<int64_t>(Padded(d, n)));
  for (int64_t row = begin; row < end; ++row) {
    const C* x = Wide(d, logits, row, -std::numeric_limits<C>::infinity(), buffer);
    const double lse = Softmax(d, x, p, n);
    Scale(d, p, static_cast<C>(scale * lse), Padded(d, n));
    Narrow(d, p, dlogits.dtype, OutRowOf(dlogits, row), n);
  }
}

void BalanceOf(const RowMap& logits, const RowMap* mask, int64_t top_k, int64_t begin, int64_t end, double* tokens,
               double* probs) {
  if (logits.dtype == DType::kF64) return Balance<double>(logits, mask, top_k, begin, end, tokens, probs);
  Balance<float>(logits, mask, top_k, begin, end, tokens, probs);
}

void BalanceGradOf(const RowMap& logits, const RowMap* mask, const void* v, const RowMap& dlogits, int64_t begin,
                   int64_t end) {
  if (logits.dtype == DType::kF64) {
    return BalanceGrad(logits, mask, static_cast<const double*>(v), dlogits, begin, end);
  }
  BalanceGrad(logits, mask, static_cast<const float*>(v), dlogits, begin, end);
}

double ZLossOf(const RowMap& logits, int64_t begin, int64_t end) {
  return logits.dtype == DType::kF64 ? ZLoss<double>(logits, begin, end) : ZLoss<float>(logits, begin, end);
}

void ZLossGradOf(const RowMap& logits, double scale, const RowMap& dlogits, int64_t begin, int64_t end) {
  if (logits.dtype == DType::kF64) return ZLossGrad<double>(logits, scale, dlogits, begin, end);
  ZLossGrad<float>(logits, scale, dlogits, begin, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
namespace {

HWY_EXPORT(BalanceOf);
HWY_EXPORT(BalanceGradOf);
HWY_EXPORT(MaskSumOf);
HWY_EXPORT(BiasRowOf);
HWY_EXPORT(ZLossOf);
HWY_EXPORT(ZLossGradOf);

}  // namespace

void BalanceRows(const RowMap& logits, const RowMap* mask, int64_t top_k, int64_t begin, int64_t end, double* tokens,
                 double* probs) {
  JUMAR_DISPATCH(BalanceOf)(logits, mask, top_k, begin, end, tokens, probs);
}
void BalanceGradRows(const RowMap& logits, const RowMap* mask, const void* v, const RowMap& dlogits, int64_t begin,
                     int64_t end) {
  JUMAR_DISPATCH(BalanceGradOf)(logits, mask, v, dlogits, begin, end);
}
double MaskColumnSum(const RowMap& mask) { return JUMAR_DISPATCH(MaskSumOf)(mask); }
void BiasRow(const RowMap& bias, const RowMap& tokens, double rate, bool center, const RowMap& to, int64_t row) {
  JUMAR_DISPATCH(BiasRowOf)(bias, tokens, rate, center, to, row);
}
double ZLossRows(const RowMap& logits, int64_t begin, int64_t end) {
  return JUMAR_DISPATCH(ZLossOf)(logits, begin, end);
}
void ZLossGradRows(const RowMap& logits, double scale, const RowMap& dlogits, int64_t begin, int64_t end) {
  JUMAR_DISPATCH(ZLossGradOf)(logits, scale, dlogits, begin, end);
}

}  // namespace jumar
#endif  // HWY_ONCE
