// bf16 x bf16 with VDPBF16PS: each lane adds the products of a pair (k, k + 1) to its fp32 sum.
#include "kernels/gemm/gemm_kernel.h"

#if defined(__AVX512BF16__)
#include <cstring>

#include "kernels/gemm/pack_bf16_x86.h"

namespace jumar {
namespace {

constexpr int kMR = 14;
constexpr int kNR = 32;

__m512bh AsBf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

// c[kRows x 32] (+)= a panel * b panel over `pairs`.
template <int kRows>
void MicroKernel(int64_t pairs, const uint32_t* a, const uint32_t* b, float* c, int64_t ldc, bool accumulate) {
  __m512 lo[kRows];
  __m512 hi[kRows];
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) lo[i] = hi[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k, a += kMR, b += kNR) {
    const __m512bh b0 = AsBf16(_mm512_loadu_si512(b));
    const __m512bh b1 = AsBf16(_mm512_loadu_si512(b + 16));
    _mm_prefetch(a + 512, _MM_HINT_T0);
    _mm_prefetch(b + 512, _MM_HINT_T0);
    _mm_prefetch(b + 528, _MM_HINT_T0);
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) {
      const __m512bh ai = AsBf16(_mm512_set1_epi32(static_cast<int>(a[i])));
      lo[i] = _mm512_dpbf16_ps(lo[i], ai, b0);
      hi[i] = _mm512_dpbf16_ps(hi[i], ai, b1);
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
    float* row = c + i * ldc;
    if (accumulate) {
      lo[i] = _mm512_add_ps(_mm512_loadu_ps(row), lo[i]);
      hi[i] = _mm512_add_ps(_mm512_loadu_ps(row + 16), hi[i]);
    }
    _mm512_storeu_ps(row, lo[i]);
    _mm512_storeu_ps(row + 16, hi[i]);
  }
}

using MicroKernelPtr = void (*)(int64_t, const uint32_t*, const uint32_t*, float*, int64_t, bool);

constexpr MicroKernelPtr kKernels[kMR] = {&MicroKernel<1>,  &MicroKernel<2>,  &MicroKernel<3>,  &MicroKernel<4>,
                                          &MicroKernel<5>,  &MicroKernel<6>,  &MicroKernel<7>,  &MicroKernel<8>,
                                          &MicroKernel<9>,  &MicroKernel<10>, &MicroKernel<11>, &MicroKernel<12>,
                                          &MicroKernel<13>, &MicroKernel<14>};

void Multiply(const GemmBlock& block) {
  const auto* b = static_cast<const uint32_t*>(block.b);
  float* c_col = static_cast<float*>(block.c);
  const int64_t pairs = (block.kc + 1) / 2;
  alignas(64) float edge[kMR * kNR];
  for (int64_t j = 0; j < block.n; j += kNR, b += block.b_panel / 2, c_col += kNR) {
    const int64_t cols = std::min<int64_t>(kNR, block.n - j);
    const auto* a = static_cast<const uint32_t*>(block.a);
    float* c = c_col;
    for (int64_t i = 0; i < block.m; i += kMR, a += block.a_panel / 2, c += kMR * block.ldc) {
      const int64_t rows = std::min<int64_t>(kMR, block.m - i);
      const MicroKernelPtr kernel = kKernels[rows - 1];
      if (cols == kNR) {
        kernel(pairs, a, b, c, block.ldc, block.accumulate);
        continue;
      }
      const size_t bytes = static_cast<size_t>(cols) * sizeof(float);
      if (block.accumulate) {
        for (int64_t r = 0; r < rows; ++r) std::memcpy(edge + r * kNR, c + r * block.ldc, bytes);
      }
      kernel(pairs, a, b, edge, kNR, block.accumulate);
      for (int64_t r = 0; r < rows; ++r) std::memcpy(c + r * block.ldc, edge + r * kNR, bytes);
    }
  }
}

void PackA(const GemmPack& p) { PackPairs(p, kMR, 2); }
void PackB(const GemmPack& p) { PackPairs(p, kNR, 2); }

}  // namespace

const GemmKernel* GemmKernelAvx512Bf16(const GemmKernel& base) {
  static const GemmKernel kernel = {kMR, kNR, 512, 2, DType::kF32, 2, &PackA, &PackB, &Multiply, &Multiply, base.store};
  return &kernel;
}

}  // namespace jumar
#else
namespace jumar {
const GemmKernel* GemmKernelAvx512Bf16(const GemmKernel& /*base*/) { return nullptr; }
}  // namespace jumar
#endif
