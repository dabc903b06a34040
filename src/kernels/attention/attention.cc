// Forward: a task is a block of queries of all heads that share a key head, so that packed keys serve all of them.
#include "kernels/attention/attention.h"

#include "base/parallel.h"
#include "kernels/attention/attention_blocks.h"

namespace jumar {
namespace {

constexpr int64_t kTaskRows = 256;  // queries of a task, heads of the group counted one by one

template <typename C>
class Forward {
 public:
  Forward(const AttentionPlan& plan, const TensorView& out, const TensorView& max, const TensorView& sum)
      : plan_(plan), out_(out), max_(max), sum_(sum) {
    const int64_t group = plan.shape.group;
    task_rows_ = std::max<int64_t>(1, kTaskRows / (group * plan.width)) * plan.width;
  }

  void Run() {
    const auto& sequences = plan_.in.sequences;
    std::vector<int64_t> first{0};
    for (const AttentionSequence& s : sequences) {
      first.push_back(first.back() + plan_.shape.kv_heads * CeilDiv(s.q_len, task_rows_));
    }
    ParallelChunks(first.back(), [&](int64_t task) {
      const auto at = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
      const AttentionSequence& s = sequences[static_cast<size_t>(at)];
      const int64_t blocks = CeilDiv(s.q_len, task_rows_);
      const int64_t local = task - first[static_cast<size_t>(at)];
      // Later queries of causal attention have more keys: they go first.
      const int64_t row = (blocks - 1 - local % blocks) * task_rows_;
      Block(s, local / blocks, row, std::min(task_rows_, s.q_len - row));
    });
  }

 private:
  struct Panel {
    int64_t head;
    int64_t row;
    int64_t rows;
    PanelKeys keys;
  };

