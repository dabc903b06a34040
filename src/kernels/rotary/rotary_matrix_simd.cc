// The form with an explicit rotation matrix:  out = x * cos + (x matrix) * sin.
#include <algorithm>
#include <type_traits>

#include "base/scratch.h"
#include "base/simd_dispatch.h"
#include "kernels/rotary/rotary_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rotary/rotary_matrix_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename F, typename T>
void WidenRow(const T* row, int64_t step, int64_t n, F* to) {
  const hn::ScalableTag<F> d;
  if (step == 1) {
    ForEachVector(d, static_cast<size_t>(n),
                  [&](const auto& load, const auto& store) HWY_ATTR { store(load(row), to); });
    return;
  }
  ScratchFrame frame;
  T* dense = frame.Alloc<T>(n);
  for (int64_t i = 0; i < n; ++i) dense[i] = row[i * step];
  WidenRow(dense, 1, n, to);
}

template <typename F>
void WidenTableRow(const RowOperand& table, int64_t k, int64_t n, F* to) {
  const int64_t at = table.kept_offset[k];
  WithStored<F>(table.dtype, [&](auto type) HWY_ATTR {
    WidenRow(static_cast<const decltype(type)*>(table.data) + at, table.step, n, to);
  });
}

template <typename T>
void MatrixBlock(const RotaryBlock& block, const RowOperand& x, const RowOperand& cos, const RowOperand& sin,
                 const void* matrix, const RowOperand& out) {
  using F = ComputeOf<T>;
  const hn::ScalableTag<F> d;
  const int64_t n = block.dim;
  ScratchFrame frame;
  F* c = frame.Alloc<F>(n);
  F* s = frame.Alloc<F>(n);
  F* row = frame.Alloc<F>(n);
  F* rotated = frame.Alloc<F>(n);
  T* dense = frame.Alloc<T>(n);
  for (int64_t k = 0; k < block.kept; ++k) {
    WidenTableRow(cos, k, n, c);
    WidenTableRow(sin, k, n, s);
    for (int64_t r = 0; r < block.reduced; ++r) {
      WidenRow(static_cast<const T*>(x.data) + x.kept_offset[k] + x.reduced_offset[r], x.step, n, row);
      std::fill(rotated, rotated + n, F(0));
      for (int64_t i = 0; i < n; ++i) {
        const F* line = static_cast<const F*>(matrix) + i * n;
        const auto factor = hn::Set(d, row[i]);
        ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
          store(hn::MulAdd(factor, load(static_cast<const F*>(line)), load(static_cast<const F*>(rotated))), rotated);
        });
      }
      T* to = static_cast<T*>(out.data) + out.kept_offset[k] + out.reduced_offset[r];
      T* dst = out.step == 1 ? to : dense;
      ForEachVector(d, static_cast<size_t>(n), [&](const auto& load, const auto& store) HWY_ATTR {
        store(hn::MulAdd(load(rotated), load(s), hn::Mul(load(row), load(c))), dst);
      });
      if (out.step == 1) continue;
      for (int64_t i = 0; i < n; ++i) to[i * out.step] = dense[i];
    }
  }
}

void Matrix(const RotaryBlock& block, const RowOperand& x, const RowOperand& cos, const RowOperand& sin,
            const void* matrix, const RowOperand& out) {
  WithFloat(x.dtype, [&](auto type) HWY_ATTR { MatrixBlock<decltype(type)>(block, x, cos, sin, matrix, out); });
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {

HWY_EXPORT(Matrix);

void RotaryMatrixRows(const RotaryBlock& block, const RowOperand& x, const RowOperand& cos, const RowOperand& sin,
                      const void* matrix, const RowOperand& out) {
  JUMAR_DISPATCH(Matrix)(block, x, cos, sin, matrix, out);
}

}  // namespace jumar
#endif  // HWY_ONCE
