#include "simd/row_products.h"

#include <algorithm>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/row_products.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows per kernel call: two accumulators each, and a pointer each in a general register.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define JUMAR_PRODUCT_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9)
constexpr int kRowsOfCall = 10;
#elif HWY_ARCH_ARM_A64
#define JUMAR_PRODUCT_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
constexpr int kRowsOfCall = 12;
#else
#define JUMAR_PRODUCT_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
constexpr int kRowsOfCall = 6;
#endif
constexpr int64_t kDepth = 256;  // k of a block: a panel of b stays in the first cache
constexpr int64_t kRun = 128;    // rows whose columns are summed: their copy stays there too
constexpr int64_t kAhead = 24;   // rows that are fetched ahead
constexpr int64_t kLine = 64;

// c[i][two vectors] (+)= sum over k of a[i][k] * b[k * b_step ..]. kTwo: else one vector. `next`: the rows of the call
// that follows.
template <int kRows, bool kTwo, typename T>
HWY_NOINLINE void Dots(const T* const* a, const T* b, int64_t b_step, int64_t kc, T* const* c, bool accumulate,
                       const T* const* next) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
#define JUMAR_X(i)                                            \
  [[maybe_unused]] const T* a##i = a[std::min(i, kRows - 1)]; \
  [[maybe_unused]] auto lo##i = hn::Zero(d);                  \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
  constexpr int64_t kStep = kLine / sizeof(T);
  for (int64_t k = 0; k < kc; k += kStep) {
    for (int i = 0; i < kRows; ++i) hwy::Prefetch(next[i] + k);
    const int64_t end = std::min(k + kStep, kc);
    for (int64_t j = k; j < end; ++j, b += b_step) {
      const auto b0 = hn::LoadU(d, b);
      [[maybe_unused]] auto b1 = b0;
      if constexpr (kTwo) b1 = hn::LoadU(d, b + lanes);
#define JUMAR_X(i)                                        \
  if constexpr (i < kRows) {                              \
    const auto x = hn::Set(d, a##i[j]);                   \
    lo##i = hn::MulAdd(x, b0, lo##i);                     \
    if constexpr (kTwo) hi##i = hn::MulAdd(x, b1, hi##i); \
  }
      JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
    }
  }
#define JUMAR_X(i)                                                                \
  if constexpr (i < kRows) {                                                      \
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, c[i]), lo##i) : lo##i, d, c[i]); \
    T* to = c[i] + lanes;                                                         \
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), hi##i) : hi##i, d, to);     \
  }
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
}

// c[r * ldc][two vectors] (+)= sum over k < n of a[k * a_step + r] * b(k), where b(k) are two vectors at rows[k] + col,
// which go to `copy` as well (kFirst), or those of the copy.
template <int kRows, bool kFirst, typename T>
HWY_NOINLINE void Sums(const T* a, int64_t a_step, const T* const* rows, int64_t col, T* copy, int64_t n, T* c,
                       int64_t ldc, bool accumulate) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
#define JUMAR_X(i)                           \
  [[maybe_unused]] auto lo##i = hn::Zero(d); \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
  const auto step = [&](int64_t k) HWY_ATTR {
    const T* b = kFirst ? rows[k] + col : copy;
    const auto b0 = hn::LoadU(d, b);
    const auto b1 = hn::LoadU(d, b + lanes);
    if constexpr (kFirst) {
      hn::StoreU(b0, d, copy);
      hn::StoreU(b1, d, copy + lanes);
    }
#define JUMAR_X(i)                    \
  if constexpr (i < kRows) {          \
    const auto x = hn::Set(d, a[i]);  \
    lo##i = hn::MulAdd(x, b0, lo##i); \
    hi##i = hn::MulAdd(x, b1, hi##i); \
  }
    JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
    a += a_step;
    copy += 2 * lanes;
  };
  int64_t k = 0;
  if constexpr (kFirst) {
    for (; k + kAhead < n; ++k) {
      hwy::Prefetch(rows[k + kAhead] + col);
      step(k);
    }
  }
  for (; k < n; ++k) step(k);
