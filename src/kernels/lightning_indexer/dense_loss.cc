// The loss over all visible keys: blocks of queries, for each first the attention's probabilities of the whole strip,
// head by head, then the indexer's gradients, key block by key block.
#include <numeric>

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
      : plan_(plan),
        teacher_(teacher),
        max_index_(max_index),
        sum_index_(sum_index),
        out_(out),
        keys_(plan.in.key, plan.compute) {}

  void Run(const RowChunk& chunk) const {
    for (int64_t row = 0; row < chunk.rows; row += kRows) {
      Strip(chunk, chunk.begin + row, std::min(kRows, chunk.rows - row));
    }
  }

 private:
  void Strip(const RowChunk& chunk, int64_t row, int64_t rows) const {
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

  // p[row, key] gains the part of each head: products of its queries and a block of keys.
  void Probabilities(const SequencePair& s, int64_t row, int64_t rows, int64_t end, C* p, int64_t ld) const {
    const GemmKernel& gemm = plan_.gemm;
    const int64_t group = teacher_.query.size[2] / teacher_.key.size[2];
    struct Part {
      TeacherPart of;
      int64_t row_panel, key_panel, size;
      C* queries;
      C* keys;
    };
    ScratchFrame frame;
    std::vector<Part> parts;
    for (const TeacherPart& of : TeacherParts(teacher_)) {
      Part part{of, gemm.PanelStride(gemm.mr, of.d), gemm.PanelStride(gemm.nr, of.d), 0, nullptr, nullptr};
      part.size = CeilDiv(rows, gemm.mr) * part.row_panel;
      part.queries = frame.Alloc<C>(group * part.size);
      part.keys = frame.Alloc<C>(plan_.key_block / gemm.nr * part.key_panel);
      parts.push_back(part);
    }
    C* tile = frame.Alloc<C>(rows * plan_.key_block);
    C* max = frame.Alloc<C>(group * rows);
    C* inverse = frame.Alloc<C>(group * rows);
    const auto operand = [&](const TensorView& x, int64_t at, int64_t n, int64_t head) {
      return GemmOperand{Element(x, s.batch, at, head), x.dtype, n, x.size[3], x.stride[1], x.stride[3]};
    };
    for (int64_t kv = 0; kv < teacher_.key.size[2]; ++kv) {
      for (int64_t g = 0; g < group; ++g) {
        for (const Part& part : parts) {
          const GemmOperand q = operand(*part.of.query, s.q_begin + row, rows, kv * group + g);
          gemm.pack_a({&q, 0, rows, 0, part.of.d, part.row_panel, part.queries + g * part.size});
        }
        for (int64_t r = 0; r < rows; ++r) {
          Statistics(teacher_, s, row + r, kv * group + g, max + g * rows + r, inverse + g * rows + r);
        }
      }
      for (int64_t key = 0; key < end; key += plan_.key_block) {
        const int64_t n = std::min(plan_.key_block, end - key);
        for (const Part& part : parts) {
          const GemmOperand k = operand(*part.of.key, s.k_begin + key, n, kv);
          gemm.pack_b({&k, 0, n, 0, part.of.d, part.key_panel, part.keys});
        }
        for (int64_t g = 0; g < group; ++g) {
          for (const Part& part : parts) {
            MultiplyTile(gemm, rows, n, part.of.d, part.queries + g * part.size, part.row_panel, part.keys,
                         part.key_panel, tile, plan_.key_block, &part != parts.data());
          }
          plan_.kernel.tile_probabilities(
              {tile, plan_.key_block, rows, n, teacher_.scale, max + g * rows, inverse + g * rows, p + key, ld});
        }
      }
    }
  }

  void Gradients(const RowChunk& chunk, int64_t row, int64_t rows, int64_t end, C* p, int64_t ld) const {
    const SequencePair& s = *chunk.sequence;
    ScratchFrame frame;
    std::vector<QueryGradient<C>> queries;
    for (int64_t r = 0; r < rows; ++r) queries.emplace_back(plan_, frame).Load(s, row + r);
    C* products = frame.Alloc<C>(QueryGradient<C>::ProductSize(plan_));
    C* scores = frame.Alloc<C>(plan_.key_block);
    int32_t* ids = frame.Alloc<int32_t>(plan_.key_block);
    const void** keys = frame.Alloc<const void*>(plan_.key_block);
    void** dk = frame.Alloc<void*>(plan_.key_block);
    double* losses = chunk.losses + (row - chunk.begin);
    for (int64_t key = 0; key < end; key += plan_.key_block) {
      const int64_t all = std::min(plan_.key_block, end - key);
      std::iota(ids, ids + all, static_cast<int32_t>(key));
      PointToKeys(keys_, s, ids, all, keys);
      PointToSums<C>(plan_, chunk, ids, all, dk);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = std::min(plan_.key_block, plan_.Limit(s, row + r) - key);
        if (n <= 0) continue;
        QueryGradient<C>& query = queries[static_cast<size_t>(r)];
        query.Scores(keys, n, products, scores);
        const int64_t at = s.q_begin + row + r;
        const C max = *reinterpret_cast<const C*>(Element(max_index_, s.batch, at));
        const C sum = *reinterpret_cast<const C*>(Element(sum_index_, s.batch, at));
        plan_.kernel.exp_sum(scores, n, max);
        losses[r] += RowLoss(p + r * ld + key, n, sum == 0 ? C(0) : C(1) / sum, scores);
        query.Add(keys, n, products, scores, dk);
      }
    }
    for (const QueryGradient<C>& query : queries) query.Store(out_.dq, out_.dw);
  }

  const IndexerPlan& plan_;
  const IndexerTeacher& teacher_;
  const TensorView& max_index_;
  const TensorView& sum_index_;
  const IndexerGradients& out_;
  KeyRows keys_;
};

template <typename C>
double Loss(const IndexerPlan& plan, const IndexerTeacher& teacher, const TensorView& max_index,
            const TensorView& sum_index, const IndexerGradients& out) {
  const DenseRows<C> rows(plan, teacher, max_index, sum_index, out);
  return SumOverChunks<C>(plan, false, out.dk, [&](const RowChunk& chunk) { rows.Run(chunk); });
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
