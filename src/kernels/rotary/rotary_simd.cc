#include <cstring>
#include <type_traits>

#include "base/scratch.h"
#include "base/simd_dispatch.h"
#include "kernels/rotary/rotary_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rotary/rotary_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The two modes differ only in where the partners of a pair (a, b) lie: `half` apart, or side by side. Tables and sums
// are kept with all first partners before all second ones, so the arithmetic is the same for both.

// How far ahead of its use a row is asked for, as if rows followed each other in memory (harmless where they do not).
constexpr size_t kAheadBytes = 2048;

struct Half {
  // Partners j.. and half + j.. of the row p.
  template <class D, typename T>
  static HWY_INLINE void Load(D d, const T* p, size_t half, size_t j, hn::Vec<D>& a, hn::Vec<D>& b) {
    a = LoadWide(d, p + j);
    b = LoadWide(d, p + half + j);
  }
  // kStream: past the caches, where the type allows it; p and half are aligned to cache lines.
  template <bool kStream, class D, typename T>
  static HWY_INLINE void Store(D d, hn::Vec<D> a, hn::Vec<D> b, T* p, size_t half, size_t j) {
    if constexpr (kStream && std::is_same_v<T, hn::TFromD<D>>) {
      hn::Stream(a, d, p + j);
      hn::Stream(b, d, p + half + j);
    } else {
      StoreNarrow(d, a, p + j);
      StoreNarrow(d, b, p + half + j);
    }
  }
  // The same for n < Lanes(d) partners; other lanes are 0.
  template <class D, typename T>
  static HWY_INLINE void LoadN(D d, const T* p, size_t half, size_t j, size_t n, hn::Vec<D>& a, hn::Vec<D>& b) {
    a = LoadWideN(d, p + j, n);
    b = LoadWideN(d, p + half + j, n);
  }
  template <class D, typename T>
  static HWY_INLINE void StoreN(D d, hn::Vec<D> a, hn::Vec<D> b, T* p, size_t half, size_t j, size_t n) {
    StoreNarrowN(d, a, p + j, n);
    StoreNarrowN(d, b, p + half + j, n);
  }
};

template <bool kClean>
struct InterleaveT {
  template <class D, typename T>
  static HWY_INLINE void Load(D d, const T* p, size_t /*half*/, size_t j, hn::Vec<D>& a, hn::Vec<D>& b) {
    if constexpr (std::is_same_v<T, BF16>) {
      LoadPair(d, p + 2 * j, a, b);  // even elements in a, odd ones in b
    } else if constexpr (std::is_same_v<T, F16>) {
      const auto first = LoadWide(d, p + 2 * j);
      const auto second = LoadWide(d, p + 2 * j + hn::Lanes(d));
      a = hn::ConcatEven(d, second, first);
      b = hn::ConcatOdd(d, second, first);
    } else {
      hn::LoadInterleaved2(d, p + 2 * j, a, b);
    }
  }
  template <bool kStream, class D, typename T>
  static HWY_INLINE void Store(D d, hn::Vec<D> a, hn::Vec<D> b, T* p, size_t /*half*/, size_t j) {
    if constexpr (std::is_same_v<T, BF16>) {
      StorePair<kStream, kClean>(d, a, b, p + 2 * j);
    } else if constexpr (std::is_same_v<T, F16>) {
      const hn::RebindToUnsigned<D> du32;
      const hn::Repartition<uint16_t, D> du16;
      const auto even = hn::PromoteTo(du32, NarrowF16(d, a));
      const auto odd = hn::ShiftLeft<16>(hn::PromoteTo(du32, NarrowF16(d, b)));
      hn::StoreU(hn::BitCast(du16, hn::Or(even, odd)), du16, reinterpret_cast<uint16_t*>(p + 2 * j));
    } else {
      hn::StoreInterleaved2(a, b, d, p + 2 * j);
    }
  }
  template <class D, typename T>
  static HWY_INLINE void LoadN(D d, const T* p, size_t half, size_t j, size_t n, hn::Vec<D>& a, hn::Vec<D>& b) {
    HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
    std::memcpy(buffer, p + 2 * j, 2 * n * sizeof(T));
    Load(d, buffer, half, 0, a, b);
  }
  template <class D, typename T>
  static HWY_INLINE void StoreN(D d, hn::Vec<D> a, hn::Vec<D> b, T* p, size_t half, size_t j, size_t n) {
    HWY_ALIGN T buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
    Store<false>(d, a, b, buffer, half, 0);
    std::memcpy(p + 2 * j, buffer, 2 * n * sizeof(T));
  }
};

