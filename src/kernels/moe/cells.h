// Single elements of small matrices ([tokens, experts]), moved bit for bit.
#pragma once

#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// Cell i is (token[i], expert[i]).
struct Cells {
  std::vector<int32_t> token;
  std::vector<int32_t> expert;

  int64_t size() const { return static_cast<int64_t>(token.size()); }
  void Add(int64_t t, int64_t e) {
    token.push_back(static_cast<int32_t>(t));
    expert.push_back(static_cast<int32_t>(e));
  }
};

// to[to_index[i]] = from[cell i]; to_index null: to[i].
void GatherCells(const TensorView& from, const Cells& cells, const int32_t* to_index, const TensorView& to);
// All bits 0.
void ZeroElements(const TensorView& view);
// to[cell i] = from[from_index[i]] and 0 elsewhere; from_index null: from[i]. to is [tokens, experts] of from's dtype.
void ScatterCells(const TensorView& from, const int32_t* from_index, const Cells& cells, const TensorView& to);

}  // namespace jumar
