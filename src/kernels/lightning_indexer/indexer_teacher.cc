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
  };
  pair("query", t.query, "key", t.key);
  JUMAR_CHECK(op, t.query.size[3] > 0, "query must not be empty, got ", ShapeString(t.query));
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

}  // namespace jumar
