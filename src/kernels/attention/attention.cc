// Forward. A head of keys of a sequence (an item) is packed once for all its queries. Short ones, of which there are
// many, are a task each: a thread packs a block of keys when it first needs it. Of long ones the keys are packed by all
// threads, and a task is a block of queries of all heads that share the key head.
#include "kernels/attention/attention.h"

#include "base/parallel.h"
#include "jumar/runtime.h"
#include "kernels/attention/attention_blocks.h"

namespace jumar {
namespace {

constexpr int64_t kWaveBytes = 32 << 20;
constexpr int64_t kOwnBytes = 4 << 20;    // packed keys and values that one thread keeps for itself
constexpr int64_t kTaskElements = 32768;  // of the queries of a task, all heads of the group

template <typename C>
class Forward {
 public:
  Forward(const AttentionPlan& plan, const TensorView& out, const TensorView& max, const TensorView& sum)
      : plan_(plan), out_(out), max_(max), sum_(sum) {
    const int64_t row = plan.shape.group * std::max<int64_t>(plan.Columns(), 64);
    int64_t panels = std::max<int64_t>(1, kTaskElements / (row * plan.width));
    // Rows do not depend on each other: smaller tasks where there are too few for all threads.
    const auto tasks = [&] {
      int64_t n = 0;
      for (const AttentionSequence& s : plan.in.sequences) n += CeilDiv(s.q_len, panels * plan.width);
      return n * plan.shape.kv_heads;
    };
    while (panels > 1 && tasks() < 2 * NumThreads()) panels = (panels + 1) / 2;
    task_rows_ = panels * plan.width;
    v_begin_ = plan.DotKeys(plan.Columns());
    v_columns_ = plan.Padded(plan.shape.dv);
    block_size_ = v_begin_ + plan.OverKeys(plan.shape.dv);
  }

  void Run() {
    std::vector<const AttentionSequence*> sequences;
    double work = 0;
    for (const AttentionSequence& s : plan_.in.sequences) {
      if (s.q_len == 0) continue;
      sequences.push_back(&s);
      work += Work(s);
    }
    // The longest first, so that all threads end together.
    std::stable_sort(sequences.begin(), sequences.end(),
                     [](const auto* a, const auto* b) { return Work(*a) > Work(*b); });
    const double share = work * static_cast<double>(plan_.shape.kv_heads) / static_cast<double>(4 * NumThreads());
    std::vector<Item> shared, own;
    for (const AttentionSequence* s : sequences) {
      const int64_t blocks = CeilDiv(s->k_len, plan_.key_block);
      const bool alone = Bytes(blocks) <= kOwnBytes && Work(*s) <= share;
      for (int64_t h = 0; h < plan_.shape.kv_heads; ++h) {
        (alone ? own : shared).push_back({s, h, blocks, CeilDiv(s->q_len, task_rows_), nullptr, nullptr});
      }
    }
    Waves(shared);
    ParallelChunks(static_cast<int64_t>(own.size()), [&](int64_t i) { Own(own[static_cast<size_t>(i)]); });
  }

 private:
  enum class Packed : uint8_t { kNot, kFinite, kNotFinite };  // the latter two of a block's values

  // One head of keys of a sequence and its blocks of packed keys and values.
  struct Item {
    const AttentionSequence* s;
    int64_t kv_head;
    int64_t key_blocks;
    int64_t query_blocks;
    C* packed;
    Packed* state;
  };

  static double Work(const AttentionSequence& s) { return static_cast<double>(s.q_len) * static_cast<double>(s.k_len); }
  int64_t Bytes(int64_t blocks) const { return blocks * block_size_ * static_cast<int64_t>(sizeof(C)); }

  void Allocate(ScratchFrame& frame, Item& item) const {
    item.packed = frame.Alloc<C>(item.key_blocks * block_size_);
    item.state = frame.Alloc<Packed>(item.key_blocks);
    std::fill_n(item.state, item.key_blocks, Packed::kNot);
  }

