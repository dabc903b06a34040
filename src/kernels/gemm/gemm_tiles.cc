#include "kernels/gemm/gemm_tiles.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/parallel.h"
#include "base/scratch.h"
#include "base/widen.h"
#include "jumar/runtime.h"
#include "kernels/gemm/gemm.h"

namespace jumar {
namespace {

constexpr int64_t kUnitRows = 512;    // that share a panel of B
constexpr int64_t kUnitCols = 2048;   // bounds the sums that outlive one run over K
constexpr int64_t kSlab = 256;        // columns of B that are packed at a time
constexpr int64_t kNarrowSlab = 128;  // likewise, for few rows: panels are used at once and leave the cache
constexpr int64_t kFewRows = 32;
constexpr int64_t kEvenRows = 64;           // up to which they are dealt out evenly
constexpr int64_t kPieceCols = 32;          // of B that are packed at a time for them
constexpr int64_t kPartRows = 96;           // whose sums stay near
constexpr int64_t kStreamBytes = 16 << 20;  // results of this size have left the caches before they are read
constexpr int64_t kMaxDepth = 2048;         // the run of K of A that is packed at a time
constexpr int64_t kSkew = 16;               // keeps rows of sums off the same cache set
constexpr int64_t kUnitsPerThread = 6;      // steps that even out what threads do
constexpr double kSerialProduct = 1 << 17;  // multiply-adds that are not worth a second thread

// Pieces of at most `limit`, equal but for the rounding to `unit`.
int64_t Piece(int64_t n, int64_t limit, int64_t unit) { return RoundUp(CeilDiv(n, CeilDiv(n, limit)), unit); }

// What one thread takes: a block of a product's rows by a range of its columns.
struct Unit {
  int64_t product;
  int64_t row;
  int64_t rows;
  int64_t col;
  int64_t cols;
  double work;
};

// A block of K of one term.
struct KBlock {
  int term;
  int64_t k;
  int64_t kc;
};

template <typename T>
void Gather(const GemmOperand& x, const int32_t* at, int64_t count, int64_t stride, int64_t first, int64_t width,
            int64_t step, T* out) {
  const T* data = static_cast<const T*>(x.data) + first * step;
  for (int64_t i = 0; i < count; ++i, out += width) {
    const T* from = data + at[i] * stride;
    if (step == 1) {
      std::memcpy(out, from, static_cast<size_t>(width) * sizeof(T));
    } else {
      for (int64_t j = 0; j < width; ++j) out[j] = from[j * step];
    }
  }
}

void GatherAny(const GemmOperand& x, const int32_t* at, int64_t count, int64_t stride, int64_t first, int64_t width,
               int64_t step, void* out) {
  switch (SizeOf(x.dtype)) {
    case 2:
      return Gather(x, at, count, stride, first, width, step, static_cast<uint16_t*>(out));
    case 4:
      return Gather(x, at, count, stride, first, width, step, static_cast<uint32_t*>(out));
    default:
      return Gather(x, at, count, stride, first, width, step, static_cast<uint64_t*>(out));
  }
}

class Tiles {
 public:
  Tiles(const GemmKernel& kernel, const std::vector<TileProduct>& products,
        const std::function<void(const SumTile&)>& epilogue, int64_t column_grid)
      : kernel_(kernel), products_(products), epilogue_(epilogue), grid_(column_grid) {}

  void Run() {
    double work = 0;
    for (const TileProduct& p : products_) work += Work(p, p.m, p.n);
    const bool serial = work < kSerialProduct;
    const double limit = work / static_cast<double>(kUnitsPerThread * NumThreads());
    std::vector<Unit> units;
    for (size_t i = 0; i < products_.size(); ++i) Cut(static_cast<int64_t>(i), limit, &units);
    std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.work > b.work; });
    const auto count = static_cast<int64_t>(units.size());
    const auto run = [&](int64_t u) { RunUnit(units[static_cast<size_t>(u)]); };
    if (serial) {
      for (int64_t u = 0; u < count; ++u) run(u);
    } else {
      ParallelChunks(count, run);
    }
  }

 private:
  static int64_t KOf(const TileProduct& p) {
    return p.terms[0].a.matrix.k + (p.separate || p.term_count == 1 ? 0 : p.terms[1].a.matrix.k);
  }
  static int Results(const TileProduct& p) { return p.separate ? 2 : 1; }

  static double Work(const TileProduct& p, int64_t m, int64_t n) {
    return static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(KOf(p) * Results(p) + 1);
  }

