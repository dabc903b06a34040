// Checks of the backward, and what is summed over rows beside the tasks: delta, dsink, dpse.
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"
#include "kernels/attention/attention_backward.h"

namespace jumar {
namespace {

// A view of [B, Nq, Sq] rows of delta.
TensorView Delta(const AttentionPlan& plan, ScratchFrame& frame) {
  const TensorView& q = plan.in.q;
  void* data = frame.AllocBytes(static_cast<size_t>(q.size[0] * q.size[1] * q.size[2]) * plan.ComputeBytes());
  return Contiguous(data, plan.shape.compute, {q.size[0], q.size[1], q.size[2]});
}

// Columns of `rows` rows side by side in `buffer`.
void Gather(const char* from, int64_t row_stride, int64_t col_stride, int64_t rows, int64_t cols, size_t bytes,
            char* buffer) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c, buffer += bytes) {
      std::copy_n(At(from, r * row_stride + c * col_stride, bytes), bytes, buffer);
    }
  }
}

// -sum over rows of exp(sink - max) / sum * delta.
template <typename C>
void SinkGradient(const AttentionPlan& plan, const TensorView& max, const TensorView& sum, const TensorView& delta,
                  const TensorView& dsink) {
  ParallelFor(plan.shape.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      const double sink = plan.in.sink.ptr<C>()[h * plan.in.sink.stride[0]];
      double total = 0;
      for (int64_t b = 0; b < delta.size[0]; ++b) {
        for (int64_t i = 0; i < delta.size[2]; ++i) {
          const double m = *reinterpret_cast<const C*>(Element(max, b, h, i));
          const double l = *reinterpret_cast<const C*>(Element(sum, b, h, i));
          if (l != 0) total -= std::exp(sink - m) / l * *reinterpret_cast<const C*>(Element(delta, b, h, i));
        }
      }
      dsink.ptr<C>()[h * dsink.stride[0]] = static_cast<C>(total);
    }
  });
}

// out[b, h, ..] = sum of parts[s, h', ..] over what `out` has once. Rows of parts beyond those of out belong to its
// first.
template <typename C>
void SumPse(const AttentionPlan& plan, const TensorView& parts, const TensorView& out) {
  const int64_t heads = out.size[1];
  const int64_t rows = out.size[2];
  ParallelFor(out.size[0] * heads * rows, 16, [&](int64_t begin, int64_t end) {
    ScratchFrame frame;
    C* row = frame.Alloc<C>(out.size[3]);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i % rows;
      const int64_t h = i / rows % heads;
      const int64_t b = i / rows / heads;
      for (int64_t j = 0; j < out.size[3]; ++j) {
        double total = 0;
        for (int64_t s = out.size[0] == 1 ? 0 : b; s < (out.size[0] == 1 ? parts.size[0] : b + 1); ++s) {
          for (int64_t n = heads == 1 ? 0 : h; n < (heads == 1 ? parts.size[1] : h + 1); ++n) {
            total += reinterpret_cast<const C*>(Element(parts, s, n, r))[j];
            for (int64_t e = rows; r == 0 && e < parts.size[2]; ++e) {
              total += reinterpret_cast<const C*>(Element(parts, s, n, e))[j];
            }
          }
        }
        row[j] = static_cast<C>(total);
      }
      GemmStore store{};
      store.acc = row;
      store.m = 1;
      store.n = out.size[3];
      store.out = Element(out, b, h, r);
      store.dtype = out.dtype;
      store.col_stride = out.stride[3];
      plan.gemm.store(store);
    }
  });
}

}  // namespace

void FillDelta(const AttentionGradients& g, int64_t batch, int64_t head, int64_t row, int64_t rows) {
  constexpr int64_t kRows = 64;
  const int64_t cols = g.out.size[3];
  const size_t bytes = SizeOf(g.out.dtype);
  ScratchFrame frame;
  char* buffer[2] = {};
  for (const int64_t end = row + rows; row < end; row += kRows) {
    rows = std::min(kRows, end - row);
    const void* data[2];
    int64_t stride[2];
    for (int x = 0; x < 2; ++x) {
      const TensorView& view = x == 0 ? g.dy : g.out;
      data[x] = Element(view, batch, head, row);
      stride[x] = view.stride[2];
      if (view.stride[3] == 1) continue;
      if (buffer[x] == nullptr) {
        buffer[x] = static_cast<char*>(frame.AllocBytes(static_cast<size_t>(kRows * cols) * bytes));
      }
      Gather(static_cast<const char*>(data[x]), view.stride[2], view.stride[3], rows, cols, bytes, buffer[x]);
      data[x] = buffer[x];
      stride[x] = cols;
    }
    g.plan.panel.dot_rows(g.out.dtype, data[0], stride[0], data[1], stride[1], rows, cols,
                          Element(g.delta, batch, head, row));
  }
}

void AttentionBackward(const char* op, const AttentionInputs& in, const TensorView& dy, const TensorView& out,
                       const TensorView& max, const TensorView& sum, const AttentionGrads& grads) {
  const AttentionShape shape = CheckAttention(op, in, out, max, sum);
  const auto like = [&](const char* name, const TensorView& x, const TensorView& model) {
    JUMAR_CHECK(op, SameShape(x, model) && x.dtype == model.dtype, name, " must be ", Describe(model), ", got ",
                Describe(x));
  };
  like("dy", dy, out);
  like("dq", grads.dq, in.q);
  like("dk", grads.dk, in.k);
  like("dv", grads.dv, in.v);
  if (in.q_rope.rank != 0) {
    like("dq_rope", grads.dq_rope, in.q_rope);
    like("dk_rope", grads.dk_rope, in.k_rope);
  }
  const AttentionPlan plan(in, shape);
  const bool f64 = shape.compute == DType::kF64;
  ScratchFrame frame;
  const TensorView delta = Delta(plan, frame);
  TensorView parts;
  const bool needs_pse = grads.dpse.rank != 0;
  if (needs_pse) {
    like("dpse", grads.dpse, in.pse);
    const int64_t early = CeilDiv(std::max<int64_t>(0, in.pse_first), kBackwardUnitRows);
    const std::vector<int64_t> sizes = {static_cast<int64_t>(in.sequences.size()), shape.heads,
                                        grads.dpse.size[2] + early, grads.dpse.size[3]};
    const auto bytes = static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]) * plan.ComputeBytes();
    char* data = static_cast<char*>(frame.AllocBytes(bytes));
    std::fill_n(data, bytes, 0);
    parts = Contiguous(data, shape.compute, sizes);
    if (sizes[2] == 1) parts.stride[2] = 0;
  }
  AttentionBackwardTasks({plan, dy, out, max, sum, delta, grads, needs_pse ? &parts : nullptr});
  if (needs_pse) f64 ? SumPse<double>(plan, parts, grads.dpse) : SumPse<float>(plan, parts, grads.dpse);
  if (grads.dsink.rank != 0) {
    like("dsink", grads.dsink, in.sink);
    f64 ? SinkGradient<double>(plan, max, sum, delta, grads.dsink)
        : SinkGradient<float>(plan, max, sum, delta, grads.dsink);
  }
}

}  // namespace jumar
