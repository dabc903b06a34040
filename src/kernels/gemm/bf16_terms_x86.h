// fp32 as a sum of bf16, for the instructions that multiply these. AVX-512 intrinsics: include it in files compiled for
// AVX-512 only; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jumar {
namespace {

constexpr int64_t kBF16Terms = 3;

// The three bf16 whose sum x is, each in the upper half of a lane: the next 8 bits of it.
struct BF16Terms {
  explicit BF16Terms(__m512 x) {
    const __m512i upper = Upper();
    t[0] = _mm512_and_si512(_mm512_castps_si512(x), upper);
    const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(t[0]));
    t[1] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
    t[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(t[1])));
  }
  static __m512i Upper() { return _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)); }
  __m512i t[kBF16Terms];
};

// The upper half of `low` below that of `high`.
inline __m512i PairOfTerms(__m512i low, __m512i high) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, BF16Terms::Upper(), 0xF8);
}

}  // namespace
}  // namespace jumar
