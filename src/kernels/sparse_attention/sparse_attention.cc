// Forward: each unit on its own, block by block with the online softmax; where there are few, each in parts.
#include "kernels/sparse_attention/sparse_attention.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "kernels/sparse_attention/sparse_blocks.h"

namespace jumar {
namespace {

// Units below this number are cut into parts of at least as many slots, each a task. What is cut depends on sizes
// alone.
constexpr int64_t kFewUnits = 16;
constexpr int64_t kPartSlots = 256;
constexpr int64_t kMaxParts = 16;

template <typename C>
class Forward {
 public:
  Forward(const SparsePlan& plan, const TensorView& out, const TensorView& max, const TensorView& sum)
      : plan_(plan), out_(out), max_(max), sum_(sum), ld_(plan.Ld(plan.shape.dv)) {}

  void Run() {
    const int64_t units = plan_.units();
    const int64_t parts = std::clamp<int64_t>(plan_.MaxSlots() / kPartSlots, 1, kMaxParts);
    if (units < kFewUnits && parts > 1) {
      InParts(parts);
      return;
    }
    const auto groups = plan_.Groups(0, units);
    ParallelChunks(static_cast<int64_t>(groups.size()), [&](int64_t g) {
      const auto [first, count] = groups[static_cast<size_t>(g)];
      Group(first, count);
    });
  }

 private:
  // A unit, the slots that it has seen so far, and what came of them: statistics [panels, width], acc [heads, ld].
  struct State {
    SparseUnit unit;
    SparsePlan::Slots slots;
    C* q;
    C* q_rope;
    C* max;
    C* sum;
    C* acc;
    bool empty;
  };
  struct Work {
    Work(const SparsePlan& plan, ScratchFrame& frame)
        : rows(plan.AllocRows(frame)),
          scores(frame.Alloc<C>(kSlotStep * plan.width)),
          factor(frame.Alloc<C>(plan.panels * plan.width)) {}
    SparsePlan::Rows rows;
    C* scores;
    C* factor;
  };

  int64_t Lanes() const { return plan_.panels * plan_.width; }
  int64_t Head(const SparseUnit& unit, int64_t i) const {
    return unit.kv_head * plan_.shape.group + std::min(i, plan_.shape.group - 1);
  }

  void Group(int64_t first, int64_t count) {
    ScratchFrame frame;
    std::vector<State> states;
    for (int64_t u = first; u < first + count; ++u) {
      State s{plan_.Unit(u), plan_.AllocSlots(frame), nullptr, nullptr, nullptr, nullptr, nullptr, true};
      plan_.ListSlots(s.unit, s.slots);
      PackQuery(&s, frame);
      Open(&s, true, frame);
      states.push_back(s);
    }
    Work work(plan_, frame);
    const OpenTiles tiles(plan_.tiles);
    for (int64_t b = 0; b < plan_.blocks; ++b) {
      for (State& s : states) Add(&s, s.slots.begins[b], s.slots.begins[b + 1], work);
    }
    for (State& s : states) Finish(&s, work.factor);
  }

  void PackQuery(State* s, ScratchFrame& frame) const {
    s->q = frame.Alloc<C>(plan_.LanesElements(plan_.shape.d));
    plan_.PackLanes(plan_.in.q, s->unit, s->q);
    if (plan_.shape.dr == 0) return;
    s->q_rope = frame.Alloc<C>(plan_.LanesElements(plan_.shape.dr));
    plan_.PackLanes(plan_.in.q_rope, s->unit, s->q_rope);
  }

  void Open(State* s, bool sinks, ScratchFrame& frame) const {
    s->max = frame.Alloc<C>(Lanes());
    s->sum = frame.Alloc<C>(Lanes());
    s->acc = frame.Alloc<C>(plan_.SumElements(plan_.shape.dv));
    const TensorView& x = plan_.in.sinks;
    const bool has = sinks && x.rank != 0;
    for (int64_t i = 0; i < Lanes(); ++i) {
      s->max[i] = has ? x.ptr<const C>()[Head(s->unit, i) * x.stride[0]] : C(kLowestScore);
      s->sum[i] = has ? C(1) : C(0);
    }
  }