  void Block(const AttentionSequence& s, int64_t kv_head, int64_t row, int64_t rows) {
    const AttentionShape& shape = plan_.shape;
    const GemmKernel& gemm = plan_.gemm;
    const int64_t width = plan_.width;
    std::vector<Panel> panels;
    for (int64_t h = kv_head * shape.group; h < (kv_head + 1) * shape.group; ++h) {
      for (int64_t r = 0; r < rows; r += width) panels.push_back({h, row + r, std::min(width, rows - r), {}});
    }
    const auto count = static_cast<int64_t>(panels.size());
    ScratchFrame frame;
    const int64_t q_stride = gemm.PanelStride(gemm.nr, shape.d);
    const int64_t acc_stride = shape.dv * width;
    C* q_packed = frame.Alloc<C>(count * q_stride);
    C* acc = frame.Alloc<C>(count * acc_stride);
    C* max = frame.Alloc<C>(count * width);
    C* sum = frame.Alloc<C>(count * width);
    C* rescale = frame.Alloc<C>(width);
    C* scores = frame.Alloc<C>(plan_.key_block * width);
    C* keep = plan_.drops() ? frame.Alloc<C>(plan_.key_block * width) : nullptr;
    void* work = frame.AllocBytes(static_cast<size_t>(plan_.ScoreWorkBytes() + width * plan_.key_block * 8));
    const int64_t k_stride = gemm.PanelStride(gemm.mr, shape.d);
    const int64_t v_stride = gemm.PanelStride(gemm.mr, plan_.key_block);
    const int64_t v_panels = CeilDiv(shape.dv, gemm.mr);
    C* k_packed = frame.Alloc<C>(CeilDiv(plan_.key_block, gemm.mr) * k_stride);
    C* v_packed = frame.Alloc<C>(v_panels * v_stride);

    std::fill(acc, acc + count * acc_stride, C(0));
    for (int64_t i = 0; i < count; ++i) {
      const Panel& p = panels[static_cast<size_t>(i)];
      const bool sink = plan_.in.sink.rank != 0;
      const C start = sink ? plan_.in.sink.ptr<C>()[p.head * plan_.in.sink.stride[0]] : C(kLowestScore);
      std::fill(max + i * width, max + (i + 1) * width, start);
      std::fill(sum + i * width, sum + (i + 1) * width, C(sink ? 1 : 0));
      const GemmOperand q = plan_.Along(plan_.in.q, s.batch, p.head, s.q_begin, s.q_len);
      gemm.pack_b({&q, p.row, p.rows, 0, shape.d, q_stride, q_packed + i * q_stride});
    }
    const int64_t last = row + rows - 1;
    const int64_t end = plan_.High(s, last);
    for (int64_t key = plan_.Low(s, row) / plan_.key_block * plan_.key_block; key < end; key += plan_.key_block) {
      const int64_t n = std::min(plan_.key_block, s.k_len - key);
      PanelKeys all{n, 0};
      bool masked = false;
      for (Panel& p : panels) {
        p.keys = plan_.Keys(s, p.head, p.row, p.rows, key, n);
        if (!p.keys.any()) continue;
        all.begin = std::min(all.begin, p.keys.begin);
        all.end = std::max(all.end, p.keys.end);
        masked = masked || p.keys.by_mask || p.keys.by_position;
      }
      if (!all.any()) continue;
      const GemmOperand k = plan_.Along(plan_.in.k, s.batch, kv_head, s.k_begin, s.k_len);
      const GemmOperand v = plan_.Across(plan_.in.v, s.batch, kv_head, s.k_begin, s.k_len);
      gemm.pack_a({&k, key, all.end, 0, shape.d, k_stride, k_packed});
      gemm.pack_a({&v, 0, shape.dv, key, all.end, v_stride, v_packed});
      const bool skip = masked && !FinitePanels(plan_, v_packed, v_panels, v_stride, gemm.mr, all.end);
      for (int64_t i = 0; i < count; ++i) {
        const Panel& p = panels[static_cast<size_t>(i)];
        if (!p.keys.any()) continue;
        const bool scaled = plan_.Scores(s, p.head, p.row, p.rows, key, p.keys, k_packed, k_stride,
                                         q_packed + i * q_stride, scores, work);
        C* visible = scores + p.keys.begin * width;
        const int64_t keys = p.keys.end - p.keys.begin;
        if (plan_.panel.softmax(
                {visible, keys, scaled ? 1.0 : plan_.in.scale, max + i * width, sum + i * width, rescale})) {
          plan_.panel.scale_lanes(acc + i * acc_stride, shape.dv, rescale);
        }
        if (keep != nullptr) {
          plan_.Keep(s, p.head, p.row, p.rows, key + p.keys.begin, keys, keep);
          plan_.panel.multiply(visible, keys * width, keep);
        }
        GemmBlock block;
        block.m = shape.dv;
        block.n = width;
        block.kc = keys;
        block.a = v_packed + p.keys.begin * gemm.mr;
        block.a_panel = v_stride;
        block.b = visible;
        block.b_panel = 0;
        block.c = acc + i * acc_stride;
        block.ldc = width;
        block.accumulate = true;
        if (skip && (p.keys.by_mask || p.keys.by_position)) {
          MultiplySkippingZeros(gemm, block, false);
        } else {
          gemm.multiply(block);
        }
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      Finish(s, panels[static_cast<size_t>(i)], acc + i * acc_stride, max + i * width, sum + i * width, rescale);
    }
  }

  // Divides by the sums and stores; a row without keys has sum 0 and sums of products 0.
  void Finish(const AttentionSequence& s, const Panel& p, C* acc, const C* max, const C* sum, C* inverse) {
    for (int64_t r = 0; r < plan_.width; ++r) inverse[r] = sum[r] == 0 ? C(0) : C(1) / sum[r];
    plan_.panel.scale_lanes(acc, plan_.shape.dv, inverse);
    const int64_t row = s.q_begin + p.row;
    GemmStore store{};
    store.acc = acc;
    store.ld_acc = plan_.width;
    store.m = plan_.shape.dv;
    store.n = p.rows;
    store.out = Element(out_, s.batch, p.head, row);
    store.dtype = out_.dtype;
    store.row_stride = out_.stride[3];
    store.col_stride = out_.stride[2];
    plan_.gemm.store(store);
    for (int64_t r = 0; r < p.rows; ++r) {
      C* m = reinterpret_cast<C*>(Element(max_, s.batch, p.head, row + r));
      C* l = reinterpret_cast<C*>(Element(sum_, s.batch, p.head, row + r));
      for (int64_t i = 0; i < 8; ++i) {
        m[i * max_.stride[3]] = max[r];
        l[i * sum_.stride[3]] = sum[r];
      }
    }
  }

  const AttentionPlan& plan_;
  const TensorView& out_;
  const TensorView& max_;
  const TensorView& sum_;
  int64_t task_rows_;
};

}  // namespace

void Attention(const char* op, const AttentionInputs& in, const TensorView& out, const TensorView& max,
               const TensorView& sum) {
  const AttentionShape shape = CheckAttention(op, in, out, max, sum);
  const AttentionPlan plan(in, shape);
  if (shape.compute == DType::kF64) {
    Forward<double>(plan, out, max, sum).Run();
  } else {
    Forward<float>(plan, out, max, sum).Run();
  }
}

}  // namespace jumar
