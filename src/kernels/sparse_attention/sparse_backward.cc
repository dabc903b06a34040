// Backward, in waves of units. First every unit of a wave takes its probabilities p and their gradients ds again, and
// gives dq. Then tasks, each of which owns a block of keys and some columns of their gradients, take the wave's units
// in order and add p and ds times rows of dy and q to the rows that the units picked. Who owns what does not matter for
// the bits: an element of dk is summed over units in ascending order, whatever the number of threads.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/convert.h"
#include "base/parallel.h"
#include "jumar/runtime.h"
#include "kernels/sparse_attention/sparse_blocks.h"

namespace jumar {
namespace {

constexpr int64_t kWaveBytes = 4 << 20;

template <typename C>
class Backward {
 public:
  Backward(const SparsePlan& plan, const TensorView& dy, const TensorView& out, const TensorView& max,
           const TensorView& sum, const SparseAttentionGradients& g)
      : plan_(plan), shape_(plan.shape), width_(plan.width), dy_(dy), out_(out), max_(max), sum_(sum), g_(g) {
    AddPart(plan.in.q, &Item::ds, g.dk);
    if (shape_.dr > 0) AddPart(plan.in.q_rope, &Item::ds, g.dk_rope);
    AddPart(dy, &Item::p, g.dv);
  }

  void Run() {
    const int64_t units = plan_.units();
    int64_t unit_bytes = 2 * plan_.panels * plan_.stride * std::max<int64_t>(plan_.MaxSlots(), 1) * Bytes();
    for (const Part& part : parts_) unit_bytes += AcrossElements(part) * Bytes();
    const int64_t wave = std::clamp<int64_t>(kWaveBytes / unit_bytes, 4 * NumThreads(), 1024);
    if (g_.dsinks.rank != 0) delta_ = HeapBuffer(units * shape_.group * Bytes());
    for (int64_t u = 0; u < units; u += wave) Wave(u, std::min(wave, units - u));
    StoreKeys();
    if (g_.dsinks.rank != 0) Sinks();
  }

 private:
  // A unit of a wave and what it gives to its keys: panels [n, stride], of each part its heads as columns.
  struct Item {
    SparseUnit unit;
    SparsePlan::Slots slots;
    C* p = nullptr;
    C* ds = nullptr;
    C* across[3] = {};                    // of parts that are not in place
    bool finite[3] = {true, true, true};  // of `across`, looked at with tiles
  };

  // dk, dk_rope or dv: sums over units of panel * rows of `x`.
  struct Part {
    const TensorView* x;
    C* Item::*panel;
    const TensorView* out;
    int64_t cols;
    int64_t ld;
    HeapBuffer sums;  // [batch, kv_heads, keys, ld]
    bool in_place;    // heads of x are taken as they lie
  };

  // A unit between its first block and its last: heads as lanes, sums over keys [heads, ld].
  struct State {
    const Item* item;
    int64_t index;
    C* q;
    C* q_rope;
    C* dy;
    C* max;
    C* inverse;
    C* delta;
    C* dq;
    C* dq_rope;
    bool empty;
  };

  static constexpr int64_t Bytes() { return static_cast<int64_t>(sizeof(C)); }
  // Of width_ columns of the heads of a panel.
  int64_t AcrossPanel() const {
    if (plan_.tiles != nullptr) return width_ / kTileHeads * plan_.AcrossBlock() / 2;
    return plan_.PanelElements(width_);
  }
  int64_t AcrossElements(const Part& part) const {
    return part.in_place ? 0 : plan_.panels * part.ld / width_ * AcrossPanel();
  }
  int64_t Rows() const { return shape_.batch * shape_.kv_heads * shape_.keys; }