  void Own(Item item) {
    ScratchFrame frame;
    Allocate(frame, item);
    for (int64_t row = 0; row < item.s->q_len; row += task_rows_) {
      Block(item, row, std::min(task_rows_, item.s->q_len - row));
    }
  }

  // Items go in waves whose packed keys and values fit a few megabytes: packed by all threads, then used by all.
  void Waves(const std::vector<Item>& items) {
    std::vector<Item> wave;
    int64_t bytes = 0;
    for (const Item& item : items) {
      const int64_t size = Bytes(item.key_blocks);
      if (bytes + size > kWaveBytes && !wave.empty()) {
        Wave(wave);
        wave.clear();
        bytes = 0;
      }
      wave.push_back(item);
      bytes += size;
    }
    if (!wave.empty()) Wave(wave);
  }

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
    for (Item& item : wave) Allocate(frame, item);
    ForEach(wave, &Item::key_blocks, [&](const Item& item, int64_t block) { PackKeys(item, block); });
    ForEach(wave, &Item::query_blocks, [&](const Item& item, int64_t task) {
      // Later queries of causal attention have more keys: they go first.
      const int64_t row = (item.query_blocks - 1 - task) * task_rows_;
      Block(item, row, std::min(task_rows_, item.s->q_len - row));
    });
  }

  AttentionPlan::Rows Values(const Item& item) const {
    static constexpr TensorView kNone{};
    return {plan_.in.v, kNone, item.s->batch, item.kv_head, item.s->k_begin};
  }

  void PackKeys(const Item& item, int64_t block) const {
    const AttentionSequence& s = *item.s;
    const int64_t key = block * plan_.key_block;
    const int64_t n = std::min(plan_.key_block, s.k_len - key);
    C* packed = item.packed + block * block_size_;
    plan_.PackDotKeys({plan_.in.k, plan_.in.k_rope, s.batch, item.kv_head, s.k_begin}, key, n, packed);
    const bool finite = plan_.PackOverKeys(Values(item), key, n, packed + v_begin_);
    item.state[block] = finite ? Packed::kFinite : Packed::kNotFinite;
  }

  struct Panel {
    int64_t head;
    int64_t row;
    int64_t rows;
    bool summed = false;  // its sums are not all 0
  };

