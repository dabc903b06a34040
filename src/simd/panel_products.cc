#include "simd/panel_products.h"

#include <algorithm>

#include "base/simd_dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/panel_products.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows of a tile: two accumulators each, two vectors of B and one broadcast fit the register file.
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
#define JUMAR_PANEL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
constexpr int kTileRows = 14;
#elif HWY_ARCH_ARM_A64
#define JUMAR_PANEL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
constexpr int kTileRows = 12;
#else
#define JUMAR_PANEL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
constexpr int kTileRows = 6;
#endif
// That are fetched while rows are packed: each may lie on a page of its own. To the second cache: rows of one head lie
// in few sets of the first.
constexpr int64_t kRowsAhead = 32;

constexpr int64_t kLine = 64;

template <typename T>
HWY_INLINE int64_t PanelWidth() {
  return static_cast<int64_t>(2 * hn::Lanes(hn::ScalableTag<T>()));
}

// One tile of one panel of columns. kByRows: as by_rows, else by_columns. kTwo: else one vector of columns; zeros go to
// the other.
template <int kRows, bool kByRows, bool kTwo, typename T>
HWY_NOINLINE void Product(const T* HWY_RESTRICT a, int64_t a_panel, int64_t begin, int64_t end, const T* HWY_RESTRICT b,
                          T* HWY_RESTRICT c, int64_t ldc, bool accumulate) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = 2 * lanes;
#define JUMAR_X(i)                           \
  [[maybe_unused]] auto lo##i = hn::Zero(d); \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
  JUMAR_PANEL_ROWS(JUMAR_X)
#undef JUMAR_X
  b += begin * width;
  const T* p = a;
  const auto step = [&]() HWY_ATTR {
    const auto b0 = hn::LoadU(d, b);
    [[maybe_unused]] auto b1 = b0;
    if constexpr (kTwo) b1 = hn::LoadU(d, b + lanes);
#define JUMAR_X(i)                                          \
  if constexpr (i < kRows) {                                \
    const auto ai = hn::Set(d, p[kByRows ? i * width : i]); \
    lo##i = hn::MulAdd(ai, b0, lo##i);                      \
    if constexpr (kTwo) hi##i = hn::MulAdd(ai, b1, hi##i);  \
  }
    JUMAR_PANEL_ROWS(JUMAR_X)
#undef JUMAR_X
    p += kByRows ? 1 : width;
    b += width;
  };
  const auto run = [&](int64_t count) HWY_ATTR {
    // Not more: the compiler would run out of registers.
    for (; count >= 2; count -= 2) {
      step();
      step();
    }
    for (; count > 0; --count) step();
  };
  if constexpr (kByRows) {
    int64_t left = end - begin;
    int64_t count = std::min(left, width - begin % width);
    p += begin / width * a_panel + begin % width;
    for (; left > 0; left -= count, count = std::min(left, width), p += a_panel - width) run(count);
  } else {
    p += begin * width;
    run(end - begin);
  }
#define JUMAR_X(i)                                                            \
  if constexpr (i < kRows) {                                                  \
    T* to = c + i * ldc;                                                      \
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), lo##i) : lo##i, d, to); \
    to += lanes;                                                              \
    hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), hi##i) : hi##i, d, to); \
  }
  JUMAR_PANEL_ROWS(JUMAR_X)
#undef JUMAR_X
}

