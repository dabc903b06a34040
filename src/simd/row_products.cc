#include "simd/row_products.h"

#include <algorithm>
#include <type_traits>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/row_products.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "simd/float_io-inl.h"

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
constexpr int64_t kLine = 64;

// Asks for the lines of kRows rows at `at`. The addresses are read anew each time: there is no register to keep them
// in.
template <int kRows, typename T>
HWY_INLINE void PrefetchRows(T* const* rows, int64_t at) {
  asm volatile("" : "+r"(rows));
  for (int i = 0; i < kRows; ++i) hwy::Prefetch(rows[i] + at);
}

// Columns of c that Dots writes: one vector, two, or one and zeros in the second.
enum class DotLanes { kOne, kTwo, kOneOfTwo };

// c[i][kLanes] (+)= sum over k of a[i][k] * b[k * b_step ..]. `next`: the rows of the call that follows.
template <int kRows, DotLanes kLanes, typename T>
HWY_NOINLINE void Dots(const T* const* a, const T* b, int64_t b_step, int64_t kc, T* const* c, bool accumulate,
                       const T* const* next) {
  constexpr bool kTwo = kLanes == DotLanes::kTwo;
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
    PrefetchRows<kRows>(next, k);
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
    if constexpr (kLanes != DotLanes::kOne) {                                     \
      T* to = c[i] + lanes;                                                       \
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), hi##i) : hi##i, d, to);   \
    }                                                                             \
  }
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
}

