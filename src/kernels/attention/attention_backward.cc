// Backward. Queries that share a key head go in units of up to kUnitRows rows. A unit walks over the key blocks that
// its queries see: in each, all its panels of queries give their part to the block's dk and dv, and take their part of
// dq.
//
// Units run side by side. dk and dv of a block are the sums over its units, each unit's part taken together first, and
// units add theirs in order: one that comes too early waits for the one before it. Both start at the first key and walk
// on at the same pace, so that waits are short. What a unit is depends on shapes alone, and with it every bit.
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>

#include "base/check.h"
#include "base/parallel.h"
#include "kernels/attention/attention_backward.h"

namespace jumar {
namespace {

constexpr int64_t kUnitRows = kBackwardUnitRows;
constexpr int64_t kQueryRows = 64;   // queries whose probabilities are kept at a time
constexpr int64_t kChunkPanels = 4;  // packed panels of keys that share a range of queries
constexpr int64_t kWaveBytes = 64 << 20;

template <typename C>
class Backward {
 public:
  explicit Backward(const AttentionGradients& g)
      : g_(g), plan_(g.plan), gemm_(plan_.gemm), shape_(plan_.shape), width_(plan_.width) {
    query_rows_ = std::max(width_, kQueryRows / width_ * width_);
    d_stride_ = gemm_.PanelStride(gemm_.nr, shape_.d + shape_.rope);
    dv_stride_ = gemm_.PanelStride(gemm_.nr, shape_.dv);
    n_stride_ = gemm_.PanelStride(gemm_.nr, query_rows_);
    k_stride_ = gemm_.PanelStride(gemm_.mr, shape_.d + shape_.rope);
    v_stride_ = gemm_.PanelStride(gemm_.mr, shape_.dv);
    kt_stride_ = gemm_.PanelStride(gemm_.mr, plan_.key_block);
    p_stride_ = gemm_.PanelStride(gemm_.mr, query_rows_);
    ld_k_ = plan_.PaddedColumns(gemm_.nr);
    ld_v_ = RoundUp(shape_.dv, gemm_.nr);
    rope_row_ = RoundUp(shape_.d, gemm_.mr);
    dq_rows_ = shape_.rope == 0 ? shape_.d : rope_row_ + shape_.rope;
    tile_ = plan_.key_block * width_;
  }

  // Key heads go in waves whose dk and dv fit some megabytes.
  void Run() {
    std::vector<Item> wave;
    int64_t bytes = 0;
    for (const AttentionSequence& s : plan_.in.sequences) {
      const std::vector<UnitShape> units = Units(s);
      const int64_t size = units.size() < 2 ? 0 : s.k_len * (ld_k_ + ld_v_) * static_cast<int64_t>(sizeof(C));
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        if (bytes + size > kWaveBytes && bytes > 0) {
          Wave(wave);
          wave.clear();
          bytes = 0;
        }
        wave.push_back({&s, h, units, nullptr, nullptr, nullptr});
        bytes += size;
      }
    }
    Wave(wave);
  }

 private:
  // Rows [row, row + rows) of `heads` heads of the group from `head` on, and the key blocks that they may see.
  struct UnitShape {
    int64_t head, heads, row, rows;
    int64_t begin, end;
    bool Touches(int64_t block) const { return begin <= block && block < end; }
  };

  // One key head of a sequence.
  struct Item {
    const AttentionSequence* s;
    int64_t kv_head;
    std::vector<UnitShape> units;
    C* dk;  // sums so far, [k_len, ld]; null with one unit
    C* dv;
    std::unique_ptr<std::atomic<int64_t>[]> done;  // per key block: the last unit that has added its part
  };

  // The rows of one head in a unit.
  struct HeadRows {
    int64_t head;
    int64_t row;
    int64_t rows;
    int64_t panel;  // its first panel among those of the unit
    int64_t block;  // and its first block of queries
  };

  // Working memory of a unit. Arrays per panel: max, inverse, delta [width], dq [dq_rows, width].
  struct Memory {
    C *max, *inverse, *delta, *dq;
    C *k, *v, *kt;         // packed key block: along d, along dv, across
    C *q, *dy, *qn, *dyn;  // packed blocks of queries: along (scores), across (gradients of keys)
    C *p, *ds, *p_packed, *ds_packed, *keep;
    C *dk, *dv;  // the unit's part of a block, [key block, ld]
    C* dpse;     // and of a row of pse that serves all queries, [heads, key block]
    void* work;
  };

