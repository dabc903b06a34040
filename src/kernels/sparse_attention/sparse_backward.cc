// Backward, in waves of units. First every unit of a wave takes its probabilities p and their gradients ds again, and
// gives dq. Then tasks, each of which owns some columns of the gradients of keys, take the wave's units in order and
// add p and ds times rows of dy and q to the rows that the units picked. Who owns which columns does not matter for the
// bits: an element of dk is summed over units in ascending order, whatever the number of threads.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "jumar/runtime.h"
#include "kernels/sparse_attention/sparse_blocks.h"

namespace jumar {
namespace {

constexpr int64_t kWaveBytes = 4 << 20;
constexpr int64_t kSliceBytes = 2 << 20;  // of the sums of a slice: they are picked at random
constexpr int64_t kMaxSlice = 64;         // columns

template <typename C>
class Backward {
 public:
  Backward(const SparsePlan& plan, const TensorView& dy, const TensorView& out, const TensorView& max,
           const TensorView& sum, const SparseAttentionGradients& g)
      : plan_(plan), shape_(plan.shape), width_(plan.width), dy_(dy), out_(out), max_(max), sum_(sum), g_(g) {
    rows_ = shape_.batch * shape_.kv_heads * shape_.keys;
    slice_ = std::min(kMaxSlice, std::max<int64_t>(1, kSliceBytes / (rows_ + 1) / Bytes() / width_) * width_);
    while (slice_ > width_ && Slices(shape_.d) + Slices(shape_.dr) + Slices(shape_.dv) < 2 * NumThreads()) {
      slice_ = RoundUp(slice_ / 2, width_);
    }
    AddPart(plan.in.q, &Item::ds, g.dk);
    if (shape_.dr > 0) AddPart(plan.in.q_rope, &Item::ds, g.dk_rope);
    AddPart(dy, &Item::p, g.dv);
  }

  void Run() {
    const int64_t units = plan_.units();
    const int64_t unit_bytes = 2 * plan_.panels * width_ * std::max<int64_t>(plan_.MaxSlots(), 1) * Bytes();
    const int64_t wave = std::clamp<int64_t>(kWaveBytes / unit_bytes, 4 * NumThreads(), 1024);
    if (g_.dsinks.rank != 0) delta_ = HeapBuffer(units * shape_.group * Bytes());
    for (int64_t u = 0; u < units; u += wave) Wave(u, std::min(wave, units - u));
    StoreKeys();
    if (g_.dsinks.rank != 0) Sinks();
  }

 private:
  // A unit of a wave and what it gives to its keys.
  struct Item {
    SparseUnit unit;
    int64_t n = 0;
    int32_t* rows = nullptr;
    C* p = nullptr;  // panels [n, width]
    C* ds = nullptr;
  };

  // dk, dk_rope or dv: sums over units of panel * rows of `x`, in slices of columns that lie one after another.
  struct Part {
    const TensorView* x;
    C* Item::*panel;
    const TensorView* out;
    int64_t cols;
    HeapBuffer sums;  // [slices][batch, kv_heads, keys][slice]
  };

  static constexpr int64_t Bytes() { return static_cast<int64_t>(sizeof(C)); }
  int64_t Slices(int64_t cols) const { return CeilDiv(cols, slice_); }

  void AddPart(const TensorView& x, C* Item::*panel, const TensorView& out) {
    const int64_t cols = x.size[3];
    const int64_t count = Slices(cols) * rows_ * slice_;
    Part part{&x, panel, &out, cols, HeapBuffer(count * Bytes())};
    C* sums = static_cast<C*>(part.sums.data());
    ParallelFor(count, 1 << 16, [&](int64_t begin, int64_t end) { std::fill(sums + begin, sums + end, C(0)); });
    parts_.push_back(std::move(part));
  }

  void Wave(int64_t first, int64_t count) {
    ScratchFrame frame;
    std::vector<Item> items(static_cast<size_t>(count));
    int32_t* rows = frame.Alloc<int32_t>(count * plan_.MaxSlots());
    const int64_t panel = plan_.panels * plan_.MaxSlots() * width_;
    C* panels = frame.Alloc<C>(2 * count * panel);
    ParallelChunks(count, [&](int64_t i) {
      Item& item = items[static_cast<size_t>(i)];
      item.unit = plan_.Unit(first + i);
      item.rows = rows + i * plan_.MaxSlots();
      item.n = plan_.ListSlots(item.unit, item.rows);
      item.p = panels + 2 * i * panel;
      item.ds = item.p + panel;
      Queries(item, first + i);
    });
    std::vector<std::pair<const Part*, int64_t>> tasks;
    for (const Part& part : parts_) {
      for (int64_t s = 0; s < Slices(part.cols); ++s) tasks.emplace_back(&part, s);
    }
    ParallelChunks(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const auto& [part, slice] = tasks[static_cast<size_t>(t)];
      Keys(items, *part, slice);
    });
  }