  void AddPart(const TensorView& x, C* Item::*panel, const TensorView& out) {
    const int64_t cols = x.size[3];
    const int64_t ld = RoundUp(cols, width_);
    const int64_t count = Rows() * ld;
    const bool in_place = plan_.tiles == nullptr && x.dtype == shape_.compute && x.stride[3] == 1 && cols % width_ == 0;
    Part part{&x, panel, &out, cols, ld, HeapBuffer(count * Bytes()), in_place};
    C* sums = static_cast<C*>(part.sums.data());
    ParallelFor(count, 1 << 16, [&](int64_t begin, int64_t end) { std::fill(sums + begin, sums + end, C(0)); });
    parts_.push_back(std::move(part));
  }

  void Wave(int64_t first, int64_t count) {
    ScratchFrame frame;
    std::vector<Item> items(static_cast<size_t>(count));
    const int64_t panels = plan_.panels * plan_.MaxSlots() * plan_.stride;
    for (Item& item : items) {
      item.slots = plan_.AllocSlots(frame);
      item.p = frame.Alloc<C>(panels);
      item.ds = frame.Alloc<C>(panels);
      for (size_t i = 0; i < parts_.size(); ++i) item.across[i] = frame.Alloc<C>(AcrossElements(parts_[i]));
    }
    const auto groups = plan_.Groups(first, count);
    ParallelChunks(static_cast<int64_t>(groups.size()), [&](int64_t g) {
      const auto [unit, n] = groups[static_cast<size_t>(g)];
      Queries(items.data() + (unit - first), unit, n);
    });
    KeysOfWave(items, first);
  }

  // p and ds of a group of units, and dq.
  void Queries(Item* items, int64_t first, int64_t count) {
    ScratchFrame frame;
    SparsePlan::Rows rows = plan_.AllocRows(frame);
    std::vector<State> states;
    for (int64_t i = 0; i < count; ++i) states.push_back(Open(&items[i], first + i, frame));
    const OpenTiles tiles(plan_.tiles);
    for (int64_t b = 0; b < plan_.blocks; ++b) {
      for (State& s : states) {
        const int64_t* begins = s.item->slots.begins + b;
        SparsePlan::ForEachStep(begins[0], begins[1], [&](int64_t at, int64_t n) { Add(&s, at, n, &rows); });
      }
    }
    for (State& s : states) {
      StoreQueries(s, s.dq, g_.dq);
      if (shape_.dr > 0) StoreQueries(s, s.dq_rope, g_.dq_rope);
    }
  }

  // ds is without the scale of the scores.
  void StoreQueries(const State& s, C* sums, const TensorView& out) const {
    const int64_t ld = plan_.Ld(out.size[3]);
    if (s.empty) std::fill_n(sums, shape_.group * ld, C(0));
    plan_.panel.scale(sums, shape_.group * ld, plan_.in.scale);
    plan_.StoreHeads(sums, ld, out, s.item->unit);
  }

  State Open(Item* item, int64_t index, ScratchFrame& frame) {
    const SparseUnit& unit = item->unit = plan_.Unit(index);
    plan_.ListSlots(unit, item->slots);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (parts_[i].in_place) continue;
      for (int64_t p = 0; p < plan_.panels; ++p) {
        C* to = item->across[i] + p * (parts_[i].ld / width_) * AcrossPanel();
        if (plan_.tiles != nullptr) {
          const bool finite = plan_.tiles->pack_across(plan_.Along(*parts_[i].x, unit), p * width_, plan_.LanesOf(p),
                                                       plan_.AcrossBlock(), to);
          item->finite[i] = item->finite[i] && finite;
          continue;
        }
        const GemmOperand across = plan_.Across(*parts_[i].x, unit);
        plan_.gemm.pack_b({&across, 0, parts_[i].cols, p * width_, plan_.LanesOf(p), AcrossPanel(), to});
      }
    }
    const int64_t lanes = plan_.panels * width_;
    State s{};
    s.item = item;
    s.index = index;
    s.empty = true;
    s.q = frame.Alloc<C>(plan_.LanesElements(shape_.d));
    s.q_rope = frame.Alloc<C>(plan_.LanesElements(shape_.dr));
    s.dy = frame.Alloc<C>(plan_.LanesElements(shape_.dv));
    s.max = frame.Alloc<C>(lanes);
    s.inverse = frame.Alloc<C>(lanes);
    s.delta = frame.Alloc<C>(lanes);
    std::fill_n(s.delta, lanes, C(0));
    s.dq = frame.Alloc<C>(plan_.SumElements(shape_.d));
    s.dq_rope = frame.Alloc<C>(plan_.SumElements(shape_.dr));
    plan_.PackLanes(plan_.in.q, unit, s.q);
    if (shape_.dr > 0) plan_.PackLanes(plan_.in.q_rope, unit, s.q_rope);
    plan_.PackLanes(dy_, unit, s.dy);
    for (int64_t i = 0; i < lanes; ++i) {
      const int64_t head = std::min(i, shape_.group - 1);
      const C sum = Statistic(sum_, unit, head);
      s.max[i] = Statistic(max_, unit, head);
      s.inverse[i] = sum == 0 ? C(0) : C(1) / sum;
    }
    Delta(unit, s);
    return s;
  }

