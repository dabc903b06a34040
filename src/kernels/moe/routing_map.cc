#include "kernels/moe/routing_map.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "base/parallel.h"
#include "base/slot_sort.h"
#include "base/widen.h"
#include "kernels/moe/cells.h"
#include "kernels/moe/moe_operands.h"
#include "kernels/moe/moe_rows.h"

namespace jumar {
namespace {

constexpr int64_t kGrainCells = 1 << 15;  // that are worth a thread

void CheckMap(const char* op, const TensorView& map, int64_t tokens) {
  CheckDims(op, "routing_map", map, 2);
  JUMAR_CHECK(op, map.dtype == DType::kBool, "routing_map must be bool or int8, got ", Name(map.dtype));
  JUMAR_CHECK(op, map.size[0] == tokens, "routing_map ", ShapeString(map), " does not go with ", tokens, " tokens");
}

void CheckProbs(const char* op, const TensorView& probs, const TensorView& map) {
  CheckDims(op, "probs", probs, 2);
  CheckFloating(op, "probs", probs);
  JUMAR_CHECK(op, SameShape(probs, map), "probs ", ShapeString(probs), " does not go with routing_map ",
              ShapeString(map));
}

bool Routed(const char* op, const TensorView& map, int64_t t, int64_t e) {
  const uint8_t value = map.ptr<uint8_t>()[t * map.stride[0] + e * map.stride[1]];
  JUMAR_CHECK(op, value <= 1, "routing_map must hold 0 and 1, got ", static_cast<int>(value), " at position [", t, ", ",
              e, "]");
  return value == 1;
}

// Calls f with each expert of a token, ascending; false when the map holds something other than 0 and 1. Adjacent bytes
// are looked at eight at a time: most are 0.
template <typename F>
bool ForEachExpert(const TensorView& map, int64_t t, const F& f) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  const int64_t experts = map.size[1];
  const uint8_t* row = map.ptr<uint8_t>() + t * map.stride[0];
  int64_t e = 0;
  for (; map.stride[1] == 1 && e + 8 <= experts; e += 8) {
    uint64_t word = 0;
    std::memcpy(&word, row + e, sizeof(word));
    if ((word & ~kOnes) != 0) return false;
    for (; word != 0; word &= word - 1) f(e + std::countr_zero(word) / 8);
  }
  for (; e < experts; ++e) {
    const uint8_t value = row[e * map.stride[1]];
    if (value > 1) return false;
    if (value == 1) f(e);
  }
  return true;
}

// Token by token, experts ascending. Throws unless every token has top_k experts.
Cells CellsOfSlots(const char* op, const TensorView& map, int64_t top_k) {
  const int64_t tokens = map.size[0];
  Cells cells;
  cells.token.resize(static_cast<size_t>(tokens * top_k));
  cells.expert.resize(cells.token.size());
  std::atomic<bool> wrong{false};
  ParallelFor(tokens, 1 + kGrainCells / std::max<int64_t>(map.size[1], 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t found = 0;
      const bool valid = ForEachExpert(map, t, [&](int64_t e) {
        if (found < top_k) {
          cells.token[static_cast<size_t>(t * top_k + found)] = static_cast<int32_t>(t);
          cells.expert[static_cast<size_t>(t * top_k + found)] = static_cast<int32_t>(e);
        }
        ++found;
      });
      if (!valid || found != top_k) wrong = true;
    }
  });
  for (int64_t t = 0; wrong && t < tokens; ++t) {
    int64_t found = 0;
    for (int64_t e = 0; e < map.size[1]; ++e) found += Routed(op, map, t, e) ? 1 : 0;
    JUMAR_CHECK(op, found == top_k, "row ", t, " of routing_map has ", found, " experts; the number of rows asks for ",
                top_k, " in each");
  }
  return cells;
}

// Expert by expert, `capacity` tokens each: routed ones ascending, then others ascending.
Cells CellsOfRows(const char* op, const TensorView& map, int64_t capacity) {
  Cells cells;
  for (int64_t e = 0; e < map.size[1]; ++e) {
    const int64_t end = (e + 1) * capacity;
    for (const bool routed : {true, false}) {
      for (int64_t t = 0; t < map.size[0] && cells.size() < end; ++t) {
        if (Routed(op, map, t, e) == routed) cells.Add(t, e);
      }
    }
  }
  return cells;
}