  std::vector<UnitShape> Units(const AttentionSequence& s) const {
    std::vector<UnitShape> units;
    const int64_t together = s.q_len == 0 ? shape_.group : std::max<int64_t>(1, kUnitRows / s.q_len);
    for (int64_t h = 0; h < shape_.group; h += together) {
      for (int64_t r = 0; r < s.q_len; r += kUnitRows) {
        UnitShape u{h, std::min(together, shape_.group - h), r, std::min(kUnitRows, s.q_len - r), 0, 0};
        const int64_t low = plan_.Low(s, r);
        const int64_t high = plan_.High(s, r + u.rows - 1);
        if (low < high) {
          u.begin = low / plan_.key_block;
          u.end = CeilDiv(high, plan_.key_block);
        }
        units.push_back(u);
      }
    }
    return units;
  }

  void Wave(std::vector<Item>& wave) {
    ScratchFrame frame;
    std::vector<int64_t> first{0};
    for (Item& item : wave) {
      const auto count = static_cast<int64_t>(item.units.size());
      first.push_back(first.back() + count);
      if (count < 2) continue;
      item.dk = frame.Alloc<C>(item.s->k_len * ld_k_);
      item.dv = frame.Alloc<C>(item.s->k_len * ld_v_);
      const auto blocks = static_cast<size_t>(CeilDiv(item.s->k_len, plan_.key_block));
      item.done = std::make_unique<std::atomic<int64_t>[]>(blocks);
      for (size_t b = 0; b < blocks; ++b) item.done[b] = -1;
    }
    ParallelChunks(static_cast<int64_t>(wave.size()), [&](int64_t i) { ClearUnseen(wave[static_cast<size_t>(i)]); });
    failed_ = false;
    ParallelChunks(first.back(), [&](int64_t task) {
      const auto at = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
      try {
        RunUnit(wave[static_cast<size_t>(at)], task - first[static_cast<size_t>(at)]);
      } catch (...) {
        failed_ = true;  // nobody may wait for this unit
        throw;
      }
    });
  }

  // Blocks that no unit sees.
  void ClearUnseen(const Item& item) {
    ScratchFrame frame;
    C* zeros = nullptr;
    for (int64_t key = 0; key < item.s->k_len; key += plan_.key_block) {
      if (Other(item, -1, 1, key / plan_.key_block) >= 0) continue;
      if (zeros == nullptr) {
        zeros = frame.Alloc<C>(plan_.key_block * std::max(ld_k_, ld_v_));
        std::fill(zeros, zeros + plan_.key_block * std::max(ld_k_, ld_v_), C(0));
      }
      StoreKeys(item, key, std::min(plan_.key_block, item.s->k_len - key), zeros, zeros);
    }
  }

  // The next unit after `u` in direction `step` that touches the block; -1: none.
  static int64_t Other(const Item& item, int64_t u, int64_t step, int64_t block) {
    const auto count = static_cast<int64_t>(item.units.size());
    for (u += step; u >= 0 && u < count; u += step) {
      if (item.units[static_cast<size_t>(u)].Touches(block)) return u;
    }
    return -1;
  }

  void RunUnit(const Item& item, int64_t unit) {
    const AttentionSequence& s = *item.s;
    const UnitShape& u = item.units[static_cast<size_t>(unit)];
    ScratchFrame frame;
    std::vector<HeadRows> heads;
    int64_t panels = 0;
    for (int64_t i = 0; i < u.heads; ++i, panels += CeilDiv(u.rows, width_)) {
      const int64_t first_block = i * CeilDiv(u.rows, query_rows_);
      heads.push_back({item.kv_head * shape_.group + u.head + i, u.row, u.rows, panels, first_block});
    }
    const Memory m = Allocate(frame, u.heads, panels, u.heads * CeilDiv(u.rows, query_rows_));
    std::fill(m.dq, m.dq + panels * dq_rows_ * width_, C(0));
    for (const HeadRows& h : heads) {
      Rows(s, h, m);
      PackQueries(s, h, m);
    }
    for (int64_t block = u.begin; block < u.end; ++block) Keys(item, unit, heads, block, m);
    std::vector<C> scale(static_cast<size_t>(width_), static_cast<C>(plan_.in.scale));
    for (const HeadRows& h : heads) {
      for (int64_t r = 0; r < h.rows; r += width_) {
        C* dq = m.dq + (h.panel + r / width_) * dq_rows_ * width_;
        const int64_t rows = std::min(width_, h.rows - r);
        const int64_t row = s.q_begin + h.row + r;
        plan_.panel.scale_lanes(dq, dq_rows_, scale.data());
        plan_.StoreLanes(dq, rows, g_.grads.dq, s.batch, h.head, row);
        if (shape_.rope == 0) continue;
        plan_.StoreLanes(dq + rope_row_ * width_, rows, g_.grads.dq_rope, s.batch, h.head, row);
      }
    }
  }