  void Block(const Item& item, int64_t row, int64_t rows) {
    const AttentionSequence& s = *item.s;
    const AttentionShape& shape = plan_.shape;
    const int64_t width = plan_.width;
    std::vector<Panel> panels;
    for (int64_t h = item.kv_head * shape.group; h < (item.kv_head + 1) * shape.group; ++h) {
      for (int64_t r = 0; r < rows; r += width) panels.push_back({h, row + r, std::min(width, rows - r)});
    }
    const auto count = static_cast<int64_t>(panels.size());
    ScratchFrame frame;
    const int64_t q_stride = plan_.DotQueries(plan_.Columns());
    const int64_t acc_stride = v_columns_ * width;
    C* q_turned = frame.Alloc<C>(count * q_stride);
    C* acc = frame.Alloc<C>(count * acc_stride);
    C* max = frame.Alloc<C>(count * width);
    C* sum = frame.Alloc<C>(count * width);
    C* rescale = frame.Alloc<C>(width);
    C* scores = frame.Alloc<C>(plan_.key_block * width);
    C* terms = frame.Alloc<C>(plan_.TermElements());
    C* keep = plan_.drops() ? frame.Alloc<C>(plan_.key_block * width) : nullptr;
    void* work = frame.AllocBytes(static_cast<size_t>(plan_.ScoreWorkBytes() + width * plan_.key_block * 8));
    C* q_packed = frame.Alloc<C>(plan_.Padded(plan_.Columns()) / width * plan_.PanelOf(width));
    std::fill(acc, acc + count * acc_stride, C(0));
    for (int64_t i = 0; i < count; ++i) {
      const Panel& p = panels[static_cast<size_t>(i)];
      const bool sink = plan_.in.sink.rank != 0;
      const C start = sink ? plan_.in.sink.ptr<C>()[p.head * plan_.in.sink.stride[0]] : C(kLowestScore);
      std::fill(max + i * width, max + (i + 1) * width, start);
      std::fill(sum + i * width, sum + (i + 1) * width, C(sink ? 1 : 0));
      const AttentionPlan::Rows q{plan_.in.q, plan_.in.q_rope, s.batch, p.head, s.q_begin};
      if (plan_.dots == nullptr) plan_.Pack(q, p.row, p.rows, plan_.PanelOf(width), q_packed);
      plan_.PackDotQueries(q, p.row, p.rows, q_packed, plan_.PanelOf(width), 0, q_turned + i * q_stride);
    }
    const int64_t end = plan_.High(s, row + rows - 1);
    for (int64_t key = plan_.Low(s, row) / plan_.key_block * plan_.key_block; key < end; key += plan_.key_block) {
      const int64_t n = std::min(plan_.key_block, s.k_len - key);
      const int64_t at = key / plan_.key_block;
      if (item.state[at] == Packed::kNot) PackKeys(item, at);
      const bool finite = item.state[at] == Packed::kFinite;
      const C* k_packed = item.packed + at * block_size_;
      const C* v_packed = k_packed + v_begin_;
      for (int64_t i = 0; i < count; ++i) {
        Panel& p = panels[static_cast<size_t>(i)];
        const PanelKeys keys = plan_.Keys(s, p.head, p.row, p.rows, key, n);
        if (!keys.any()) continue;
        const bool scaled =
            plan_.Scores(s, p.head, p.row, p.rows, key, keys, k_packed, q_turned + i * q_stride, scores, work);
        C* visible = scores + keys.begin * width;
        const int64_t seen = keys.end - keys.begin;
        C* sums = acc + i * acc_stride;
        const bool moved = plan_.panel.softmax(
            {visible, seen, scaled ? 1.0 : plan_.in.scale, max + i * width, sum + i * width, rescale});
        if (moved && p.summed) plan_.ScaleSums(sums, shape.dv, p.rows, rescale);
        p.summed = true;
        if (keep != nullptr) {
          plan_.Keep(s, p.head, p.row, p.rows, key + keys.begin, seen, keep);
          plan_.panel.multiply(visible, seen * width, keep);
        }
        plan_.Split(keys, scores, nullptr, terms);
        plan_.AddOverKeys({s, p.row, p.rows, key, keys, scores, terms, v_packed, finite, Values(item), sums});
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      Finish(s, panels[static_cast<size_t>(i)], acc + i * acc_stride, max + i * width, sum + i * width, rescale);
    }
  }

  // Divides by the sums and stores; a row without keys has sum 0 and sums of products 0.
  void Finish(const AttentionSequence& s, const Panel& p, C* acc, const C* max, const C* sum, C* inverse) {
    for (int64_t r = 0; r < plan_.width; ++r) inverse[r] = sum[r] == 0 ? C(0) : C(1) / sum[r];
    plan_.ScaleSums(acc, plan_.shape.dv, p.rows, inverse);
    const int64_t row = s.q_begin + p.row;
    plan_.StoreSums(acc, plan_.shape.dv, 0, p.rows, out_, s.batch, p.head, row);
    for (int64_t r = 0; r < p.rows; ++r) {
      C* m = reinterpret_cast<C*>(Element(max_, s.batch, p.head, row + r));
      C* l = reinterpret_cast<C*>(Element(sum_, s.batch, p.head, row + r));
      if (max_.stride[3] == 1 && sum_.stride[3] == 1) {
        std::fill_n(m, 8, max[r]);
        std::fill_n(l, 8, sum[r]);
        continue;
      }
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
  // A packed block: keys, then values from v_begin_ on.
  int64_t v_begin_, v_columns_, block_size_;
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
