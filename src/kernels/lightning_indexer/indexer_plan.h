// What the operators of the lightning indexer share: checks, packed keys, and one query against a block of keys.
#pragma once

#include <algorithm>

#include "base/check.h"
#include "base/scratch.h"
#include "base/widen.h"
#include "kernels/gemm/gemm_kernel.h"
#include "kernels/lightning_indexer/lightning_indexer.h"
#include "kernels/lightning_indexer/lightning_indexer_simd.h"
#include "simd/row_products.h"

namespace jumar {

inline char* Element(const TensorView& x, int64_t i, int64_t j, int64_t k = 0) {
  const int64_t at = i * x.stride[0] + j * x.stride[1] + (x.rank > 2 ? k * x.stride[2] : 0);
  return static_cast<char*>(x.data) + at * static_cast<int64_t>(SizeOf(x.dtype));
}

void CheckShape(const char* op, const char* name, const TensorView& x, const std::vector<int64_t>& sizes, DType dtype);
// A result: contiguous beside.
void CheckResult(const char* op, const char* name, const TensorView& x, const std::vector<int64_t>& sizes, DType dtype);

// One call's constants. `frame` outlives it.
class IndexerPlan {
 public:
  // Throws Error, `op` first.
  IndexerPlan(const char* op, const IndexerInputs& in, ScratchFrame& frame);

  const char* op;
  const IndexerInputs& in;
  DType compute;
  const GemmKernel& gemm;
  const IndexerKernel& kernel;
  const RowProducts& products;
  int64_t heads;
  int64_t panels;  // of heads
  int64_t d;
  int64_t ld_d;       // columns of an accumulator of D
  int64_t key_block;  // keys of a block, a multiple of gemm.nr

  // Keys that row i of a sequence sees.
  int64_t Limit(const SequencePair& s, int64_t i) const {
    return in.causal ? std::clamp<int64_t>(i + s.k_len - s.q_len + 1, 0, s.k_len) : s.k_len;
  }
  template <typename C>
  const C* Weights(const SequencePair& s, int64_t i) const {
    return static_cast<const C*>(weights_) + (s.batch * in.query.size[1] + s.q_begin + i) * heads;
  }
  // The heads of one query [N, D]; keys [begin, begin + n) of a sequence [n, D].
  GemmOperand Query(const SequencePair& s, int64_t i) const;
  GemmOperand Keys(const SequencePair& s, int64_t begin, int64_t n) const;

  // Packed elements of a block of keys as columns.
  int64_t key_panel, key_size;

 private:
  const void* weights_;
};

// tile [m, n rounded up to the kernel's nr] (+)= a * b.
inline void MultiplyTile(const GemmKernel& gemm, int64_t m, int64_t n, int64_t kc, const void* a, int64_t a_panel,
                         const void* b, int64_t b_panel, void* tile, int64_t ld, bool accumulate) {
  gemm.multiply_near({m, RoundUp(n, gemm.nr), kc, a, a_panel, b, b_panel, tile, ld, accumulate});
}

// Stores [rows, cols] of sums as a contiguous result.
void StoreRows(const IndexerPlan& plan, const void* acc, int64_t ld, int64_t rows, int64_t cols, DType dtype,
               void* out);

// Rows of no sequence, and rows that see nothing, keep these: bytes of 0.
void ZeroResult(const TensorView& x);

}  // namespace jumar
