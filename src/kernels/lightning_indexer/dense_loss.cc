// The loss over all visible keys: blocks of queries, for each first the attention's probabilities of the whole strip,
// head by head, then the indexer's gradients, key block by key block.
#include "kernels/lightning_indexer/indexer_gradient.h"
#include "kernels/lightning_indexer/indexer_loss.h"
#include "kernels/lightning_indexer/indexer_teacher.h"

namespace jumar {
namespace {

constexpr int64_t kRows = 64;  // queries of a strip

template <typename C>
class DenseRows {
 public:
  DenseRows(const IndexerPlan& plan, const IndexerTeacher& teacher, const TensorView& max_index,
            const TensorView& sum_index, const IndexerGradients& out)
      : plan_(plan), teacher_(teacher), max_index_(max_index), sum_index_(sum_index), out_(out) {}

  void Run(const RowChunk& chunk) {
    for (int64_t row = 0; row < chunk.rows; row += kRows) {
      Strip(chunk, chunk.begin + row, std::min(kRows, chunk.rows - row));
    }
  }

 private:
  void Strip(const RowChunk& chunk, int64_t row, int64_t rows) {
    const SequencePair& s = *chunk.sequence;
    const int64_t end = plan_.Limit(s, row + rows - 1);
    if (end == 0) return;
    ScratchFrame frame;
    const int64_t ld = RoundUp(end, plan_.key_block);
    C* p = frame.Alloc<C>(rows * ld);
    std::fill_n(p, rows * ld, C(0));
    Probabilities(s, row, rows, end, p, ld);
    Gradients(chunk, row, rows, end, p, ld);
  }

  void Probabilities(const SequencePair& s, int64_t row, int64_t rows, int64_t end, C* p, int64_t ld) {
    ScratchFrame frame;
    TeacherTiles<C> tiles(plan_, teacher_, rows, frame);
    const int64_t group = tiles.heads() / tiles.kv_heads();
    C* queries = frame.Alloc<C>(group * tiles.QuerySize());
    C* max = frame.Alloc<C>(group * rows);
    C* inverse = frame.Alloc<C>(group * rows);
    for (int64_t kv = 0; kv < tiles.kv_heads(); ++kv) {
      for (int64_t g = 0; g < group; ++g) {
        const int64_t head = kv * group + g;
        tiles.PackRows(s, row, rows, head, queries + g * tiles.QuerySize());
        for (int64_t r = 0; r < rows; ++r) {
          tiles.Statistics(s, row + r, head, max + g * rows + r, inverse + g * rows + r);
        }
      }
      for (int64_t key = 0; key < end; key += plan_.key_block) {
        const int64_t n = std::min(plan_.key_block, end - key);
        tiles.PackKeys(s, key, n, kv);
        for (int64_t g = 0; g < group; ++g) {
          tiles.Add(queries + g * tiles.QuerySize(), rows, n, max + g * rows, inverse + g * rows, p + key, ld);
        }
      }
    }
  }

  void Gradients(const RowChunk& chunk, int64_t row, int64_t rows, int64_t end, C* p, int64_t ld) {
    const SequencePair& s = *chunk.sequence;
    ScratchFrame frame;
    std::vector<QueryGradient<C>> queries;
    for (int64_t r = 0; r < rows; ++r) queries.emplace_back(plan_, frame).Load(s, row + r);
    const typename QueryGradient<C>::Work work(plan_, frame);
    C* packed = frame.Alloc<C>(plan_.key_size);
    C* across = frame.Alloc<C>(plan_.across_size);
    C* r_tile = frame.Alloc<C>(plan_.key_block * plan_.heads);
    C* scores = frame.Alloc<C>(plan_.key_block);
    C* dk = static_cast<C*>(chunk.dk);
    double* losses = chunk.losses + (row - chunk.begin);
    for (int64_t key = 0; key < end; key += plan_.key_block) {
      const int64_t all = std::min(plan_.key_block, end - key);
      const GemmOperand keys = plan_.Keys(s, key, all);
      const GemmOperand turned = Across(keys);
      plan_.gemm.pack_b({&keys, 0, all, 0, plan_.d, plan_.key_panel, packed});
      plan_.gemm.pack_b({&turned, 0, plan_.d, 0, all, plan_.across_panel, across});
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = std::min(plan_.key_block, plan_.Limit(s, row + r) - key);
        if (n <= 0) continue;
        QueryGradient<C>& query = queries[static_cast<size_t>(r)];
        query.Products(packed, n, r_tile);
        query.Scores(r_tile, n, scores);
        const int64_t at = s.q_begin + row + r;
        const C max = *reinterpret_cast<const C*>(Element(max_index_, s.batch, at));
        const C sum = *reinterpret_cast<const C*>(Element(sum_index_, s.batch, at));
        plan_.kernel.exp_sum(scores, n, max);
        losses[r] += RowLoss(p + r * ld + key, n, sum == 0 ? C(0) : C(1) / sum, scores);
        query.Add(across, n, r_tile, scores, dk + key * plan_.ld_d, true, work);
      }
    }
    for (const QueryGradient<C>& query : queries) query.Store(out_.dq, out_.dw);
  }

  const IndexerPlan& plan_;
  const IndexerTeacher& teacher_;
  const TensorView& max_index_;
  const TensorView& sum_index_;
  const IndexerGradients& out_;
};

template <typename C>
double Loss(const IndexerPlan& plan, const IndexerTeacher& teacher, const TensorView& max_index,
            const TensorView& sum_index, const IndexerGradients& out) {
  return SumOverChunks<C>(plan, false, out.dk, [&](const RowChunk& chunk) {
    DenseRows<C>(plan, teacher, max_index, sum_index, out).Run(chunk);
  });
}

}  // namespace

double DenseIndexerLoss(const char* op, const IndexerInputs& in, const IndexerTeacher& teacher,
                        const TensorView& max_index, const TensorView& sum_index, const IndexerGradients& gradients) {
  ScratchFrame frame;
  const IndexerPlan plan(op, in, frame);
  CheckTeacher(plan, teacher);
  const std::vector<int64_t> sizes = {in.query.size[0], in.query.size[1]};
  CheckShape(op, "softmax_max_index", max_index, sizes, plan.compute);
  CheckShape(op, "softmax_sum_index", sum_index, sizes, plan.compute);
  CheckGradients(plan, gradients);
  return plan.compute == DType::kF64 ? Loss<double>(plan, teacher, max_index, sum_index, gradients)
                                     : Loss<float>(plan, teacher, max_index, sum_index, gradients);
}

}  // namespace jumar
