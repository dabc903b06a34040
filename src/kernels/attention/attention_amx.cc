#include "kernels/attention/attention_split.h"

#if defined(__AMX_BF16__)
#include <algorithm>

#include "kernels/gemm/amx_tiles.h"
#include "kernels/gemm/bf16_terms_x86.h"

namespace jumar {
namespace {

constexpr int64_t kRowBytes = 64;        // of a tile of a left operand
constexpr int64_t kRightRowBytes = 128;  // two tiles of a right operand lie side by side
constexpr int64_t kHalf = kSplitBlock / 2;
static_assert(kSplitTerms == kBF16Terms);

// Two rows of 32 queries: x[0], x[1] and x[2], x[3].
template <bool kLeft, bool kRight>
void SplitRows(const __m512 x[4], uint16_t* left, uint16_t* right) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                      33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_load_si512(kUpper);
  const BF16Terms terms[4] = {BF16Terms(x[0]), BF16Terms(x[1]), BF16Terms(x[2]), BF16Terms(x[3])};
  for (int64_t i = 0; i < kSplitTerms; ++i) {
    if constexpr (kLeft) {
      _mm512_store_si512(left, _mm512_permutex2var_epi16(terms[0].t[i], upper, terms[1].t[i]));
      _mm512_store_si512(left + kSplitStep, _mm512_permutex2var_epi16(terms[2].t[i], upper, terms[3].t[i]));
      left += kSplitBlock;
    }
    if constexpr (kRight) {
      _mm512_store_si512(right, PairOfTerms(terms[0].t[i], terms[2].t[i]));
      _mm512_store_si512(right + kSplitStep, PairOfTerms(terms[1].t[i], terms[3].t[i]));
      right += kSplitBlock;
    }
  }
}

template <bool kLeft, bool kRight>
void SplitAs(const SplitPanel& p) {
  const int64_t first = p.begin / kSplitStep * kSplitStep;
  const int64_t last = (p.end + kSplitStep - 1) / kSplitStep * kSplitStep;
  for (int64_t key = first; key < last; key += 2) {
    __m512 x[4];
    for (int64_t r = 0; r < 2; ++r) {
      const float* row = p.panel + (key + r) * kSplitStep;
      const bool inside = p.begin <= key + r && key + r < p.end;
      x[2 * r] = inside ? _mm512_load_ps(row) : _mm512_setzero_ps();
      x[2 * r + 1] = inside ? _mm512_load_ps(row + 16) : _mm512_setzero_ps();
    }
    const int64_t at = key / kSplitStep * kSplitTerms * kSplitBlock + key % kSplitStep * kSplitStep;
    SplitRows<kLeft, kRight>(x, kLeft ? p.left + at : nullptr, kRight ? p.right + at : nullptr);
  }
}

void Split(const SplitPanel& p) {
  if (p.left != nullptr && p.right != nullptr) {
    SplitAs<true, true>(p);
  } else if (p.left != nullptr) {
    SplitAs<true, false>(p);
  } else if (p.right != nullptr) {
    SplitAs<false, true>(p);
  }
}

// The sums of 32 x 32, in tiles 0 to 3.
inline void LoadSums(const float* c, int64_t stride, int64_t below) {
  _tile_loadd(0, c, stride);
  _tile_loadd(1, c + 16, stride);
  _tile_loadd(2, c + below, stride);
  _tile_loadd(3, c + below + 16, stride);
}
inline void StoreSums(float* c, int64_t stride, int64_t below) {
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, c + below, stride);
  _tile_stored(3, c + below + 16, stride);
}

void MultiplyLeft(const SplitLeftProduct& x) {
  const Tiles tiles;
  SplitSteps all{INT64_MAX, 0};
  for (int64_t t = 0; t < x.panels; ++t) {
    if (x.steps[t].begin >= x.steps[t].end) continue;
    all = {std::min(all.begin, x.steps[t].begin), std::max(all.end, x.steps[t].end)};
  }
  const int64_t stride = x.ldc * 4;
  const int64_t below = 16 * x.ldc;
  const uint16_t* b = x.b;
  for (int64_t j = 0; j < x.n; j += kSplitStep, b += x.b_panel) {
    for (int64_t i = all.begin; i < all.end; ++i) {
      float* c = x.c + i * kSplitStep * x.ldc + j;
      LoadSums(c, stride, below);
      for (int64_t t = 0; t < x.panels; ++t) {
        if (i < x.steps[t].begin || i >= x.steps[t].end) continue;
        const uint16_t* a = x.a + t * x.a_panel + i * kSplitTerms * kSplitBlock;
        _tile_loadd(6, b + t * kSplitBlock, kRightRowBytes);
        _tile_loadd(7, b + t * kSplitBlock + 32, kRightRowBytes);
        for (int64_t term = 0; term < kSplitTerms; ++term, a += kSplitBlock) {
          _tile_loadd(4, a, kRowBytes);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_loadd(5, a + kHalf, kRowBytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      StoreSums(c, stride, below);
    }
  }
}

void MultiplyRight(const SplitRightProduct& x) {
  const Tiles tiles;
  constexpr int64_t kStride = kSplitStep * 4;
  constexpr int64_t kBelow = 16 * kSplitStep;
  const uint16_t* panel = x.a;
  float* c = x.c;
  for (int64_t i = 0; i < x.m; i += kSplitStep, panel += x.a_panel, c += kSplitBlock) {
    LoadSums(c, kStride, kBelow);
    for (int64_t s = x.steps.begin; s < x.steps.end; ++s) {
      const uint16_t* a = panel + s * kSplitBlock;
      const uint16_t* b = x.b + s * kSplitTerms * kSplitBlock;
      _tile_loadd(4, a, kRowBytes);
      _tile_loadd(5, a + kHalf, kRowBytes);
      for (int64_t term = 0; term < kSplitTerms; ++term, b += kSplitBlock) {
        _tile_loadd(6, b, kRightRowBytes);
        _tile_loadd(7, b + 32, kRightRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    StoreSums(c, kStride, kBelow);
  }
}

bool Finite(const uint16_t* x, int64_t count) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 bad = 0;
  for (int64_t i = 0; i < count; i += 32) {
    const __m512i v = _mm512_and_si512(_mm512_loadu_si512(x + i), exponent);
    bad |= _mm512_cmpeq_epi16_mask(v, exponent);
  }
  return bad == 0;
}

}  // namespace

const SplitKernel* SplitKernelAmx() {
  static const SplitKernel kernel = {&Split, &MultiplyLeft, &MultiplyRight, &Finite};
  return &kernel;
}

}  // namespace jumar
#else
namespace jumar {
const SplitKernel* SplitKernelAmx() { return nullptr; }
}  // namespace jumar
#endif
