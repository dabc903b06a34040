// Loads that widen any floating dtype to fp64, exactly, and stores that round fp64 once.
// fp64 -> fp32 -> 16 bits rounds twice in name: a result is off by at most 0.5 + 2^-14 ulp.
#include <type_traits>

#include "simd/float_io-inl.h"

#if defined(JUMAR_SIMD_F64_IO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_SIMD_F64_IO_INL_H_
#undef JUMAR_SIMD_F64_IO_INL_H_
#else
#define JUMAR_SIMD_F64_IO_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadF64(D d, const T* p) {
  if constexpr (std::is_same_v<T, double>) {
    return hn::LoadU(d, p);
  } else {
    return hn::PromoteTo(d, LoadWide(hn::Rebind<float, D>(), p));
  }
}

template <class D, typename T>
HWY_INLINE void StoreF64(D d, hn::Vec<D> v, T* p) {
  if constexpr (std::is_same_v<T, double>) {
    hn::StoreU(v, d, p);
  } else {
    const hn::Rebind<float, D> df;
    StoreNarrow(df, hn::DemoteTo(df, v), p);
  }
}

// Calls body(load, store) over [0, n) in whole vectors of fp64 and one partial: load(p) reads at p + i, store(v, p)
// writes at p + i.
template <class D, class Body>
HWY_INLINE void ForEachF64(D d, size_t n, const Body& body) {
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    body([&](const auto* p) HWY_ATTR { return LoadF64(d, p + i); },
         [&](hn::Vec<D> v, auto* p) HWY_ATTR { StoreF64(d, v, p + i); });
  }
  if (i < n) {
    const size_t rest = n - i;
    body(
        [&](const auto* p) HWY_ATTR {
          HWY_ALIGN std::remove_cvref_t<decltype(*p)> buffer[HWY_MAX_BYTES / sizeof(double)] = {};
          for (size_t k = 0; k < rest; ++k) buffer[k] = p[i + k];
          return LoadF64(d, buffer);
        },
        [&](hn::Vec<D> v, auto* p) HWY_ATTR {
          HWY_ALIGN std::remove_cvref_t<decltype(*p)> buffer[HWY_MAX_BYTES / sizeof(double)];
          StoreF64(d, v, buffer);
          for (size_t k = 0; k < rest; ++k) p[i + k] = buffer[k];
        });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