  Memory Allocate(ScratchFrame& frame, int64_t heads, int64_t panels, int64_t blocks) {
    const int64_t q_panels = query_rows_ / width_;
    const int64_t key_panels = plan_.key_block / gemm_.mr;
    Memory m;
    for (C** x : {&m.max, &m.inverse, &m.delta}) *x = frame.Alloc<C>(panels * width_);
    m.dq = frame.Alloc<C>(panels * dq_rows_ * width_);
    m.k = frame.Alloc<C>(key_panels * k_stride_);
    m.v = frame.Alloc<C>(key_panels * v_stride_);
    m.kt = frame.Alloc<C>(plan_.PaddedColumns(gemm_.mr) / gemm_.mr * kt_stride_);
    m.q = frame.Alloc<C>(panels * d_stride_);
    m.dy = frame.Alloc<C>(panels * dv_stride_);
    m.qn = frame.Alloc<C>(blocks * (ld_k_ / gemm_.nr) * n_stride_);
    m.dyn = frame.Alloc<C>(blocks * (ld_v_ / gemm_.nr) * n_stride_);
    for (C** x : {&m.p, &m.ds}) *x = frame.Alloc<C>(q_panels * tile_);
    for (C** x : {&m.p_packed, &m.ds_packed}) *x = frame.Alloc<C>(key_panels * p_stride_);
    m.keep = plan_.drops() ? frame.Alloc<C>(tile_) : nullptr;
    m.dk = frame.Alloc<C>(plan_.key_block * ld_k_);
    m.dv = frame.Alloc<C>(plan_.key_block * ld_v_);
    m.dpse = SharesPse() ? frame.Alloc<C>(heads * plan_.key_block) : nullptr;
    m.work = frame.AllocBytes(static_cast<size_t>(plan_.ScoreWorkBytes()) + static_cast<size_t>(tile_) * sizeof(C));
    return m;
  }

  bool SharesPse() const { return g_.dpse != nullptr && g_.dpse->stride[2] == 0; }

  void PackQueries(const AttentionSequence& s, const HeadRows& h, const Memory& m) {
    const AttentionPlan::Rows q{plan_.in.q, plan_.in.q_rope, s.batch, h.head, s.q_begin, s.q_len};
    const AttentionPlan::Rows dy{g_.dy, kNone, s.batch, h.head, s.q_begin, s.q_len};
    plan_.PackAlong(false, q, h.row, h.rows, d_stride_, m.q + h.panel * d_stride_);
    plan_.PackAlong(false, dy, h.row, h.rows, dv_stride_, m.dy + h.panel * dv_stride_);
    for (int64_t r = 0, at = h.block; r < h.rows; r += query_rows_, ++at) {
      const int64_t rows = std::min(query_rows_, h.rows - r);
      plan_.PackAcross(false, q, h.row + r, rows, n_stride_, m.qn + at * (ld_k_ / gemm_.nr) * n_stride_);
      plan_.PackAcross(false, dy, h.row + r, rows, n_stride_, m.dyn + at * (ld_v_ / gemm_.nr) * n_stride_);
    }
  }

  // Statistics of the rows of a head, lane by lane.
  void Rows(const AttentionSequence& s, const HeadRows& h, const Memory& m) {
    for (int64_t r = 0; r < CeilDiv(h.rows, width_) * width_; ++r) {
      const int64_t row = s.q_begin + h.row + std::min(r, h.rows - 1);
      const int64_t at = h.panel * width_ + r;
      const C sum = *reinterpret_cast<const C*>(Element(g_.sum, s.batch, h.head, row));
      m.max[at] = *reinterpret_cast<const C*>(Element(g_.max, s.batch, h.head, row));
      m.inverse[at] = sum == 0 ? C(0) : C(1) / sum;
      m.delta[at] = g_.delta.template ptr<C>()[s.batch * g_.delta.stride[0] + h.head * g_.delta.stride[1] + row];
    }
  }

