// Scores in a stream of key blocks: the choice of the largest, and the statistics of their softmax.
#include "kernels/lightning_indexer/lightning_indexer.h"

#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "jumar/runtime.h"
#include "kernels/lightning_indexer/indexer_plan.h"
#include "kernels/lightning_indexer/running_top_k.h"

namespace jumar {
namespace {

constexpr int64_t kWaveBytes = 32 << 20;
constexpr int64_t kPieceKeys = 1024;  // of a task, where rows are few
constexpr int64_t kTaskHeads = 256;   // rows of queries and heads that pass one block of keys

// Keys are packed once, for a few sequences at a time, and serve all queries. A task is a block of queries of one
// sequence. For each, make(sequence, row, rows, frame) gives what takes its scores: take(row, scores, n, key), in
// ascending order of keys, then finish(row).
template <typename C, typename Make>
class ScoreStream {
 public:
  ScoreStream(const IndexerPlan& plan, const Make& make) : plan_(plan), make_(make) {}

  void Run() {
    std::vector<Item> wave;
    int64_t bytes = 0;
    for (const SequencePair& s : plan_.in.sequences) {
      if (s.q_len == 0) continue;
      const int64_t blocks = CeilDiv(s.k_len, plan_.key_block);
      const int64_t size = blocks * plan_.key_size * static_cast<int64_t>(sizeof(C));
      if (bytes + size > kWaveBytes && !wave.empty()) {
        Wave(wave);
        wave.clear();
        bytes = 0;
      }
      wave.push_back({&s, blocks, nullptr});
      bytes += size;
    }
    Wave(wave);
  }

 private:
  struct Item {
    const SequencePair* s;
    int64_t blocks;
    C* packed;
  };
  struct Task {
    const Item* item;
    int64_t begin;
  };

  void Wave(std::vector<Item>& wave) {
    ScratchFrame frame;
    std::vector<Task> packs;
    std::vector<Task> tasks;
    int64_t rows = std::max<int64_t>(1, kTaskHeads / plan_.heads);
    int64_t all = 0;
    for (const Item& item : wave) all += item.s->q_len;
    rows = std::clamp<int64_t>(all / (2 * NumThreads()), 1, rows);
    for (Item& item : wave) {
      item.packed = frame.Alloc<C>(item.blocks * plan_.key_size);
      for (int64_t b = 0; b < item.blocks; ++b) packs.push_back({&item, b});
      // Later queries of causal attention have more keys: they go first.
      for (int64_t end = item.s->q_len; end > 0; end -= rows)
        tasks.push_back({&item, std::max<int64_t>(end - rows, 0)});
    }
    ParallelChunks(static_cast<int64_t>(packs.size()), [&](int64_t i) {
      const auto& [item, b] = packs[static_cast<size_t>(i)];
      const int64_t key = b * plan_.key_block;
      const int64_t n = std::min(plan_.key_block, item->s->k_len - key);
      const GemmOperand keys = plan_.Keys(*item->s, 0, item->s->k_len);
      plan_.gemm.pack_b({&keys, key, n, 0, plan_.d, plan_.key_panel, item->packed + b * plan_.key_size});
    });
    if (all <= 2 * NumThreads()) {
      FewRows(tasks);
      return;
    }
    ParallelChunks(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
      const auto& [item, begin] = tasks[static_cast<size_t>(i)];
      const SequencePair& s = *item->s;
      const int64_t count = std::min(rows, s.q_len - begin);
      ScratchFrame memory;
      auto sink = make_(s, begin, count, memory);
      Scores(*item, begin, count, 0, plan_.Limit(s, begin + count - 1),
             [&](int64_t r, C* scores, int64_t n, int64_t key) { sink.Take(r, scores, n, key); });
      for (int64_t r = 0; r < count; ++r) sink.Finish(r);
    });
  }

  // Tasks of one row, fewer than threads can share: their keys are shared out, and what takes the scores gets them as
  // it would block by block.
  void FewRows(const std::vector<Task>& tasks) {
    ScratchFrame frame;
    struct Piece {
      size_t task;
      int64_t begin, end;
    };
    std::vector<Piece> pieces;
    std::vector<C*> scores;
    for (size_t t = 0; t < tasks.size(); ++t) {
      const int64_t end = plan_.Limit(*tasks[t].item->s, tasks[t].begin);
      scores.push_back(frame.Alloc<C>(end));
      const int64_t step = std::max<int64_t>(1, kPieceKeys / plan_.key_block) * plan_.key_block;
      for (int64_t key = 0; key < end; key += step) pieces.push_back({t, key, std::min(end, key + step)});
    }
    ParallelChunks(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
      const Piece& piece = pieces[static_cast<size_t>(i)];
      const auto& [item, row] = tasks[piece.task];
      Scores(*item, row, 1, piece.begin, piece.end,
             [&](int64_t, const C* x, int64_t n, int64_t key) { std::copy_n(x, n, scores[piece.task] + key); });
    });
    ParallelChunks(static_cast<int64_t>(tasks.size()), [&](int64_t i) {
      const auto& [item, row] = tasks[static_cast<size_t>(i)];
      ScratchFrame memory;
      auto sink = make_(*item->s, row, 1, memory);
      const int64_t end = plan_.Limit(*item->s, row);
      for (int64_t key = 0; key < end; key += plan_.key_block) {
        sink.Take(0, scores[static_cast<size_t>(i)] + key, std::min(plan_.key_block, end - key), key);
      }
      sink.Finish(0);
    });
  }

