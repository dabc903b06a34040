// Forward: each unit on its own.
#include "kernels/sparse_attention/sparse_attention.h"

#include <algorithm>

#include "base/parallel.h"
#include "kernels/sparse_attention/sparse_blocks.h"

namespace jumar {
namespace {

constexpr int64_t kTaskUnits = 4;

template <typename C>
class Forward {
 public:
  Forward(const SparsePlan& plan, const TensorView& out, const TensorView& max, const TensorView& sum)
      : plan_(plan), out_(out), max_(max), sum_(sum) {}

  void Run() {
    const int64_t units = plan_.units();
    ParallelChunks(CeilDiv(units, kTaskUnits), [&](int64_t chunk) {
      for (int64_t u = chunk * kTaskUnits; u < std::min(units, (chunk + 1) * kTaskUnits); ++u) Unit(plan_.Unit(u));
    });
  }

 private:
  void Unit(const SparseUnit& unit) {
    const SparseShape& shape = plan_.shape;
    const int64_t width = plan_.width;
    ScratchFrame frame;
    int32_t* rows = frame.Alloc<int32_t>(plan_.MaxSlots());
    const int64_t n = plan_.ListSlots(unit, rows);
    const void** k = frame.Alloc<const void*>(n);
    const void** v = frame.Alloc<const void*>(n);
    const void** k_rope = frame.Alloc<const void*>(n);
    plan_.Pointers(plan_.k(), unit, rows, n, k);
    plan_.Pointers(plan_.v(), unit, rows, n, v);
    if (shape.dr > 0) plan_.Pointers(plan_.k_rope(), unit, rows, n, k_rope);
    C* work = frame.Alloc<C>(plan_.PanelElements(std::max(shape.d, shape.dr)));
    C* scores = frame.Alloc<C>(n * width);
    C* max = frame.Alloc<C>(width);
    C* sum = frame.Alloc<C>(width);
    C* factor = frame.Alloc<C>(width);
    const int64_t ld = RoundUp(shape.dv, width);
    C* acc = frame.Alloc<C>(shape.group * ld);
    if (n == 0) std::fill(acc, acc + shape.group * ld, C(0));
    for (int64_t p = 0; p < plan_.panels; ++p) {
      const int64_t lanes = plan_.LanesOf(p);
      const int64_t first = p * width;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t head = unit.kv_head * shape.group + first + std::min(i, lanes - 1);
        const TensorView& sinks = plan_.in.sinks;
        max[i] = sinks.rank == 0 ? C(kLowestScore) : sinks.ptr<const C>()[head * sinks.stride[0]];
        sum[i] = sinks.rank == 0 ? C(0) : C(1);
      }
      if (n > 0) {
        plan_.Scores(unit, p, n, k, k_rope, work, scores);
        plan_.panel.softmax({scores, n, plan_.in.scale, max, sum, factor});
        for (int64_t i = 0; i < width; ++i) factor[i] = sum[i] == 0 ? C(0) : C(1) / sum[i];
        plan_.panel.scale_lanes(scores, n, factor);
        plan_.products.sums({v, n, shape.dv, scores, lanes, acc + first * ld, ld, false});
      }
      for (int64_t i = 0; i < lanes; ++i) {
        *Statistic(max_, unit, first + i) = max[i];
        *Statistic(sum_, unit, first + i) = sum[i];
      }
    }
    plan_.StoreHeads(acc, ld, out_, unit);
  }

  static C* Statistic(const TensorView& x, const SparseUnit& unit, int64_t head) {
    return x.ptr<C>() + unit.batch * x.stride[0] + unit.kv_head * x.stride[1] + unit.query * x.stride[2] +
           head * x.stride[3];
  }

  const SparsePlan& plan_;
  const TensorView& out_;
  const TensorView& max_;
  const TensorView& sum_;
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
