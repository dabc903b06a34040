// Products of fp32 panels (p and ds, see simd/panel.h) with rows of bf16 by instructions that multiply bf16. A number
// of 24 bits is a sum of three of 8 bits, each a bf16, exactly; products of two bf16 are exact in fp32, and sums are
// fp32. So nothing is rounded that an fp32 product would not round.
//
// Rows of a panel go in steps of kSplitStep keys, columns of it are kSplitStep queries. A step of a panel is
// kSplitTerms blocks, the leading bits first, of kSplitBlock numbers each. As left operand a block is [key][query], as
// right operand [key / 2][query][2].
#pragma once

#include <cstdint>

namespace jumar {

inline constexpr int64_t kSplitStep = 32;
inline constexpr int64_t kSplitTerms = 3;
inline constexpr int64_t kSplitBlock = kSplitStep * kSplitStep;

// Steps [begin, end) of a panel.
struct SplitSteps {
  int64_t begin = 0;
  int64_t end = 0;
};

// Rows [begin, end) of a panel [keys, kSplitStep]; other rows of the steps that they touch become zeros.
// Null: not wanted.
struct SplitPanel {
  const float* panel;
  int64_t begin;
  int64_t end;
  uint16_t* left;
  uint16_t* right;
};

// c[key, j] += sum over panels t and their queries of a_t[key, query] * b[query, j], for j < n and the keys of the
// steps that each panel has. a: left operands, `a_panel` apart. b: packed by the bf16 kernel's pack_b, k = queries,
// from the first query of the first panel on. c: n rounded up to kSplitStep columns are written.
struct SplitLeftProduct {
  const uint16_t* a;
  int64_t a_panel;
  const SplitSteps* steps;
  int64_t panels;
  const uint16_t* b;
  int64_t b_panel;
  int64_t n;
  float* c;
  int64_t ldc;
};

// c[i, query] += sum over the keys of `steps` of a[i, key] * b[key, query], for i < m. a: packed by the bf16 kernel's
// pack_a, k = keys. b: a right operand. c: [m rounded up to kSplitStep, kSplitStep].
struct SplitRightProduct {
  const uint16_t* a;
  int64_t a_panel;
  int64_t m;
  const uint16_t* b;
  SplitSteps steps;
  float* c;
};

struct SplitKernel {
  void (*split)(const SplitPanel&);
  void (*multiply_left)(const SplitLeftProduct&);
  void (*multiply_right)(const SplitRightProduct&);
  // Whether `count` bf16, a multiple of kSplitStep, are finite.
  bool (*finite)(const uint16_t* x, int64_t count);
};

// With AMX; null where it was not compiled. To be called where the bf16 matrix kernel is that of AMX.
const SplitKernel* SplitKernelAmx();

}  // namespace jumar
