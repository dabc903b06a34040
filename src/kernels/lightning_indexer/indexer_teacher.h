// The attention that the indexer learns from.
#pragma once

#include "kernels/lightning_indexer/indexer_plan.h"

namespace jumar {

// Throws Error for shapes and dtypes that do not go together.
void CheckTeacher(const IndexerPlan& plan, const IndexerTeacher& teacher);

// Queries and keys of the attention, and of its rope where it has one: products of the parts are added.
struct TeacherPart {
  const TensorView* query;
  const TensorView* key;
  int64_t d;
};
inline std::vector<TeacherPart> TeacherParts(const IndexerTeacher& t) {
  std::vector<TeacherPart> parts = {{&t.query, &t.key, t.query.size[3]}};
  if (t.query_rope.rank != 0 && t.query_rope.size[3] > 0)
    parts.push_back({&t.query_rope, &t.key_rope, t.query_rope.size[3]});
  return parts;
}

// max, and 1 / (sum * heads), of a query's head; 0 where the sum is 0.
template <typename C>
void Statistics(const IndexerTeacher& t, const SequencePair& s, int64_t row, int64_t head, C* max, C* inverse) {
  const int64_t at = s.q_begin + row;
  *max = *reinterpret_cast<const C*>(Element(t.max, s.batch, at, head));
  const C sum = *reinterpret_cast<const C*>(Element(t.sum, s.batch, at, head));
  *inverse = sum == 0 ? C(0) : C(1) / (sum * static_cast<C>(t.query.size[2]));
}

}  // namespace jumar