// For sums, whose NaN may be anything, and for rotated rows, whose tables are clean (CleanNaN).
using Interleave = InterleaveT<false>;
using InterleaveClean = InterleaveT<true>;

// Four arrays (first and second partners of cos, then of sin) of `stride` elements each.
template <typename F>
struct TableRow {
  F* data;
  size_t stride;
  F* cos1() const { return data; }
  F* cos2() const { return data + stride; }
  F* sin1() const { return data + 2 * stride; }
  F* sin2() const { return data + 3 * stride; }
};

template <typename F>
size_t TableStride(int64_t width) {
  const size_t pair = 2 * hn::Lanes(hn::ScalableTag<F>());
  return (static_cast<size_t>(width) / 2 + pair - 1) / pair * pair;
}

// A NaN with the lower 16 bits clear, so that results may be rounded to bf16 without a test for NaN (RoundToBF16Bits).
template <class D, class V>
HWY_INLINE V CleanNaN(D d, V v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::NaN(d), v);
}

template <typename T>
HWY_INLINE const T* GatherRow(const T* row, int64_t step, int64_t n, T* buffer) {
  if (step == 1) return row;
  for (int64_t i = 0; i < n; ++i) buffer[i] = row[i * step];
  return buffer;
}

// Widens one row of a table into its two arrays, negated when asked.
template <class Mode, typename F, typename T>
void PrepareRow(const T* row, size_t half, bool negate, F* first, F* second) {
  const hn::ScalableTag<F> d;
  const size_t lanes = hn::Lanes(d);
  const auto sign = hn::Set(d, negate ? F(-1) : F(1));
  for (size_t j = 0; j < half; j += lanes) {
    auto a = hn::Zero(d), b = hn::Zero(d);
    if (j + lanes <= half) {
      Mode::Load(d, row, half, j, a, b);
    } else {
      Mode::LoadN(d, row, half, j, half - j, a, b);
    }
    // The arrays are padded to whole vectors.
    hn::StoreU(CleanNaN(d, hn::Mul(a, sign)), d, first + j);
    hn::StoreU(CleanNaN(d, hn::Mul(b, sign)), d, second + j);
  }
}

template <class Mode, typename F, typename T>
void PrepareTable(const RotaryBlock& block, const RowOperand& table, bool negate, F* first, F* second, int64_t stride) {
  ScratchFrame frame;
  T* buffer = table.step == 1 ? nullptr : frame.Alloc<T>(block.width);
  for (int64_t k = 0; k < block.kept; ++k) {
    const T* row = GatherRow(static_cast<const T*>(table.data) + table.kept_offset[k], table.step, block.width, buffer);
    PrepareRow<Mode, F>(row, static_cast<size_t>(block.width / 2), negate, first + k * stride, second + k * stride);
  }
}

template <class Mode, typename F>
void PrepareAnyTable(const RotaryBlock& block, const RowOperand& table, bool negate, F* first, F* second,
                     int64_t stride) {
  WithStored<F>(table.dtype, [&](auto type) HWY_ATTR {
    PrepareTable<Mode, F, decltype(type)>(block, table, negate, first, second, stride);
  });
}

