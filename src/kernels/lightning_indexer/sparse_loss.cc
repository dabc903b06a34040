// Gradients over chosen slots: of the chosen scores, and of the loss that compares them with attention.
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/indices.h"
#include "kernels/lightning_indexer/indexer_gradient.h"
#include "kernels/lightning_indexer/indexer_loss.h"
#include "kernels/lightning_indexer/indexer_teacher.h"

namespace jumar {
namespace {

// One chunk of rows, one row after another. Slots of a row go in blocks of key_block.
template <typename C>
class SparseRows {
 public:
  SparseRows(const IndexerPlan& plan, const KeyRows& keys, const TensorView& indices, const IndexerGradients& out,
             ScratchFrame& frame)
      : plan_(plan),
        keys_(keys),
        indices_(indices),
        out_(out),
        query_(plan, frame),
        ids_(frame.Alloc<int32_t>(indices.size[2])),
        slots_(frame.Alloc<int32_t>(indices.size[2])),
        rows_(frame.Alloc<const void*>(indices.size[2])),
        sums_(frame.Alloc<void*>(indices.size[2])),
        r_(frame.Alloc<C>(CeilDiv(indices.size[2], plan.key_block) * QueryGradient<C>::ProductSize(plan))),
        di_(frame.Alloc<C>(indices.size[2])) {}

  // fill(row, ids, slots, n, scores) makes the n scores their gradients, and returns the row's loss; ids and slots say
  // which keys these are and where they stand. With `masked`, keys that the row does not see are skipped.
  template <typename Fill>
  void Run(const RowChunk& chunk, bool masked, const Fill& fill) {
    const SequencePair& s = *chunk.sequence;
    for (int64_t i = chunk.begin; i < chunk.begin + chunk.rows; ++i) {
      const int64_t n = Slots(s, i, masked ? plan_.Limit(s, i) : s.k_len);
      if (n == 0) continue;
      PointToKeys(keys_, s, ids_, n, rows_);
      PointToSums<C>(plan_, chunk, ids_, n, sums_);
      query_.Load(s, i);
      const auto blocks = [&](const auto& body) {
        C* r = r_;
        for (int64_t at = 0; at < n; at += plan_.key_block, r += QueryGradient<C>::ProductSize(plan_)) {
          body(at, std::min(plan_.key_block, n - at), r);
        }
      };
      blocks([&](int64_t at, int64_t count, C* r) { query_.Scores(rows_ + at, count, r, di_ + at); });
      chunk.losses[i - chunk.begin] = fill(s, i, ids_, slots_, n, di_);
      blocks([&](int64_t at, int64_t count, C* r) { query_.Add(rows_ + at, count, r, di_ + at, sums_ + at); });
      query_.Store(out_.dq, out_.dw);
    }
  }

 private:
  int64_t Slots(const SequencePair& s, int64_t i, int64_t limit) {
    const int64_t count = indices_.size[2];
    const int64_t stride = indices_.stride[2];
    const char* from = Element(indices_, s.batch, s.q_begin + i);
    int64_t n = 0;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t id = indices_.dtype == DType::kI32 ? reinterpret_cast<const int32_t*>(from)[j * stride]
                                                       : reinterpret_cast<const int64_t*>(from)[j * stride];
      if (id < 0 || id >= limit) continue;
      ids_[n] = static_cast<int32_t>(id);
      slots_[n++] = static_cast<int32_t>(j);
    }
    return n;
  }

  const IndexerPlan& plan_;
  const KeyRows& keys_;
  const TensorView& indices_;
  const IndexerGradients& out_;
  QueryGradient<C> query_;
  int32_t* ids_;
  int32_t* slots_;
  const void** rows_;
  void** sums_;
  C* r_;
  C* di_;
};

// Probabilities of the attention's heads over some keys.
template <typename C>
class TeacherRow {
 public:
  TeacherRow(const IndexerPlan& plan, const IndexerTeacher& teacher, const std::vector<KeyRows>& keys, int64_t slots,
             ScratchFrame& frame)
      : plan_(plan), teacher_(teacher), keys_(keys), parts_(TeacherParts(teacher)) {
    const int64_t padded = RoundUp(heads(), plan.kernel.width);
    for (const TeacherPart& part : parts_) {
      forms_.push_back({heads(), part.d, plan.gemm.PanelStride(plan.gemm.nr, part.d)});
      packed_.push_back(frame.Alloc<C>(forms_.back().Size(plan.kernel.width)));
    }
    rows_ = frame.Alloc<const void*>(slots);
    r_ = frame.Alloc<C>(padded * plan.key_block);
    max_ = frame.Alloc<C>(padded);
    inverse_ = frame.Alloc<C>(padded);
    std::fill_n(max_, padded, C(0));
    std::fill_n(inverse_, padded, C(0));
  }

  // p[0..n) for the keys `ids`.
  void Fill(const SequencePair& s, int64_t row, const int32_t* ids, int64_t n, C* p) {
    for (int64_t h = 0; h < heads(); ++h) Statistics(teacher_, s, row, h, max_ + h, inverse_ + h);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const TensorView& x = *parts_[i].query;
      const GemmOperand q{Element(x, s.batch, s.q_begin + row), x.dtype, heads(), x.size[3], x.stride[2], x.stride[3]};
      plan_.gemm.pack_b({&q, 0, heads(), 0, x.size[3], forms_[i].panel, packed_[i]});
    }
    std::fill_n(p, n, C(0));
    const int64_t ld = RoundUp(heads(), plan_.kernel.width);
    for (int64_t at = 0; at < n; at += plan_.key_block) {
      const int64_t count = std::min(plan_.key_block, n - at);
      const TurnedTile tile{r_, ld, heads(), count};
      for (size_t i = 0; i < parts_.size(); ++i) {
        PointToKeys(keys_[i], s, ids + at, count, rows_);
        HeadProducts(plan_, forms_[i], packed_[i], rows_, tile, i > 0);
      }
      plan_.kernel.turned_probabilities(tile, teacher_.scale, max_, inverse_, p + at);
    }
  }

