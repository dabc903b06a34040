// Packing of operands into panels, with widening, in either orientation.
#include <algorithm>

#include "kernels/gemm/gemm_kernel.h"
#include "simd/float_io-inl.h"

#if defined(JUMAR_KERNELS_GEMM_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_KERNELS_GEMM_PACK_INL_H_
#undef JUMAR_KERNELS_GEMM_PACK_INL_H_
#else
#define JUMAR_KERNELS_GEMM_PACK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Any strides: one group of up to a vector of rows, k by k.
template <typename T, typename S>
void PackAnyStride(const S* src, int64_t row_stride, int64_t k_stride, int64_t rows, int64_t kc, int64_t width,
                   T* out) {
  const hn::ScalableTag<T> d;
  HWY_ALIGN S buffer[HWY_MAX_BYTES / sizeof(T)] = {};
  for (int64_t k = 0; k < kc; ++k) {
    for (int64_t r = 0; r < rows; ++r) buffer[r] = src[r * row_stride + k * k_stride];
    hn::StoreU(LoadWide(d, buffer), d, out + k * width);
  }
}

// Rows are adjacent (row_stride 1): a widening copy. k is the outer loop over all panels so that memory is read in
// long runs.
template <typename T, typename S>
void PackAlongRows(const S* src, int64_t k_stride, int64_t readable, int64_t rows, int64_t kc, int64_t width,
                   int64_t step, int64_t panel, T* out) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t panels = CeilDiv(rows, step);
  // Panels whose vectors all lie within the operand.
  const int64_t reach = (width + lanes - 1) / lanes * lanes;
  const int64_t whole = readable < reach ? 0 : std::min(panels, (readable - reach) / step + 1);
  for (int64_t k = 0; k < kc; ++k) {
    const S* from = src + k * k_stride;
    T* to = out + k * width;
    if (width == 2 * lanes) {
      for (int64_t p = 0; p < whole; ++p, from += step, to += panel) {
        hn::StoreU(LoadWide(d, from), d, to);
        hn::StoreU(LoadWide(d, from + lanes), d, to + lanes);
      }
    } else if (width <= lanes) {
      for (int64_t p = 0; p < whole; ++p, from += step, to += panel) hn::StoreU(LoadWide(d, from), d, to);
    } else {
      for (int64_t p = 0; p < whole; ++p, from += step, to += panel) {
        for (int64_t r = 0; r < width; r += lanes) hn::StoreU(LoadWide(d, from + r), d, to + r);
      }
    }
    for (int64_t p = whole; p < panels; ++p, from += step, to += panel) {
      const int64_t have = readable - p * step;
      for (int64_t r = 0; r < width; r += lanes) {
        const int64_t n = std::clamp<int64_t>(have - r, 0, lanes);
        hn::StoreU(LoadWideN(d, from + r, static_cast<size_t>(n)), d, to + r);
      }
    }
  }
}

#if !HWY_HAVE_SCALABLE

// 128-bit blocks b = 0, 1, ...: the 16 bytes at rows[b * step] + byte offset.
template <class D, typename S>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const S* const* rows, size_t step, int64_t k) {
  using T = hn::TFromD<D>;
  if constexpr (hn::MaxLanes(D()) * sizeof(T) == 16) {
    return hn::LoadU(d, reinterpret_cast<const T*>(rows[0] + k));
  } else {
    const hn::Half<D> half;
    constexpr size_t kHalfBlocks = hn::MaxLanes(D()) * sizeof(T) / 32;
    return hn::Combine(d, LoadBlocks(half, rows + kHalfBlocks * step, step, k), LoadBlocks(half, rows, step, k));
  }
}