// y1 = a cos1 - b sin1,  y2 = b cos2 + a sin2.
template <class D, class V, typename F>
HWY_INLINE void RotatePair(D d, V a, V b, const TableRow<F>& table, size_t j, V& y1, V& y2) {
  y1 = hn::NegMulAdd(b, hn::LoadU(d, table.sin1() + j), hn::Mul(a, hn::LoadU(d, table.cos1() + j)));
  y2 = hn::MulAdd(a, hn::LoadU(d, table.sin2() + j), hn::Mul(b, hn::LoadU(d, table.cos2() + j)));
}

template <class Mode, bool kStream, typename T, typename F>
HWY_INLINE void RotateRow(const T* x, const TableRow<F>& table, size_t half, T* out) {
  const hn::ScalableTag<F> d;
  const size_t lanes = hn::Lanes(d);
  auto a = hn::Zero(d), b = hn::Zero(d), y1 = hn::Zero(d), y2 = hn::Zero(d);
  size_t j = 0;
  for (; j + lanes <= half; j += lanes) {
    hwy::Prefetch(x + 2 * j + kAheadBytes / sizeof(T));
    Mode::Load(d, x, half, j, a, b);
    RotatePair(d, a, b, table, j, y1, y2);
    Mode::template Store<kStream>(d, y1, y2, out, half, j);
  }
  if (j == half) return;
  if (half >= lanes) {
    // Once more the last whole vector: some elements are computed twice, alike.
    j = half - lanes;
    Mode::Load(d, x, half, j, a, b);
    RotatePair(d, a, b, table, j, y1, y2);
    Mode::template Store<false>(d, y1, y2, out, half, j);
  } else {
    Mode::LoadN(d, x, half, j, half - j, a, b);
    RotatePair(d, a, b, table, j, y1, y2);
    Mode::StoreN(d, y1, y2, out, half, j, half - j);
  }
}

// bf16 in half mode, two vectors of each partner at a time: widening and narrowing even and odd elements apart costs
// half as much. Block b covers 2 * Lanes partners from j = min(b * 2 * Lanes, half - 2 * Lanes); its part of each table
// array is in the order of LoadPair. Needs half >= 2 * Lanes.
void PackTable(float* array, size_t half) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  const size_t blocks = (half + 2 * lanes - 1) / (2 * lanes);
  auto even = hn::Zero(d), odd = hn::Zero(d);
  // The last block first: it may start within the one before, whose own part it leaves alone.
  for (size_t b = blocks; b-- > 0;) {
    const size_t slot = b * 2 * lanes;
    hn::LoadInterleaved2(d, array + (slot + 2 * lanes <= half ? slot : half - 2 * lanes), even, odd);
    hn::StoreU(even, d, array + slot);
    hn::StoreU(odd, d, array + slot + lanes);
  }
}

template <bool kStream>
HWY_INLINE void RotatePackedRow(const BF16* x, const TableRow<float>& table, size_t half, BF16* out) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto a0 = hn::Zero(d), a1 = hn::Zero(d), b0 = hn::Zero(d), b1 = hn::Zero(d);
  auto y0 = hn::Zero(d), y1 = hn::Zero(d), z0 = hn::Zero(d), z1 = hn::Zero(d);
  for (size_t slot = 0; slot < half; slot += 2 * lanes) {
    const size_t j = slot + 2 * lanes <= half ? slot : half - 2 * lanes;
    hwy::Prefetch(x + j + kAheadBytes / sizeof(BF16));
    hwy::Prefetch(x + half + j + kAheadBytes / sizeof(BF16));
    LoadPair(d, x + j, a0, a1);
    LoadPair(d, x + half + j, b0, b1);
    RotatePair(d, a0, b0, table, slot, y0, z0);
    RotatePair(d, a1, b1, table, slot + lanes, y1, z1);
    StorePair<kStream, true>(d, y0, y1, out + j);
    StorePair<kStream, true>(d, z0, z1, out + half + j);
  }
}

