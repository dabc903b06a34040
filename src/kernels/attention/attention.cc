// Forward: a task is a block of queries of all heads that share a key head, so that packed keys serve all of them.
#include "kernels/attention/attention.h"

#include "base/parallel.h"
#include "jumar/runtime.h"
#include "kernels/attention/attention_blocks.h"

namespace jumar {
namespace {

constexpr int64_t kWaveBytes = 32 << 20;
constexpr int64_t kTaskElements = 32768;  // of the queries of a task, all heads of the group

template <typename C>
class Forward {
 public:
  Forward(const AttentionPlan& plan, const TensorView& out, const TensorView& max, const TensorView& sum)
      : plan_(plan), out_(out), max_(max), sum_(sum) {
    const int64_t row = plan.shape.group * std::max<int64_t>(plan.shape.d + plan.shape.rope, 64);
    int64_t panels = std::max<int64_t>(1, kTaskElements / (row * plan.width));
    // Rows do not depend on each other: smaller tasks where there are too few for all threads.
    const auto tasks = [&] {
      int64_t n = 0;
      for (const AttentionSequence& s : plan.in.sequences) n += CeilDiv(s.q_len, panels * plan.width);
      return n * plan.shape.kv_heads;
    };
    while (panels > 1 && tasks() < 2 * NumThreads()) panels = (panels + 1) / 2;
    task_rows_ = panels * plan.width;
    const GemmKernel& gemm = plan.gemm;
    k_stride_ = gemm.PanelStride(gemm.mr, plan.shape.d + plan.shape.rope);
    v_stride_ = gemm.PanelStride(gemm.mr, plan.key_block);
    v_panels_ = CeilDiv(plan.shape.dv, gemm.mr);
    v_begin_ = plan.key_block / gemm.mr * k_stride_;
    block_size_ = v_begin_ + v_panels_ * v_stride_;
  }

  // Heads of keys go in waves whose packed keys and values fit a few megabytes: packed by all threads, then used by
  // all.
  void Run() {
    std::vector<Item> wave;
    int64_t bytes = 0;
    for (const AttentionSequence& s : plan_.in.sequences) {
      if (s.q_len == 0) continue;
      const int64_t blocks = CeilDiv(s.k_len, plan_.key_block);
      const int64_t size = blocks * block_size_ * static_cast<int64_t>(sizeof(C));
      for (int64_t h = 0; h < plan_.shape.kv_heads; ++h) {
        if (bytes + size > kWaveBytes && !wave.empty()) {
          Wave(wave);
          wave.clear();
          bytes = 0;
        }
        wave.push_back({&s, h, blocks, CeilDiv(s.q_len, task_rows_), nullptr, nullptr});
        bytes += size;
      }
    }
    if (!wave.empty()) Wave(wave);
  }

 private:
  // One head of keys of a sequence: its blocks of packed keys and values, and which blocks of values are finite.
  struct Item {
    const AttentionSequence* s;
    int64_t kv_head;
    int64_t key_blocks;
    int64_t query_blocks;
    C* packed;
    bool* finite;
  };

  // Calls body(item, i) for all i below the item's `count`.
  template <typename F>
  static void ForEach(std::vector<Item>& wave, int64_t Item::*count, const F& body) {
    std::vector<int64_t> first{0};
    for (const Item& item : wave) first.push_back(first.back() + item.*count);
    ParallelChunks(first.back(), [&](int64_t task) {
      const auto at = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
      body(wave[static_cast<size_t>(at)], task - first[static_cast<size_t>(at)]);
    });
  }

  void Wave(std::vector<Item>& wave) {
    ScratchFrame frame;
    for (Item& item : wave) {
      item.packed = frame.Alloc<C>(item.key_blocks * block_size_);
      item.finite = frame.Alloc<bool>(item.key_blocks);
    }
    ForEach(wave, &Item::key_blocks, [&](const Item& item, int64_t block) {
      const AttentionSequence& s = *item.s;
      const int64_t key = block * plan_.key_block;
      const int64_t n = std::min(plan_.key_block, s.k_len - key);
      C* packed = item.packed + block * block_size_;
      plan_.PackAlong(true, {plan_.in.k, plan_.in.k_rope, s.batch, item.kv_head, s.k_begin, s.k_len}, key, n, k_stride_,
                      packed);
      plan_.PackAcross(true, {plan_.in.v, {}, s.batch, item.kv_head, s.k_begin, s.k_len}, key, n, v_stride_,
                       packed + v_begin_);
      item.finite[block] = FinitePanels(plan_, packed + v_begin_, v_panels_, v_stride_, plan_.gemm.mr, n);
    });
    ForEach(wave, &Item::query_blocks, [&](const Item& item, int64_t task) {
      // Later queries of causal attention have more keys: they go first.
      const int64_t row = (item.query_blocks - 1 - task) * task_rows_;
      Block(item, row, std::min(task_rows_, item.s->q_len - row));
    });
  }

