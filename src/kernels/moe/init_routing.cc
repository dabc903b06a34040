#include "kernels/moe/init_routing.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/indices.h"
#include "base/slot_sort.h"
#include "kernels/moe/cells.h"
#include "kernels/moe/moe_operands.h"
#include "kernels/moe/moe_rows.h"

namespace jumar {
namespace {

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

void CheckIds(const char* op, const char* name, const TensorView& ids, const TensorView& x) {
  CheckDims(op, "x", x, 2);
  CheckFloating(op, "x", x);
  CheckDims(op, name, ids, 2);
  JUMAR_CHECK(op, ids.size[0] == x.size[0], name, " ", ShapeString(ids), " does not go with x ", ShapeString(x));
  CheckSlots(op, ids.numel());
}

// Rows of any leading shape as a matrix.
TensorView Flat(const TensorView& view) {
  return Contiguous(view.data, view.dtype, {view.size[0] * view.size[1], view.size[2]});
}

void CopyTokens(const TensorView& x, const SlotTable& table, const TensorView& expanded) {
  SpreadRows(x, table, expanded.rank == 3 ? Flat(expanded) : expanded);
}

// What the slots of one call come to.
struct Routing {
  std::vector<int32_t> order;   // active rows -> slot
  std::vector<int32_t> rows;    // slot -> row of expanded_x, or -1
  std::vector<int64_t> counts;  // of active experts
};

Routing Route(const char* op, const TensorView& expert_idx, const RoutingOptions& o, int64_t limit) {
  std::vector<int64_t> ids = ReadIndices(op, "expert_idx", expert_idx, 0, kAny);
  const auto n = static_cast<int64_t>(ids.size());
  const int64_t experts = o.end - o.start;
  for (int64_t& id : ids) id = id >= o.start && id < o.end ? id - o.start : experts;
  Routing r;
  r.order.resize(ids.size());
  r.rows.resize(ids.size());
  SortSlots(ids.data(), n, r.order.data(), r.rows.data());
  r.counts = CountIds(ids.data(), n, experts);
  int64_t begin = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = r.counts[static_cast<size_t>(e)];
    for (int64_t c = 0; c < count; ++c) {
      int32_t& row = r.rows[static_cast<size_t>(r.order[static_cast<size_t>(begin + c)])];
      if (o.capacity > 0) row = static_cast<int32_t>(c < o.capacity ? e * o.capacity + c : -1);
      if (row >= limit) row = -1;
    }
    begin += count;
  }
  for (int64_t i = begin; i < n; ++i) r.rows[static_cast<size_t>(r.order[static_cast<size_t>(i)])] = -1;
  r.order.resize(static_cast<size_t>(begin));
  return r;
}

void WriteCounts(const std::vector<int64_t>& counts, const RoutingOptions& o, const TensorView& out) {
  auto* to = out.ptr<int64_t>();
  std::fill(to, to + out.numel(), 0);
  int64_t sum = 0;
  int64_t* pair = to;
  for (size_t e = 0; e < counts.size(); ++e) {
    sum += counts[e];
    if (o.counts == TokenCounts::kCumulative) to[e] = sum;
    if (o.counts == TokenCounts::kEach) to[e] = counts[e];
    if (o.counts == TokenCounts::kPairs && counts[e] > 0) {
      *pair++ = o.start + static_cast<int64_t>(e);
      *pair++ = counts[e];
    }
  }
}

}  // namespace

int64_t CheckInitRouting(const char* op, const TensorView& x, const TensorView& row_idx, const TensorView& expert_idx,
                         int64_t active_num) {
  CheckIds(op, "expert_idx", expert_idx, x);
  CheckDims(op, "row_idx", row_idx, 2);
  JUMAR_CHECK(op, SameShape(row_idx, expert_idx), "row_idx ", ShapeString(row_idx), " must be like expert_idx ",
              ShapeString(expert_idx));
  JUMAR_CHECK(op, active_num >= 0, "active_num must be a non-negative number, got ", active_num);
  return std::min(active_num, x.size[0]) * expert_idx.size[1];
}

void InitRouting(const char* op, const TensorView& x, const TensorView& row_idx, const TensorView& expert_idx,
                 const TensorView& expanded_x, const TensorView& expanded_row_idx,
                 const TensorView& expanded_expert_idx) {
  const int64_t slots = expert_idx.numel();
  const int64_t n = x.size[0];
  const std::vector<int64_t> ids = ReadIndices(op, "expert_idx", expert_idx, 0, std::numeric_limits<int32_t>::max());
  const std::vector<int32_t> src = ReadRowsBelow(op, "row_idx", row_idx, slots);
  std::vector<char> seen(src.size());
  for (size_t i = 0; i < src.size(); ++i) {
    char& mark = seen[static_cast<size_t>(src[i])];
    JUMAR_CHECK(op, mark == 0, "row_idx ", src[i], " occurs twice, again at position ",
                PositionOf(row_idx, static_cast<int64_t>(i)));
    mark = 1;
  }
  std::vector<int32_t> order(src.size());
  SortSlots(ids.data(), slots, order.data(), nullptr);
  // By token, in the order of k.
  std::vector<int32_t> rows(src.size());
  const int64_t top_k = expert_idx.size[1];
  for (int64_t r = 0; r < slots; ++r) {
    const int32_t slot = order[static_cast<size_t>(r)];
    const int64_t to = src[static_cast<size_t>(slot)];
    expanded_row_idx.ptr<int32_t>()[to] = static_cast<int32_t>(r);
    expanded_expert_idx.ptr<int32_t>()[r] = static_cast<int32_t>(ids[static_cast<size_t>(slot)]);
    rows[static_cast<size_t>(to % n * top_k + to / n)] = static_cast<int32_t>(r);
  }
  const SlotTable table{rows.data(), expanded_x.size[0], top_k};
  CopyTokens(x, table, expanded_x);
}

