// Packing of bf16 operands without widening, for the instructions that multiply pairs (k, k + 1). AVX-512 intrinsics:
// include it in files compiled for AVX-512 only; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "kernels/gemm/gemm_kernel.h"

namespace jumar {
namespace {

inline __mmask32 FirstLanes(int64_t n) {
  const int64_t lanes = std::clamp<int64_t>(n, 0, 32);
  return static_cast<__mmask32>((uint64_t{1} << lanes) - 1);
}

// 4 x 4 transposition of 32-bit values within each 128-bit block.
inline void Transpose4x4(__m512i r[4]) {
  const __m512i lo01 = _mm512_unpacklo_epi32(r[0], r[1]);
  const __m512i hi01 = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i lo23 = _mm512_unpacklo_epi32(r[2], r[3]);
  const __m512i hi23 = _mm512_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm512_unpacklo_epi64(lo01, lo23);
  r[1] = _mm512_unpackhi_epi64(lo01, lo23);
  r[2] = _mm512_unpacklo_epi64(hi01, hi23);
  r[3] = _mm512_unpackhi_epi64(hi01, hi23);
}

// 8 values of k from rows 0, 4, 8 and 12 as four blocks.
inline __m512i LoadBlocks(const uint16_t* const* rows, int64_t k, __mmask8 mask) {
  const auto load = [&](int row) { return _mm_maskz_loadu_epi16(mask, rows[row] + k); };
  __m512i v = _mm512_castsi128_si512(load(0));
  v = _mm512_inserti32x4(v, load(4), 1);
  v = _mm512_inserti32x4(v, load(8), 2);
  return _mm512_inserti32x4(v, load(12), 3);
}

inline __m512i LoadWholeBlocks(const uint16_t* const* rows, int64_t k) {
  const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + k)); };
  __m512i v = _mm512_castsi128_si512(load(0));
  v = _mm512_inserti32x4(v, load(4), 1);
  v = _mm512_inserti32x4(v, load(8), 2);
  return _mm512_inserti32x4(v, load(12), 3);
}

// Pairs of 16 adjacent values of rows k and k + 1.
inline __m512i PairsOf(__m256i k0, __m256i k1) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(k0), _mm512_slli_epi32(_mm512_cvtepu16_epi32(k1), 16));
}

// out[pair][0..16) for one group of 16 rows that lie along k; `rows` has 16 pointers.
inline void PairsAlongK(const uint16_t* const* rows, int64_t kc, int64_t pairs, int64_t width, uint32_t* out) {
  __m512i r[4];
  int64_t pair = 0;
  for (; 2 * pair + 8 <= kc; pair += 4, out += 4 * width) {
    for (int i = 0; i < 4; ++i) r[i] = LoadWholeBlocks(rows + i, 2 * pair);
    Transpose4x4(r);
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(out + i * width, r[i]);
  }
  for (; pair < pairs; pair += 4, out += 4 * width) {
    const auto mask = static_cast<__mmask8>(FirstLanes(std::min<int64_t>(kc - 2 * pair, 8)));
    for (int i = 0; i < 4; ++i) r[i] = LoadBlocks(rows + i, std::min(2 * pair, kc), mask);
    Transpose4x4(r);
    for (int i = 0; i < 4 && pair + i < pairs; ++i) _mm512_storeu_si512(out + i * width, r[i]);
  }
}

// Panels of `width` rows as [pair][width] of 32-bit pairs; pairs beyond kc are 0, k_step is even. Whole vectors are
// stored: what reaches over a pair's end is overwritten by the next pair or lands in the slack.
inline void PackPairs(const GemmPack& p, int64_t width, int64_t k_step) {
  const GemmOperand& x = *p.operand;
  const uint16_t* src = static_cast<const uint16_t*>(x.data) + p.row * x.row_stride + p.k * x.k_stride;
  uint32_t* out = static_cast<uint32_t*>(p.out);
  const int64_t panel = p.panel / 2;
  const int64_t pairs = (p.kc + k_step - 1) / k_step * k_step / 2;
  const int64_t readable = x.rows - p.row;
  const int64_t panels = (p.rows + width - 1) / width;
  if (x.row_stride == 1) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const uint16_t* k0 = src + 2 * pair * x.k_stride;
      const uint16_t* k1 = k0 + x.k_stride;
      const bool has0 = 2 * pair < p.kc;
      const bool has1 = 2 * pair + 1 < p.kc;
      for (int64_t q = 0; q < panels; ++q) {
        for (int64_t g = 0; g < width; g += 16) {
          const int64_t at = q * width + g;
          const auto mask = static_cast<__mmask16>(FirstLanes(std::min<int64_t>(readable - at, 16)));
          const __m256i a = _mm256_maskz_loadu_epi16(has0 ? mask : 0, k0 + at);
          const __m256i b = _mm256_maskz_loadu_epi16(has1 ? mask : 0, k1 + at);
          _mm512_storeu_si512(out + q * panel + pair * width + g, PairsOf(a, b));
        }
      }
    }
    return;
  }
  for (int64_t q = 0; q < panels; ++q) {
    for (int64_t g = (width - 1) / 16 * 16; g >= 0; g -= 16) {
      const int64_t row = q * width + g;
      uint32_t* to = out + q * panel + g;
      if (row >= readable) {
        for (int64_t pair = 0; pair < pairs; ++pair) _mm512_storeu_si512(to + pair * width, _mm512_setzero_si512());
        continue;
      }
      const uint16_t* rows[16];
      for (int64_t r = 0; r < 16; ++r) rows[r] = src + std::min(row + r, readable - 1) * x.row_stride;
      if (x.k_stride == 1) {
        PairsAlongK(rows, p.kc, pairs, width, to);
        continue;
      }
      alignas(64) uint32_t buffer[16];
      for (int64_t pair = 0; pair < pairs; ++pair) {
        for (int r = 0; r < 16; ++r) {
          const uint32_t low = 2 * pair < p.kc ? rows[r][2 * pair * x.k_stride] : 0;
          const uint32_t high = 2 * pair + 1 < p.kc ? rows[r][(2 * pair + 1) * x.k_stride] : 0;
          buffer[r] = low | high << 16;
        }
        _mm512_storeu_si512(to + pair * width, _mm512_load_si512(buffer));
      }
    }
  }
}

}  // namespace
}  // namespace jumar