// Rows lie along k: transposes blocks of one vector of rows by 16 bytes of k. 16-bit values move as pairs (k, k + 1)
// in 32-bit lanes and are widened after the transposition.
template <typename T, typename S>
void PackAlongK(const S* const* rows, int64_t kc, int64_t width, T* out) {
  const hn::ScalableTag<T> d;
  int64_t k = 0;
  if constexpr (sizeof(T) == 8) {
    for (; k + 2 <= kc; k += 2, out += 2 * width) {
      const auto r0 = LoadBlocks(d, rows, 2, k);
      const auto r1 = LoadBlocks(d, rows + 1, 2, k);
      hn::StoreU(hn::InterleaveLower(d, r0, r1), d, out);
      hn::StoreU(hn::InterleaveUpper(d, r0, r1), d, out + width);
    }
  } else {
    const hn::RebindToUnsigned<decltype(d)> du;
    const hn::Repartition<uint64_t, decltype(d)> du64;
    constexpr int64_t kStep = 16 / sizeof(S);
    for (; k + kStep <= kc; k += kStep, out += kStep * width) {
      const auto r0 = LoadBlocks(du, rows, 4, k);
      const auto r1 = LoadBlocks(du, rows + 1, 4, k);
      const auto r2 = LoadBlocks(du, rows + 2, 4, k);
      const auto r3 = LoadBlocks(du, rows + 3, 4, k);
      const auto lo01 = hn::BitCast(du64, hn::InterleaveLower(du, r0, r1));
      const auto hi01 = hn::BitCast(du64, hn::InterleaveUpper(du, r0, r1));
      const auto lo23 = hn::BitCast(du64, hn::InterleaveLower(du, r2, r3));
      const auto hi23 = hn::BitCast(du64, hn::InterleaveUpper(du, r2, r3));
      const auto t0 = hn::BitCast(du, hn::InterleaveLower(du64, lo01, lo23));
      const auto t1 = hn::BitCast(du, hn::InterleaveUpper(du64, lo01, lo23));
      const auto t2 = hn::BitCast(du, hn::InterleaveLower(du64, hi01, hi23));
      const auto t3 = hn::BitCast(du, hn::InterleaveUpper(du64, hi01, hi23));
      const auto put = [&](hn::Vec<decltype(du)> t, int64_t i) HWY_ATTR {
        if constexpr (std::is_same_v<S, float>) {
          hn::StoreU(hn::BitCast(d, t), d, out + i * width);
        } else if constexpr (std::is_same_v<S, BF16>) {
          hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(t)), d, out + 2 * i * width);
          hn::StoreU(hn::BitCast(d, hn::And(t, hn::Set(du, 0xFFFF0000u))), d, out + (2 * i + 1) * width);
        } else {
          const hn::Rebind<uint16_t, decltype(d)> du16;
          const hn::RebindToSigned<decltype(d)> di;
          const auto low = hn::And(t, hn::Set(du, 0xFFFFu));
          hn::StoreU(WidenF16(d, hn::DemoteTo(du16, hn::BitCast(di, low))), d, out + 2 * i * width);
          const auto high = hn::ShiftRight<16>(t);
          hn::StoreU(WidenF16(d, hn::DemoteTo(du16, hn::BitCast(di, high))), d, out + (2 * i + 1) * width);
        }
      };
      put(t0, 0);
      put(t1, 1);
      put(t2, 2);
      put(t3, 3);
    }
  }
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN S buffer[HWY_MAX_BYTES / sizeof(T)] = {};
  for (; k < kc; ++k, out += width) {
    for (int64_t r = 0; r < lanes; ++r) buffer[r] = rows[r][k];
    hn::StoreU(LoadWide(d, buffer), d, out);
  }
}

#endif  // !HWY_HAVE_SCALABLE

// Whole vectors are stored: the last one of a k may reach into the next k, which is written later, or into the slack
// after the panel. Groups of rows therefore go from the last to the first. A panel takes `step` new rows.
template <typename T, typename S>
void PackTyped(const GemmPack& p, int64_t width, int64_t step) {
  const GemmOperand& x = *p.operand;
  const S* src = static_cast<const S*>(x.data) + p.row * x.row_stride + p.k * x.k_stride;
  T* out = static_cast<T*>(p.out);
  const int64_t readable = x.rows - p.row;
  if (x.row_stride == 1 || (x.rows == 1 && x.k_stride != 1)) {
    return PackAlongRows(src, x.k_stride, readable, p.rows, p.kc, width, step, p.panel, out);
  }
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  for (int64_t first = 0; first < p.rows; first += step, out += p.panel) {
    for (int64_t g = (width - 1) / lanes; g >= 0; --g) {
      const int64_t row = first + g * lanes;
      T* to = out + g * lanes;
#if !HWY_HAVE_SCALABLE
      if (x.k_stride == 1) {
        if (row >= readable) {
          const auto zero = hn::Zero(hn::ScalableTag<T>());
          for (int64_t k = 0; k < p.kc; ++k) hn::StoreU(zero, hn::ScalableTag<T>(), to + k * width);
          continue;
        }
        // The rest of a vector repeats the last row.
        const S* rows[HWY_MAX_BYTES / sizeof(T)];
        for (int64_t r = 0; r < lanes; ++r) rows[r] = src + std::min(row + r, readable - 1) * x.row_stride;
        PackAlongK(rows, p.kc, width, to);
        continue;
      }
#endif
      const int64_t have = std::clamp<int64_t>(readable - row, 0, lanes);
      PackAnyStride(src + row * x.row_stride, x.row_stride, x.k_stride, have, p.kc, width, to);
    }
  }
}

// Panels of `width` rows in the compute type T.
template <typename T>
void PackPanels(const GemmPack& p, int64_t width) {
  WithStored<T>(p.operand->dtype, [&](auto type) HWY_ATTR {
    if (!p.even) return PackTyped<T, decltype(type)>(p, width, width);
    const EvenPanels even(p.rows, width);
    GemmPack part = p;
    part.rows = even.longer * (even.rows + 1);
    PackTyped<T, decltype(type)>(part, width, even.rows + 1);
    part.row += part.rows;
    part.rows = p.rows - part.rows;
    part.out = static_cast<T*>(p.out) + even.longer * p.panel;
    PackTyped<T, decltype(type)>(part, width, even.rows);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
