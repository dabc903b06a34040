#include "kernels/limits/limits_kernels.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace jumar {
namespace {

constexpr int kChains = 16;

float Run(int64_t rounds) {
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3F80);
  const __m512bh b = (__m512bh)_mm512_set1_epi16(0x3C00);
  __m512 x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) x[i] = _mm512_dpbf16_ps(x[i], a, b);
  }
  __m512 sum = x[0];
  for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, x[i]);
  return _mm512_cvtss_f32(sum);
}

}  // namespace

// 32 multiply-adds per instruction.
PeakKernel PeakAvx512Bf16() { return {kChains * 64.0, &Run}; }

}  // namespace jumar
#else
namespace jumar {
PeakKernel PeakAvx512Bf16() { return {}; }
}  // namespace jumar
#endif