template <class Mode, bool kStream, typename T, typename F>
HWY_INLINE void RotateOne(const T* x, const TableRow<F>& table, bool packed, size_t half, T* out) {
  if constexpr (std::is_same_v<T, BF16> && std::is_same_v<Mode, Half>) {
    if (packed) return RotatePackedRow<kStream>(x, table, half, out);
  }
  RotateRow<Mode, kStream>(x, table, half, out);
}

template <class Mode, typename T>
void RotateBlock(const RotaryBlock& block, bool transpose, const RowOperand& x, const RowOperand& cos,
                 const RowOperand& sin, const RowOperand& out) {
  using F = ComputeOf<T>;
  ScratchFrame frame;
  const size_t stride = TableStride<F>(block.width);
  const auto row_stride = static_cast<int64_t>(4 * stride);
  F* tables = frame.Alloc<F>(block.kept * row_stride);
  const TableRow<F> first{tables, stride};
  PrepareAnyTable<Mode>(block, cos, false, first.cos1(), first.cos2(), row_stride);
  // R^T(x sin): y1 = a cos1 + b sin2,  y2 = b cos2 - a sin1. That is the forward formula with the arrays of sin
  // exchanged and negated.
  PrepareAnyTable<Mode>(block, sin, transpose, transpose ? first.sin2() : first.sin1(),
                        transpose ? first.sin1() : first.sin2(), row_stride);
  const auto half = static_cast<size_t>(block.width / 2);
  bool packed = false;
  if constexpr (std::is_same_v<T, BF16> && std::is_same_v<Mode, Half>) {
    packed = half >= 2 * hn::Lanes(hn::ScalableTag<float>());
    for (int64_t k = 0; packed && k < 4 * block.kept; ++k) PackTable(tables + k * static_cast<int64_t>(stride), half);
  }

  T* x_buffer = x.step == 1 ? nullptr : frame.Alloc<T>(block.dim);
  T* out_buffer = out.step == 1 ? nullptr : frame.Alloc<T>(block.dim);
  const auto rest = static_cast<size_t>(block.dim - block.width) * sizeof(T);
  const auto one = [&](int64_t k, int64_t r) HWY_ATTR {
    const T* from =
        GatherRow(static_cast<const T*>(x.data) + x.kept_offset[k] + x.reduced_offset[r], x.step, block.dim, x_buffer);
    T* row = static_cast<T*>(out.data) + out.kept_offset[k] + out.reduced_offset[r];
    T* to = out.step == 1 ? row : out_buffer;
    const TableRow<F> table{tables + k * row_stride, stride};
    // Halves of rows must be whole cache lines too.
    const bool stream = block.stream && (reinterpret_cast<uintptr_t>(to) | half * sizeof(T)) % 64 == 0;
    if (stream) {
      RotateOne<Mode, true>(from, table, packed, half, to);
    } else {
      RotateOne<Mode, false>(from, table, packed, half, to);
    }
    if (rest > 0) std::memcpy(to + block.width, from + block.width, rest);
    if (out.step != 1) {
      for (int64_t i = 0; i < block.dim; ++i) row[i * out.step] = to[i];
    }
  };
  if (block.kept_inside) {
    for (int64_t r = 0; r < block.reduced; ++r) {
      for (int64_t k = 0; k < block.kept; ++k) one(k, r);
    }
  } else {
    for (int64_t k = 0; k < block.kept; ++k) {
      for (int64_t r = 0; r < block.reduced; ++r) one(k, r);
    }
  }
  if (block.stream) hwy::FlushStream();
}