 private:
  int64_t heads() const { return teacher_.query.size[2]; }

  const IndexerPlan& plan_;
  const IndexerTeacher& teacher_;
  const std::vector<KeyRows>& keys_;
  std::vector<TeacherPart> parts_;
  std::vector<PackedHeads> forms_;
  std::vector<C*> packed_;
  const void** rows_;
  C* r_;
  C* max_;
  C* inverse_;
};

void CheckIndices(const IndexerPlan& plan, const TensorView& indices) {
  JUMAR_CHECK(plan.op, indices.rank == 3 && indices.size[2] > 0, "sparse_indices must hold some slots, got ",
              ShapeString(indices));
  JUMAR_CHECK(plan.op, indices.dtype == DType::kI32 || indices.dtype == DType::kI64,
              "sparse_indices must be int32 or int64, got ", Name(indices.dtype));
  CheckShape(plan.op, "sparse_indices", indices, {plan.in.query.size[0], plan.in.query.size[1], indices.size[2]},
             indices.dtype);
}

// Of rows that belong to a sequence, before anything is written. `masked`: as SparseRows::Run has it; an index may then
// name any key.
void CheckSlots(const IndexerPlan& plan, const TensorView& indices, bool masked) {
  const int64_t queries = plan.in.query.size[1];
  std::vector<int64_t> ends(static_cast<size_t>(indices.size[0] * queries), std::numeric_limits<int64_t>::max());
  for (const SequencePair& s : plan.in.sequences) {
    std::fill_n(ends.begin() + s.batch * queries + s.q_begin, s.q_len, masked ? plan.in.key.size[1] : s.k_len);
  }
  const auto end = [&](int64_t row) { return ends[static_cast<size_t>(row)]; };
  const int64_t bad = FirstOutside(indices, -1, end);
  if (bad < 0) return;
  Fail(plan.op, "sparse_indices is ", IntegerAt(indices, bad), " at position ", PositionOf(indices, bad),
       ", neither -1 nor within [0, ", end(bad / indices.size[2]), ")");
}

template <typename C>
void Grad(const IndexerPlan& plan, const TensorView& dy, const TensorView& indices, const IndexerGradients& out) {
  const KeyRows keys(plan.in.key, plan.compute);
  SumOverChunks<C>(plan, true, out.dk, [&](const RowChunk& chunk) {
    ScratchFrame frame;
    SparseRows<C> rows(plan, keys, indices, out, frame);
    const auto fill = [&](const SequencePair& s, int64_t i, const int32_t*, const int32_t* slots, int64_t n, C* di) {
      ScratchFrame inner;
      TensorView row = dy;
      row.data = Element(dy, s.batch, s.q_begin + i);
      row.rank = 1;
      row.size[0] = dy.size[2];
      row.stride[0] = dy.stride[2];
      const C* wide = static_cast<const C*>(WidenAll(row, plan.compute, -0.0, inner));
      for (int64_t j = 0; j < n; ++j) di[j] = wide[slots[j]];
      return 0.0;
    };
    rows.Run(chunk, false, fill);
  });
}

template <typename C>
double Loss(const IndexerPlan& plan, const IndexerTeacher& teacher, const TensorView& indices,
            const IndexerGradients& out) {
  const KeyRows keys(plan.in.key, plan.compute);
  std::vector<KeyRows> teacher_keys;
  for (const TeacherPart& part : TeacherParts(teacher)) teacher_keys.emplace_back(*part.key, plan.compute);
  return SumOverChunks<C>(plan, false, out.dk, [&](const RowChunk& chunk) {
    ScratchFrame frame;
    SparseRows<C> rows(plan, keys, indices, out, frame);
    TeacherRow<C> attention(plan, teacher, teacher_keys, plan.key_block, frame);
    C* p = frame.Alloc<C>(indices.size[2]);
    const auto fill = [&](const SequencePair& s, int64_t i, const int32_t* ids, const int32_t*, int64_t n, C* scores) {
      attention.Fill(s, i, ids, n, p);
      double total = 0;
      for (int64_t j = 0; j < n; ++j) total += static_cast<double>(p[j]);
      const auto share = static_cast<C>(total == 0 ? 0.0 : 1.0 / total);
      for (int64_t j = 0; j < n; ++j) p[j] *= share;
      const double top = plan.kernel.max(scores, n, kLowestIndexScore);
      const double sum = plan.kernel.exp_sum(scores, n, top);
      return RowLoss(p, n, static_cast<C>(sum == 0 ? 0 : 1 / sum), scores);
    };
    rows.Run(chunk, true, fill);
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
  CheckSlots(plan, indices, false);
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
  CheckSlots(plan, indices, true);
  CheckGradients(plan, gradients);
  return plan.compute == DType::kF64 ? Loss<double>(plan, teacher, indices, gradients)
                                     : Loss<float>(plan, teacher, indices, gradients);
}

}  // namespace jumar