int64_t CheckInitRoutingV2(const char* op, const TensorView& x, const TensorView& expert_idx, const TensorView* scale,
                           const RoutingOptions& o) {
  CheckIds(op, "expert_idx", expert_idx, x);
  JUMAR_CHECK(op, 0 <= o.start && o.start < o.end, "active_expert_range [", o.start, ", ", o.end,
              ") holds no expert (the default is [0, expert_num), with expert_num ", o.experts, ")");
  JUMAR_CHECK(op, o.experts <= 0 || o.end <= o.experts, "active_expert_range [", o.start, ", ", o.end,
              ") is not within expert_num ", o.experts);
  JUMAR_CHECK(op, o.counts != TokenCounts::kPairs || o.experts > 0, "expert_tokens_num_type 2 needs expert_num, got ",
              o.experts);
  if (scale != nullptr) {
    CheckFloating(op, "scale", *scale);
    JUMAR_CHECK(op, scale->rank == 1 && scale->size[0] == x.size[0], "scale must be [", x.size[0], "], got ",
                ShapeString(*scale));
  }
  if (o.capacity > 0) {
    JUMAR_CHECK(op, o.start == 0 && o.end == o.experts, "drop_pad_mode 1 takes all experts, got active_expert_range [",
                o.start, ", ", o.end, ") of expert_num ", o.experts);
    JUMAR_CHECK(op, o.row_index == RowIndex::kSlotToRow, "drop_pad_mode 1 takes row_idx_type 0");
    CheckSlots(op, o.experts * o.capacity);
    return o.experts * o.capacity;
  }
  return o.active_num <= 0 ? expert_idx.numel() : std::min(o.active_num, expert_idx.numel());
}

void InitRoutingV2(const char* op, const TensorView& x, const TensorView& expert_idx, const TensorView* scale,
                   const RoutingOptions& o, const TensorView& expanded_x, const TensorView& expanded_row_idx,
                   const TensorView& counts, const TensorView* expanded_scale) {
  SlotTable table;
  table.limit = expanded_x.rank == 3 ? expanded_x.size[0] * expanded_x.size[1] : expanded_x.size[0];
  table.per_token = expert_idx.size[1];
  const Routing routing = Route(op, expert_idx, o, table.limit);
  table.rows = routing.rows.data();
  auto* row_idx = expanded_row_idx.ptr<int32_t>();
  if (o.row_index == RowIndex::kSlotToRow) {
    std::copy(routing.rows.begin(), routing.rows.end(), row_idx);
  } else {
    std::fill(std::copy(routing.order.begin(), routing.order.end(), row_idx), row_idx + expanded_row_idx.numel(), -1);
  }
  WriteCounts(routing.counts, o, counts);
  CopyTokens(x, table, expanded_x);
  if (scale == nullptr) return;
  Cells cells;
  std::vector<int32_t> to;
  for (size_t i = 0; i < routing.rows.size(); ++i) {
    if (routing.rows[i] < 0) continue;
    cells.Add(static_cast<int64_t>(i) / table.per_token, 0);
    to.push_back(routing.rows[i]);
  }
  TensorView from = *scale;
  from.rank = 2;
  from.size[1] = 1;
  ZeroElements(*expanded_scale);
  GatherCells(from, cells, to.data(), *expanded_scale);
}

void InitRoutingGrad(const char* op, const TensorView& grad, const TensorView& expanded_row_idx, bool by_column,
                     RowIndex row_index, const TensorView& dx) {
  JUMAR_CHECK(op, grad.rank == 2 || grad.rank == 3, "grad must have 2 or 3 dimensions, got ", ShapeString(grad));
  CheckFloating(op, "grad", grad);
  CheckDType(op, "grad", grad, dx.dtype);
  JUMAR_CHECK(op, grad.size[grad.rank - 1] == dx.size[1], "grad ", ShapeString(grad), " does not go with x ",
              ShapeString(dx));
  CheckDims(op, "expanded_row_idx", expanded_row_idx, 1);
  const int64_t slots = expanded_row_idx.size[0];
  const int64_t n = dx.size[0];
  JUMAR_CHECK(op, n == 0 ? slots == 0 : slots % n == 0, slots, " slots cannot be shared out to ", n, " tokens");
  const int64_t top_k = n == 0 ? 0 : slots / n;
  const int64_t limit = grad.rank == 3 ? grad.size[0] * grad.size[1] : grad.size[0];
  const std::vector<int64_t> index = ReadIndices(op, "expanded_row_idx", expanded_row_idx, -1, std::max(slots, limit));
  std::vector<int32_t> rows(static_cast<size_t>(slots), -1);
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t value = index[static_cast<size_t>(i)];
    if (row_index == RowIndex::kRowToSlot) {
      if (value >= 0) rows[static_cast<size_t>(value)] = static_cast<int32_t>(i);
    } else {
      rows[static_cast<size_t>(by_column ? i % n * top_k + i / n : i)] = static_cast<int32_t>(value);
    }
  }
  const SlotTable table{rows.data(), limit, top_k};
  CombineRows(grad, table, dx);
}

}  // namespace jumar