  // The sums of dy * out of the unit's heads.
  void Delta(const SparseUnit& unit, const State& s) {
    ScratchFrame frame;
    TensorView rows[2];
    // Both of one dtype: as they are where the columns of both are adjacent.
    const bool adjacent = shape_.dv <= 1 || (dy_.stride[3] == 1 && out_.stride[3] == 1);
    for (int i = 0; i < 2; ++i) {
      const TensorView& x = i == 0 ? dy_ : out_;
      const GemmOperand heads = plan_.Along(x, unit);
      rows[i] = Contiguous(const_cast<void*>(heads.data), x.dtype, {heads.rows, heads.k});
      rows[i].stride[0] = heads.row_stride;
      rows[i].stride[1] = heads.k_stride;
      if (adjacent) continue;
      const TensorView near = Contiguous(frame.Alloc<C>(heads.rows * heads.k), shape_.compute, {heads.rows, heads.k});
      ConvertAll(rows[i], near);
      rows[i] = near;
    }
    plan_.panel.dot_rows(rows[0].dtype, rows[0].data, rows[0].stride[0], rows[1].data, rows[1].stride[0], shape_.group,
                         shape_.dv, s.delta);
    if (delta_.data() == nullptr) return;
    std::copy_n(s.delta, shape_.group, static_cast<C*>(delta_.data()) + s.index * shape_.group);
  }

  // Slots [at, at + n) of a unit.
  void Add(State* s, int64_t at, int64_t n, SparsePlan::Rows* rows) const {
    const Item& item = *s->item;
    const int64_t all = plan_.Count(item.slots);
    plan_.PointTo(item.unit, item.slots.rows + at, n, rows);
    for (int64_t p = 0; p < plan_.panels; ++p) {
      const int64_t first = p * width_;
      C* prob = item.p + (p * all + at) * plan_.stride;
      C* ds = item.ds + (p * all + at) * plan_.stride;
      plan_.Scores(p, *rows, s->q, s->q_rope, prob);
      plan_.Dots(p, *rows, SparsePlan::kValue, s->dy, ds, false);
      PanelGradient gradient{};
      gradient.scores = prob;
      gradient.dp = ds;
      gradient.n = n;
      gradient.scale = plan_.in.scale;
      gradient.max = s->max + first;
      gradient.inverse_sum = s->inverse + first;
      gradient.delta = s->delta + first;
      gradient.half = plan_.half;
      plan_.panel.gradient(gradient);
      plan_.Sums(p, *rows, SparsePlan::kKey, ds, s->dq, !s->empty);
      if (shape_.dr > 0) plan_.Sums(p, *rows, SparsePlan::kKeyRope, ds, s->dq_rope, !s->empty);
    }
    s->empty = false;
  }