#define JUMAR_X(i)                                                            \
  if constexpr (i < kRows) {                                                  \
    T* to = c + i * ldc;                                                      \
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), lo##i) : lo##i, d, to); \
    to += lanes;                                                              \
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), hi##i) : hi##i, d, to); \
  }
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
}

// c[i][0 .. cols) += sum over k < count of a[i * a_step + k] * b[panel][k], row by row: rows may be the same one.
// `next`: the rows of the call that follows.
template <int kRows, typename T>
HWY_NOINLINE void Updates(const T* a, int64_t a_step, int64_t count, const T* b, int64_t b_panel, int64_t cols,
                          T* const* c, T* const* next) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const size_t width = 2 * lanes;
#define JUMAR_X(i) [[maybe_unused]] const T* a##i = a + std::min(i, kRows - 1) * a_step;
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
  for (int64_t j = 0; j < cols; j += static_cast<int64_t>(width), b += b_panel) {
    for (int i = 0; i < kRows; ++i) hwy::Prefetch(next[i] + j);
#define JUMAR_X(i)                           \
  [[maybe_unused]] auto lo##i = hn::Zero(d); \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
    JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
    const T* bk = b;
    for (int64_t k = 0; k < count; ++k, bk += width) {
      const auto b0 = hn::LoadU(d, bk);
      const auto b1 = hn::LoadU(d, bk + lanes);
#define JUMAR_X(i)                      \
  if constexpr (i < kRows) {            \
    const auto x = hn::Set(d, a##i[k]); \
    lo##i = hn::MulAdd(x, b0, lo##i);   \
    hi##i = hn::MulAdd(x, b1, hi##i);   \
  }
      JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
    }
#define JUMAR_X(i)                                       \
  if constexpr (i < kRows) {                             \
    T* to = c[i] + j;                                    \
    hn::StoreU(hn::Add(hn::LoadU(d, to), lo##i), d, to); \
    to += lanes;                                         \
    hn::StoreU(hn::Add(hn::LoadU(d, to), hi##i), d, to); \
  }
    JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
  }
}

template <bool kTwo, typename T>
auto DotsOf(int64_t rows) {
  using Ptr = void (*)(const T* const*, const T*, int64_t, int64_t, T* const*, bool, const T* const*);
#define JUMAR_X(i) &Dots<i + 1, kTwo, T>,
  static constexpr Ptr kTable[] = {JUMAR_PRODUCT_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

template <bool kFirst, typename T>
auto SumsOf(int64_t rows) {
  using Ptr = void (*)(const T*, int64_t, const T* const*, int64_t, T*, int64_t, T*, int64_t, bool);
#define JUMAR_X(i) &Sums<i + 1, kFirst, T>,
  static constexpr Ptr kTable[] = {JUMAR_PRODUCT_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

template <typename T>
auto UpdatesOf(int64_t rows) {
  using Ptr = void (*)(const T*, int64_t, int64_t, const T*, int64_t, int64_t, T* const*, T* const*);
#define JUMAR_X(i) &Updates<i + 1, T>,
  static constexpr Ptr kTable[] = {JUMAR_PRODUCT_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

template <typename T>
int64_t Width() {
  return static_cast<int64_t>(2 * hn::Lanes(hn::ScalableTag<T>()));
}

template <typename T>
void DotRowsWith(const RowDots& x) {
  const int64_t width = Width<T>();
  const auto* rows = reinterpret_cast<const T* const*>(x.rows);
  T* panel = static_cast<T*>(x.panel);
  const int64_t ld = x.ld == 0 ? width : x.ld;
  const bool two = 2 * x.lanes > width;
  const T* a[kRowsOfCall];
  const T* next[kRowsOfCall];
  T* c[kRowsOfCall];
  for (int64_t k = 0; k < std::max<int64_t>(x.depth, 1); k += kDepth) {
    const int64_t kc = std::min(kDepth, x.depth - k);
    const T* b = static_cast<const T*>(x.b) + k * width;
    for (int64_t i = 0; i < x.n; i += kRowsOfCall) {
      const int64_t count = std::min<int64_t>(kRowsOfCall, x.n - i);
      for (int64_t r = 0; r < count; ++r) {
        a[r] = rows[i + r] + k;
        next[r] = rows[std::min(i + kRowsOfCall + r, x.n - 1)] + k;
        c[r] = panel + (i + r) * ld;
      }
      (two ? DotsOf<true, T>(count) : DotsOf<false, T>(count))(a, b, width, kc, c, x.accumulate || k > 0, next);
    }
  }
}

template <typename T>
void SumRows(const RowSums& x) {
  const int64_t width = Width<T>();
  const auto* rows = reinterpret_cast<const T* const*>(x.rows);
  // Lanes in groups of nearly one size: few accumulators do not fill the pipelines.
  const int64_t groups = (x.lanes + kRowsOfCall - 1) / kRowsOfCall;
  const int64_t tail = x.cols % width;
  const int64_t ld = x.panel_ld == 0 ? width : x.panel_ld;
  HWY_ALIGN T copy[kRun * 2 * HWY_MAX_BYTES / sizeof(T)];
  for (int64_t i = 0; i < x.n; i += kRun) {
    const int64_t run = std::min(kRun, x.n - i);
    const T* panel = static_cast<const T*>(x.panel) + i * ld;
    for (int64_t j = 0; j < x.cols; j += width) {
      const bool whole = j + width <= x.cols;
      for (int64_t r = 0; r < run && !whole; ++r) {
        T* to = copy + r * width;
        std::fill(std::copy_n(rows[i + r] + j, tail, to), to + width, T(0));
      }
      T* out = static_cast<T*>(x.out) + j;
      int64_t lane = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t count = (x.lanes - lane + groups - g - 1) / (groups - g);
        const auto kernel = g == 0 && whole ? SumsOf<true, T>(count) : SumsOf<false, T>(count);
        kernel(panel + lane, ld, rows + i, j, copy, run, out + lane * x.ld, x.ld, x.accumulate || i > 0);
        lane += count;
      }
    }
  }
}

template <typename T>
void UpdateRows(const RowUpdates& x) {
  const int64_t width = Width<T>();
  const auto* rows = reinterpret_cast<T* const*>(x.rows);
  const T* panel = static_cast<const T*>(x.panel);
  const int64_t ld = x.ld == 0 ? width : x.ld;
  T* next[kRowsOfCall];
  for (int64_t i = 0; i < x.n; i += kRowsOfCall) {
    const int64_t count = std::min<int64_t>(kRowsOfCall, x.n - i);
    for (int64_t r = 0; r < count; ++r) next[r] = rows[std::min(i + kRowsOfCall + r, x.n - 1)];
    UpdatesOf<T>(count)(panel + i * ld, ld, x.lanes, static_cast<const T*>(x.b), x.b_panel, x.cols, rows + i, next);
  }
}

template <typename T>
RowProducts MakeProducts() {
  return {&DotRowsWith<T>, &SumRows<T>, &UpdateRows<T>};
}

const RowProducts* ProductsOf(bool f64) {
  static const RowProducts k32 = MakeProducts<float>();
  static const RowProducts k64 = MakeProducts<double>();
  return f64 ? &k64 : &k32;
}

#undef JUMAR_PRODUCT_ROWS

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(ProductsOf);

const RowProducts& ChooseRowProducts(bool f64) { return *JUMAR_DISPATCH(ProductsOf)(f64); }

}  // namespace jumar
#endif  // HWY_ONCE