  // Calls take(r, scores, n, key) for every row and block of keys [begin, end), which `begin` starts. Queries and heads
  // are one list of rows for the product with a block.
  template <typename Take>
  void Scores(const Item& item, int64_t row, int64_t rows, int64_t begin, int64_t end, const Take& take) {
    const SequencePair& s = *item.s;
    ScratchFrame frame;
    const int64_t heads = plan_.heads;
    const int64_t panel = plan_.gemm.PanelStride(plan_.gemm.mr, plan_.d);
    C* queries = frame.Alloc<C>(CeilDiv(rows * heads, plan_.gemm.mr) * panel);
    C* tile = frame.Alloc<C>(rows * heads * plan_.key_block);
    C* scores = frame.Alloc<C>(plan_.key_block);
    const GemmOperand q = Queries(s, row, rows, frame);
    plan_.gemm.pack_a({&q, 0, q.rows, 0, plan_.d, panel, queries});
    for (int64_t key = begin; key < end; key += plan_.key_block) {
      const C* keys = item.packed + key / plan_.key_block * plan_.key_size;
      int64_t first = 0;
      while (plan_.Limit(s, row + first) <= key) ++first;
      const int64_t skipped = first * heads / plan_.gemm.mr * plan_.gemm.mr;
      MultiplyTile(plan_.gemm, rows * heads - skipped, std::min(plan_.key_block, end - key), plan_.d,
                   queries + skipped / plan_.gemm.mr * panel, panel, keys, plan_.key_panel,
                   tile + skipped * plan_.key_block, plan_.key_block, false);
      for (int64_t r = first; r < rows; ++r) {
        const int64_t n = std::min(plan_.key_block, plan_.Limit(s, row + r) - key);
        plan_.kernel.tile_scores(tile + r * heads * plan_.key_block, plan_.key_block, heads, n,
                                 plan_.Weights<C>(s, row + r), scores);
        take(r, scores, n, key);
      }
    }
  }

  // The heads of some queries as rows: of the tensor itself where they are evenly spaced, else of a copy.
  GemmOperand Queries(const SequencePair& s, int64_t row, int64_t rows, ScratchFrame& frame) const {
    GemmOperand q = plan_.Query(s, row);
    q.rows *= rows;
    const TensorView& x = plan_.in.query;
    if (rows == 1 || x.stride[1] == plan_.heads * x.stride[2]) return q;
    const TensorView from = Narrow(Narrow(x, 0, s.batch, 1), 1, s.q_begin + row, rows);
    q.data = WidenAll(from, plan_.compute, -0.0, frame);
    q.dtype = plan_.compute;
    q.row_stride = plan_.d;
    q.k_stride = 1;
    return q;
  }

  const IndexerPlan& plan_;
  const Make& make_;
};

template <typename C, typename Make>
void StreamScores(const IndexerPlan& plan, const Make& make) {
  ScoreStream<C, Make>(plan, make).Run();
}

template <typename C>
class ChooseKeys {
 public:
  ChooseKeys(const IndexerPlan& plan, const TensorView& indices, const TensorView* values, const SequencePair& s,
             int64_t row, int64_t rows, ScratchFrame& frame)
      : plan_(plan),
        indices_(indices),
        values_(values),
        first_(s.batch * plan.in.query.size[1] + s.q_begin + row),
        count_(indices.size[3]),
        limits_(count_, std::max<int64_t>(plan.Limit(s, row + rows - 1), 1), plan.key_block),
        scratch_(frame, limits_),
        row_(values == nullptr ? nullptr : frame.Alloc<C>(count_)) {
    for (int64_t r = 0; r < rows; ++r) best_.emplace_back(plan.kernel, frame, limits_);
  }

  void Take(int64_t r, const C* scores, int64_t n, int64_t key) {
    best_[static_cast<size_t>(r)].Add(scores, n, key, scratch_);
  }

  void Finish(int64_t r) {
    const typename RunningTopK<C>::Choice* chosen = nullptr;
    const int64_t n = best_[static_cast<size_t>(r)].Finish(scratch_, &chosen);
    int32_t* ids = indices_.ptr<int32_t>() + (first_ + r) * count_;
    for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(chosen[i].id);
    std::fill(ids + n, ids + count_, -1);
    if (values_ == nullptr) return;
    for (int64_t i = 0; i < n; ++i) row_[i] = chosen[i].score();
    std::fill(row_ + n, row_ + count_, -std::numeric_limits<C>::infinity());
    StoreRows(plan_, row_, 0, 1, count_, values_->dtype, Element(*values_, 0, 0) + RowBytes() * (first_ + r));
  }

