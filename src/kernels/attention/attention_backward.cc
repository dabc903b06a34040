// Backward: a task is one key head of a sequence with all query heads that share it. Its key blocks come one after
// another; for each, all panels of queries give their part to the block's dk and dv, and take their part of dq.
//
// dk and dv of a block are summed over units, a unit being up to kUnitRows queries of one head, and the sums of units
// are added in order. Who computes a unit does not matter for the bits.
#include <cmath>

#include "base/parallel.h"
#include "kernels/attention/attention_backward.h"

namespace jumar {
namespace {

constexpr int64_t kUnitRows = 4096;
constexpr int64_t kQueryRows = 64;   // queries whose probabilities are kept at a time
constexpr int64_t kChunkPanels = 4;  // packed panels of keys that share a range of queries

template <typename C>
class Backward {
 public:
  explicit Backward(const AttentionGradients& g)
      : g_(g), plan_(g.plan), gemm_(plan_.gemm), shape_(plan_.shape), width_(plan_.width) {
    query_rows_ = std::max(width_, kQueryRows / width_ * width_);
    d_stride_ = gemm_.PanelStride(gemm_.nr, shape_.d);
    dv_stride_ = gemm_.PanelStride(gemm_.nr, shape_.dv);
    n_stride_ = gemm_.PanelStride(gemm_.nr, query_rows_);
    k_stride_ = gemm_.PanelStride(gemm_.mr, shape_.d);
    v_stride_ = gemm_.PanelStride(gemm_.mr, shape_.dv);
    kt_stride_ = gemm_.PanelStride(gemm_.mr, plan_.key_block);
    p_stride_ = gemm_.PanelStride(gemm_.mr, query_rows_);
    ld_k_ = CeilDiv(shape_.d, gemm_.nr) * gemm_.nr;
    ld_v_ = CeilDiv(shape_.dv, gemm_.nr) * gemm_.nr;
    tile_ = plan_.key_block * width_;
  }

  void Run() {
    const auto sequences = static_cast<int64_t>(plan_.in.sequences.size());
    ParallelChunks(sequences * shape_.kv_heads, [&](int64_t task) {
      Task(plan_.in.sequences[static_cast<size_t>(task / shape_.kv_heads)], task % shape_.kv_heads);
    });
  }

 private:
  // q and dy of one head of a sequence: side by side in memory, since they are read once per key block.
  struct Head {
    TensorView q;
    TensorView dy;
  };

  struct Unit {
    int64_t head;
    int64_t row;
    int64_t rows;
    int64_t panel;  // its first panel among those of the task
  };

  // Working memory of a task. Arrays per panel: max, inverse, delta [width], dq [d, width].
  struct Memory {
    C *max, *inverse, *delta, *dq;
    C *k, *v, *kt;         // packed key block: along d, along dv, across
    C *q, *dy, *qn, *dyn;  // packed queries: along (scores), across (gradients of keys)
    C *p, *ds, *p_packed, *ds_packed, *keep;
    C *dk, *dv, *unit_dk, *unit_dv;  // [key block, ld]
    void* work;
    const Head* heads;
    int64_t first_head;
  };

  // [1, 1, q_len, columns] of one head; a copy where rows lie apart.
  TensorView Dense(const TensorView& x, const AttentionSequence& s, int64_t head, ScratchFrame& frame) const {
    TensorView view = x;
    view.size[0] = view.size[1] = 1;
    view.size[2] = s.q_len;
    view.data = Element(x, s.batch, head, s.q_begin);
    const int64_t cols = x.size[3];
    const size_t bytes = SizeOf(x.dtype);
    if (x.stride[3] != 1 || x.stride[2] == cols || s.q_len == 0) return view;
    char* copy = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(s.q_len * cols) * bytes));
    for (int64_t r = 0; r < s.q_len; ++r) {
      std::copy_n(At(view.data, r * x.stride[2], bytes), static_cast<size_t>(cols) * bytes, At(copy, r * cols, bytes));
    }
    view.data = copy;
    view.stride[2] = cols;
    return view;
  }