  int64_t SlabOf(int64_t rows) const {
    return grid_ > 0 ? grid_ : RoundUp(rows <= kFewRows ? kNarrowSlab : kSlab, kernel_.nr);
  }

  void Cut(int64_t index, double limit, std::vector<Unit>* units) const {
    const TileProduct& p = products_[static_cast<size_t>(index)];
    if (p.m == 0 || p.n == 0) return;
    int64_t rows = Piece(p.m, kUnitRows, kernel_.mr);
    const int64_t unit_cols = std::max<int64_t>(grid_, kernel_.nr);
    int64_t cols = Piece(p.n, kUnitCols, unit_cols);
    while (Work(p, std::min(rows, p.m), std::min(cols, p.n)) > limit) {
      if (cols >= rows && cols > 2 * SlabOf(rows) && cols > unit_cols) {
        cols = RoundUp(cols / 2, unit_cols);
      } else if (rows > 128) {
        rows = RoundUp(rows / 2, kernel_.mr);
      } else if (cols > 128 && cols > unit_cols) {
        cols = RoundUp(cols / 2, unit_cols);
      } else {
        break;
      }
    }
    for (int64_t i = 0; i < p.m; i += rows) {
      for (int64_t j = 0; j < p.n; j += cols) {
        const int64_t m = std::min(rows, p.m - i);
        const int64_t n = std::min(cols, p.n - j);
        units->push_back({index, i, m, j, n, Work(p, m, n)});
      }
    }
  }

  // All of K as blocks, those of a second term that is added after those of the first.
  std::vector<KBlock> Blocks(const TileProduct& p) const {
    std::vector<KBlock> blocks;
    for (int t = 0; t < (p.separate ? 1 : p.term_count); ++t) {
      const int64_t all = p.terms[t].a.matrix.k;
      if (all == 0) continue;
      const int64_t kc = kernel_.KBlock(all, p.terms[t].b.matrix.rows);
      for (int64_t k = 0; k < all; k += kc) blocks.push_back({t, k, std::min(kc, all - k)});
    }
    return blocks;
  }

  // Rows [row, row + rows) by one block of K of an operand, as panels; `even` as in GemmPack.
  void Pack(void (*pack)(const GemmPack&), const TileOperand& x, int64_t row, int64_t rows, const KBlock& block,
            int64_t panel, void* gathered, void* out, bool even) const {
    GemmOperand picked = x.matrix;
    GemmPack p{&picked, row, rows, block.k, block.kc, panel, out, even};
    if (x.row_at != nullptr || x.k_at != nullptr) {
      picked.data = gathered;
      picked.rows = rows;
      picked.k = block.kc;
      p.row = 0;
      p.k = 0;
      if (x.row_at != nullptr) {
        GatherAny(x.matrix, x.row_at + row, rows, x.matrix.row_stride, block.k, block.kc, x.matrix.k_stride, gathered);
        picked.row_stride = block.kc;
        picked.k_stride = 1;
      } else {
        GatherAny(x.matrix, x.k_at + block.k, block.kc, x.matrix.k_stride, row, rows, x.matrix.row_stride, gathered);
        picked.row_stride = 1;
        picked.k_stride = rows;
      }
    }
    pack(p);
  }

  // What Pack of B will read, if it is not picked from here and there.
  static GemmAhead Raw(const TileOperand& x, int64_t row, int64_t rows, const KBlock& block) {
    if (x.row_at != nullptr || x.k_at != nullptr) return {};
    const GemmOperand& m = x.matrix;
    const auto size = static_cast<int64_t>(SizeOf(m.dtype));
    const char* data = static_cast<const char*>(m.data) + (row * m.row_stride + block.k * m.k_stride) * size;
    if (m.row_stride == 1) return {data, block.kc, rows * size, m.k_stride * size};
    if (m.k_stride == 1) return {data, rows, block.kc * size, m.row_stride * size};
    return {};
  }

  // What is packed of B at a time: one block of K of some columns of a unit, for one result.
  struct Step {
    int result;
    int64_t at;
    int64_t col;
    int64_t cols;
    bool last;  // of its slab
  };

  static std::vector<Step> Steps(const Unit& u, int results, int64_t q, int64_t q_end, int64_t slab, int64_t width) {
    std::vector<Step> steps;
    for (int64_t begin = 0; begin < u.cols; begin += slab) {
      const int64_t end = std::min(begin + slab, u.cols);
      for (int r = 0; r < results; ++r) {
        for (int64_t at = q; at < q_end; ++at) {
          for (int64_t col = begin; col < end; col += width) {
            steps.push_back({r, at, col, std::min(width, end - col), false});
          }
        }
      }
      if (!steps.empty()) steps.back().last = true;
    }
    return steps;
  }

