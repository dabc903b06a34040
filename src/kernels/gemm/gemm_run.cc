// Blocking and threading of one product.
//
// The result is cut into super-blocks whose packed operands stay within a few megabytes; K is cut into blocks of
// `kc`, and where K is very long, into runs of blocks that are packed at a time. For each super-block the operands are
// packed by all threads, then tiles of it are computed by all threads. A product with few rows shares no B panel
// between tiles; there each tile packs its own B block, which stays in its core's cache.
#include <algorithm>

#include "base/parallel.h"
#include "base/scratch.h"
#include "jumar/runtime.h"
#include "kernels/gemm/gemm_kernel.h"

namespace jumar {
namespace {

constexpr int64_t kTileRows = 256;
constexpr int64_t kTileCols = 512;
constexpr int64_t kSkew = 16;                  // keeps rows of accumulators off the same cache set
constexpr int64_t kMaxDepth = 2048;            // the run of K that is packed at a time
constexpr int64_t kMaxOperandBytes = 8 << 20;  // of one packed operand
constexpr int64_t kPanels = 8;                 // that one task packs
constexpr int64_t kSerialPack = 1 << 15;       // elements that are not worth a second thread
constexpr int64_t kSerialProduct = 1 << 17;    // multiply-adds, likewise

// Block size for n in equal blocks of at most about `limit`, a multiple of `unit`.
int64_t Balanced(int64_t n, int64_t limit, int64_t unit) {
  const int64_t blocks = CeilDiv(n, std::max(limit / unit * unit, unit));
  return RoundUp(CeilDiv(n, blocks), unit);
}

template <typename F>
void Parallel(int64_t chunks, bool serial, const F& body) {
  if (serial) {
    for (int64_t c = 0; c < chunks; ++c) body(c);
  } else {
    ParallelChunks(chunks, body);
  }
}

class Product {
 public:
  Product(const GemmKernel& kernel, const GemmOperand& a, const GemmOperand& b, const GemmStore& store, int64_t columns)
      : kernel_(kernel), a_(a), b_(b), store_(store) {
    kc_ = kernel.KBlock(a.k, columns);
    k_blocks_ = CeilDiv(a.k, kc_);
    depth_blocks_ = std::min(k_blocks_, std::max<int64_t>(1, kMaxDepth / kc_));
    const int64_t side = std::max<int64_t>(1024, kMaxOperandBytes / (depth_blocks_ * kc_ * kernel.packed_bytes));
    mb_ = Balanced(store.m, side, kernel.mr);
    nb_ = Balanced(store.n, side, kernel.nr);
    mc_ = Balanced(mb_, kTileRows, kernel.mr);
    private_b_ = store.m <= mc_;
    nt_ = Balanced(nb_, store.m <= 32 ? kTileCols / 4 : kTileCols, kernel.nr);
    // Smaller tiles where there are too few to keep all threads busy to the end.
    const int64_t wanted = 4 * NumThreads();
    while (CeilDiv(mb_, mc_) * CeilDiv(nb_, nt_) < wanted) {
      if (nt_ >= 2 * mc_ && nt_ > 2 * kernel.nr) {
        nt_ = RoundUp(nt_ / 2, kernel.nr);
      } else if (mc_ > kTileRows / 4) {
        mc_ = RoundUp(mc_ / 2, kernel.mr);
      } else if (nt_ > 2 * kernel.nr) {
        nt_ = RoundUp(nt_ / 2, kernel.nr);
      } else {
        break;
      }
    }
    a_panel_ = kernel.PanelStride(kernel.mr, kc_);
    b_panel_ = kernel.PanelStride(kernel.nr, kc_);
    direct_ = store.dtype == kernel.acc && store.col_stride == 1 && store.bias == nullptr;
    serial_ = store.m * store.n * a.k < kSerialProduct;
  }