  void Task(const AttentionSequence& s, int64_t kv_head) {
    std::vector<Unit> units;
    int64_t panels = 0;
    for (int64_t h = kv_head * shape_.group; h < (kv_head + 1) * shape_.group; ++h) {
      for (int64_t r = 0; r < s.q_len; r += kUnitRows) {
        units.push_back({h, r, std::min(kUnitRows, s.q_len - r), panels});
        panels += CeilDiv(units.back().rows, width_);
      }
    }
    ScratchFrame frame;
    std::vector<Head> heads;
    for (int64_t h = kv_head * shape_.group; h < (kv_head + 1) * shape_.group; ++h) {
      heads.push_back({Dense(plan_.in.q, s, h, frame), Dense(g_.dy, s, h, frame)});
    }
    Memory m = Allocate(frame, panels);
    m.heads = heads.data();
    m.first_head = kv_head * shape_.group;
    std::fill(m.dq, m.dq + panels * shape_.d * width_, C(0));
    for (const Unit& u : units) Rows(s, u, m);
    for (int64_t key = 0; key < s.k_len; key += plan_.key_block) {
      Keys(s, kv_head, units, key, std::min(plan_.key_block, s.k_len - key), m);
    }
    std::vector<C> scale(static_cast<size_t>(width_), static_cast<C>(plan_.in.scale));
    for (const Unit& u : units) {
      for (int64_t r = 0; r < u.rows; r += width_) {
        C* dq = m.dq + (u.panel + r / width_) * shape_.d * width_;
        plan_.panel.scale_lanes(dq, shape_.d, scale.data());
        plan_.StoreLanes(dq, std::min(width_, u.rows - r), g_.dq, s.batch, u.head, s.q_begin + u.row + r);
      }
    }
  }

  Memory Allocate(ScratchFrame& frame, int64_t panels) {
    const int64_t q_panels = query_rows_ / width_;
    const int64_t key_panels = plan_.key_block / gemm_.mr;
    Memory m;
    for (C** x : {&m.max, &m.inverse, &m.delta}) *x = frame.Alloc<C>(panels * width_);
    m.dq = frame.Alloc<C>(panels * shape_.d * width_);
    m.k = frame.Alloc<C>(key_panels * k_stride_);
    m.v = frame.Alloc<C>(key_panels * v_stride_);
    m.kt = frame.Alloc<C>(CeilDiv(shape_.d, gemm_.mr) * kt_stride_);
    m.q = frame.Alloc<C>(q_panels * d_stride_);
    m.dy = frame.Alloc<C>(q_panels * dv_stride_);
    m.qn = frame.Alloc<C>(ld_k_ / gemm_.nr * n_stride_);
    m.dyn = frame.Alloc<C>(ld_v_ / gemm_.nr * n_stride_);
    for (C** x : {&m.p, &m.ds}) *x = frame.Alloc<C>(q_panels * tile_);
    for (C** x : {&m.p_packed, &m.ds_packed}) *x = frame.Alloc<C>(key_panels * p_stride_);
    m.keep = plan_.drops() ? frame.Alloc<C>(tile_) : nullptr;
    for (C** x : {&m.dk, &m.unit_dk}) *x = frame.Alloc<C>(plan_.key_block * ld_k_);
    for (C** x : {&m.dv, &m.unit_dv}) *x = frame.Alloc<C>(plan_.key_block * ld_v_);
    m.work = frame.AllocBytes(static_cast<size_t>(plan_.ScoreWorkBytes()) + static_cast<size_t>(tile_) * sizeof(C));
    return m;
  }

  // Statistics of a unit's rows, lane by lane.
  void Rows(const AttentionSequence& s, const Unit& u, const Memory& m) {
    for (int64_t r = 0; r < CeilDiv(u.rows, width_) * width_; ++r) {
      const int64_t row = s.q_begin + u.row + std::min(r, u.rows - 1);
      const int64_t at = u.panel * width_ + r;
      const C sum = *reinterpret_cast<const C*>(Element(g_.sum, s.batch, u.head, row));
      m.max[at] = *reinterpret_cast<const C*>(Element(g_.max, s.batch, u.head, row));
      m.inverse[at] = sum == 0 ? C(0) : C(1) / sum;
      m.delta[at] = g_.delta.template ptr<C>()[s.batch * g_.delta.stride[0] + u.head * g_.delta.stride[1] + row];
    }
  }