  void RunUnit(const Unit& u) const {
    ScratchFrame frame;
    const TileProduct& p = products_[static_cast<size_t>(u.product)];
    const std::vector<KBlock> blocks = Blocks(p);
    const auto block_count = static_cast<int64_t>(blocks.size());
    int64_t kc = kernel_.k_step;
    for (const KBlock& b : blocks) kc = std::max(kc, b.kc);
    const int64_t depth = std::min(block_count, std::max<int64_t>(1, kMaxDepth / kc));
    const int results = Results(p);
    const bool even = u.rows <= kEvenRows;
    const bool own_sums = p.sums == nullptr;
    const bool one_run = depth == block_count;
    // With one block of K the sums of some rows are finished, and leave the near caches, before those of others.
    const bool in_parts = block_count == 1 && results == 1 && own_sums && !even;
    const int64_t part = in_parts ? RoundUp(kPartRows, kernel_.mr) : u.rows;
    const int64_t slab = std::min(SlabOf(u.rows), RoundUp(u.cols, kernel_.nr));
    const int64_t width = even ? std::min(slab, RoundUp(kPieceCols, kernel_.nr)) : slab;
    const int64_t a_panel = kernel_.PanelStride(kernel_.mr, kc);
    const int64_t b_panel = kernel_.PanelStride(kernel_.nr, kc);
    const auto acc_bytes = static_cast<int64_t>(SizeOf(kernel_.acc));
    const int64_t packed = kernel_.packed_bytes;
    const int64_t a_block = CeilDiv(u.rows, kernel_.mr) * a_panel * packed;
    char* a = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(depth * a_block)));
    char* b = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(CeilDiv(width, kernel_.nr) * b_panel * packed)));
    char* gathered = nullptr;
    for (const TileTerm& term : p.terms) {
      const bool picks =
          term.a.row_at != nullptr || term.a.k_at != nullptr || term.b.row_at != nullptr || term.b.k_at != nullptr;
      if (picks && gathered == nullptr) {
        gathered = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(std::max(u.rows, slab) * kc * 8)));
      }
    }
    int64_t ld = p.ld_sums;
    char* sums = nullptr;
    if (own_sums) {
      ld = RoundUp(one_run ? slab : u.cols, kernel_.nr) + kSkew;
      sums = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(results * part * ld * acc_bytes)));
    } else {
      sums = static_cast<char*>(p.sums) + (u.row * ld + u.col) * acc_bytes;
    }
    const auto sums_at = [&](int r, int64_t col) {
      return sums + (r * u.rows * ld + (one_run && own_sums ? col % slab : col)) * acc_bytes;
    };
    const auto tile_of = [&](int64_t col) {
      const int64_t begin = col / slab * slab;
      return SumTile{u.product,
                     u.row,
                     u.rows,
                     u.col + begin,
                     std::min(slab, u.cols - begin),
                     {sums_at(0, begin), results > 1 ? sums_at(1, begin) : nullptr},
                     ld};
    };
    const auto right = [&](const Step& step) -> const TileOperand& {
      return p.terms[p.separate ? step.result : blocks[static_cast<size_t>(step.at)].term].b;
    };
    for (int64_t q = 0; q < block_count; q += depth) {
      const int64_t q_end = std::min(q + depth, block_count);
      for (int64_t at = q; at < q_end; ++at) {
        const KBlock& k = blocks[static_cast<size_t>(at)];
        Pack(kernel_.pack_a, p.terms[k.term].a, u.row, u.rows, k, a_panel, gathered, a + (at - q) * a_block, even);
      }
      const std::vector<Step> steps = Steps(u, results, q, q_end, slab, width);
      for (size_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
        const KBlock& k = blocks[static_cast<size_t>(step.at)];
        Pack(kernel_.pack_b, right(step), u.col + step.col, step.cols, k, b_panel, gathered, b, false);
        GemmBlock block{};
        block.n = own_sums ? RoundUp(step.cols, kernel_.nr) : step.cols;
        block.kc = k.kc;
        block.a_panel = a_panel;
        block.b = b;
        block.b_panel = b_panel;
        block.ldc = ld;
        block.accumulate = p.add || step.at > 0;
        block.even = even;
        if (i + 1 < steps.size()) {
          const Step& then = steps[i + 1];
          block.ahead = Raw(right(then), u.col + then.col, then.cols, blocks[static_cast<size_t>(then.at)]);
        }
        SumTile tile = tile_of(step.col);
        for (int64_t row = 0; row < u.rows; row += part, block.ahead = {}) {
          block.m = std::min(part, u.rows - row);
          block.a = a + (step.at - q) * a_block + row / kernel_.mr * a_panel * packed;
          block.c = sums_at(step.result, step.col);
          (even || in_parts ? kernel_.multiply_near : kernel_.multiply)(block);
          if (!own_sums || !step.last || q_end < block_count) continue;
          tile.row = u.row + row;
          tile.rows = block.m;
          epilogue_(tile);
        }
      }
    }
    for (int64_t col = 0; block_count == 0 && col < u.cols; col += slab) {
      const SumTile tile = tile_of(col);
      if (!p.add) Zero(tile, results);
      if (own_sums) epilogue_(tile);
    }
  }

  void Zero(const SumTile& tile, int results) const {
    const auto bytes = static_cast<int64_t>(SizeOf(kernel_.acc));
    for (int r = 0; r < results; ++r) {
      for (int64_t i = 0; i < tile.rows; ++i) {
        std::memset(static_cast<char*>(tile.sums[r]) + i * tile.ld * bytes, 0, static_cast<size_t>(tile.cols * bytes));
      }
    }
  }

  const GemmKernel& kernel_;
  const std::vector<TileProduct>& products_;
  const std::function<void(const SumTile&)>& epilogue_;
  const int64_t grid_;
};

