#include "base/widen.h"

#include "base/rows.h"
#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/widen.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void Widen(const T* in, size_t n, float offset, float* out) {
  const hn::ScalableTag<float> d;
  const auto add = hn::Set(d, offset);
  ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Add(load(in), add), out); });
}

void WidenRow(const RowMap& row, float offset, float* out) {
  const auto n = static_cast<size_t>(row.cols);
  WithStored<float>(row.dtype, [&](auto type) HWY_ATTR { Widen(row.Row<const decltype(type)>(0), n, offset, out); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(WidenRow);

void* WidenAll(const TensorView& view, DType wide, double offset, ScratchFrame& frame) {
  const RowMap row = InputRows(view, view.rank, frame);
  if (wide == DType::kF64) {
    double* out = frame.Alloc<double>(row.cols);
    if (row.dtype == DType::kF64) {
      for (int64_t i = 0; i < row.cols; ++i) out[i] = row.Row<const double>(0)[i] + offset;
      return out;
    }
    ScratchFrame inner;
    float* narrow = inner.Alloc<float>(row.cols);
    JUMAR_DISPATCH(WidenRow)(row, 0.0f, narrow);
    for (int64_t i = 0; i < row.cols; ++i) out[i] = static_cast<double>(narrow[i]) + offset;
    return out;
  }
  float* out = frame.Alloc<float>(row.cols);
  JUMAR_DISPATCH(WidenRow)(row, static_cast<float>(offset), out);
  return out;
}

}  // namespace jumar
#endif  // HWY_ONCE