// The row of each slot, of slots by expert.
std::vector<int32_t> RowsOfSlots(const Cells& cells) {
  const std::vector<int64_t> ids(cells.expert.begin(), cells.expert.end());
  std::vector<int32_t> rows(ids.size());
  SortSlots(ids.data(), cells.size(), nullptr, rows.data());
  return rows;
}

// The cell of each row with drop_and_pad.
Cells CellsOf(const std::vector<int32_t>& tokens, int64_t capacity) {
  Cells cells;
  for (size_t r = 0; r < tokens.size(); ++r) cells.Add(tokens[r], static_cast<int64_t>(r) / capacity);
  return cells;
}

// Rows for each of so many tokens or experts.
int64_t PerGroup(const char* op, const char* what, int64_t rows, int64_t groups) {
  if (rows == 0) return 0;
  JUMAR_CHECK(op, groups > 0 && rows % groups == 0, rows, " rows cannot be shared out to ", groups, " ", what);
  return rows / groups;
}

void CheckIndices(const char* op, const char* name, const TensorView& indices, int64_t rows) {
  CheckDims(op, name, indices, 1);
  JUMAR_CHECK(op, indices.size[0] == rows, indices.size[0], " ", name, " do not go with ", rows, " rows");
}

// In the compute type of `rows`, in the order of the cells.
void* WeightsOf(const TensorView& probs, const Cells& cells, DType rows, ScratchFrame& frame) {
  TensorView list = Contiguous(nullptr, probs.dtype, {cells.size()});
  list.data = frame.AllocBytes(static_cast<size_t>(cells.size()) * SizeOf(probs.dtype));
  GatherCells(probs, cells, nullptr, list);
  return InComputeType(list, rows, frame);
}

void CopyIndices(const std::vector<int32_t>& from, const TensorView& to) {
  std::copy(from.begin(), from.end(), to.ptr<int32_t>());
}

}  // namespace

int64_t CheckPermuteWithRoutingMap(const char* op, const TensorView& tokens, const TensorView& routing_map,
                                   const TensorView* probs, const std::optional<int64_t>& num_out_tokens,
                                   bool drop_and_pad) {
  CheckDims(op, "tokens", tokens, 2);
  CheckFloating(op, "tokens", tokens);
  CheckMap(op, routing_map, tokens.size[0]);
  if (probs != nullptr) CheckProbs(op, *probs, routing_map);
  const int64_t n = num_out_tokens.value_or(tokens.size[0]);
  JUMAR_CHECK(op, n >= 0, "num_out_tokens must not be negative, got ", n);
  const int64_t groups = routing_map.size[drop_and_pad ? 1 : 0];
  const int64_t rows = groups == 0 ? 0 : n / groups * groups;
  CheckSlots(op, rows);
  JUMAR_CHECK(op, !drop_and_pad || rows == 0 || rows / groups <= tokens.size[0], "num_out_tokens ", n, " asks for ",
              rows / std::max<int64_t>(groups, 1), " rows an expert, of ", tokens.size[0], " tokens");
  return rows;
}

void PermuteWithRoutingMap(const char* op, const TensorView& tokens, const TensorView& routing_map,
                           const TensorView* probs, bool drop_and_pad, const TensorView& permuted,
                           const TensorView* permuted_probs, const TensorView& sorted_indices) {
  const int64_t rows = permuted.size[0];
  SlotTable table;
  table.limit = rows;
  Cells cells;
  std::vector<int32_t> slot_rows;
  SlotsByRow by_token;
  if (drop_and_pad) {
    cells = CellsOfRows(op, routing_map, PerGroup(op, "experts", rows, routing_map.size[1]));
    CopyIndices(cells.token, sorted_indices);
    by_token = GroupByRow(cells.token.data(), rows, tokens.size[0]);
    table.rows = by_token.slots.data();
    table.begin = by_token.begin.data();
  } else {
    table.per_token = PerGroup(op, "tokens", rows, tokens.size[0]);
    cells = CellsOfSlots(op, routing_map, table.per_token);
    slot_rows = RowsOfSlots(cells);
    CopyIndices(slot_rows, sorted_indices);
    table.rows = slot_rows.data();
  }
  SpreadRows(tokens, table, permuted);
  if (probs != nullptr) GatherCells(*probs, cells, drop_and_pad ? nullptr : slot_rows.data(), *permuted_probs);
}