// cos1 += g1 x1, cos2 += g2 x2, sin1 -= g1 x2, sin2 += g2 x1.
template <class Mode, typename T, typename F>
HWY_INLINE void SumRow(const T* grad, const T* x, size_t half, const TableRow<F>& sums) {
  const hn::ScalableTag<F> d;
  const size_t lanes = hn::Lanes(d);
  auto g1 = hn::Zero(d), g2 = hn::Zero(d), x1 = hn::Zero(d), x2 = hn::Zero(d);
  for (size_t j = 0; j < half; j += lanes) {
    if (j + lanes <= half) {
      Mode::Load(d, grad, half, j, g1, g2);
      Mode::Load(d, x, half, j, x1, x2);
    } else {
      Mode::LoadN(d, grad, half, j, half - j, g1, g2);
      Mode::LoadN(d, x, half, j, half - j, x1, x2);
    }
    hn::StoreU(hn::MulAdd(g1, x1, hn::LoadU(d, sums.cos1() + j)), d, sums.cos1() + j);
    hn::StoreU(hn::MulAdd(g2, x2, hn::LoadU(d, sums.cos2() + j)), d, sums.cos2() + j);
    hn::StoreU(hn::NegMulAdd(g1, x2, hn::LoadU(d, sums.sin1() + j)), d, sums.sin1() + j);
    hn::StoreU(hn::MulAdd(g2, x1, hn::LoadU(d, sums.sin2() + j)), d, sums.sin2() + j);
  }
}

template <class Mode, typename T>
void SumBlock(const RotaryBlock& block, const RowOperand& grad, const RowOperand& x, void* sums) {
  using F = ComputeOf<T>;
  ScratchFrame frame;
  const size_t stride = TableStride<F>(block.width);
  const auto row_stride = static_cast<int64_t>(4 * stride);
  auto* all = static_cast<F*>(sums);
  std::memset(all, 0, static_cast<size_t>(block.kept * row_stride) * sizeof(F));
  T* grad_buffer = grad.step == 1 ? nullptr : frame.Alloc<T>(block.width);
  T* x_buffer = x.step == 1 ? nullptr : frame.Alloc<T>(block.width);
  const auto half = static_cast<size_t>(block.width / 2);
  const auto one = [&](int64_t k, int64_t r) HWY_ATTR {
    const T* g = GatherRow(static_cast<const T*>(grad.data) + grad.kept_offset[k] + grad.reduced_offset[r], grad.step,
                           block.width, grad_buffer);
    const T* v = GatherRow(static_cast<const T*>(x.data) + x.kept_offset[k] + x.reduced_offset[r], x.step, block.width,
                           x_buffer);
    SumRow<Mode>(g, v, half, TableRow<F>{all + k * row_stride, stride});
  };
  if (block.kept_inside) {
    for (int64_t r = 0; r < block.reduced; ++r) {
      for (int64_t k = 0; k < block.kept; ++k) one(k, r);
    }
  } else {
    for (int64_t k = 0; k < block.kept; ++k) {
      for (int64_t r = 0; r < block.reduced; ++r) one(k, r);
    }
  }
}

// Sums of `parts` pairs of arrays, narrowed into a row.
template <class Mode, typename F, typename T>
void StoreSums(const F* first, const F* second, size_t half, int64_t parts, int64_t part_stride, const TensorView& to) {
  const hn::ScalableTag<F> d;
  const size_t lanes = hn::Lanes(d);
  ScratchFrame frame;
  const int64_t step = to.size[0] == 1 ? 1 : to.stride[0];
  T* row = to.ptr<T>();
  T* dense = step == 1 ? row : frame.Alloc<T>(to.size[0]);
  for (size_t j = 0; j < half; j += lanes) {
    auto a = hn::LoadU(d, first + j);
    auto b = hn::LoadU(d, second + j);
    for (int64_t p = 1; p < parts; ++p) {
      a = hn::Add(a, hn::LoadU(d, first + p * part_stride + j));
      b = hn::Add(b, hn::LoadU(d, second + p * part_stride + j));
    }
    if (j + lanes <= half) {
      Mode::template Store<false>(d, a, b, dense, half, j);
    } else {
      Mode::StoreN(d, a, b, dense, half, j, half - j);
    }
  }
  if (step == 1) return;
  for (int64_t i = 0; i < to.size[0]; ++i) row[i * step] = dense[i];
}

