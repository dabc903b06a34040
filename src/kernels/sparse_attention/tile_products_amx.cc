#include "kernels/sparse_attention/tile_products.h"

#if defined(__AMX_BF16__)
#include <algorithm>
#include <cstring>

#include "kernels/gemm/amx_tiles.h"
#include "kernels/gemm/bf16_terms_x86.h"
#include "kernels/gemm/pack_bf16_x86.h"

namespace jumar {
namespace {

constexpr int64_t kTile = 512;     // 16-bit elements of a tile
constexpr int64_t kRowBytes = 64;  // of a tile in memory of its own
constexpr int64_t kStep = 32;      // k of one tile
constexpr int64_t kDotRows = 64;   // rows whose copy stays in the first cache
constexpr int64_t kDotSteps = 4;   // and steps of their columns
constexpr int64_t kSumRows = 64;
constexpr int64_t kSumCols = kTileSumColumns;  // four tiles of sums

const uint16_t* Row(const PickedRows& x, int64_t i) {
  return static_cast<const uint16_t*>(x.base) + x.rows[i] * x.stride;
}

void PackHeads(const GemmOperand& x, void* out) {
  for (int64_t head = 0; head < x.rows; head += kTileHeads) {
    const GemmPack pack{&x, head, std::min(kTileHeads, x.rows - head), 0, x.k, 0, out};
    PackPairs(pack, kTileHeads, kStep);
    out = static_cast<uint16_t*>(out) + TileProducts::HeadElements(x.k);
  }
}

// The lanes of 16 bits that are an infinity or NaN.
__mmask32 NotFinite(__m512i x) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
}

bool Finite(const void* x, int64_t n) {
  const auto* p = static_cast<const uint16_t*>(x);
  __mmask32 bad = 0;
  for (int64_t i = 0; i < n; i += 32) bad |= NotFinite(_mm512_maskz_loadu_epi16(FirstLanes(n - i), p + i));
  return bad == 0;
}

// Each column of a head twice: the two terms of a factor meet the same.
bool PackAcross(const GemmOperand& x, int64_t head, int64_t lanes, int64_t block, void* out) {
  const uint16_t* src = static_cast<const uint16_t*>(x.data) + head * x.row_stride;
  __mmask32 bad = 0;
  for (int64_t h = 0; h < RoundUp(lanes, kTileHeads); ++h, src += x.row_stride) {
    uint32_t* to = static_cast<uint32_t*>(out) + h * 16;
    for (int64_t c = 0; c < RoundUp(x.k, 2 * kTileHeads); c += 16, to += block / 2) {
      const auto mask = static_cast<__mmask16>(h < lanes ? FirstLanes(std::min<int64_t>(x.k - c, 16)) : 0);
      __m256i row = _mm256_setzero_si256();
      if (x.k_stride == 1) {
        row = _mm256_maskz_loadu_epi16(mask, src + c);
      } else if (h < lanes) {
        alignas(32) uint16_t buffer[16] = {};
        for (int64_t i = 0; i < std::min<int64_t>(16, x.k - c); ++i) buffer[i] = src[(c + i) * x.k_stride];
        row = _mm256_load_si256(reinterpret_cast<const __m256i*>(buffer));
      }
      const __m512i pairs = PairsOf(row, row);
      bad |= NotFinite(pairs);
      _mm512_storeu_si512(to, pairs);
    }
  }
  return bad == 0;
}

// c[i] (+)= tile i of a * b over `steps`, for kRows tiles of 16 rows, kDotRows rows a step.
template <int kRows>
void DotTiles(int64_t steps, const uint16_t* a, const uint16_t* b, float* const* c, int64_t stride, bool accumulate) {
  if (accumulate) {
    _tile_loadd(0, c[0], stride);
    if constexpr (kRows > 1) _tile_loadd(1, c[1], stride);
    if constexpr (kRows > 2) _tile_loadd(2, c[2], stride);
    if constexpr (kRows > 3) _tile_loadd(3, c[3], stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s, a += kDotRows * kStep, b += kTile) {
    _tile_loadd(6, b, kRowBytes);
    _tile_loadd(4, a, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRows > 1) {
      _tile_loadd(5, a + kTile, kRowBytes);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (kRows > 2) {
      _tile_loadd(4, a + 2 * kTile, kRowBytes);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kRows > 3) {
      _tile_loadd(5, a + 3 * kTile, kRowBytes);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, c[0], stride);
  if constexpr (kRows > 1) _tile_stored(1, c[1], stride);
  if constexpr (kRows > 2) _tile_stored(2, c[2], stride);
  if constexpr (kRows > 3) _tile_stored(3, c[3], stride);
}

void Dots(const TileDots& x) {
  constexpr void (*kKernels[])(int64_t, const uint16_t*, const uint16_t*, float* const*, int64_t, bool) = {
      &DotTiles<1>, &DotTiles<2>, &DotTiles<3>, &DotTiles<4>};
  alignas(64) uint16_t copy[kDotRows * kStep * kDotSteps];
  alignas(64) float edge[kTileHeads * 2 * kTileHeads];
  const PickedRows& rows = x.rows;
  const int64_t steps = CeilDiv(rows.cols, kStep);
  for (int64_t i = 0; i < rows.n; i += kDotRows) {
    const int64_t n = std::min(kDotRows, rows.n - i);
    float* c[kDotRows / kTileHeads];
    for (int64_t t = 0; t < CeilDiv(n, kTileHeads); ++t) c[t] = x.panel + (i + t * kTileHeads) * x.ld;
    const int64_t rest = n % kTileHeads;
    float* last = x.panel + (i + n - rest) * x.ld;
    if (rest > 0) {
      c[n / kTileHeads] = edge;
      if (x.accumulate) std::memcpy(edge, last, static_cast<size_t>(rest * x.ld) * sizeof(float));
    }
    for (int64_t s = 0; s < std::max<int64_t>(steps, 1); s += kDotSteps) {
      const int64_t count = std::min(kDotSteps, steps - s);
      for (int64_t r = 0; r < n; ++r) {
        const uint16_t* from = Row(rows, i + r) + s * kStep;
        uint16_t* to = copy + r * kStep;
        int64_t k = s * kStep;
        for (int64_t j = 0; j < count; ++j, k += kStep, from += kStep, to += kDotRows * kStep) {
          _mm512_store_si512(to, k + kStep <= rows.cols ? _mm512_loadu_si512(from)
                                                        : _mm512_maskz_loadu_epi16(FirstLanes(rows.cols - k), from));
        }
      }
      Stored(copy);
      const auto* b = static_cast<const uint16_t*>(x.heads) + s * kTile;
      const auto kernel = kKernels[CeilDiv(n, kTileHeads) - 1];
      for (int64_t t = 0; t < x.tiles; ++t, b += TileProducts::HeadElements(rows.cols)) {
        kernel(count, copy, b, c, x.ld * 4, x.accumulate || s > 0);
        for (float*& p : c) p += kTileHeads;
      }
      for (float*& p : c) p -= x.tiles * kTileHeads;
    }
    if (rest > 0) std::memcpy(last, edge, static_cast<size_t>(rest * x.ld) * sizeof(float));
  }
}

// 16 x 16 values of 32 bits: column j of `from` becomes row j of `to`.
void Transpose16x16(const __m512i* from, uint32_t* to) {
  __m512i r[16];
  for (int i = 0; i < 16; ++i) r[i] = from[i];
  for (int i = 0; i < 16; i += 4) Transpose4x4(r + i);
  // r[4 * b + j]: block l of it has column 4 * l + j of rows 4 * b ...
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xEE);
    const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x44);
    const __m512i e = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xEE);
    _mm512_store_si512(to + (0 + j) * 16, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_store_si512(to + (4 + j) * 16, _mm512_shuffle_i32x4(a, c, 0xDD));
    _mm512_store_si512(to + (8 + j) * 16, _mm512_shuffle_i32x4(b, e, 0x88));
    _mm512_store_si512(to + (12 + j) * 16, _mm512_shuffle_i32x4(b, e, 0xDD));
  }
}

// 32 rows of a panel, of which `n` are there, as kBF16Terms left operands: heads by rows.
void PackFactors(const float* panel, int64_t ld, int64_t n, __mmask16 lanes, uint16_t* out) {
  alignas(64) __m512i pairs[kBF16Terms][16];
  for (int64_t i = 0; i < 16; ++i) {
    const float* p = panel + 2 * i * ld;
    const BF16Terms even(_mm512_maskz_loadu_ps(2 * i < n ? lanes : 0, p));
    const BF16Terms odd(_mm512_maskz_loadu_ps(2 * i + 1 < n ? lanes : 0, p + ld));
    for (int64_t t = 0; t < kBF16Terms; ++t) pairs[t][i] = PairOfTerms(even.t[t], odd.t[t]);
  }
  for (int64_t t = 0; t < kBF16Terms; ++t) Transpose16x16(pairs[t], reinterpret_cast<uint32_t*>(out + t * kTile));
}

// kSumCols columns of kSumRows rows as right operands, steps of kSumCols / 16 tiles: some pairs of rows at a time,
// between instructions on other tiles.
class RowPacker {
 public:
  explicit RowPacker(const PickedRows& rows) : rows_(rows) {}
  // Rows [row, row + n), columns from `col` on.
  void Start(int64_t row, int64_t n, int64_t col, uint16_t* out) {
    row_ = row;
    n_ = n;
    col_ = col;
    out_ = out;
    pair_ = 0;
    pairs_ = RoundUp(n, kStep) / 2;
    first_ = FirstLanes(rows_.cols - col);
    second_ = FirstLanes(rows_.cols - col - 32);
  }
  void Pack(int64_t pairs) {
    for (const int64_t end = std::min(pair_ + pairs, pairs_); pair_ < end; ++pair_) {
      uint16_t* to = out_ + pair_ / 16 * (kSumCols / 16 * kTile) + pair_ % 16 * 32;
      if (2 * pair_ + 1 < n_) {
        const uint16_t* a = Row(rows_, row_ + 2 * pair_) + col_;
        const uint16_t* b = Row(rows_, row_ + 2 * pair_ + 1) + col_;
        Interleave(_mm512_maskz_loadu_epi16(first_, a), _mm512_maskz_loadu_epi16(first_, b), to);
        Interleave(_mm512_maskz_loadu_epi16(second_, a + 32), _mm512_maskz_loadu_epi16(second_, b + 32),
                   to + 2 * kTile);
      } else {
        const __m512i none = _mm512_setzero_si512();
        const uint16_t* a = Row(rows_, row_ + std::min(2 * pair_, n_ - 1)) + col_;
        const __mmask32 has = 2 * pair_ < n_ ? ~__mmask32{0} : 0;
        Interleave(_mm512_maskz_loadu_epi16(first_ & has, a), none, to);
        Interleave(_mm512_maskz_loadu_epi16(second_ & has, a + 32), none, to + 2 * kTile);
      }
    }
  }
  void PackRest() { Pack(pairs_); }