  void Run() {
    ScratchFrame frame;
    const int64_t bytes = kernel_.packed_bytes;
    char* a = static_cast<char*>(
        frame.AllocBytes(static_cast<size_t>(depth_blocks_ * CeilDiv(mb_, kernel_.mr) * a_panel_ * bytes)));
    char* b = nullptr;
    if (!private_b_) {
      b = static_cast<char*>(
          frame.AllocBytes(static_cast<size_t>(depth_blocks_ * CeilDiv(nb_, kernel_.nr) * b_panel_ * bytes)));
    }
    const bool one_depth = depth_blocks_ == k_blocks_;
    if (!one_depth && !direct_) {
      shared_acc_ = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(mb_ * nb_) * SizeOf(kernel_.acc)));
    }
    for (int64_t j = 0; j < store_.n; j += nb_) {
      for (int64_t i = 0; i < store_.m; i += mb_) {
        const int64_t m = std::min(mb_, store_.m - i);
        const int64_t n = std::min(nb_, store_.n - j);
        for (int64_t q = 0; q < k_blocks_; q += depth_blocks_) {
          const int64_t q_end = std::min(q + depth_blocks_, k_blocks_);
          // With all of K packed at a time, the panels of B serve every i, and those of A every j when there is one i.
          const bool new_a = !one_depth || j == 0 || mb_ < store_.m;
          const bool new_b = !private_b_ && (!one_depth || i == 0);
          Pack(q, q_end, i, new_a ? m : 0, a, j, new_b ? n : 0, b);
          Multiply(q, q_end, i, m, a, j, n, b);
        }
      }
    }
  }

 private:
  int64_t KOf(int64_t q) const { return q * kc_; }
  int64_t KCount(int64_t q) const { return std::min(kc_, a_.k - KOf(q)); }

  // Packed blocks lie one after another, each of all panels of the super-block.
  char* Panel(char* base, int64_t block, int64_t panels, int64_t panel, int64_t stride) const {
    return base + (block * panels + panel) * stride * kernel_.packed_bytes;
  }

  void Pack(int64_t q, int64_t q_end, int64_t i, int64_t m, char* a, int64_t j, int64_t n, char* b) const {
    // A unit is some panels of one K block. Where rows are adjacent, long runs of them are read for each k.
    const int64_t a_panels = a_.row_stride == 1 ? 4 * kPanels : kPanels;
    const int64_t b_panels = b_.row_stride == 1 ? 2 * kPanels : kPanels;
    const int64_t a_units = CeilDiv(m, a_panels * kernel_.mr);
    const int64_t b_units = CeilDiv(n, b_panels * kernel_.nr);
    const int64_t blocks = q_end - q;
    const int64_t units = a_units + b_units;
    const bool serial = (m + n) * blocks * kc_ < kSerialPack;
    Parallel(units * blocks, serial, [&](int64_t unit) {
      const int64_t block = unit / units;
      const int64_t u = unit % units;
      const bool is_a = u < a_units;
      const int64_t width = is_a ? kernel_.mr : kernel_.nr;
      const int64_t panels = is_a ? a_panels : b_panels;
      const int64_t first = (is_a ? u : u - a_units) * panels;
      const int64_t all = is_a ? m : n;
      GemmPack p;
      p.operand = is_a ? &a_ : &b_;
      p.row = (is_a ? i : j) + first * width;
      p.rows = std::min(panels * width, all - first * width);
      p.k = KOf(q + block);
      p.kc = KCount(q + block);
      p.panel = is_a ? a_panel_ : b_panel_;
      p.out = Panel(is_a ? a : b, block, CeilDiv(is_a ? mb_ : nb_, width), first, p.panel);
      (is_a ? kernel_.pack_a : kernel_.pack_b)(p);
    });
  }

  void Multiply(int64_t q, int64_t q_end, int64_t i, int64_t m, char* a, int64_t j, int64_t n, char* b) const {
    const int64_t col_tiles = CeilDiv(n, nt_);
    const int64_t row_tiles = CeilDiv(m, mc_);
    Parallel(col_tiles * row_tiles, serial_, [&](int64_t tile) {
      // Neighbouring tiles share their B panels.
      const int64_t ti = tile % row_tiles * mc_;
      const int64_t tj = tile / row_tiles * nt_;
      Tile(q, q_end, i, ti, std::min(mc_, m - ti), a, j, tj, std::min(nt_, n - tj), b);
    });
  }

