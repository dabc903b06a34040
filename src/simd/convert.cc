#include "base/convert.h"

#include "base/blocks.h"
#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/convert.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/f64_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename From, typename To>
void ConvertT(const From* in, To* out, size_t n) {
  const hn::ScalableTag<double> d;
  ForEachF64(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(load(in), out); });
}

void ConvertBlock(DType from, const void* in, DType to, void* out, int64_t n) {
  WithFloat(from, [&](auto source) HWY_ATTR {
    WithFloat(to, [&](auto result) HWY_ATTR {
      ConvertT(static_cast<const decltype(source)*>(in), static_cast<decltype(result)*>(out), static_cast<size_t>(n));
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(ConvertBlock);

void ConvertAll(const TensorView& src, const TensorView& dst) {
  ForEachBlock({src, dst}, 1, [&](void* const* p, int64_t n) {
    JUMAR_DISPATCH(ConvertBlock)(src.dtype, p[0], dst.dtype, p[1], n);
  });
}

}  // namespace jumar
#endif  // HWY_ONCE
