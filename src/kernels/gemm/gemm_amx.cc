// bf16 x bf16 with AMX: TDPBF16PS multiplies a tile of 16 rows x 16 pairs by one of 16 pairs x 16 columns and adds to a
// tile of 16 x 16 fp32 sums. A block of 2 x 2 sum tiles uses all eight tile registers.
#include "kernels/gemm/gemm_kernel.h"

#if defined(__AMX_BF16__)
#include <cstring>

#include "kernels/gemm/amx_tiles.h"
#include "kernels/gemm/pack_bf16_x86.h"

namespace jumar {
namespace {

constexpr int kMR = 32;
constexpr int kNR = 32;
constexpr int kKC = 320;                  // a panel of A and one of B share the L1 cache
constexpr int kStep = 32;                 // k of one tile
constexpr int64_t kABlock = kMR * kStep;  // packed elements of one step
constexpr int64_t kRowBytes = 64;         // of an A tile
constexpr int64_t kBRowBytes = kNR * 4;   // two B tiles lie side by side
constexpr int64_t kBBlock = kStep / 2 * kNR * 2;

// c[32 x 32] (+)= a panel * b panel.
void Block32x32(int64_t steps, const uint16_t* a, const uint16_t* b, float* c, int64_t ldc, bool accumulate) {
  const int64_t stride = ldc * 4;
  float* c1 = c + 16 * ldc;
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + 16, stride);
    _tile_loadd(2, c1, stride);
    _tile_loadd(3, c1 + 16, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s, a += kABlock, b += kBBlock) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kBRowBytes);
    _tile_loadd(7, b + 32, kBRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kABlock / 2, kRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, c1, stride);
  _tile_stored(3, c1 + 16, stride);
}

// The upper half alone, for results of few rows.
void Block16x32(int64_t steps, const uint16_t* a, const uint16_t* b, float* c, int64_t ldc, bool accumulate) {
  const int64_t stride = ldc * 4;
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + 16, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t s = 0; s < steps; ++s, a += kABlock, b += kBBlock) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kBRowBytes);
    _tile_loadd(7, b + 32, kBRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
}

void Multiply(const GemmBlock& block) {
  const Tiles tiles;
  const auto* b = static_cast<const uint16_t*>(block.b);
  float* c_col = static_cast<float*>(block.c);
  const int64_t steps = (block.kc + kStep - 1) / kStep;
  alignas(64) float edge[kMR * kNR];
  for (int64_t j = 0; j < block.n; j += kNR, b += block.b_panel, c_col += kNR) {
    const int64_t cols = std::min<int64_t>(kNR, block.n - j);
    const auto* a = static_cast<const uint16_t*>(block.a);
    float* c = c_col;
    for (int64_t i = 0; i < block.m; i += kMR, a += block.a_panel, c += kMR * block.ldc) {
      const int64_t rows = std::min<int64_t>(kMR, block.m - i);
      const auto product = rows <= 16 ? &Block16x32 : &Block32x32;
      if (cols == kNR && (rows == kMR || rows == 16)) {
        product(steps, a, b, c, block.ldc, block.accumulate);
        continue;
      }
      const size_t bytes = static_cast<size_t>(cols) * sizeof(float);
      if (block.accumulate) {
        std::memset(edge, 0, sizeof(edge));
        for (int64_t r = 0; r < rows; ++r) std::memcpy(edge + r * kNR, c + r * block.ldc, bytes);
      }
      product(steps, a, b, edge, kNR, block.accumulate);
      for (int64_t r = 0; r < rows; ++r) std::memcpy(c + r * block.ldc, edge + r * kNR, bytes);
    }
  }
}

// 16 rows by 8 k of a step, rows adjacent in memory: pairs are formed from two k, then transposed in blocks.
void RowsFromColumns(const uint16_t* src, int64_t k_stride, __mmask16 rows, int64_t kc, uint16_t* out) {
  __m512i r[4];
  for (int i = 0; i < 4; ++i) {
    const uint16_t* k0 = src + 2 * i * k_stride;
    r[i] = PairsOf(_mm256_maskz_loadu_epi16(2 * i < kc ? rows : 0, k0),
                   _mm256_maskz_loadu_epi16(2 * i + 1 < kc ? rows : 0, k0 + k_stride));
  }
  Transpose4x4(r);
  for (int i = 0; i < 4; ++i) {
    auto* row = reinterpret_cast<__m128i*>(out + i * kStep);
    constexpr int64_t kFourRows = 4 * kStep / 8;
    _mm_store_si128(row, _mm512_castsi512_si128(r[i]));
    _mm_store_si128(row + kFourRows, _mm512_extracti32x4_epi32(r[i], 1));
    _mm_store_si128(row + 2 * kFourRows, _mm512_extracti32x4_epi32(r[i], 2));
    _mm_store_si128(row + 3 * kFourRows, _mm512_extracti32x4_epi32(r[i], 3));
  }
}

// Panels of 32 rows as [step][32 rows][32 k], zeros beyond the operand.
void PackA(const GemmPack& p) {
  const GemmOperand& x = *p.operand;
  const uint16_t* src = static_cast<const uint16_t*>(x.data) + p.row * x.row_stride + p.k * x.k_stride;
  uint16_t* out = static_cast<uint16_t*>(p.out);
  const int64_t steps = (p.kc + kStep - 1) / kStep;
  const int64_t readable = x.rows - p.row;
  if (x.row_stride == 1) {
    // k outermost: memory is read in runs across all panels.
    for (int64_t k = 0; k < steps * kStep; k += 8) {
      const uint16_t* from = src + k * x.k_stride;
      for (int64_t first = 0; first < p.rows; first += 16) {
        const auto rows = static_cast<__mmask16>(FirstLanes(std::min<int64_t>(readable - first, 16)));
        RowsFromColumns(from + first, x.k_stride, rows, p.kc - k,
                        out + first / kMR * p.panel + k / kStep * kABlock + first % kMR * kStep + k % kStep);
      }
    }
    return;
  }
  for (int64_t first = 0; first < p.rows; first += kMR, out += p.panel) {
    for (int64_t r = 0; r < kMR; ++r) {
      const bool inside = first + r < readable;
      const uint16_t* row = src + (first + r) * x.row_stride;
      for (int64_t s = 0; s < steps; ++s) {
        uint16_t* to = out + s * kABlock + r * kStep;
        const int64_t k = s * kStep;
        if (!inside) {
          _mm512_store_si512(to, _mm512_setzero_si512());
        } else if (x.k_stride == 1) {
          _mm512_store_si512(to, _mm512_maskz_loadu_epi16(FirstLanes(p.kc - k), row + k));
        } else {
          for (int64_t i = 0; i < kStep; ++i) to[i] = k + i < p.kc ? row[(k + i) * x.k_stride] : 0;
        }
      }
    }
  }
}

void PackB(const GemmPack& p) { PackPairs(p, kNR, kStep); }

}  // namespace

const GemmKernel* GemmKernelAmx(const GemmKernel& base) {
  static const GemmKernel kernel = {kMR,    kNR,    kKC,       kStep,     DType::kF32, 2,
                                    &PackA, &PackB, &Multiply, &Multiply, base.store};
  return &kernel;
}

}  // namespace jumar
#else
namespace jumar {
const GemmKernel* GemmKernelAmx(const GemmKernel& /*base*/) { return nullptr; }
}  // namespace jumar
#endif
