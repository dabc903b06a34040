// Many products in one parallel region (grouped matmul, expert networks): however unequal they are, all threads take
// tiles from one list, the largest first.
//
// A tile's operands are packed by the thread that multiplies them: its rows of A once, each panel of B once for up to
// 512 rows. K is never split among threads and is cut into blocks as GemmRun does, so that the numbers, and the bound,
// are those of gemm.h for every thread count.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "jumar/tensor.h"
#include "kernels/gemm/gemm_kernel.h"

namespace jumar {

// An operand whose rows, or whose k, may be picked from a longer matrix: row r is row_at[r] of `matrix`, k is k_at[k].
// matrix.rows and matrix.k count what is picked. At most one of the two is given.
struct TileOperand {
  GemmOperand matrix;
  const int32_t* row_at = nullptr;
  const int32_t* k_at = nullptr;
};

struct TileTerm {
  TileOperand a;
  TileOperand b;
};

// Sums [m, n] of one term, or of the products of both. With `separate` there are two results of one A: terms[0].a times
// either b.
struct TileProduct {
  int64_t m = 0;
  int64_t n = 0;
  TileTerm terms[2];
  int term_count = 1;
  bool separate = false;
  // Where the sums are built in place, in the accumulation type with adjacent columns; they start at what is there with
  // `add`. No epilogue is called then. Not with `separate`.
  void* sums = nullptr;
  int64_t ld_sums = 0;
  bool add = false;
};

// The finished sums of a tile: element (i, j) of result r is sums[r][i * ld + j], of the accumulation type, for
// row + i and col + j of the product.
struct SumTile {
  int64_t product;
  int64_t row;
  int64_t rows;
  int64_t col;
  int64_t cols;
  void* sums[2];
  int64_t ld;
};

// `epilogue` is called once for every tile that is not built in place, from any thread; it may overwrite the sums.
// K = 0 gives tiles of zeros. With `column_grid`, a multiple of the kernel's nr, tiles are that wide (but for the last
// column of tiles), so that what an epilogue sums along columns does not depend on the thread count.
void RunTiles(const GemmKernel& kernel, const std::vector<TileProduct>& products,
              const std::function<void(const SumTile&)>& epilogue, int64_t column_grid = 0);

// out = round(a * b + bias), out of any strides; `bias`, one a column in the accumulation type, may be null.
struct MatrixProduct {
  TileOperand a;
  TileOperand b;
  TensorView out;
  const void* bias = nullptr;
};

// RunTiles for products whose results are matrices. With `add`, not beside a bias, each is added to what is in `out`.
void RunProducts(const GemmKernel& kernel, std::vector<MatrixProduct> products, bool add = false);

}  // namespace jumar
