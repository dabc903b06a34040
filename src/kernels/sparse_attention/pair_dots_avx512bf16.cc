#include "kernels/sparse_attention/pair_dots.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace jumar {
namespace {

constexpr int64_t kVector = 16;
constexpr int64_t kPanel = 32;   // pairs of a packed k
constexpr int64_t kAhead = 16;   // pairs of a row that fill a line
constexpr int kRowsOfCall = 12;  // accumulators for the latency of an instruction, a register for each pointer

__m512bh AsBf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

__m512bh Pair(const uint16_t* at) {
  int32_t pair;
  std::memcpy(&pair, at, sizeof(pair));
  return AsBf16(_mm512_set1_epi32(pair));
}

// c[kRows][16 or 32] (+)= sum over pairs of rows * b. `next`: the rows of the call that follows.
template <int kRows, bool kTwo>
void Rows(const uint16_t* const* rows, const uint32_t* b, int64_t pairs, float* c, int64_t ld, bool accumulate,
          const uint16_t* const* next) {
  const uint16_t* a[kRows];
  __m512 lo[kRows];
  __m512 hi[kRows];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    a[i] = rows[i];
    lo[i] = hi[i] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < pairs; k += kAhead) {
    for (int i = 0; i < kRows; ++i) _mm_prefetch(next[i] + 2 * k, _MM_HINT_T0);
    const int64_t end = std::min(k + kAhead, pairs);
    for (int64_t j = k; j < end; ++j, b += kPanel) {
      const __m512bh b0 = AsBf16(_mm512_loadu_si512(b));
      const __m512bh b1 = kTwo ? AsBf16(_mm512_loadu_si512(b + kVector)) : b0;
#pragma GCC unroll 12
      for (int i = 0; i < kRows; ++i) {
        const __m512bh x = Pair(a[i] + 2 * j);
        lo[i] = _mm512_dpbf16_ps(lo[i], b0, x);
        if constexpr (kTwo) hi[i] = _mm512_dpbf16_ps(hi[i], b1, x);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    float* to = c + i * ld;
    _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), lo[i]) : lo[i]);
    if constexpr (!kTwo) continue;
    to += kVector;
    _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), hi[i]) : hi[i]);
  }
}

using RowsPtr = void (*)(const uint16_t* const*, const uint32_t*, int64_t, float*, int64_t, bool,
                         const uint16_t* const*);

template <bool kTwo>
constexpr RowsPtr kRowsOf[kRowsOfCall] = {&Rows<1, kTwo>, &Rows<2, kTwo>,  &Rows<3, kTwo>,  &Rows<4, kTwo>,
                                          &Rows<5, kTwo>, &Rows<6, kTwo>,  &Rows<7, kTwo>,  &Rows<8, kTwo>,
                                          &Rows<9, kTwo>, &Rows<10, kTwo>, &Rows<11, kTwo>, &Rows<12, kTwo>};

void Dots(const PairRows& x) {
  const auto* rows = reinterpret_cast<const uint16_t* const*>(x.rows);
  const auto* b = static_cast<const uint32_t*>(x.heads);
  const EvenPanels calls(x.n, kRowsOfCall);
  const uint16_t* next[kRowsOfCall];
  for (int64_t i = 0, call = 0, count = 0; i < x.n; i += count, ++call) {
    count = calls.rows + (call < calls.longer ? 1 : 0);
    for (int64_t r = 0; r < count; ++r) next[r] = rows[std::min(i + count + r, x.n - 1)];
    const RowsPtr kernel = (x.two ? kRowsOf<true> : kRowsOf<false>)[count - 1];
    kernel(rows + i, b, x.columns / 2, x.panel + i * x.ld, x.ld, x.accumulate, next);
    if (!x.two && x.ld > kVector && !x.accumulate) {
      for (int64_t r = 0; r < count; ++r) std::fill_n(x.panel + (i + r) * x.ld + kVector, kVector, 0.0f);
    }
  }
}

}  // namespace

PairDotsKernel PairDotsAvx512Bf16() { return &Dots; }

}  // namespace jumar
#else
namespace jumar {
PairDotsKernel PairDotsAvx512Bf16() { return nullptr; }
}  // namespace jumar
#endif