void PermuteWithRoutingMapGrad(const char* op, const TensorView& grad, const TensorView* probs_grad,
                               const TensorView& sorted_indices, const TensorView& routing_map, bool drop_and_pad,
                               const TensorView& dtokens, const TensorView* dprobs) {
  CheckDims(op, "permuted_token_out_grad", grad, 2);
  CheckFloating(op, "permuted_token_out_grad", grad);
  CheckMap(op, routing_map, dtokens.size[0]);
  const int64_t rows = grad.size[0];
  const int64_t tokens = dtokens.size[0];
  CheckIndices(op, "sorted_indices", sorted_indices, rows);
  if (probs_grad != nullptr) {
    CheckDims(op, "probs_grad", *probs_grad, 1);
    CheckFloating(op, "probs_grad", *probs_grad);
    JUMAR_CHECK(op, probs_grad->size[0] == rows, "probs_grad ", ShapeString(*probs_grad), " does not go with ", rows,
                " rows");
    JUMAR_CHECK(op, SameShape(*dprobs, routing_map), "experts_num ", dprobs->size[1], " does not go with routing_map ",
                ShapeString(routing_map));
  }
  SlotTable table;
  table.limit = rows;
  Cells cells;
  SlotsByRow by_token;
  std::vector<int32_t> indices;
  if (drop_and_pad) {
    const int64_t capacity = PerGroup(op, "experts", rows, routing_map.size[1]);
    indices = ReadRowsBelow(op, "sorted_indices", sorted_indices, tokens);
    cells = CellsOf(indices, capacity);
    by_token = GroupByRow(indices.data(), rows, tokens);
    table.rows = by_token.slots.data();
    table.begin = by_token.begin.data();
  } else {
    table.per_token = PerGroup(op, "tokens", rows, tokens);
    indices = ReadRowsBelow(op, "sorted_indices", sorted_indices, rows);
    if (probs_grad != nullptr) cells = CellsOfSlots(op, routing_map, table.per_token);
    table.rows = indices.data();
  }
  CombineRows(grad, table, dtokens);
  if (probs_grad != nullptr) ScatterCells(*probs_grad, drop_and_pad ? nullptr : indices.data(), cells, *dprobs);
}

void UnpermuteWithRoutingMap(const char* op, const TensorView& permuted, const TensorView& sorted_indices,
                             const TensorView* probs, const TensorView* routing_map, bool drop_and_pad,
                             const TensorView& unpermuted, const TensorView& out_index, const TensorView& token_ids,
                             const TensorView* permuted_probs) {
  CheckDims(op, "permuted_tokens", permuted, 2);
  CheckFloating(op, "permuted_tokens", permuted);
  const int64_t rows = permuted.size[0];
  const int64_t tokens = unpermuted.size[0];
  JUMAR_CHECK(op, unpermuted.size[1] == permuted.size[1], "restore_shape ", ShapeString(unpermuted),
              " does not go with permuted_tokens ", ShapeString(permuted));
  CheckIndices(op, "sorted_indices", sorted_indices, rows);
  if (routing_map != nullptr) CheckMap(op, *routing_map, tokens);
  if (probs != nullptr) {
    JUMAR_CHECK(op, drop_and_pad || routing_map != nullptr, "probs ", ShapeString(*probs), " need a routing_map");
    if (routing_map != nullptr) CheckProbs(op, *probs, *routing_map);
    CheckDims(op, "probs", *probs, 2);
    CheckFloating(op, "probs", *probs);
    JUMAR_CHECK(op, probs->size[0] == tokens, "probs ", ShapeString(*probs), " does not go with ", tokens, " tokens");
  }
  ScratchFrame frame;
  SlotTable table;
  table.limit = rows;
  SlotsByRow by_token;
  Cells cells;
  const std::vector<int32_t> indices =
      ReadRowsBelow(op, "sorted_indices", sorted_indices, drop_and_pad ? tokens : rows);
  if (drop_and_pad) {
    if (probs != nullptr) cells = CellsOf(indices, PerGroup(op, "experts", rows, probs->size[1]));
    by_token = GroupByRow(indices.data(), rows, tokens);
    table.rows = by_token.slots.data();
    table.begin = by_token.begin.data();
    CopyIndices(by_token.slots, out_index);
    for (int64_t i = 0; i < rows; ++i) token_ids.ptr<int32_t>()[i] = indices[static_cast<size_t>(by_token.slots[i])];
    if (probs != nullptr) {
      GatherCells(*probs, cells, nullptr, *permuted_probs);
      Cells by_slot;
      for (const int32_t r : by_token.slots)
        by_slot.Add(cells.token[static_cast<size_t>(r)], cells.expert[static_cast<size_t>(r)]);
      table.weights = WeightsOf(*probs, by_slot, permuted.dtype, frame);
    }
  } else {
    table.per_token = PerGroup(op, "tokens", rows, tokens);
    if (probs != nullptr) cells = CellsOfSlots(op, *routing_map, table.per_token);
    table.rows = indices.data();
    CopyIndices(indices, out_index);
    CopyIndices(indices, token_ids);
    if (probs != nullptr) {
      GatherCells(*probs, cells, indices.data(), *permuted_probs);
      table.weights = WeightsOf(*probs, cells, permuted.dtype, frame);
    }
  }
  CombineRows(permuted, table, unpermuted);
}