  void Tile(int64_t q, int64_t q_end, int64_t i, int64_t ti, int64_t m, char* a, int64_t j, int64_t tj, int64_t n,
            char* b) const {
    ScratchFrame frame;
    const auto acc_bytes = static_cast<int64_t>(SizeOf(kernel_.acc));
    GemmBlock block;
    block.m = m;
    block.n = n;
    block.a_panel = a_panel_;
    block.b_panel = b_panel_;
    char* out = static_cast<char*>(store_.out) + ((i + ti) * store_.row_stride + (j + tj) * store_.col_stride) *
                                                     static_cast<int64_t>(SizeOf(store_.dtype));
    if (direct_) {
      block.c = out;
      block.ldc = store_.row_stride;
    } else if (shared_acc_ != nullptr) {
      block.c = shared_acc_ + (ti * nb_ + tj) * acc_bytes;
      block.ldc = nb_;
      block.n = RoundUp(n, kernel_.nr);
    } else {
      block.n = RoundUp(n, kernel_.nr);
      block.ldc = block.n + kSkew;
      block.c = frame.AllocBytes(static_cast<size_t>(m * block.ldc * acc_bytes));
    }
    GemmPack own{};
    if (private_b_) {
      own.operand = &b_;
      own.row = j + tj;
      own.rows = n;
      own.panel = b_panel_;
      own.out = frame.AllocBytes(static_cast<size_t>(CeilDiv(n, kernel_.nr) * b_panel_ * kernel_.packed_bytes));
    }
    for (int64_t at = q; at < q_end; ++at) {
      block.kc = KCount(at);
      block.accumulate = store_.add || at > 0;
      block.a = Panel(a, at - q, CeilDiv(mb_, kernel_.mr), ti / kernel_.mr, a_panel_);
      if (private_b_) {
        own.k = KOf(at);
        own.kc = block.kc;
        kernel_.pack_b(own);
        block.b = own.out;
      } else {
        block.b = Panel(b, at - q, CeilDiv(nb_, kernel_.nr), tj / kernel_.nr, b_panel_);
      }
      kernel_.multiply(block);
    }
    if (direct_ || q_end < k_blocks_) return;
    Store(block.c, block.ldc, i + ti, m, j + tj, n, out);
  }

  void Store(const void* acc, int64_t ld, int64_t i, int64_t m, int64_t j, int64_t n, void* out) const {
    GemmStore s = store_;
    s.acc = acc;
    s.ld_acc = ld;
    s.m = m;
    s.n = n;
    s.out = out;
    if (s.bias != nullptr) {
      s.bias = static_cast<const char*>(s.bias) + (s.bias_per_row ? i : j) * static_cast<int64_t>(SizeOf(kernel_.acc));
    }
    kernel_.store(s);
  }

  const GemmKernel& kernel_;
  const GemmOperand& a_;
  const GemmOperand& b_;
  const GemmStore& store_;
  int64_t kc_ = 0;            // K block
  int64_t k_blocks_ = 0;      // all of K
  int64_t depth_blocks_ = 0;  // K blocks packed at a time
  int64_t mb_ = 0, nb_ = 0;   // super-block
  int64_t mc_ = 0, nt_ = 0;   // tile of one task
  int64_t a_panel_ = 0, b_panel_ = 0;
  bool private_b_ = false;  // tiles pack their own B
  bool direct_ = false;     // accumulators live in the output
  bool serial_ = false;
  char* shared_acc_ = nullptr;  // accumulators of a super-block that outlive one run over K
};

// K = 0: the sum is 0.
void StoreZeros(const GemmKernel& kernel, const GemmStore& store) {
  ScratchFrame frame;
  const size_t bytes = static_cast<size_t>(store.n) * SizeOf(kernel.acc);
  char* zeros = static_cast<char*>(frame.AllocBytes(bytes));
  std::fill_n(zeros, bytes, 0);
  GemmStore s = store;
  s.acc = zeros;
  s.ld_acc = 0;
  kernel.store(s);
}

}  // namespace

void GemmRun(const GemmKernel& kernel, const GemmOperand& a, const GemmOperand& b, const GemmStore& store,
             int64_t columns) {
  if (store.m == 0 || store.n == 0) return;
  if (a.k == 0 && store.add) return;
  if (a.k == 0) return StoreZeros(kernel, store);
  Product(kernel, a, b, store, columns == 0 ? store.n : columns).Run();
}

}  // namespace jumar