 private:
  // 32 columns of two rows: a tile's row each of the first and of the last 16.
  static void Interleave(__m512i a, __m512i b, uint16_t* to) {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    a = _mm512_permutexvar_epi64(order, a);
    b = _mm512_permutexvar_epi64(order, b);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + kTile, _mm512_unpackhi_epi16(a, b));
  }

  const PickedRows& rows_;
  int64_t row_ = 0, n_ = 0, col_ = 0, pair_ = 0, pairs_ = 0;
  __mmask32 first_ = 0, second_ = 0;
  uint16_t* out_ = nullptr;
};

// c[16 x kSumCols] (+)= factors * rows. between(): other work.
template <typename Between>
inline void SumTiles(int64_t steps, const uint16_t* a, const uint16_t* b, float* c, int64_t stride, bool accumulate,
                     const Between& between) {
  static_assert(kBF16Terms == 3 && kSumCols == 64);
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + 16, stride);
    _tile_loadd(2, c + 32, stride);
    _tile_loadd(3, c + 48, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s, a += kBF16Terms * kTile, b += 4 * kTile) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(5, a + kTile, kRowBytes);
    _tile_loadd(6, a + 2 * kTile, kRowBytes);
    _tile_loadd(7, b, kRowBytes);
    _tile_dpbf16ps(0, 4, 7);
    _tile_dpbf16ps(0, 5, 7);
    _tile_dpbf16ps(0, 6, 7);
    between();
    _tile_loadd(7, b + kTile, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(1, 5, 7);
    _tile_dpbf16ps(1, 6, 7);
    between();
    _tile_loadd(7, b + 2 * kTile, kRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(2, 5, 7);
    _tile_dpbf16ps(2, 6, 7);
    between();
    _tile_loadd(7, b + 3 * kTile, kRowBytes);
    _tile_dpbf16ps(3, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(3, 6, 7);
    between();
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, c + 32, stride);
  _tile_stored(3, c + 48, stride);
}

void Sums(const TileSums& x) {
  constexpr int64_t kSteps = kSumRows / kStep;
  alignas(64) uint16_t factors[2][kSteps * kBF16Terms * kTile];
  alignas(64) uint16_t packed[2][kSteps * kSumCols * kStep];
  RowPacker packer(x.rows);
  packer.Start(0, std::min(kSumRows, x.rows.n), 0, packed[0]);
  packer.PackRest();
  int64_t now = 0;
  for (int64_t i = 0; i < x.rows.n; i += kSumRows) {
    const int64_t n = std::min(kSumRows, x.rows.n - i);
    const int64_t steps = CeilDiv(n, kStep);
    for (int64_t h = 0; h < x.lanes; h += kTileHeads) {
      const auto lanes = static_cast<__mmask16>(FirstLanes(std::min(kTileHeads, x.lanes - h)));
      for (int64_t s = 0; s < steps; ++s) {
        PackFactors(x.panel + (i + s * kStep) * x.ld + h, x.ld, n - s * kStep, lanes,
                    factors[h / kTileHeads] + s * kBF16Terms * kTile);
      }
    }
    for (int64_t c = 0; c < x.rows.cols; c += kSumCols, now = 1 - now) {
      if (c + kSumCols < x.rows.cols) {
        packer.Start(i, n, c + kSumCols, packed[1 - now]);
      } else {
        packer.Start(i + n, std::min(kSumRows, x.rows.n - i - n), 0, packed[1 - now]);
      }
      Stored(factors);
      for (int64_t h = 0; h < x.lanes; h += kTileHeads) {
        SumTiles(steps, factors[h / kTileHeads], packed[now], x.out + h * x.ld_out + c, x.ld_out * 4,
                 x.accumulate || i > 0, [&] { packer.Pack(4); });
      }
      packer.PackRest();
    }
  }
}

constexpr int64_t kUpdateCols = 128;
constexpr int64_t kUpdateRows = 16;
constexpr int64_t kUpdateRun = 64;  // rows whose factors are packed at a time

// sums[16 x 32] = factors * heads: two tiles of factors, and of 16 columns one of heads, for each 16 heads; the first
// factors are in tiles 4 and 5 already, and the last remain there. The sums are left in tiles 2 and 3 (kSecond), or 0
// and 1.
template <bool kSecond>
inline void UpdateTiles(int64_t heads, const uint16_t* a, const uint16_t* b, int64_t block) {
  if constexpr (kSecond) {
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t h = 0;; a += 2 * kTile, b += kTile) {
    _tile_loadd(6, b, kRowBytes);
    _tile_loadd(7, b + block, kRowBytes);
    if constexpr (kSecond) {
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(0, 5, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(1, 5, 7);
    }
    if (++h == heads) return;
    _tile_loadd(4, a + 2 * kTile, kRowBytes);
    _tile_loadd(5, a + 3 * kTile, kRowBytes);
  }
}

template <bool kSecond>
inline void StoreUpdates(float* sums) {
  constexpr int64_t kStride = kUpdateCols * 4;
  if constexpr (kSecond) {
    _tile_stored(2, sums, kStride);
    _tile_stored(3, sums + 16, kStride);
  } else {
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + 16, kStride);
  }
}

// Rows [i, i + n) of a panel as left operands: two terms of each lane side by side, and the third alone.
void PackUpdates(const TileUpdates& x, int64_t i, int64_t n, uint16_t* out) {
  for (int64_t h = 0; h < x.lanes; h += kTileHeads, out += 2 * kTile) {
    const auto lanes = static_cast<__mmask16>(FirstLanes(std::min(kTileHeads, x.lanes - h)));
    for (int64_t r = 0; r < n; ++r) {
      const BF16Terms terms(_mm512_maskz_loadu_ps(lanes, x.panel + (i + r) * x.ld + h));
      _mm512_store_si512(out + r * 32, PairOfTerms(terms.t[0], terms.t[1]));
      _mm512_store_si512(out + kTile + r * 32, _mm512_srli_epi32(terms.t[2], 16));
    }
  }
}

// to[0 .. 16 * kVectors) += from
template <int kVectors>
inline void AddRow(const float* from, float* to) {
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j, from += 16, to += 16) {
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(from)));
  }
}

