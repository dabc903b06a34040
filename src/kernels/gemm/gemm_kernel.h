// The parts that matrix products are made of (gemm, grouped matmul): packers and a block product, one set per
// instruction set, behind plain functions.
//
// A block of A, `rows` x kc, is packed into panels of `mr` rows: within a panel, the mr values of each k are adjacent.
// B likewise into panels of `nr` columns. The padding of a panel holds arbitrary finite or copied values in row
// direction (its products are never stored) and zeros in k direction.
//
// Few rows of A may be dealt out evenly, 32 as 6 + 6 + 5 + 5 + 5 + 5 rather than five times 6 and 2: a product of two
// rows takes as long as one of five.
#pragma once

#include <algorithm>
#include <cstdint>

#include "jumar/tensor.h"

namespace jumar {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// One operand: element (r, k) is at r * row_stride + k * k_stride; r is m for A and n for B.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t k = 0;
  int64_t row_stride = 0;
  int64_t k_stride = 0;
};

// A matrix as the left operand [m, k], or the right one [k, n], of a product.
inline GemmOperand LeftOperand(const TensorView& x) {
  return {x.data, x.dtype, x.size[0], x.size[1], x.stride[0], x.stride[1]};
}
inline GemmOperand RightOperand(const TensorView& x) {
  return {x.data, x.dtype, x.size[1], x.size[0], x.stride[1], x.stride[0]};
}

// The fewest panels that hold `all` rows: `longer` of rows + 1, then some of `rows`.
struct EvenPanels {
  EvenPanels() = default;
  EvenPanels(int64_t all, int64_t width) {
    const int64_t count = all <= width ? 1 : CeilDiv(all, width);
    rows = all / count;
    longer = all % count;
  }
  int64_t rows = 0;
  int64_t longer = 0;
};

// Rows [row, row + rows) by [k, k + kc) of an operand become ceil(rows / panel width) panels, `panel` packed elements
// apart. Reads may touch rows beyond row + rows where the operand has them.
struct GemmPack {
  const GemmOperand* operand;
  int64_t row;
  int64_t rows;
  int64_t k;
  int64_t kc;
  int64_t panel;
  void* out;
  bool even = false;  // of A: rows are dealt out evenly, where the kernel can
};

// Memory that is wanted soon: `runs` runs of `bytes` bytes, `stride` bytes apart.
struct GemmAhead {
  const char* data = nullptr;
  int64_t runs = 0;
  int64_t bytes = 0;
  int64_t stride = 0;
};

// c[0..m) x [0..n) (+)= A block * B block, in the accumulation type; nothing else of c is touched.
struct GemmBlock {
  int64_t m;
  int64_t n;
  int64_t kc;
  const void* a;
  int64_t a_panel;
  const void* b;
  int64_t b_panel;
  void* c;
  int64_t ldc;
  bool accumulate;
  bool even = false;  // as A was packed: m are then the rows of one GemmPack
  GemmAhead ahead{};  // comes nearer meanwhile
};

// out[i, j] = round(acc[i, j] + bias); bias is per column, or per row when bias_per_row; null: none. With `add`, which
// GemmRun takes for results in the accumulation type with adjacent columns and no bias, the sums start at out[i, j].
struct GemmStore {
  const void* acc;
  int64_t ld_acc;
  int64_t m;
  int64_t n;
  const void* bias;
  bool bias_per_row;
  void* out;
  DType dtype;
  int64_t row_stride;
  int64_t col_stride;
  bool add = false;
  bool stream = false;  // adjacent columns that begin on a vector go past the caches
};

inline constexpr int64_t kFewColumns = 16;

struct GemmKernel {
  int mr;            // rows of an A panel
  int nr;            // columns of a B panel
  int kc;            // longest K block
  int k_step;        // packed K is a multiple of this
  DType acc;         // kF32 or kF64
  int packed_bytes;  // per packed element
  void (*pack_a)(const GemmPack&);
  void (*pack_b)(const GemmPack&);
  void (*multiply)(const GemmBlock&);
  void (*multiply_near)(const GemmBlock&);  // the same for blocks that lie in the first two caches
  void (*store)(const GemmStore&);

  // The K block of a product of n columns: equal ones of at most `kc`. It depends on k and n alone, and with it the
  // order of every sum. The error of a sum grows with the roots of the length of a block and of their number. Few
  // columns, those of adapters, are summed by others across vectors, in some sixteen short sums: here both are near the
  // root of k.
  int64_t KBlock(int64_t k, int64_t n) const {
    int64_t longest = kc;
    if (n <= kFewColumns) {
      longest = std::min<int64_t>(kc, 16);
      while (2 * longest <= kc && longest * longest < k) longest *= 2;
    }
    return RoundUp(CeilDiv(k, CeilDiv(k, longest)), k_step);
  }

  // Packed elements from one panel to the next; the slack takes whole-vector stores at the end of a panel.
  int64_t PanelStride(int width, int64_t kc_used) const { return RoundUp(RoundUp(kc_used, k_step) * width, 64) + 64; }
};

// The best kernel under the SIMD cap for these input dtypes (both fp64, or neither).
const GemmKernel& ChooseGemmKernel(DType a, DType b);

// Instruction-set files; null where they were not compiled. They take `store` from the base kernel.
const GemmKernel* GemmKernelAvx512Bf16(const GemmKernel& base);
const GemmKernel* GemmKernelAmx(const GemmKernel& base);

// out[i, j] of a product of operands, driven in parallel; see Gemm for the numbers. `store.acc`, `ld_acc` are ignored.
// store.m = a.rows, store.n = b.rows; bias in the accumulation type. `columns`: of the product whose transpose this is,
// for KBlock; 0: store.n.
void GemmRun(const GemmKernel& kernel, const GemmOperand& a, const GemmOperand& b, const GemmStore& store,
             int64_t columns = 0);

}  // namespace jumar