  // One key block.
  void Keys(const Item& item, int64_t unit, const std::vector<HeadRows>& heads, int64_t block, const Memory& m) {
    const AttentionSequence& s = *item.s;
    const int64_t key = block * plan_.key_block;
    const int64_t n = std::min(plan_.key_block, s.k_len - key);
    bool packed = false;
    bool finite = true;
    for (const HeadRows& h : heads) {
      for (int64_t r = 0; r < h.rows; r += query_rows_) {
        const int64_t rows = std::min(query_rows_, h.rows - r);
        PanelKeys keys[kQueryRows];
        PanelKeys all{n, 0};
        bool masked = false;
        for (int64_t t = 0; t * width_ < rows; ++t) {
          keys[t] = plan_.Keys(s, h.head, h.row + r + t * width_, std::min(width_, rows - t * width_), key, n);
          if (!keys[t].any()) {
            keys[t] = {};
            masked = true;
            continue;
          }
          all.begin = std::min(all.begin, keys[t].begin);
          all.end = std::max(all.end, keys[t].end);
          masked = masked || keys[t].by_mask || keys[t].by_position;
        }
        if (!all.any()) continue;
        if (!packed) {
          finite = PackKeys(item, key, n, m);
          std::fill(m.dk, m.dk + n * ld_k_, C(0));
          std::fill(m.dv, m.dv + n * ld_v_, C(0));
          if (m.dpse != nullptr) {
            std::fill(m.dpse, m.dpse + static_cast<int64_t>(heads.size()) * plan_.key_block, C(0));
          }
          packed = true;
        }
        C* dpse = m.dpse == nullptr ? nullptr : m.dpse + (&h - heads.data()) * plan_.key_block;
        Queries(s, {h, r, rows, dpse}, key, all, keys, masked, masked && !finite, m);
      }
    }
    Add(item, unit, heads, block, n, packed, m);
  }

  // Adds the unit's part of a block (`any`: it has one) in its turn; the last unit stores the sums.
  void Add(const Item& item, int64_t unit, const std::vector<HeadRows>& heads, int64_t block, int64_t n, bool any,
           const Memory& m) {
    const int64_t key = block * plan_.key_block;
    C* dk = m.dk;
    C* dv = m.dv;
    const int64_t before = Other(item, unit, -1, block);
    const bool alone = before < 0 && Other(item, unit, 1, block) < 0;
    if (!alone) {
      for (int tries = 0; item.done[static_cast<size_t>(block)].load(std::memory_order_acquire) != before; ++tries) {
        if (failed_) return;
        if (tries > 100) std::this_thread::yield();
      }
      dk = item.dk + key * ld_k_;
      dv = item.dv + key * ld_v_;
    }
    if (before < 0 && !any) {
      std::fill(dk, dk + n * ld_k_, C(0));
      std::fill(dv, dv + n * ld_v_, C(0));
    } else if (before < 0 && !alone) {
      std::copy(m.dk, m.dk + n * ld_k_, dk);
      std::copy(m.dv, m.dv + n * ld_v_, dv);
    } else if (before >= 0 && any) {
      for (int64_t i = 0; i < n * ld_k_; ++i) dk[i] += m.dk[i];
      for (int64_t i = 0; i < n * ld_v_; ++i) dv[i] += m.dv[i];
    }
    if (m.dpse != nullptr && any) {
      const TensorView& x = *g_.dpse;
      for (size_t h = 0; h < heads.size(); ++h) {
        C* row = reinterpret_cast<C*>(Element(x, item.s->index, heads[h].head, 0)) + key;
        for (int64_t k = 0; k < n; ++k) row[k] += m.dpse[static_cast<int64_t>(h) * plan_.key_block + k];
      }
    }
    if (Other(item, unit, 1, block) < 0) {
      const C scale = static_cast<C>(plan_.in.scale);
      for (int64_t i = 0; i < n * ld_k_; ++i) dk[i] *= scale;
      StoreKeys(item, key, n, dk, dv);
    }
    if (!alone) item.done[static_cast<size_t>(block)].store(unit, std::memory_order_release);
  }