template <bool kByRows, bool kTwo, typename T>
auto ProductOf(int64_t rows) {
  using Ptr = void (*)(const T*, int64_t, int64_t, int64_t, const T*, T*, int64_t, bool);
#define JUMAR_X(i) &Product<i + 1, kByRows, kTwo, T>,
  static constexpr Ptr kTable[] = {JUMAR_PANEL_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

template <bool kByRows, typename T>
void Multiply(const PanelProduct& x, const PanelTile* tiles, int64_t count) {
  const int64_t width = PanelWidth<T>();
  const T* b = static_cast<const T*>(x.b);
  for (int64_t j = 0; j < x.n; j += width, b += x.b_panel) {
    const bool two = 2 * (x.n - j) > width;
    for (int64_t t = 0; t < count; ++t) {
      const PanelTile& tile = tiles[t];
      if (x.accumulate && tile.begin >= tile.end) continue;
      const T* a = static_cast<const T*>(x.a) + (kByRows ? tile.row * width : tile.row);
      T* c = static_cast<T*>(x.c) + tile.row * x.ldc + j;
      const auto product = two ? ProductOf<kByRows, true, T>(tile.rows) : ProductOf<kByRows, false, T>(tile.rows);
      product(a, x.a_panel, tile.begin, tile.end, b, c, x.ldc, x.accumulate);
    }
  }
}

template <typename T, typename S>
void PackWhole(const PanelRows& p) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = 2 * lanes;
  const S* from = static_cast<const S*>(p.x);
  T* out = static_cast<T*>(p.out) + p.col / width * p.panel;
  for (int64_t r = 0; r < p.rows; ++r, from += p.row_stride, out += width) {
    if (r + kRowsAhead < p.rows) {
      for (int64_t c = 0; c < p.cols; c += kLine / static_cast<int64_t>(sizeof(S)))
        __builtin_prefetch(from + kRowsAhead * p.row_stride + c, 0, 2);
    }
    T* to = out;
    int64_t c = 0;
    for (; c + width <= p.cols; c += width, to += p.panel) {
      hn::StoreU(LoadWide(d, from + c), d, to);
      hn::StoreU(LoadWide(d, from + c + lanes), d, to + lanes);
    }
    if (c == p.cols) continue;
    for (int64_t v = 0; v < width; v += lanes) {
      const int64_t have = std::clamp<int64_t>(p.cols - c - v, 0, lanes);
      hn::StoreU(have == lanes ? LoadWide(d, from + c + v) : LoadWideN(d, from + c + v, static_cast<size_t>(have)), d,
                 to + v);
    }
  }
}

// Any stride of columns, from any column on.
template <typename T, typename S>
void PackScattered(const PanelRows& p) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t width = 2 * lanes;
  const int64_t end = p.col + p.cols;
  const int64_t padded = (end + width - 1) / width * width;
  HWY_ALIGN S gathered[HWY_MAX_BYTES / sizeof(T)] = {};
  HWY_ALIGN T wide[HWY_MAX_BYTES / sizeof(T)];
  for (int64_t r = 0; r < p.rows; ++r) {
    const S* from = static_cast<const S*>(p.x) + r * p.row_stride;
    T* out = static_cast<T*>(p.out) + r * width;
    const auto put = [&](int64_t col, T x) { out[col / width * p.panel + col % width] = x; };
    for (int64_t c = 0; c < p.cols; c += lanes) {
      const int64_t n = std::min(lanes, p.cols - c);
      for (int64_t i = 0; i < n; ++i) gathered[i] = from[(c + i) * p.col_stride];
      hn::StoreU(LoadWide(d, gathered), d, wide);
      for (int64_t i = 0; i < n; ++i) put(p.col + c + i, wide[i]);
    }
    for (int64_t col = end; col < padded; ++col) put(col, T(0));
  }
}

template <typename T>
void Pack(const PanelRows& p) {
  WithStored<T>(p.dtype, [&](auto type) HWY_ATTR {
    using S = decltype(type);
    (p.col_stride == 1 || p.cols == 1) && p.col % PanelWidth<T>() == 0 ? PackWhole<T, S>(p) : PackScattered<T, S>(p);
  });
}

template <typename T>
PanelProducts MakePanelProducts() {
  return {PanelWidth<T>(), kTileRows, &Multiply<true, T>, &Multiply<false, T>, &Pack<T>};
}

const PanelProducts* PanelProductsOf(bool f64) {
  static const PanelProducts k32 = MakePanelProducts<float>();
  static const PanelProducts k64 = MakePanelProducts<double>();
  return f64 ? &k64 : &k32;
}

#undef JUMAR_PANEL_ROWS

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(PanelProductsOf);

const PanelProducts& ChoosePanelProducts(bool f64) { return *JUMAR_DISPATCH(PanelProductsOf)(f64); }

}  // namespace jumar
#endif  // HWY_ONCE