// Up to kUpdateRun rows, 32 * kPairs columns from `base` on.
template <int kPairs>
void UpdateRun(const int32_t* rows, int64_t n, int64_t stride, float* base, const uint16_t* factors, int64_t heads,
               const uint16_t* right, int64_t block) {
  alignas(64) float sums[2][kUpdateRows * kUpdateCols];
  // Some of the rows that came last are added between the products of those that come next, before what waits for them.
  const auto add = [&](int64_t i, int64_t begin, int64_t end) {
    const float* from = sums[i / kUpdateRows % 2];
    for (int64_t r = begin; r < std::min(end, n - i); ++r) {
      AddRow<2 * kPairs>(from + r * kUpdateCols, base + rows[i + r] * stride);
    }
  };
  const int64_t left_step = heads * 2 * kTile;
  for (int64_t i = 0; i < n; i += kUpdateRows, factors += left_step) {
    float* to = sums[i / kUpdateRows % 2];
    for (int64_t t = 0; t < kPairs; ++t) {
      if (t == 0 || heads > 1) {
        _tile_loadd(4, factors, kRowBytes);
        _tile_loadd(5, factors + kTile, kRowBytes);
      }
      const uint16_t* b = right + 2 * t * block;
      t % 2 == 0 ? UpdateTiles<false>(heads, factors, b, block) : UpdateTiles<true>(heads, factors, b, block);
      if (i > 0) add(i - kUpdateRows, kUpdateRows * t / kPairs, kUpdateRows * (t + 1) / kPairs);
      t % 2 == 0 ? StoreUpdates<false>(to + 32 * t) : StoreUpdates<true>(to + 32 * t);
    }
  }
  add((n - 1) / kUpdateRows * kUpdateRows, 0, kUpdateRows);
}