  struct Panel {
    int64_t head;
    int64_t row;
    int64_t rows;
    PanelKeys keys;
  };

  void Block(const Item& item, int64_t row, int64_t rows) {
    const AttentionSequence& s = *item.s;
    const int64_t kv_head = item.kv_head;
    const AttentionShape& shape = plan_.shape;
    const GemmKernel& gemm = plan_.gemm;
    const int64_t width = plan_.width;
    std::vector<Panel> panels;
    for (int64_t h = kv_head * shape.group; h < (kv_head + 1) * shape.group; ++h) {
      for (int64_t r = 0; r < rows; r += width) panels.push_back({h, row + r, std::min(width, rows - r), {}});
    }
    const auto count = static_cast<int64_t>(panels.size());
    ScratchFrame frame;
    const int64_t q_stride = gemm.PanelStride(gemm.nr, shape.d + shape.rope);
    const int64_t acc_stride = shape.dv * width;
    C* q_packed = frame.Alloc<C>(count * q_stride);
    C* acc = frame.Alloc<C>(count * acc_stride);
    C* max = frame.Alloc<C>(count * width);
    C* sum = frame.Alloc<C>(count * width);
    C* rescale = frame.Alloc<C>(width);
    C* scores = frame.Alloc<C>(plan_.key_block * width);
    C* keep = plan_.drops() ? frame.Alloc<C>(plan_.key_block * width) : nullptr;
    void* work = frame.AllocBytes(static_cast<size_t>(plan_.ScoreWorkBytes() + width * plan_.key_block * 8));
    std::fill(acc, acc + count * acc_stride, C(0));
    for (int64_t i = 0; i < count; ++i) {
      const Panel& p = panels[static_cast<size_t>(i)];
      const bool sink = plan_.in.sink.rank != 0;
      const C start = sink ? plan_.in.sink.ptr<C>()[p.head * plan_.in.sink.stride[0]] : C(kLowestScore);
      std::fill(max + i * width, max + (i + 1) * width, start);
      std::fill(sum + i * width, sum + (i + 1) * width, C(sink ? 1 : 0));
      plan_.PackAlong(false, {plan_.in.q, plan_.in.q_rope, s.batch, p.head, s.q_begin, s.q_len}, p.row, p.rows,
                      q_stride, q_packed + i * q_stride);
    }
    const int64_t last = row + rows - 1;
    const int64_t end = plan_.High(s, last);
    for (int64_t key = plan_.Low(s, row) / plan_.key_block * plan_.key_block; key < end; key += plan_.key_block) {
      const int64_t n = std::min(plan_.key_block, s.k_len - key);
      const C* k_packed = item.packed + key / plan_.key_block * block_size_;
      const C* v_packed = k_packed + v_begin_;
      const bool finite = item.finite[key / plan_.key_block];
      for (int64_t i = 0; i < count; ++i) {
        Panel& p = panels[static_cast<size_t>(i)];
        p.keys = plan_.Keys(s, p.head, p.row, p.rows, key, n);
        if (!p.keys.any()) continue;
        const bool scaled = plan_.Scores(s, p.head, p.row, p.rows, key, p.keys, k_packed, k_stride_,
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
        block.a_panel = v_stride_;
        block.b = visible;
        block.b_panel = 0;
        block.c = acc + i * acc_stride;
        block.ldc = width;
        block.accumulate = true;
        if (!finite && (p.keys.by_mask || p.keys.by_position)) {
          MultiplySkippingZeros(gemm, block, false);
        } else {
          gemm.multiply_near(block);
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
    plan_.StoreLanes(acc, p.rows, out_, s.batch, p.head, row);
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
  // A packed block: panels of keys along d, then panels of values across.
  int64_t k_stride_, v_stride_, v_panels_, v_begin_, block_size_;
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