// c[r * ldc][two vectors] (+)= sum over k < n of a[k * a_step + r] * b(k), where b(k) are two vectors at rows[k] + col
// of S, which go to `copy` as well, or, with void as S, those of the copy. `ahead`: the columns of the call that
// follows.
template <int kRows, typename S, typename T>
HWY_NOINLINE void Sums(const T* a, int64_t a_step, const void* const* rows, int64_t col, int64_t ahead, T* copy,
                       int64_t n, T* c, int64_t ldc, bool accumulate) {
  constexpr bool kFirst = !std::is_void_v<S>;
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
#define JUMAR_X(i)                           \
  [[maybe_unused]] auto lo##i = hn::Zero(d); \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
  for (int64_t k = 0; k < n; ++k) {
    const auto load = [&](int64_t at) HWY_ATTR {
      if constexpr (kFirst) return LoadWide(d, static_cast<const S*>(rows[k]) + col + at);
      if constexpr (!kFirst) return hn::LoadU(d, copy + at);
    };
    const auto b0 = load(0);
    const auto b1 = load(static_cast<int64_t>(lanes));
    if constexpr (kFirst) {
      const S* next = static_cast<const S*>(rows[k]) + ahead;
      hwy::Prefetch(next);
      if (2 * lanes * sizeof(S) > kLine) hwy::Prefetch(next + lanes);
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
  }
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

// c[i][0 .. cols) += sum over k < count of a[i * a_step + k] * b[panel][k * b_step], row by row: rows may be the same
// one. `next`: the rows of the call that follows.
template <int kRows, typename T>
HWY_NOINLINE void Updates(const T* a, int64_t a_step, int64_t count, const T* b, int64_t b_panel, int64_t b_step,
                          int64_t cols, T* const* c, T* const* next) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const size_t width = 2 * lanes;
#define JUMAR_X(i) [[maybe_unused]] const T* a##i = a + std::min(i, kRows - 1) * a_step;
  JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
  for (int64_t j = 0; j < cols; j += static_cast<int64_t>(width), b += b_panel) {
    PrefetchRows<kRows>(next, j);
    if (width * sizeof(T) > kLine) PrefetchRows<kRows>(next, j + static_cast<int64_t>(lanes));
#define JUMAR_X(i)                           \
  [[maybe_unused]] auto lo##i = hn::Zero(d); \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
    JUMAR_PRODUCT_ROWS(JUMAR_X)
#undef JUMAR_X
    const T* bk = b;
    for (int64_t k = 0; k < count; ++k, bk += b_step) {
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

template <DotLanes kLanes, typename T>
auto DotsOf(int64_t rows) {
  using Ptr = void (*)(const T* const*, const T*, int64_t, int64_t, T* const*, bool, const T* const*);
#define JUMAR_X(i) &Dots<i + 1, kLanes, T>,
  static constexpr Ptr kTable[] = {JUMAR_PRODUCT_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

template <typename S, typename T>
auto SumsOf(int64_t rows) {
  using Ptr = void (*)(const T*, int64_t, const void* const*, int64_t, int64_t, T*, int64_t, T*, int64_t, bool);
#define JUMAR_X(i) &Sums<i + 1, S, T>,
  static constexpr Ptr kTable[] = {JUMAR_PRODUCT_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

template <typename T>
auto UpdatesOf(int64_t rows) {
  using Ptr = void (*)(const T*, int64_t, int64_t, const T*, int64_t, int64_t, int64_t, T* const*, T* const*);
#define JUMAR_X(i) &Updates<i + 1, T>,
  static constexpr Ptr kTable[] = {JUMAR_PRODUCT_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

// body(first, count): n rows dealt out to calls of nearly one size. Few accumulators do not fill the pipelines.
template <typename Body>
HWY_INLINE void ForEachCall(int64_t n, const Body& body) {
  const int64_t calls = (n + kRowsOfCall - 1) / kRowsOfCall;
  int64_t first = 0;
  for (int64_t c = calls; c > 0; --c) {
    const int64_t count = (n - first + c - 1) / c;
    body(first, count);
    first += count;
  }
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
  const auto kernel_of = two          ? &DotsOf<DotLanes::kTwo, T>
                         : ld < width ? &DotsOf<DotLanes::kOne, T>
                                      : &DotsOf<DotLanes::kOneOfTwo, T>;
  const T* a[kRowsOfCall];
  const T* next[kRowsOfCall];
  T* c[kRowsOfCall];
  for (int64_t k = 0; k < std::max<int64_t>(x.depth, 1); k += kDepth) {
    const int64_t kc = std::min(kDepth, x.depth - k);
    const T* b = static_cast<const T*>(x.b) + k * width;
    ForEachCall(x.n, [&](int64_t i, int64_t count) HWY_ATTR {
      for (int64_t r = 0; r < count; ++r) {
        a[r] = rows[i + r] + k;
        next[r] = rows[std::min(i + count + r, x.n - 1)] + k;
        c[r] = panel + (i + r) * ld;
      }
      kernel_of(count)(a, b, width, kc, c, x.accumulate || k > 0, next);
    });
  }
}

template <typename S, typename T>
void SumRowsOf(const RowSums& x) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = 2 * lanes;
  const int64_t ld = x.panel_ld == 0 ? width : x.panel_ld;
  HWY_ALIGN T copy[kRun * 2 * HWY_MAX_BYTES / sizeof(T)];
  for (int64_t i = 0; i < x.n; i += kRun) {
    const int64_t run = std::min(kRun, x.n - i);
    const T* panel = static_cast<const T*>(x.panel) + i * ld;
    for (int64_t j = 0; j < x.cols; j += width) {
      const bool whole = j + width <= x.cols;
      for (int64_t r = 0; r < run && !whole; ++r) {
        const S* row = static_cast<const S*>(x.rows[i + r]) + j;
        for (int64_t v = 0; v < width; v += lanes) {
          const auto have = static_cast<size_t>(std::clamp<int64_t>(x.cols - j - v, 0, lanes));
          hn::StoreU(LoadWideN(d, row + v, have), d, copy + r * width + v);
        }
      }
      T* out = static_cast<T*>(x.out) + j;
      ForEachCall(x.lanes, [&](int64_t lane, int64_t count) HWY_ATTR {
        const auto kernel = lane == 0 && whole ? SumsOf<S, T>(count) : SumsOf<void, T>(count);
        const int64_t ahead = j + width < x.cols ? j + width : j;
        kernel(panel + lane, ld, x.rows + i, j, ahead, copy, run, out + lane * x.ld, x.ld, x.accumulate || i > 0);
      });
    }
  }
}

template <typename T>
void SumRows(const RowSums& x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (x.bf16) return SumRowsOf<BF16, T>(x);
  }
  SumRowsOf<T, T>(x);
}

template <typename T>
void UpdateRows(const RowUpdates& x) {
  const int64_t width = Width<T>();
  const auto* rows = reinterpret_cast<T* const*>(x.rows);
  const T* panel = static_cast<const T*>(x.panel);
  const int64_t ld = x.ld == 0 ? width : x.ld;
  T* next[kRowsOfCall];
  ForEachCall(x.n, [&](int64_t i, int64_t count) HWY_ATTR {
    for (int64_t r = 0; r < count; ++r) next[r] = rows[std::min(i + count + r, x.n - 1)];
    UpdatesOf<T>(count)(panel + i * ld, ld, x.lanes, static_cast<const T*>(x.b), x.b_panel, x.b_step, x.cols, rows + i,
                        next);
  });
}

#if !HWY_HAVE_SCALABLE
// Keys of a call to Deep; four heads each.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
constexpr int kDeepRows = 4;
#else
constexpr int kDeepRows = 2;
#endif

// to[0 .. 4) = the sums of the lanes of a, b, c and e.
template <class D, class V>
HWY_INLINE void StoreSums(D d, V a, V b, V c, V e, bool accumulate, float* to) {
  const hn::Repartition<double, D> wide;
  const auto pairs = [&](V x, V y) HWY_ATTR {
    return hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y)));
  };
  const auto ab = pairs(a, b);
  const auto ce = pairs(c, e);
  const auto blocks =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(wide, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(wide, ab, ce)));
  HWY_ALIGN float buffer[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(blocks, d, buffer);
  const hn::CappedTag<float, 4> four;
  auto sum = hn::Load(four, buffer);
  for (size_t i = 4; i < hn::Lanes(d); i += 4) sum = hn::Add(sum, hn::Load(four, buffer + i));
  hn::StoreU(accumulate ? hn::Add(hn::LoadU(four, to), sum) : sum, four, to);
}

// c[i][0 .. 4) (+)= sum over k of a[i][k] * q[head][k]: lanes are k.
template <int kRows>
HWY_NOINLINE void Deep(const float* const* a, const float* q, int64_t ldq, int64_t depth, float* const* c,
                       bool accumulate, const float* const* next) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
#define JUMAR_DEEP_ROWS(X) X(0) X(1) X(2) X(3)
#define JUMAR_X(i)                             \
  [[maybe_unused]] auto s##i##0 = hn::Zero(d); \
  [[maybe_unused]] auto s##i##1 = hn::Zero(d); \
  [[maybe_unused]] auto s##i##2 = hn::Zero(d); \
  [[maybe_unused]] auto s##i##3 = hn::Zero(d);
  JUMAR_DEEP_ROWS(JUMAR_X)
#undef JUMAR_X
  const auto step = [&](int64_t k, const auto& load) HWY_ATTR {
    const auto q0 = hn::LoadU(d, q + k);
    const auto q1 = hn::LoadU(d, q + ldq + k);
    const auto q2 = hn::LoadU(d, q + 2 * ldq + k);
    const auto q3 = hn::LoadU(d, q + 3 * ldq + k);
#define JUMAR_X(i)                        \
  if constexpr (i < kRows) {              \
    const auto x = load(a[i] + k);        \
    s##i##0 = hn::MulAdd(x, q0, s##i##0); \
    s##i##1 = hn::MulAdd(x, q1, s##i##1); \
    s##i##2 = hn::MulAdd(x, q2, s##i##2); \
    s##i##3 = hn::MulAdd(x, q3, s##i##3); \
  }
    JUMAR_DEEP_ROWS(JUMAR_X)
#undef JUMAR_X
  };
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
    PrefetchRows<kRows>(next, k);
    step(k, [&](const float* p) HWY_ATTR { return hn::LoadU(d, p); });
  }
  if (k < depth) {
    const auto rest = static_cast<size_t>(depth - k);
    step(k, [&](const float* p) HWY_ATTR { return LoadWideN(d, p, rest); });
  }
#define JUMAR_X(i) \
  if constexpr (i < kRows) StoreSums(d, s##i##0, s##i##1, s##i##2, s##i##3, accumulate, c[i]);
  JUMAR_DEEP_ROWS(JUMAR_X)
#undef JUMAR_X
#undef JUMAR_DEEP_ROWS
}

void DeepRows(const RowDeepDots& x) {
  const auto* rows = reinterpret_cast<const float* const*>(x.rows);
  float* panel = static_cast<float*>(x.panel);
  for (int64_t i = 0; i < x.n; i += kDeepRows) {
    const int64_t count = std::min<int64_t>(kDeepRows, x.n - i);
    for (int64_t h = 0; h < x.heads; h += 4) {
      const float* next[kDeepRows];
      float* c[kDeepRows];
      for (int64_t r = 0; r < kDeepRows; ++r) {
        next[r] = rows[std::min(i + kDeepRows + r, x.n - 1)];
        c[r] = panel + std::min(i + r, x.n - 1) * x.ld + h;
      }
      const auto* q = static_cast<const float*>(x.q) + h * x.ldq;
      if (count == kDeepRows) {
        Deep<kDeepRows>(rows + i, q, x.ldq, x.depth, c, x.accumulate, next);
      } else {
        for (int64_t r = 0; r < count; ++r) Deep<1>(rows + i + r, q, x.ldq, x.depth, c + r, x.accumulate, next);
      }
    }
  }
}
#endif  // !HWY_HAVE_SCALABLE

template <typename T>
RowProducts MakeProducts() {
  RowProducts products{&DotRowsWith<T>, &SumRows<T>, &UpdateRows<T>};
#if !HWY_HAVE_SCALABLE
  // Sums of lanes cost as much as they save where vectors are short.
  if constexpr (sizeof(T) == sizeof(float)) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
    products.deep_dots = &DeepRows;
    products.deep_heads = lanes < 8 ? 0 : lanes / 2;
  }
#endif
  return products;
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
