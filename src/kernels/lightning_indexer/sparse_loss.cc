// Gradients over chosen slots: of the chosen scores, and of the loss that compares them with attention.
#include <cmath>

#include "kernels/lightning_indexer/indexer_gradient.h"
#include "kernels/lightning_indexer/indexer_loss.h"
#include "kernels/lightning_indexer/indexer_teacher.h"

namespace jumar {
namespace {

// One chunk of rows, one row after another. Slots of a row go in blocks of key_block.
template <typename C>
class SparseRows {
 public:
  SparseRows(const IndexerPlan& plan, const TensorView& indices, const IndexerGradients& out, ScratchFrame& frame)
      : plan_(plan),
        indices_(indices),
        out_(out),
        query_(plan, frame),
        work_(plan, frame),
        ids_(frame.Alloc<int32_t>(indices.size[2])),
        slots_(frame.Alloc<int32_t>(indices.size[2])),
        r_(frame.Alloc<C>(RoundUp(indices.size[2], plan.key_block) * plan.heads)),
        di_(frame.Alloc<C>(RoundUp(indices.size[2], plan.key_block))),
        gathered_(frame.AllocBytes(static_cast<size_t>(plan.key_block * plan.d) * sizeof(C))),
        packed_(frame.Alloc<C>(std::max(plan.key_size, plan.across_size))),
        sums_(frame.Alloc<C>(plan.key_block * plan.ld_d)) {}

  // fill(row, ids, slots, n, scores, di): gradients of the n scores, whose slots these are. With `masked`, keys that
  // the row does not see are skipped; else an index beyond the keys is an error.
  template <typename Fill>
  void Run(const RowChunk& chunk, bool masked, const Fill& fill) {
    const SequencePair& s = *chunk.sequence;
    for (int64_t i = chunk.begin; i < chunk.begin + chunk.rows; ++i) {
      const int64_t n = Slots(s, i, masked ? plan_.Limit(s, i) : s.k_len, masked);
      query_.Load(s, i);
      for (int64_t at = 0; at < n; at += plan_.key_block) {
        const int64_t count = std::min(plan_.key_block, n - at);
        const GemmOperand keys = Gather(s, at, count);
        plan_.gemm.pack_b({&keys, 0, count, 0, plan_.d, plan_.key_panel, packed_});
        query_.Products(packed_, count, r_ + at * plan_.heads);
        query_.Scores(r_ + at * plan_.heads, count, di_ + at);
      }
      if (n > 0) chunk.losses[i - chunk.begin] = fill(s, i, ids_, slots_, n, di_);
      for (int64_t at = 0; at < n; at += plan_.key_block) {
        const int64_t count = std::min(plan_.key_block, n - at);
        const GemmOperand keys = Across(Gather(s, at, count));
        plan_.gemm.pack_b({&keys, 0, plan_.d, 0, count, plan_.across_panel, packed_});
        query_.Add(packed_, count, r_ + at * plan_.heads, di_ + at, sums_, false, work_);
        C* dk = static_cast<C*>(chunk.dk);
        for (int64_t j = 0; j < count; ++j) {
          plan_.kernel.add(dk + ids_[at + j] * plan_.ld_d, sums_ + j * plan_.ld_d, plan_.d);
        }
      }
      query_.Store(out_.dq, out_.dw);
    }
  }

 private:
  int64_t Slots(const SequencePair& s, int64_t i, int64_t limit, bool masked) {
    const int64_t count = indices_.size[2];
    const int64_t stride = indices_.stride[2];
    const auto* from = reinterpret_cast<const int32_t*>(Element(indices_, s.batch, s.q_begin + i));
    const int64_t end = masked ? plan_.in.key.size[1] : s.k_len;
    int64_t n = 0;
    for (int64_t j = 0; j < count; ++j) {
      const int32_t id = from[j * stride];
      JUMAR_CHECK(plan_.op, id >= -1 && id < end, "sparse_indices is ", id, " at position [", s.batch, ", ",
                  s.q_begin + i, ", ", j, "], neither -1 nor within [0, ", end, ")");
      if (id < 0 || id >= limit) continue;
      ids_[n] = id;
      slots_[n++] = static_cast<int32_t>(j);
    }
    return n;
  }

  GemmOperand Gather(const SequencePair& s, int64_t at, int64_t count) {
    const GemmOperand keys = plan_.Keys(s, 0, s.k_len);
    GatherRows(keys, ids_ + at, count, gathered_);
    return {gathered_, keys.dtype, count, plan_.d, plan_.d, 1};
  }