 private:
  int64_t RowBytes() const { return count_ * static_cast<int64_t>(SizeOf(values_->dtype)); }

  const IndexerPlan& plan_;
  const TensorView& indices_;
  const TensorView* values_;
  int64_t first_;
  int64_t count_;
  typename RunningTopK<C>::Limits limits_;
  typename RunningTopK<C>::Scratch scratch_;
  C* row_;
  std::vector<RunningTopK<C>> best_;
};

// max and the sum of exponentials so far; the sum is rescaled where a block has a larger score.
template <typename C>
class Softmax {
 public:
  Softmax(const IndexerPlan& plan, const TensorView& max, const TensorView& sum, const SequencePair& s, int64_t row,
          int64_t rows)
      : plan_(plan), max_(max), sum_(sum), first_(s.batch * plan.in.query.size[1] + s.q_begin + row) {
    rows_.assign(static_cast<size_t>(rows), {static_cast<C>(kLowestIndexScore), C(0)});
  }

  void Take(int64_t r, C* scores, int64_t n, int64_t /*key*/) {
    auto& [max, sum] = rows_[static_cast<size_t>(r)];
    const C higher = static_cast<C>(plan_.kernel.max(scores, n, max));
    const C more = static_cast<C>(plan_.kernel.exp_sum(scores, n, higher));
    sum = sum * std::exp(max - higher) + more;
    max = higher;
  }

  void Finish(int64_t r) {
    const auto& [max, sum] = rows_[static_cast<size_t>(r)];
    max_.ptr<C>()[first_ + r] = max;
    sum_.ptr<C>()[first_ + r] = sum;
  }

 private:
  const IndexerPlan& plan_;
  const TensorView& max_;
  const TensorView& sum_;
  int64_t first_;
  std::vector<std::pair<C, C>> rows_;
};

// Calls body(C()) with the compute type.
template <typename F>
void WithCompute(const IndexerPlan& plan, const F& body) {
  plan.compute == DType::kF64 ? body(double()) : body(float());
}

template <typename T>
void FillResult(const TensorView& x, T value) {
  ParallelFor(x.numel(), 1 << 18,
              [&](int64_t begin, int64_t end) { std::fill(x.ptr<T>() + begin, x.ptr<T>() + end, value); });
}

// Whether every query belongs to a sequence.
bool Covered(const IndexerInputs& in) {
  int64_t rows = 0;
  for (const SequencePair& s : in.sequences) rows += s.q_len;
  return rows == in.query.size[0] * in.query.size[1];
}

}  // namespace

void LightningIndexer(const char* op, const IndexerInputs& in, const TensorView& indices, const TensorView* values) {
  ScratchFrame frame;
  const IndexerPlan plan(op, in, frame);
  const TensorView& q = in.query;
  JUMAR_CHECK(op, indices.rank == 4 && indices.size[3] > 0, "sparse_count must be positive, got ",
              indices.rank == 4 ? indices.size[3] : 0);
  const std::vector<int64_t> sizes = {q.size[0], q.size[1], 1, indices.size[3]};
  CheckResult(op, "indices", indices, sizes, DType::kI32);
  if (values != nullptr) CheckResult(op, "values", *values, sizes, q.dtype);
  if (!Covered(in)) {
    FillResult<int32_t>(indices, -1);
    if (values != nullptr) {
      const TensorView rows = Contiguous(values->data, values->dtype, {q.size[0] * q.size[1], indices.size[3]});
      WithCompute(plan, [&](auto zero) {
        using C = decltype(zero);
        const std::vector<C> hidden(static_cast<size_t>(indices.size[3]), -std::numeric_limits<C>::infinity());
        for (int64_t i = 0; i < rows.size[0]; ++i) {
          StoreRows(plan, hidden.data(), 0, 1, rows.size[1], rows.dtype, Element(rows, i, 0));
        }
      });
    }
  }
  WithCompute(plan, [&](auto zero) {
    using C = decltype(zero);
    StreamScores<C>(plan, [&](const SequencePair& s, int64_t row, int64_t rows, ScratchFrame& memory) {
      return ChooseKeys<C>(plan, indices, values, s, row, rows, memory);
    });
  });
}

void IndexerSoftmax(const char* op, const IndexerInputs& in, const TensorView& max, const TensorView& sum) {
  ScratchFrame frame;
  const IndexerPlan plan(op, in, frame);
  const std::vector<int64_t> sizes = {in.query.size[0], in.query.size[1]};
  CheckResult(op, "softmax_max", max, sizes, plan.compute);
  CheckResult(op, "softmax_sum", sum, sizes, plan.compute);
  WithCompute(plan, [&](auto zero) {
    using C = decltype(zero);
    if (!Covered(in)) {
      FillResult(max, static_cast<C>(kLowestIndexScore));
      FillResult(sum, C(0));
    }
    StreamScores<C>(plan, [&](const SequencePair& s, int64_t row, int64_t rows, ScratchFrame&) {
      return Softmax<C>(plan, max, sum, s, row, rows);
    });
  });
}

}  // namespace jumar