  void StoreKeys(const Item& item, int64_t key, int64_t n, const C* dk, const C* dv) {
    const int64_t row = item.s->k_begin + key;
    const auto store = [&](const C* acc, int64_t ld, const TensorView& out) {
      GemmStore to{};
      to.acc = acc;
      to.ld_acc = ld;
      to.m = n;
      to.n = out.size[3];
      to.out = Element(out, item.s->batch, item.kv_head, row);
      to.dtype = out.dtype;
      to.row_stride = out.stride[2];
      to.col_stride = out.stride[3];
      gemm_.store(to);
    };
    store(dk, ld_k_, g_.grads.dk);
    store(dv, ld_v_, g_.grads.dv);
    if (shape_.rope != 0) store(dk + RoundUp(shape_.d, gemm_.nr), ld_k_, g_.grads.dk_rope);
  }

  // False if k of the block holds NaN or infinity.
  bool PackKeys(const Item& item, int64_t key, int64_t n, const Memory& m) {
    const AttentionSequence& s = *item.s;
    const AttentionPlan::Rows k{plan_.in.k, plan_.in.k_rope, s.batch, item.kv_head, s.k_begin, s.k_len};
    plan_.PackAlong(true, k, key, n, k_stride_, m.k);
    plan_.PackAlong(true, {plan_.in.v, {}, s.batch, item.kv_head, s.k_begin, s.k_len}, key, n, v_stride_, m.v);
    plan_.PackAcross(true, k, key, n, kt_stride_, m.kt);
    return FinitePanels(plan_, m.kt, plan_.PaddedColumns(gemm_.mr) / gemm_.mr, kt_stride_, gemm_.mr, n);
  }

  // Queries [row, row + rows) of those of a head in the unit. dpse: the head's row of Memory::dpse.
  struct Block {
    const HeadRows& head;
    int64_t row;
    int64_t rows;
    C* dpse;
  };

  // One block of queries with one block of keys.
  void Queries(const AttentionSequence& s, const Block& b, int64_t key, const PanelKeys& all, const PanelKeys* keys,
               bool masked, bool skip, const Memory& m) {
    const int64_t panels = CeilDiv(b.rows, width_);
    const HeadRows& h = b.head;
    const int64_t block_at = h.block + b.row / query_rows_;
    const C* qn = m.qn + block_at * (ld_k_ / gemm_.nr) * n_stride_;
    const C* dyn = m.dyn + block_at * (ld_v_ / gemm_.nr) * n_stride_;
    for (int64_t t = 0; t < panels; ++t) {
      const int64_t rows = std::min(width_, b.rows - t * width_);
      C* p = m.p + t * tile_;
      C* ds = m.ds + t * tile_;
      if (keys[t].any()) Panel(s, {h, b.row + t * width_, rows, b.dpse}, t, key, keys[t], skip, m);
      for (C* x : {p, ds}) {
        std::fill(x, x + keys[t].begin * width_, C(0));
        std::fill(x + keys[t].end * width_, x + all.end * width_, C(0));
      }
      const GemmOperand pt{p, shape_.compute, all.end, rows, width_, 1};
      const GemmOperand dst{ds, shape_.compute, all.end, rows, width_, 1};
      gemm_.pack_a({&pt, 0, all.end, 0, rows, p_stride_, m.p_packed + t * width_ * gemm_.mr});
      gemm_.pack_a({&dst, 0, all.end, 0, rows, p_stride_, m.ds_packed + t * width_ * gemm_.mr});
    }
    const bool finite_q = !masked || FinitePanels(plan_, qn, ld_k_ / gemm_.nr, n_stride_, gemm_.nr, b.rows);
    const bool finite_dy = !masked || FinitePanels(plan_, dyn, ld_v_ / gemm_.nr, n_stride_, gemm_.nr, b.rows);
    const int64_t chunk = kChunkPanels * gemm_.mr;
    for (int64_t c = all.begin / chunk * chunk; c < all.end; c += chunk) {
      const int64_t end = std::min(c + chunk, all.end);
      int64_t t0 = panels;
      int64_t t1 = 0;
      for (int64_t t = 0; t < panels; ++t) {
        if (keys[t].begin >= end || keys[t].end <= c) continue;
        t0 = std::min(t0, t);
        t1 = t + 1;
      }
      if (t0 >= t1) continue;
      GemmBlock block;
      block.m = end - c;
      block.kc = std::min(t1 * width_, b.rows) - t0 * width_;
      block.a_panel = p_stride_;
      block.b_panel = n_stride_;
      block.accumulate = true;
      const int64_t a = c / gemm_.mr * p_stride_ + t0 * width_ * gemm_.mr;
      const auto product = [&](const C* left, const C* right, C* sum, int64_t n, bool finite) {
        block.n = n;
        block.a = left + a;
        block.b = right + t0 * width_ * gemm_.nr;
        block.c = sum + c * n;
        block.ldc = n;
        finite ? gemm_.multiply_near(block) : MultiplySkippingZeros(gemm_, block, true);
      };
      product(m.p_packed, dyn, m.dv, ld_v_, finite_dy);
      product(m.ds_packed, qn, m.dk, ld_k_, finite_q);
    }
  }

