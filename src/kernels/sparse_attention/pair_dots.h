// Scores of picked rows of bf16 where the CPU multiplies pairs of bf16 at twice the rate of fp32 (simd/row_products.h
// has those of widened rows).
//
// Products of two bf16 are exact in fp32; a lane adds those of columns k and k + 1 one after the other. What is smaller
// than the least normal number of fp32 counts as 0.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm_kernel.h"

namespace jumar {

// panel[i * ld + head] (+)= sum over columns of row i * head, for heads < 16, or < 32 where `two`. columns is even.
struct PairRows {
  const void* const* rows;
  int64_t n;
  int64_t columns;
  const void* heads;  // one panel of gemm.pack_b
  bool two;
  float* panel;
  int64_t ld;
  bool accumulate;
};

using PairDotsKernel = void (*)(const PairRows&);

struct PairDots {
  const GemmKernel& gemm;  // packs heads, as its right operand
  PairDotsKernel dots;
};

// Null where the CPU, or the SIMD cap, has none, or where they are slower.
const PairDots* ChoosePairDots();

// The instruction-set file; null where it was not compiled.
PairDotsKernel PairDotsAvx512Bf16();

}  // namespace jumar