// sums += out, for results that are not built in place.
void AddOut(const TensorView& out, const SumTile& tile, DType acc) {
  ScratchFrame frame;
  const void* before = WidenAll(out, acc, -0.0, frame);
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (acc == DType::kF64) {
      double* sum = static_cast<double*>(tile.sums[0]) + i * tile.ld;
      for (int64_t j = 0; j < tile.cols; ++j) sum[j] += static_cast<const double*>(before)[i * tile.cols + j];
    } else {
      float* sum = static_cast<float*>(tile.sums[0]) + i * tile.ld;
      for (int64_t j = 0; j < tile.cols; ++j) sum[j] += static_cast<const float*>(before)[i * tile.cols + j];
    }
  }
}

}  // namespace

void RunTiles(const GemmKernel& kernel, const std::vector<TileProduct>& products,
              const std::function<void(const SumTile&)>& epilogue, int64_t column_grid) {
  Tiles(kernel, products, epilogue, column_grid).Run();
}

void RunProducts(const GemmKernel& kernel, std::vector<MatrixProduct> products, bool add) {
  std::vector<TileProduct> tiles;
  int64_t bytes = 0;
  for (MatrixProduct& product : products) {
    // A result that lies column by column is computed as its transpose.
    if (product.bias == nullptr && product.out.stride[0] == 1 && product.out.stride[1] != 1) {
      std::swap(product.a, product.b);
      product.out = Transposed(product.out);
    }
    const TensorView& out = product.out;
    TileProduct p;
    p.m = out.size[0];
    p.n = out.size[1];
    p.terms[0] = {product.a, product.b};
    if (out.dtype == kernel.acc && out.stride[1] == 1 && product.bias == nullptr) {
      p.sums = out.data;
      p.ld_sums = out.stride[0];
      p.add = add;
    }
    tiles.push_back(p);
    bytes += out.numel() * static_cast<int64_t>(SizeOf(out.dtype));
  }
  RunTiles(kernel, tiles, [&](const SumTile& tile) {
    const MatrixProduct& product = products[static_cast<size_t>(tile.product)];
    const TensorView part = Narrow(Narrow(product.out, 0, tile.row, tile.rows), 1, tile.col, tile.cols);
    if (add) AddOut(part, tile, kernel.acc);
    GemmStore store{};
    store.acc = tile.sums[0];
    store.ld_acc = tile.ld;
    store.m = tile.rows;
    store.n = tile.cols;
    if (product.bias != nullptr) {
      store.bias = static_cast<const char*>(product.bias) + tile.col * static_cast<int64_t>(SizeOf(kernel.acc));
    }
    store.out = part.data;
    store.dtype = part.dtype;
    store.row_stride = part.stride[0];
    store.col_stride = part.stride[1];
    store.stream = bytes >= kStreamBytes && part.dtype != kernel.acc;
    kernel.store(store);
  });
}

}  // namespace jumar