  const IndexerPlan& plan_;
  const TensorView& indices_;
  const IndexerGradients& out_;
  QueryGradient<C> query_;
  typename QueryGradient<C>::Work work_;
  int32_t* ids_;
  int32_t* slots_;
  C* r_;
  C* di_;
  void* gathered_;
  C* packed_;
  C* sums_;
};

void CheckIndices(const IndexerPlan& plan, const TensorView& indices) {
  JUMAR_CHECK(plan.op, indices.rank == 3 && indices.size[2] > 0, "sparse_indices must hold some slots, got ",
              ShapeString(indices));
  CheckShape(plan.op, "sparse_indices", indices, {plan.in.query.size[0], plan.in.query.size[1], indices.size[2]},
             DType::kI32);
}

template <typename C>
void Grad(const IndexerPlan& plan, const TensorView& dy, const TensorView& indices, const IndexerGradients& out) {
  SumOverChunks<C>(plan, true, out.dk, [&](const RowChunk& chunk) {
    ScratchFrame frame;
    SparseRows<C> rows(plan, indices, out, frame);
    rows.Run(chunk, false,
             [&](const SequencePair& s, int64_t i, const int32_t*, const int32_t* slots, int64_t n, C* di) {
               ScratchFrame inner;
               TensorView row = dy;
               row.data = Element(dy, s.batch, s.q_begin + i);
               row.rank = 1;
               row.size[0] = dy.size[2];
               row.stride[0] = dy.stride[2];
               const C* wide = static_cast<const C*>(WidenAll(row, plan.compute, -0.0, inner));
               for (int64_t j = 0; j < n; ++j) di[j] = wide[slots[j]];
               return 0.0;
             });
  });
}

template <typename C>
double Loss(const IndexerPlan& plan, const IndexerTeacher& teacher, const TensorView& indices,
            const IndexerGradients& out) {
  const int64_t heads = teacher.query.size[2];
  return SumOverChunks<C>(plan, false, out.dk, [&](const RowChunk& chunk) {
    ScratchFrame frame;
    SparseRows<C> rows(plan, indices, out, frame);
    TeacherTiles<C> tiles(plan, teacher, heads, frame);
    C* query = frame.Alloc<C>(tiles.QuerySize());
    C* max = frame.Alloc<C>(heads);
    C* inverse = frame.Alloc<C>(heads);
    C* p = frame.Alloc<C>(indices.size[2]);
    rows.Run(chunk, true,
             [&](const SequencePair& s, int64_t i, const int32_t* ids, const int32_t*, int64_t n, C* scores) {
               for (int64_t h = 0; h < heads; ++h) tiles.Statistics(s, i, h, max + h, inverse + h);
               tiles.PackHeads(s, i, query);
               std::fill_n(p, n, C(0));
               for (int64_t at = 0; at < n; at += plan.key_block) {
                 const int64_t count = std::min(plan.key_block, n - at);
                 tiles.GatherKeys(s, ids + at, count);
                 tiles.Add(query, heads, count, max, inverse, p + at, 0);
               }
               double total = 0;
               for (int64_t j = 0; j < n; ++j) total += static_cast<double>(p[j]);
               const auto share = static_cast<C>(total == 0 ? 0.0 : 1.0 / total);
               for (int64_t j = 0; j < n; ++j) p[j] *= share;
               const double top = plan.kernel.max(scores, n, kLowestIndexScore);
               const double sum = plan.kernel.exp_sum(scores, n, top);
               return RowLoss(p, n, static_cast<C>(sum == 0 ? 0 : 1 / sum), scores);
             });
  });
}

}  // namespace

void CheckGradients(const IndexerPlan& plan, const IndexerGradients& g) {
  const auto like = [&](const char* name, const TensorView& x, const TensorView& model) {
    CheckResult(plan.op, name, x, {model.size, model.size + model.rank}, model.dtype);
  };
  like("d_query", g.dq, plan.in.query);
  like("d_key", g.dk, plan.in.key);
  like("d_weights", g.dw, plan.in.weights);
  ZeroResult(g.dq);
  ZeroResult(g.dw);
}

void LightningIndexerGrad(const char* op, const IndexerInputs& in, const TensorView& dy, const TensorView& indices,
                          const TensorView& dq, const TensorView& dk, const TensorView& dw) {
  ScratchFrame frame;
  const IndexerPlan plan(op, in, frame);
  CheckIndices(plan, indices);
  CheckShape(op, "dy", dy, {indices.size, indices.size + 3}, in.query.dtype);
  const IndexerGradients out{dq, dk, dw};
  CheckGradients(plan, out);
  plan.compute == DType::kF64 ? Grad<double>(plan, dy, indices, out) : Grad<float>(plan, dy, indices, out);
}

double SparseIndexerLoss(const char* op, const IndexerInputs& in, const IndexerTeacher& teacher,
                         const TensorView& indices, const IndexerGradients& gradients) {
  ScratchFrame frame;
  const IndexerPlan plan(op, in, frame);
  CheckIndices(plan, indices);
  CheckTeacher(plan, teacher);
  JUMAR_CHECK(op, teacher.key.size[2] == 1, "key must have one head, got ", ShapeString(teacher.key));
  CheckGradients(plan, gradients);
  return plan.compute == DType::kF64 ? Loss<double>(plan, teacher, indices, gradients)
                                     : Loss<float>(plan, teacher, indices, gradients);
}

}  // namespace jumar
