// The two movements of rows that every operator of this family is made of. Operands are checked by the callers.
#pragma once

#include <vector>

#include "base/rows.h"

namespace jumar {

// Slot i connects a token with row rows[i] of the permuted side; a row outside [0, limit) stands for a slot that was
// dropped and contributes nothing. The slots of token t are [t * per_token, (t + 1) * per_token), or
// [begin[t], begin[t + 1]) where `begin` is given.
struct SlotTable {
  const int32_t* rows = nullptr;
  int64_t limit = 0;
  int64_t per_token = 1;
  const void* weights = nullptr;  // one a slot in the compute type of the rows' dtype, or null: all ones
  const int64_t* begin = nullptr;

  int64_t First(int64_t token) const { return begin == nullptr ? token * per_token : begin[token]; }
  int64_t End(int64_t token) const { return First(token + 1); }
  bool Kept(int64_t slot) const { return rows[slot] >= 0 && rows[slot] < limit; }
};

// out[t] = sum over the slots i of t, ascending, of weights[i] * in[rows[i]]; 0 where a token has none. Summed in the
// compute type and rounded once; a lone slot without a weight is copied bit for bit. in, out: one dtype and width.
// Multithreaded.
void CombineRows(const RowMap& in, const SlotTable& slots, const RowMap& out);

// The same for views of any strides, rows along all dimensions but the last.
void CombineRows(const TensorView& in, const SlotTable& slots, const TensorView& out);

// The same over several inputs, whose terms follow each other.
struct CombinePart {
  RowMap in;
  SlotTable slots;
};
void CombineParts(const std::vector<CombinePart>& parts, const RowMap& out);

// For the slots i of t:  out[rows[i]] = weights[i] * in[t],   dots[i] = <in[t], other[rows[i]]>.
//
// out or (other, dots) may be left out; dots is in the compute type, 0 for dropped slots. Without weights rows are
// copied bit for bit. Rows of out that no slot has become 0; where several slots have one row, it is their sum, slots
// ascending, rounded once. Multithreaded; each dot product is summed in vector lanes, in the compute type.
void SpreadRows(const RowMap& in, const SlotTable& slots, int64_t tokens, const RowMap* out, const RowMap* other,
                void* dots);

// out alone, for views of any strides; the tokens are the rows of `in`.
void SpreadRows(const TensorView& in, const SlotTable& slots, const TensorView& out);

// out[rows[i]] = sum over the slots i that have that row, ascending, of weights[i] * in[t]; 0 for rows that no slot
// has. Rounded once. Multithreaded over the rows of out.
void SumByRow(const RowMap& in, const SlotTable& slots, int64_t tokens, const RowMap& out);

// The slots by row: slots[i] for i in [begin[r], begin[r + 1]), ascending, are those of row r in [0, limit).
struct SlotsByRow {
  std::vector<int32_t> slots;
  std::vector<int64_t> begin;
};
SlotsByRow GroupByRow(const int32_t* rows, int64_t n, int64_t limit);

}  // namespace jumar