  // One key block.
  void Keys(const AttentionSequence& s, int64_t kv_head, const std::vector<Unit>& units, int64_t key, int64_t n,
            const Memory& m) {
    std::fill(m.dk, m.dk + n * ld_k_, C(0));
    std::fill(m.dv, m.dv + n * ld_v_, C(0));
    bool packed = false;
    bool finite = true;
    for (const Unit& u : units) {
      bool first = true;
      for (int64_t r = 0; r < u.rows; r += query_rows_) {
        const int64_t rows = std::min(query_rows_, u.rows - r);
        PanelKeys keys[kQueryRows];
        PanelKeys all{n, 0};
        bool masked = false;
        for (int64_t t = 0; t * width_ < rows; ++t) {
          keys[t] = plan_.Keys(s, u.head, u.row + r + t * width_, std::min(width_, rows - t * width_), key, n);
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
          finite = PackKeys(s, kv_head, key, n, m);
          packed = true;
        }
        if (first) {
          std::fill(m.unit_dk, m.unit_dk + n * ld_k_, C(0));
          std::fill(m.unit_dv, m.unit_dv + n * ld_v_, C(0));
          first = false;
        }
        Queries(s, {u.head, u.row + r, rows, u.panel + r / width_}, key, all, keys, masked, masked && !finite, m);
      }
      if (first) continue;
      for (int64_t i = 0; i < n * ld_k_; ++i) m.dk[i] += m.unit_dk[i];
      for (int64_t i = 0; i < n * ld_v_; ++i) m.dv[i] += m.unit_dv[i];
    }
    const C scale = static_cast<C>(plan_.in.scale);
    for (int64_t i = 0; i < n * ld_k_; ++i) m.dk[i] *= scale;
    StoreKeys(m.dk, ld_k_, n, shape_.d, g_.dk, s.batch, kv_head, s.k_begin + key);
    StoreKeys(m.dv, ld_v_, n, shape_.dv, g_.dv, s.batch, kv_head, s.k_begin + key);
  }

  void StoreKeys(const C* acc, int64_t ld, int64_t n, int64_t cols, const TensorView& out, int64_t batch, int64_t head,
                 int64_t row) {
    GemmStore store{};
    store.acc = acc;
    store.ld_acc = ld;
    store.m = n;
    store.n = cols;
    store.out = Element(out, batch, head, row);
    store.dtype = out.dtype;
    store.row_stride = out.stride[2];
    store.col_stride = out.stride[3];
    gemm_.store(store);
  }

  // False if k of the block holds NaN or infinity.
  bool PackKeys(const AttentionSequence& s, int64_t kv_head, int64_t key, int64_t n, const Memory& m) {
    const GemmOperand k = plan_.Along(plan_.in.k, s.batch, kv_head, s.k_begin, s.k_len);
    const GemmOperand v = plan_.Along(plan_.in.v, s.batch, kv_head, s.k_begin, s.k_len);
    const GemmOperand kt = plan_.Across(plan_.in.k, s.batch, kv_head, s.k_begin, s.k_len, key + n - 1);
    gemm_.pack_a({&k, key, n, 0, shape_.d, k_stride_, m.k});
    gemm_.pack_a({&v, key, n, 0, shape_.dv, v_stride_, m.v});
    gemm_.pack_a({&kt, 0, shape_.d, key, n, kt_stride_, m.kt});
    return FinitePanels(plan_, m.kt, CeilDiv(shape_.d, gemm_.mr), kt_stride_, gemm_.mr, n);
  }