  // p and ds of a unit, and dq.
  void Queries(const Item& item, int64_t index) {
    const SparseUnit& unit = item.unit;
    const int64_t n = item.n;
    ScratchFrame frame;
    const void** k = frame.Alloc<const void*>(n);
    const void** v = frame.Alloc<const void*>(n);
    const void** k_rope = frame.Alloc<const void*>(n);
    plan_.Pointers(plan_.k(), unit, item.rows, n, k);
    plan_.Pointers(plan_.v(), unit, item.rows, n, v);
    if (shape_.dr > 0) plan_.Pointers(plan_.k_rope(), unit, item.rows, n, k_rope);
    C* work = frame.Alloc<C>(plan_.PanelElements(std::max(shape_.d, shape_.dr)));
    C* dy = frame.Alloc<C>(plan_.PanelElements(shape_.dv));
    C* out = frame.Alloc<C>(plan_.PanelElements(shape_.dv));
    C* max = frame.Alloc<C>(width_);
    C* inverse = frame.Alloc<C>(width_);
    C* delta = frame.Alloc<C>(width_);
    const int64_t ld = RoundUp(shape_.d, width_);
    const int64_t ld_rope = RoundUp(shape_.dr, width_);
    C* dq = frame.Alloc<C>(shape_.group * ld);
    C* dq_rope = frame.Alloc<C>(shape_.group * ld_rope);
    if (n == 0) {
      std::fill(dq, dq + shape_.group * ld, C(0));
      std::fill(dq_rope, dq_rope + shape_.group * ld_rope, C(0));
    }
    std::vector<C> scale(static_cast<size_t>(width_), static_cast<C>(plan_.in.scale));
    for (int64_t p = 0; p < plan_.panels; ++p) {
      const int64_t lanes = plan_.LanesOf(p);
      const int64_t first = p * width_;
      plan_.PackLanes(dy_, unit, p, dy);
      plan_.PackLanes(out_, unit, p, out);
      plan_.panel.dot_lanes(dy, out, shape_.dv, delta);
      if (delta_.data() != nullptr) {
        std::copy_n(delta, lanes, static_cast<C*>(delta_.data()) + index * shape_.group + first);
      }
      if (n == 0) continue;
      for (int64_t i = 0; i < width_; ++i) {
        const C sum = Statistic(sum_, unit, first + std::min(i, lanes - 1));
        max[i] = Statistic(max_, unit, first + std::min(i, lanes - 1));
        inverse[i] = sum == 0 ? C(0) : C(1) / sum;
      }
      C* prob = item.p + p * n * width_;
      C* ds = item.ds + p * n * width_;
      plan_.Scores(unit, p, n, k, k_rope, work, prob);
      plan_.products.dots({v, n, shape_.dv, dy, lanes, ds, false});
      PanelGradient gradient{};
      gradient.scores = prob;
      gradient.dp = ds;
      gradient.n = n;
      gradient.scale = plan_.in.scale;
      gradient.max = max;
      gradient.inverse_sum = inverse;
      gradient.delta = delta;
      plan_.panel.gradient(gradient);
      plan_.panel.scale_lanes(ds, n, scale.data());
      plan_.products.sums({k, n, shape_.d, ds, lanes, dq + first * ld, ld, false});
      if (shape_.dr > 0) {
        plan_.products.sums({k_rope, n, shape_.dr, ds, lanes, dq_rope + first * ld_rope, ld_rope, false});
      }
    }
    plan_.StoreHeads(dq, ld, g_.dq, unit);
    if (shape_.dr > 0) plan_.StoreHeads(dq_rope, ld_rope, g_.dq_rope, unit);
  }

  // Columns [slice * slice_, ..) of a part.
  void Keys(const std::vector<Item>& items, const Part& part, int64_t slice) {
    const int64_t col = slice * slice_;
    const int64_t cols = std::min(slice_, part.cols - col);
    const int64_t b_panel = plan_.PanelElements(width_);
    C* sums = static_cast<C*>(part.sums.data()) + slice * rows_ * slice_;
    ScratchFrame frame;
    C* b = frame.Alloc<C>(CeilDiv(cols, width_) * b_panel);
    void** rows = frame.Alloc<void*>(plan_.MaxSlots());
    for (const Item& item : items) {
      C* base = sums + (item.unit.batch * shape_.kv_heads + item.unit.kv_head) * shape_.keys * slice_;
      for (int64_t i = 0; i < item.n; ++i) rows[i] = base + item.rows[i] * slice_;
      for (int64_t p = 0; p < plan_.panels && item.n > 0; ++p) {
        const int64_t lanes = plan_.LanesOf(p);
        const GemmOperand across = plan_.Across(*part.x, item.unit);
        plan_.gemm.pack_b({&across, col, cols, p * width_, lanes, b_panel, b});
        plan_.products.updates(
            {rows, item.n, RoundUp(cols, width_), item.*part.panel + p * item.n * width_, lanes, b, b_panel});
      }
    }
  }

