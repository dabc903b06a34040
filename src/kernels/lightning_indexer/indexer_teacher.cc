#include "kernels/lightning_indexer/indexer_teacher.h"

namespace jumar {

void CheckTeacher(const IndexerPlan& plan, const IndexerTeacher& t) {
  const char* op = plan.op;
  const TensorView& q = plan.in.query;
  const TensorView& k = plan.in.key;
  const auto pair = [&](const char* name, const TensorView& query, const char* key_name, const TensorView& key) {
    JUMAR_CHECK(op, query.rank == 4 && key.rank == 4, name, " and ", key_name, " must have 4 dimensions, got ",
                ShapeString(query), " and ", ShapeString(key));
    CheckShape(op, name, query, {q.size[0], q.size[1], t.query.size[2], query.size[3]}, q.dtype);
    CheckShape(op, key_name, key, {k.size[0], k.size[1], t.key.size[2], query.size[3]}, q.dtype);
    JUMAR_CHECK(op, query.size[3] > 0, name, " must not be empty, got ", ShapeString(query));
  };
  pair("query", t.query, "key", t.key);
  JUMAR_CHECK(op, (t.query_rope.rank == 0) == (t.key_rope.rank == 0),
              "query_rope and key_rope go together, got only one of them");
  if (t.query_rope.rank != 0) pair("query_rope", t.query_rope, "key_rope", t.key_rope);
  const int64_t heads = t.query.size[2];
  const int64_t kv_heads = t.key.size[2];
  JUMAR_CHECK(op, kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
              "the number of query heads must be a multiple of that of key heads, got ", heads, " and ", kv_heads);
  CheckShape(op, "softmax_max", t.max, {q.size[0], q.size[1], heads}, plan.compute);
  CheckShape(op, "softmax_sum", t.sum, {q.size[0], q.size[1], heads}, plan.compute);
}

template <typename C>
TeacherTiles<C>::TeacherTiles(const IndexerPlan& plan, const IndexerTeacher& teacher, int64_t rows, ScratchFrame& frame)
    : plan_(plan), teacher_(teacher) {
  int64_t widest = 0;
  const auto add = [&](const TensorView& query, const TensorView& key) {
    if (query.rank == 0) return;
    const GemmKernel& gemm = plan.gemm;
    Part p{&query, &key, query.size[3], 0, 0, query_size_, nullptr};
    p.row_panel = gemm.PanelStride(gemm.mr, p.d);
    p.key_panel = gemm.PanelStride(gemm.nr, p.d);
    p.keys = frame.Alloc<C>(plan.key_block / gemm.nr * p.key_panel);
    query_size_ += CeilDiv(rows, gemm.mr) * p.row_panel;
    widest = std::max(widest, p.d);
    parts_.push_back(p);
  };
  add(teacher.query, teacher.key);
  add(teacher.query_rope, teacher.key_rope);
  tile_ = frame.Alloc<C>(rows * plan.key_block);
  gathered_ = frame.AllocBytes(static_cast<size_t>(plan.key_block * widest) * sizeof(C));
}

template <typename C>
void TeacherTiles<C>::PackHeads(const SequencePair& s, int64_t row, C* out) const {
  for (const Part& p : parts_) {
    const TensorView& x = *p.query;
    const GemmOperand q{Element(x, s.batch, s.q_begin + row), x.dtype, heads(), p.d, x.stride[2], x.stride[3]};
    plan_.gemm.pack_a({&q, 0, heads(), 0, p.d, p.row_panel, out + p.row_begin});
  }
}

template <typename C>
void TeacherTiles<C>::PackRows(const SequencePair& s, int64_t row, int64_t rows, int64_t head, C* out) const {
  for (const Part& p : parts_) {
    const TensorView& x = *p.query;
    const GemmOperand q{Element(x, s.batch, s.q_begin + row, head), x.dtype, rows, p.d, x.stride[1], x.stride[3]};
    plan_.gemm.pack_a({&q, 0, rows, 0, p.d, p.row_panel, out + p.row_begin});
  }
}

template <typename C>
void TeacherTiles<C>::PackKeys(const SequencePair& s, int64_t begin, int64_t n, int64_t head) {
  for (const Part& p : parts_) {
    const TensorView& x = *p.key;
    const GemmOperand k{Element(x, s.batch, s.k_begin + begin, head), x.dtype, n, p.d, x.stride[1], x.stride[3]};
    plan_.gemm.pack_b({&k, 0, n, 0, p.d, p.key_panel, p.keys});
  }
}

template <typename C>
void TeacherTiles<C>::GatherKeys(const SequencePair& s, const int32_t* ids, int64_t n) {
  for (const Part& p : parts_) {
    const TensorView& x = *p.key;
    GatherRows({Element(x, s.batch, s.k_begin), x.dtype, s.k_len, p.d, x.stride[1], x.stride[3]}, ids, n, gathered_);
    const GemmOperand k{gathered_, x.dtype, n, p.d, p.d, 1};
    plan_.gemm.pack_b({&k, 0, n, 0, p.d, p.key_panel, p.keys});
  }
}

template <typename C>
void TeacherTiles<C>::Add(const C* rows_packed, int64_t rows, int64_t n, const C* max, const C* inverse, C* out,
                          int64_t out_stride) {
  for (const Part& p : parts_) {
    MultiplyTile(plan_.gemm, rows, n, p.d, rows_packed + p.row_begin, p.row_panel, p.keys, p.key_panel, tile_,
                 plan_.key_block, &p != parts_.data());
  }
  plan_.kernel.add_probabilities({tile_, plan_.key_block, rows, n, teacher_.scale, max, inverse, out, out_stride});
}

template <typename C>
void TeacherTiles<C>::Statistics(const SequencePair& s, int64_t row, int64_t head, C* max, C* inverse) const {
  const int64_t at = s.q_begin + row;
  *max = *reinterpret_cast<const C*>(Element(teacher_.max, s.batch, at, head));
  const C sum = *reinterpret_cast<const C*>(Element(teacher_.sum, s.batch, at, head));
  *inverse = sum == 0 ? C(0) : C(1) / (sum * static_cast<C>(heads()));
}

template class TeacherTiles<float>;
template class TeacherTiles<double>;

}  // namespace jumar