  // p and ds of one panel, and its part of dq.
  void Panel(const AttentionSequence& s, const Block& b, int64_t t, int64_t key, const PanelKeys& keys, bool skip,
             const Memory& m) {
    C* p = m.p + t * tile_;
    C* ds = m.ds + t * tile_;
    const int64_t panel = b.head.panel + b.row / width_;
    const int64_t row = b.head.row + b.row;
    const int64_t from = keys.begin * width_;
    const int64_t n = keys.end - keys.begin;
    const bool scaled =
        plan_.Scores(s, b.head.head, row, b.rows, key, keys, m.k, k_stride_, m.q + panel * d_stride_, p, m.work);
    GemmBlock block;
    block.m = n;
    block.n = width_;
    block.kc = shape_.dv;
    block.a = m.v + keys.begin / gemm_.mr * v_stride_;
    block.a_panel = v_stride_;
    block.b = m.dy + panel * dv_stride_;
    block.b_panel = 0;
    block.c = ds + from;
    block.ldc = width_;
    block.accumulate = false;
    gemm_.multiply_near(block);
    if (m.keep != nullptr) plan_.Keep(s, b.head.head, row, b.rows, key + keys.begin, n, m.keep);
    PanelGradient g{};
    g.scores = p + from;
    g.dp = ds + from;
    g.n = n;
    g.scale = scaled ? 1.0 : plan_.in.scale;
    g.max = m.max + panel * width_;
    g.inverse_sum = m.inverse + panel * width_;
    g.delta = m.delta + panel * width_;
    g.keep = m.keep;
    g.masked = keys.by_mask || keys.by_position;
    plan_.panel.gradient(g);
    if (g_.dpse != nullptr) AddPse(s, b, key, keys.begin, n, ds + from);
    block.m = dq_rows_;
    block.kc = n;
    block.a = m.kt + keys.begin * gemm_.mr;
    block.a_panel = kt_stride_;
    block.b = ds + from;
    block.c = m.dq + panel * dq_rows_ * width_;
    block.accumulate = true;
    skip&& g.masked ? MultiplySkippingZeros(gemm_, block, false) : gemm_.multiply_near(block);
  }

  // dpse += scale * ds. Rows that do not serve all queries belong to this unit alone.
  void AddPse(const AttentionSequence& s, const Block& b, int64_t key, int64_t begin, int64_t n, const C* ds) {
    const C scale = static_cast<C>(plan_.in.scale);
    const int64_t first = plan_.in.pse_first;
    for (int64_t r = 0; r < b.rows; ++r) {
      const int64_t i = b.head.row + b.row + r;
      C* row = b.dpse;
      int64_t count = n;
      if (row == nullptr) {
        const bool early = i < first;
        const int64_t at = early ? plan_.in.pse.size[2] + i / kUnitRows : i - first;
        const int64_t column = key + (early ? first - i : 0);
        row = reinterpret_cast<C*>(Element(*g_.dpse, s.index, b.head.head, at)) + column;
        count = std::min(n, g_.dpse->size[3] - column - begin);  // keys beyond are hidden
      }
      for (int64_t k = 0; k < count; ++k) row[begin + k] += scale * ds[k * width_ + r];
    }
  }

  const AttentionGradients& g_;
  const AttentionPlan& plan_;
  const GemmKernel& gemm_;
  const AttentionShape& shape_;
  int64_t width_;
  int64_t query_rows_;
  int64_t d_stride_, dv_stride_, n_stride_, k_stride_, v_stride_, kt_stride_, p_stride_;
  int64_t ld_k_, ld_v_, tile_;
  int64_t rope_row_, dq_rows_;  // rows of dq^T in a panel: those of q_rope begin a panel of keys across
  std::atomic<bool> failed_{false};
  static constexpr TensorView kNone{};
};

}  // namespace

void AttentionBackwardTasks(const AttentionGradients& g) {
  if (g.plan.shape.compute == DType::kF64) {
    Backward<double>(g).Run();
  } else {
    Backward<float>(g).Run();
  }
}

}  // namespace jumar