template <class Mode, typename F>
void StoreAnySums(const F* first, const F* second, size_t half, int64_t parts, int64_t part_stride,
                  const TensorView& to) {
  WithStored<F>(to.dtype, [&](auto type) HWY_ATTR {
    StoreSums<Mode, F, decltype(type)>(first, second, half, parts, part_stride, to);
  });
}

template <class Mode, typename F>
void StoreBoth(int64_t width, const void* sums, int64_t parts, int64_t part_stride, const TensorView* dcos,
               const TensorView* dsin) {
  const TableRow<const F> row{static_cast<const F*>(sums), TableStride<F>(width)};
  const auto half = static_cast<size_t>(width / 2);
  if (dcos != nullptr) StoreAnySums<Mode>(row.cos1(), row.cos2(), half, parts, part_stride, *dcos);
  if (dsin != nullptr) StoreAnySums<Mode>(row.sin1(), row.sin2(), half, parts, part_stride, *dsin);
}

// Calls f(mode tag, type tag) for a mode and a stored dtype.
template <class F>
void ForModeAndType(RotaryMode mode, DType dtype, const F& f) {
  const auto with_mode = [&](auto tag) HWY_ATTR { WithFloat(dtype, [&](auto type) HWY_ATTR { f(tag, type); }); };
  return mode == RotaryMode::kHalf ? with_mode(Half()) : with_mode(Interleave());
}

void Rotate(const RotaryBlock& block, bool transpose, const RowOperand& x, const RowOperand& cos, const RowOperand& sin,
            const RowOperand& out) {
  ForModeAndType(block.mode, x.dtype, [&](auto mode, auto type) {
    using Mode = std::conditional_t<std::is_same_v<decltype(mode), Half>, Half, InterleaveClean>;
    RotateBlock<Mode, decltype(type)>(block, transpose, x, cos, sin, out);
  });
}

void Sum(const RotaryBlock& block, const RowOperand& grad, const RowOperand& x, void* sums) {
  ForModeAndType(block.mode, x.dtype,
                 [&](auto mode, auto type) { SumBlock<decltype(mode), decltype(type)>(block, grad, x, sums); });
}

int64_t SumsStride(DType dtype, int64_t width) {
  return static_cast<int64_t>(4 * (dtype == DType::kF64 ? TableStride<double>(width) : TableStride<float>(width)));
}

void Store(DType compute, RotaryMode mode, int64_t width, const void* sums, int64_t parts, int64_t part_stride,
           const TensorView* dcos, const TensorView* dsin) {
  ForModeAndType(mode, compute, [&](auto tag, auto type) {
    StoreBoth<decltype(tag), ComputeOf<decltype(type)>>(width, sums, parts, part_stride, dcos, dsin);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Rotate);
HWY_EXPORT(Sum);
HWY_EXPORT(SumsStride);
HWY_EXPORT(Store);

void RotaryRows(const RotaryBlock& block, bool transpose, const RowOperand& x, const RowOperand& cos,
                const RowOperand& sin, const RowOperand& out) {
  JUMAR_DISPATCH(Rotate)(block, transpose, x, cos, sin, out);
}

int64_t RotarySumsStride(DType dtype, int64_t width) { return JUMAR_DISPATCH(SumsStride)(dtype, width); }

void RotarySumRows(const RotaryBlock& block, const RowOperand& grad, const RowOperand& x, void* sums) {
  JUMAR_DISPATCH(Sum)(block, grad, x, sums);
}

void RotaryStoreSums(DType compute, RotaryMode mode, int64_t width, const void* sums, int64_t parts,
                     int64_t part_stride, const TensorView* dcos_row, const TensorView* dsin_row) {
  JUMAR_DISPATCH(Store)(compute, mode, width, sums, parts, part_stride, dcos_row, dsin_row);
}

}  // namespace jumar
#endif  // HWY_ONCE