  void StoreKeys() {
    constexpr int64_t kRows = 256;
    const int64_t blocks = CeilDiv(shape_.keys, kRows);
    for (const Part& part : parts_) {
      const int64_t heads = shape_.batch * shape_.kv_heads;
      ParallelChunks(heads * blocks, [&](int64_t task) {
        const int64_t head = task / blocks;
        const int64_t row = task % blocks * kRows;
        const TensorView& x = *part.out;
        const int64_t at =
            head / shape_.kv_heads * x.stride[0] + row * x.stride[1] + head % shape_.kv_heads * x.stride[2];
        for (int64_t s = 0; s < Slices(part.cols); ++s) {
          GemmStore store{};
          store.acc = static_cast<const C*>(part.sums.data()) + (s * rows_ + head * shape_.keys + row) * slice_;
          store.ld_acc = slice_;
          store.m = std::min(kRows, shape_.keys - row);
          store.n = std::min(slice_, part.cols - s * slice_);
          store.out = At(x.data, at + s * slice_ * x.stride[3], static_cast<int64_t>(SizeOf(x.dtype)));
          store.dtype = x.dtype;
          store.row_stride = x.stride[1];
          store.col_stride = x.stride[3];
          plan_.gemm.store(store);
        }
      });
    }
  }

  // -sum over queries of exp(sink - max) / sum * delta.
  void Sinks() {
    const TensorView& sinks = plan_.in.sinks;
    ParallelFor(shape_.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) {
        const double sink = sinks.ptr<const C>()[h * sinks.stride[0]];
        const int64_t lane = h % shape_.group;
        double total = 0;
        for (int64_t u = h / shape_.group; u < plan_.units(); u += shape_.kv_heads) {
          const SparseUnit unit = plan_.Unit(u);
          const double sum = Statistic(sum_, unit, lane);
          if (sum == 0) continue;
          const double weight = std::exp(sink - static_cast<double>(Statistic(max_, unit, lane))) / sum;
          total -= weight * static_cast<const C*>(delta_.data())[u * shape_.group + lane];
        }
        g_.dsinks.ptr<C>()[h * g_.dsinks.stride[0]] = static_cast<C>(total);
      }
    });
  }

  static C Statistic(const TensorView& x, const SparseUnit& unit, int64_t head) {
    return x.ptr<const C>()[unit.batch * x.stride[0] + unit.kv_head * x.stride[1] + unit.query * x.stride[2] +
                            head * x.stride[3]];
  }

  const SparsePlan& plan_;
  const SparseShape& shape_;
  int64_t width_;
  const TensorView& dy_;
  const TensorView& out_;
  const TensorView& max_;
  const TensorView& sum_;
  const SparseAttentionGradients& g_;
  int64_t rows_;   // of the sums
  int64_t slice_;  // columns of a slice
  std::vector<Part> parts_;
  HeapBuffer delta_;  // [units, group]
};

}  // namespace

void SparseAttentionBackward(const char* op, const SparseAttentionInputs& in, const TensorView& dy,
                             const TensorView& out, const TensorView& max, const TensorView& sum,
                             const SparseAttentionGradients& g) {
  const SparseShape shape = CheckSparseAttention(op, in, out, max, sum);
  const auto like = [&](const char* name, const TensorView& x, const TensorView& model) {
    JUMAR_CHECK(op, SameShape(x, model) && (model.rank == 0 || x.dtype == model.dtype), name, " must be ",
                Describe(model), ", got ", Describe(x));
  };
  like("d_out", dy, out);
  like("dq", g.dq, in.q);
  like("dk", g.dk, in.k);
  like("dv", g.dv, in.v);
  like("dq_rope", g.dq_rope, in.q_rope);
  like("dk_rope", g.dk_rope, in.k_rope);
  if (g.dsinks.rank != 0) like("dsinks", g.dsinks, in.sinks);
  const SparsePlan plan(op, in, shape);
  if (shape.compute == DType::kF64) {
    Backward<double>(plan, dy, out, max, sum, g).Run();
  } else {
    Backward<float>(plan, dy, out, max, sum, g).Run();
  }
}

}  // namespace jumar