void Updates(const TileUpdates& x) {
  constexpr void (*kRuns[])(const int32_t*, int64_t, int64_t, float*, const uint16_t*, int64_t, const uint16_t*,
                            int64_t) = {&UpdateRun<1>, &UpdateRun<2>, &UpdateRun<3>, &UpdateRun<4>};
  const int64_t heads = CeilDiv(x.lanes, kTileHeads);
  alignas(64) uint16_t factors[kUpdateRun / kUpdateRows * 2 * 2 * kTile];
  float* base = static_cast<float*>(const_cast<void*>(x.rows.base));
  for (int64_t first = 0; first < x.rows.n; first += kUpdateRun) {
    const int64_t n = std::min(kUpdateRun, x.rows.n - first);
    // All of them before the first is used: an instruction on tiles waits until memory has what was stored.
    for (int64_t i = 0; i < n; i += kUpdateRows) {
      PackUpdates(x, first + i, std::min(kUpdateRows, n - i), factors + i / kUpdateRows * heads * 2 * kTile);
    }
    Stored(factors);
    for (int64_t c = 0; c < x.rows.cols; c += kUpdateCols) {
      const auto run = kRuns[std::min(kUpdateCols, x.rows.cols - c) / 32 - 1];
      run(x.rows.rows + first, n, x.rows.stride, base + c, factors, heads,
          static_cast<const uint16_t*>(x.heads) + c / 16 * x.block, x.block);
    }
  }
}

}  // namespace

const TileProducts* TileProductsAmx() {
  static const TileProducts products = {&PackHeads,      &PackAcross, &Finite, &OpenRegisters,
                                        &CloseRegisters, &Dots,       &Sums,   &Updates};
  return &products;
}

}  // namespace jumar
#else
namespace jumar {
const TileProducts* TileProductsAmx() { return nullptr; }
}  // namespace jumar
#endif