  void Add(State* s, int64_t begin, int64_t end, Work& work) const {
    SparsePlan::ForEachStep(begin, end, [&](int64_t first, int64_t n) {
      plan_.PointTo(s->unit, s->slots.rows + first, n, &work.rows);
      for (int64_t p = 0; p < plan_.panels; ++p) {
        const int64_t lane = p * plan_.width;
        plan_.Scores(p, work.rows, s->q, s->q_rope, work.scores);
        const bool moved = plan_.panel.softmax(
            {work.scores, n, plan_.in.scale, s->max + lane, s->sum + lane, work.factor, plan_.half});
        if (moved && !s->empty)
          plan_.panel.scale_rows(s->acc + lane * ld_, ld_, plan_.LanesOf(p), plan_.shape.dv, work.factor);
        plan_.Sums(p, work.rows, SparsePlan::kValue, work.scores, s->acc, !s->empty);
      }
      s->empty = false;
    });
  }

  void Finish(State* s, C* factor) const {
    if (s->empty) std::fill_n(s->acc, plan_.shape.group * ld_, C(0));
    for (int64_t i = 0; i < plan_.shape.group; ++i) factor[i] = s->sum[i] == 0 ? C(0) : C(1) / s->sum[i];
    plan_.panel.scale_rows(s->acc, ld_, plan_.shape.group, plan_.shape.dv, factor);
    plan_.StoreHeads(s->acc, ld_, out_, s->unit);
    for (int64_t i = 0; i < plan_.shape.group; ++i) {
      *Statistic(max_, s->unit, i) = s->max[i];
      *Statistic(sum_, s->unit, i) = s->sum[i];
    }
  }

  void InParts(int64_t parts) {
    const int64_t units = plan_.units();
    ScratchFrame frame;
    std::vector<State> states;
    for (int64_t u = 0; u < units; ++u) {
      State s{plan_.Unit(u), plan_.AllocSlots(frame), nullptr, nullptr, nullptr, nullptr, nullptr, true};
      PackQuery(&s, frame);
      for (int64_t j = 0; j < parts; ++j) {
        Open(&s, j == 0, frame);
        states.push_back(s);
      }
    }
    ParallelChunks(units, [&](int64_t u) {
      const State& s = states[static_cast<size_t>(u * parts)];
      plan_.ListSlots(s.unit, s.slots);
    });
    ParallelChunks(units * parts, [&](int64_t i) {
      State& s = states[static_cast<size_t>(i)];
      ScratchFrame mine;
      Work work(plan_, mine);
      const OpenTiles tiles(plan_.tiles);
      const int64_t n = plan_.Count(s.slots);
      Add(&s, ChunkBegin(n, parts, i % parts), ChunkBegin(n, parts, i % parts + 1), work);
    });
    C* factor = frame.Alloc<C>(Lanes());
    for (int64_t u = 0; u < units; ++u) {
      State& first = states[static_cast<size_t>(u * parts)];
      for (int64_t j = 1; j < parts; ++j) Merge(&first, states[static_cast<size_t>(u * parts + j)]);
      Finish(&first, factor);
    }
  }

  // Adds what a part has seen to `s`.
  void Merge(State* s, const State& part) const {
    if (part.empty) return;
    for (int64_t i = 0; i < plan_.shape.group; ++i) {
      const C max = std::max(s->max[i], part.max[i]);
      const C mine = std::exp(s->max[i] - max);
      const C other = std::exp(part.max[i] - max);
      s->max[i] = max;
      s->sum[i] = s->sum[i] * mine + part.sum[i] * other;
      C* acc = s->acc + i * ld_;
      const C* more = part.acc + i * ld_;
      for (int64_t c = 0; c < plan_.shape.dv; ++c) acc[c] = (s->empty ? C(0) : acc[c] * mine) + more[c] * other;
    }
    s->empty = false;
  }

  static C* Statistic(const TensorView& x, const SparseUnit& unit, int64_t head) {
    return x.ptr<C>() + unit.batch * x.stride[0] + unit.kv_head * x.stride[1] + unit.query * x.stride[2] +
           head * x.stride[3];
  }

  const SparsePlan& plan_;
  const TensorView& out_;
  const TensorView& max_;
  const TensorView& sum_;
  int64_t ld_;
};

}  // namespace

void SparseAttention(const char* op, const SparseAttentionInputs& in, const TensorView& out, const TensorView& max,
                     const TensorView& sum) {
  const SparseShape shape = CheckSparseAttention(op, in, out, max, sum);
  const SparsePlan plan(op, in, shape);
  if (shape.compute == DType::kF64) {
    Forward<double>(plan, out, max, sum).Run();
  } else {
    Forward<float>(plan, out, max, sum).Run();
  }
}

}  // namespace jumar
