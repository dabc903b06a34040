// Probabilities of the attention that the indexer learns: products of its queries and keys, rope parts added.
#pragma once

#include "kernels/lightning_indexer/indexer_plan.h"

namespace jumar {

// Throws Error for shapes and dtypes that do not go together.
void CheckTeacher(const IndexerPlan& plan, const IndexerTeacher& teacher);

// Packs rows and multiplies tiles; what is a row, and which keys, is up to the caller.
template <typename C>
class TeacherTiles {
 public:
  // `rows`: at most, of the left operand.
  TeacherTiles(const IndexerPlan& plan, const IndexerTeacher& teacher, int64_t rows, ScratchFrame& frame);

  int64_t QuerySize() const { return query_size_; }
  int64_t heads() const { return teacher_.query.size[2]; }
  int64_t kv_heads() const { return teacher_.key.size[2]; }

  // All heads of a query, or the rows of one head.
  void PackHeads(const SequencePair& s, int64_t row, C* out) const;
  void PackRows(const SequencePair& s, int64_t row, int64_t rows, int64_t head, C* out) const;
  // Keys of one head of a sequence: a block, or those that `ids` names.
  void PackKeys(const SequencePair& s, int64_t begin, int64_t n, int64_t head);
  void GatherKeys(const SequencePair& s, const int32_t* ids, int64_t n);

  // out[i * out_stride + j] += mean over heads' part of row i with key j. max and inverse of the rows.
  void Add(const C* rows_packed, int64_t rows, int64_t n, const C* max, const C* inverse, C* out, int64_t out_stride);

  // 1 / (sum * heads) and max of a query's head; 0 where the sum is 0.
  void Statistics(const SequencePair& s, int64_t row, int64_t head, C* max, C* inverse) const;

 private:
  struct Part {
    const TensorView* query;
    const TensorView* key;
    int64_t d;
    int64_t row_panel, key_panel;
    int64_t row_begin;  // in the packed rows
    C* keys;
  };

  const IndexerPlan& plan_;
  const IndexerTeacher& teacher_;
  std::vector<Part> parts_;
  int64_t query_size_ = 0;
  C* tile_;
  void* gathered_;
};

}  // namespace jumar