  // Tasks for the items of each head of keys, every block of keys, and some columns of each part.
  void KeysOfWave(const std::vector<Item>& items, int64_t first) {
    struct Task {
      size_t part;
      size_t begin, end;  // items
      int64_t block;
      int64_t col, cols;
    };
    std::vector<Task> tasks;
    const auto count = static_cast<int64_t>(items.size());
    for (int64_t begin = 0; begin < count;) {
      const int64_t same = ((first + begin) / shape_.queries + 1) * shape_.queries - first;
      const int64_t end = std::min(count, same);
      for (size_t i = 0; i < parts_.size(); ++i) {
        const int64_t panels = parts_[i].ld / width_;
        const int64_t slices = std::clamp<int64_t>(2 * NumThreads() / plan_.blocks, 1, panels);
        const int64_t cols = CeilDiv(panels, slices) * width_;
        for (int64_t b = 0; b < plan_.blocks; ++b) {
          for (int64_t c = 0; c < parts_[i].ld; c += cols) {
            tasks.push_back(
                {i, static_cast<size_t>(begin), static_cast<size_t>(end), b, c, std::min(cols, parts_[i].ld - c)});
          }
        }
      }
      begin = end;
    }
    ParallelChunks(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const Task& task = tasks[static_cast<size_t>(t)];
      const Part& part = parts_[task.part];
      const SparseUnit& unit = items[task.begin].unit;
      C* sums = static_cast<C*>(part.sums.data()) +
                (unit.batch * shape_.kv_heads + unit.kv_head) * shape_.keys * part.ld + task.col;
      ScratchFrame frame;
      const OpenTiles tiles(plan_.tiles);
      void** rows = plan_.tiles != nullptr ? nullptr : frame.Alloc<void*>(plan_.MaxSlots());
      for (size_t i = task.begin; i < task.end; ++i) {
        const SparsePlan::Slots& slots = items[i].slots;
        const int64_t at = slots.begins[task.block];
        const int64_t n = slots.begins[task.block + 1] - at;
        if (n == 0) continue;
        const int32_t* numbers = slots.rows + at;
        for (int64_t r = 0; r < n && rows != nullptr; ++r) rows[r] = sums + numbers[r] * part.ld;
        for (int64_t p = 0; p < plan_.panels; ++p) {
          const C* panel = items[i].*part.panel + (p * plan_.Count(slots) + at) * plan_.stride;
          if (part.in_place) {
            const GemmOperand heads = plan_.Along(*part.x, items[i].unit);
            const C* first_head = static_cast<const C*>(heads.data) + p * width_ * heads.row_stride;
            plan_.products.updates({rows, n, task.cols, panel, plan_.LanesOf(p), first_head + task.col, width_,
                                    heads.row_stride, plan_.stride});
            continue;
          }
          const C* across = items[i].across[task.part] + (p * part.ld + task.col) / width_ * AcrossPanel();
          if (plan_.tiles != nullptr) {
            plan_.TileUpdate(p, {sums, part.ld, numbers, n, task.cols}, panel, across, items[i].finite[task.part]);
            continue;
          }
          plan_.products.updates(
              {rows, n, task.cols, panel, plan_.LanesOf(p), across, AcrossPanel(), width_, plan_.stride});
        }
      }
    });
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
        C* sums = static_cast<C*>(part.sums.data()) + (head * shape_.keys + row) * part.ld;
        GemmStore store{};
        store.acc = sums;
        store.ld_acc = part.ld;
        store.m = std::min(kRows, shape_.keys - row);
        if (part.panel == &Item::ds) plan_.panel.scale(sums, store.m * part.ld, plan_.in.scale);
        store.n = part.cols;
        store.out = At(x.data, at, static_cast<int64_t>(SizeOf(x.dtype)));
        store.dtype = x.dtype;
        store.row_stride = x.stride[1];
        store.col_stride = x.stride[3];
        plan_.gemm.store(store);
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
        for (int64_t i = 0; i < shape_.batch * shape_.queries; ++i) {
          const int64_t head = i / shape_.queries * shape_.kv_heads + h / shape_.group;
          const int64_t u = head * shape_.queries + i % shape_.queries;
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