  // One block of queries with one block of keys.
  void Queries(const AttentionSequence& s, const Unit& u, int64_t key, const PanelKeys& all, const PanelKeys* keys,
               bool masked, bool skip, const Memory& m) {
    const int64_t panels = CeilDiv(u.rows, width_);
    const int64_t last = u.row + u.rows - 1;
    const Head& head = m.heads[u.head - m.first_head];
    const GemmOperand q = plan_.Along(head.q, 0, 0, 0, s.q_len);
    const GemmOperand dy = plan_.Along(head.dy, 0, 0, 0, s.q_len);
    const GemmOperand qn = plan_.Across(head.q, 0, 0, 0, s.q_len, last);
    const GemmOperand dyn = plan_.Across(head.dy, 0, 0, 0, s.q_len, last);
    gemm_.pack_b({&q, u.row, u.rows, 0, shape_.d, d_stride_, m.q});
    gemm_.pack_b({&dy, u.row, u.rows, 0, shape_.dv, dv_stride_, m.dy});
    gemm_.pack_b({&qn, 0, shape_.d, u.row, u.rows, n_stride_, m.qn});
    gemm_.pack_b({&dyn, 0, shape_.dv, u.row, u.rows, n_stride_, m.dyn});
    for (int64_t t = 0; t < panels; ++t) {
      const int64_t rows = std::min(width_, u.rows - t * width_);
      C* p = m.p + t * tile_;
      C* ds = m.ds + t * tile_;
      if (keys[t].any()) Panel(s, {u.head, u.row + t * width_, rows, u.panel + t}, t, key, keys[t], skip, m);
      for (C* x : {p, ds}) {
        std::fill(x, x + keys[t].begin * width_, C(0));
        std::fill(x + keys[t].end * width_, x + all.end * width_, C(0));
      }
      const GemmOperand pt{p, shape_.compute, all.end, rows, width_, 1};
      const GemmOperand dst{ds, shape_.compute, all.end, rows, width_, 1};
      gemm_.pack_a({&pt, 0, all.end, 0, rows, p_stride_, m.p_packed + t * width_ * gemm_.mr});
      gemm_.pack_a({&dst, 0, all.end, 0, rows, p_stride_, m.ds_packed + t * width_ * gemm_.mr});
    }
    const bool finite_q = !masked || FinitePanels(plan_, m.qn, ld_k_ / gemm_.nr, n_stride_, gemm_.nr, u.rows);
    const bool finite_dy = !masked || FinitePanels(plan_, m.dyn, ld_v_ / gemm_.nr, n_stride_, gemm_.nr, u.rows);
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
      block.kc = std::min(t1 * width_, u.rows) - t0 * width_;
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
      product(m.p_packed, m.dyn, m.unit_dv, ld_v_, finite_dy);
      product(m.ds_packed, m.qn, m.unit_dk, ld_k_, finite_q);
    }
  }

  // p and ds of one panel, and its part of dq.
  void Panel(const AttentionSequence& s, const Unit& u, int64_t t, int64_t key, const PanelKeys& keys, bool skip,
             const Memory& m) {
    C* p = m.p + t * tile_;
    C* ds = m.ds + t * tile_;
    const int64_t from = keys.begin * width_;
    const int64_t n = keys.end - keys.begin;
    const bool scaled =
        plan_.Scores(s, u.head, u.row, u.rows, key, keys, m.k, k_stride_, m.q + t * d_stride_, p, m.work);
    GemmBlock block;
    block.m = n;
    block.n = width_;
    block.kc = shape_.dv;
    block.a = m.v + keys.begin / gemm_.mr * v_stride_;
    block.a_panel = v_stride_;
    block.b = m.dy + t * dv_stride_;
    block.b_panel = 0;
    block.c = ds + from;
    block.ldc = width_;
    block.accumulate = false;
    gemm_.multiply_near(block);
    if (m.keep != nullptr) plan_.Keep(s, u.head, u.row, u.rows, key + keys.begin, n, m.keep);
    PanelGradient g{};
    g.scores = p + from;
    g.dp = ds + from;
    g.n = n;
    g.scale = scaled ? 1.0 : plan_.in.scale;
    g.max = m.max + u.panel * width_;
    g.inverse_sum = m.inverse + u.panel * width_;
    g.delta = m.delta + u.panel * width_;
    g.keep = m.keep;
    g.masked = keys.by_mask || keys.by_position;
    plan_.panel.gradient(g);
    if (g_.dpse != nullptr) AddPse(s, u, key + keys.begin, n, ds + from);
    block.m = shape_.d;
    block.kc = n;
    block.a = m.kt + keys.begin * gemm_.mr;
    block.a_panel = kt_stride_;
    block.b = ds + from;
    block.c = m.dq + u.panel * shape_.d * width_;
    block.accumulate = true;
    skip&& g.masked ? MultiplySkippingZeros(gemm_, block, false) : gemm_.multiply_near(block);
  }

  // dpse += scale * ds. Its elements belong to this task alone; rows that share one go in order.
  void AddPse(const AttentionSequence& s, const Unit& u, int64_t key, int64_t n, const C* ds) {
    const TensorView& x = *g_.dpse;
    const C scale = static_cast<C>(plan_.in.scale);
    for (int64_t r = 0; r < u.rows; ++r) {
      C* row =
          x.ptr<C>() + s.index * x.stride[0] + u.head * x.stride[1] + (u.row + r) * x.stride[2] + key * x.stride[3];
      for (int64_t k = 0; k < n; ++k) row[k * x.stride[3]] += scale * ds[k * width_ + r];
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
