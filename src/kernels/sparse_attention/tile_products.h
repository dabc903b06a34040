// The products of simd/row_products.h with rows of bf16 that are picked by number, where the CPU multiplies tiles of
// bf16: scores and their gradients, 16 heads by 16 slots a tile.
//
// Products of two bf16 are exact in fp32. A factor in fp32, a probability or its gradient, is the sum of three bf16
// without a rest, so that its products are as exact; all sums are fp32. Zeros of these three make NaN of an infinity:
// sums want rows, updates heads that are finite.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm_kernel.h"

namespace jumar {

inline constexpr int64_t kTileHeads = 16;
inline constexpr int64_t kTileSumColumns = 64;

struct PickedRows {
  const void* base;
  int64_t stride;  // in elements
  const int32_t* rows;
  int64_t n;
  int64_t cols;
};

// panel[i * ld + head] (+)= sum over columns of row i * head, for tiles * 16 heads.
struct TileDots {
  PickedRows rows;
  const void* heads;  // as packed by pack_heads
  int64_t tiles;      // 1, or 2 where ld is 32
  float* panel;
  int64_t ld;
  bool accumulate;
};

// out[head * ld_out + c] (+)= sum over i of panel[i * ld + head] * row i [c], for heads < lanes. `out` has a multiple
// of kTileHeads rows and of kTileSumColumns columns, all of which are written.
struct TileSums {
  PickedRows rows;
  const float* panel;
  int64_t ld;
  int64_t lanes;
  float* out;
  int64_t ld_out;
  bool accumulate;
};

// base[rows[i] * stride + c] += sum over head < lanes of panel[i * ld + head] * heads[head, c], for c < cols, a
// multiple of 16, i ascending. `base` is fp32.
struct TileUpdates {
  PickedRows rows;
  const float* panel;
  int64_t ld;
  int64_t lanes;
  const void* heads;  // as packed by pack_across, from the first column on
  int64_t block;
};

struct TileProducts {
  // x (index = head, k = column) as the right operand of dots, a tile after the other of HeadElements(k) 16-bit
  // elements.
  void (*pack_heads)(const GemmOperand& x, void* out);
  // Heads [head, head + lanes) of x as that of updates: 16 columns of them, and a column more than an odd number of
  // these, `block` 16-bit elements apart. Each element twice. Whether all are finite.
  bool (*pack_across)(const GemmOperand& x, int64_t head, int64_t lanes, int64_t block, void* out);
  // Whether n adjacent bf16 are.
  bool (*finite)(const void* x, int64_t n);
  // The thread's tile registers: the products that follow, up to close(), need them open.
  void (*open)();
  void (*close)();
  void (*dots)(const TileDots&);
  void (*sums)(const TileSums&);
  void (*updates)(const TileUpdates&);

  static int64_t HeadElements(int64_t columns) { return RoundUp(columns, 32) * kTileHeads; }
};

// The tile registers, open for as long as it lives, which costs as much as a few slots. Null: nothing.
class OpenTiles {
 public:
  explicit OpenTiles(const TileProducts* products) : products_(products) {
    if (products_ != nullptr) products_->open();
  }
  ~OpenTiles() {
    if (products_ != nullptr) products_->close();
  }
  OpenTiles(const OpenTiles&) = delete;
  OpenTiles& operator=(const OpenTiles&) = delete;

 private:
  const TileProducts* products_;
};

// Null where the CPU, or the SIMD cap, has no tiles.
const TileProducts* ChooseTileProducts();

// The instruction-set file; null where it was not compiled.
const TileProducts* TileProductsAmx();

}  // namespace jumar