void UnpermuteWithRoutingMapGrad(const char* op, const TensorView& grad, const TensorView& out_index,
                                 const TensorView& token_ids, const TensorView* routing_map, const TensorView* permuted,
                                 const TensorView* probs, bool drop_and_pad, const TensorView& dpermuted,
                                 const TensorView* dprobs) {
  CheckDims(op, "unpermuted_tokens_grad", grad, 2);
  CheckFloating(op, "unpermuted_tokens_grad", grad);
  const int64_t rows = dpermuted.size[0];
  const int64_t tokens = grad.size[0];
  CheckIndices(op, "out_index", out_index, rows);
  CheckIndices(op, "permuted_token_id", token_ids, rows);
  if (probs != nullptr) {
    CheckDims(op, "probs", *probs, 2);
    CheckFloating(op, "probs", *probs);
    JUMAR_CHECK(op, probs->size[0] == tokens, "probs ", ShapeString(*probs), " does not go with ", tokens, " tokens");
    JUMAR_CHECK(op, permuted != nullptr, "the gradient of probs ", ShapeString(*probs), " needs permuted_tokens");
    JUMAR_CHECK(op, drop_and_pad || routing_map != nullptr, "probs ", ShapeString(*probs), " need a routing_map");
    CheckDType(op, "permuted_tokens", *permuted, grad.dtype);
    JUMAR_CHECK(op, SameShape(*permuted, dpermuted), "permuted_tokens ", ShapeString(*permuted), " must be ",
                ShapeString(dpermuted));
  }
  if (routing_map != nullptr) {
    CheckMap(op, *routing_map, tokens);
    if (probs != nullptr) CheckProbs(op, *probs, *routing_map);
  }
  SlotTable table;
  table.limit = rows;
  Cells cells;
  SlotsByRow by_token;
  std::vector<int32_t> indices = ReadRowsBelow(op, "out_index", out_index, rows);
  if (drop_and_pad) {
    const std::vector<int32_t> ids = ReadRowsBelow(op, "permuted_token_id", token_ids, tokens);
    const int64_t capacity = probs == nullptr ? 1 : PerGroup(op, "experts", rows, probs->size[1]);
    by_token = GroupByRow(ids.data(), rows, tokens);
    std::vector<int32_t> by_slot;
    for (const int32_t i : by_token.slots) {
      by_slot.push_back(indices[static_cast<size_t>(i)]);
      cells.Add(ids[static_cast<size_t>(i)], by_slot.back() / capacity);
    }
    indices = std::move(by_slot);
    table.begin = by_token.begin.data();
  } else {
    table.per_token = PerGroup(op, "tokens", rows, tokens);
    if (probs != nullptr) cells = CellsOfSlots(op, *routing_map, table.per_token);
  }
  table.rows = indices.data();
  ScratchFrame frame;
  const RowMap in = InputRows(grad, 1, frame);
  const OutputRows out(dpermuted, 1, frame);
  if (probs == nullptr) {
    SpreadRows(in, table, tokens, &out.rows(), nullptr, nullptr);
    return out.Finish();
  }
  table.weights = WeightsOf(*probs, cells, grad.dtype, frame);
  const RowMap other = InputRows(*permuted, 1, frame);
  TensorView dots = Contiguous(nullptr, ComputeType(grad.dtype), {rows});
  dots.data = frame.AllocBytes(static_cast<size_t>(rows) * SizeOf(dots.dtype));
  SpreadRows(in, table, tokens, &out.rows(), &other, dots.data);
  out.Finish();
  TensorView rounded = Contiguous(nullptr, dprobs->dtype, {rows});
  rounded.data = frame.AllocBytes(static_cast<size_t>(rows) * SizeOf(rounded.dtype));
  ConvertAll(dots, rounded);
  ScatterCells(rounded, nullptr, cells, *dprobs);
}

}  // namespace jumar
