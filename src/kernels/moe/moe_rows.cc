#include "kernels/moe/moe_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/parallel.h"
#include "base/slot_sort.h"
#include "kernels/moe/moe_rows_simd.h"

namespace jumar {
namespace {

// An output of this size has left the caches before its consumer reads its start.
constexpr int64_t kStreamBytes = int64_t{16} << 20;
// Bytes that one thread moves at least.
constexpr int64_t kGrainBytes = 1 << 16;
constexpr int64_t kLine = 64;

int64_t RowBytes(const RowMap& map) { return map.cols * static_cast<int64_t>(SizeOf(map.dtype)); }

bool Streams(const RowMap& out) {
  if (out.rows * RowBytes(out) < kStreamBytes || reinterpret_cast<uintptr_t>(out.data) % kLine != 0) return false;
  for (int i = 0; i < out.rank; ++i) {
    if (out.stride[i] * static_cast<int64_t>(SizeOf(out.dtype)) % kLine != 0) return false;
  }
  return true;
}

int64_t Grain(int64_t row_bytes, int64_t tokens, int64_t slots) {
  const int64_t per_token = (1 + slots / std::max<int64_t>(tokens, 1)) * std::max<int64_t>(row_bytes, 1);
  return std::max<int64_t>(1, kGrainBytes / per_token);
}

// Which rows of [0, limit) n slots have, and whether none of them is had twice.
struct Coverage {
  std::vector<char> covered;
  int64_t count = 0;
  bool distinct = true;
};

Coverage Cover(const SlotTable& slots, int64_t n) {
  Coverage c;
  c.covered.resize(static_cast<size_t>(slots.limit));
  for (int64_t i = 0; i < n; ++i) {
    if (!slots.Kept(i)) continue;
    if (std::exchange(c.covered[static_cast<size_t>(slots.rows[i])], 1) != 0) {
      c.distinct = false;
    } else {
      ++c.count;
    }
  }
  return c;
}

void ZeroUncovered(const Coverage& c, const RowMap& out) {
  if (c.count == out.rows) return;
  ParallelFor(out.rows, Grain(RowBytes(out), 1, 0), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (c.covered[static_cast<size_t>(r)]) continue;
      std::memset(static_cast<char*>(out.data) + out.Offset(r) * static_cast<int64_t>(SizeOf(out.dtype)), 0,
                  static_cast<size_t>(RowBytes(out)));
    }
  });
}

template <typename C>
void SpreadSums(const RowMap& in, const SlotTable& slots, int64_t tokens, const RowMap& out) {
  const int64_t n = slots.First(tokens);
  std::vector<int32_t> token_of(static_cast<size_t>(n));
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill(token_of.begin() + slots.First(t), token_of.begin() + slots.End(t), static_cast<int32_t>(t));
  }
  const SlotsByRow by_row = GroupByRow(slots.rows, n, slots.limit);
  std::vector<int32_t> sources;
  std::vector<C> weights;
  for (const int32_t slot : by_row.slots) {
    sources.push_back(token_of[static_cast<size_t>(slot)]);
    if (slots.weights != nullptr) weights.push_back(static_cast<const C*>(slots.weights)[slot]);
  }
  SlotTable back;
  back.rows = sources.data();
  back.limit = tokens;
  back.begin = by_row.begin.data();
  if (slots.weights != nullptr) back.weights = weights.data();
  CombineRows(in, back, out);
}

}  // namespace

void CombineRows(const RowMap& in, const SlotTable& slots, const RowMap& out) { CombineParts({{in, slots}}, out); }

void CombineRows(const TensorView& in, const SlotTable& slots, const TensorView& out) {
  ScratchFrame frame;
  const OutputRows rows(out, 1, frame);
  CombineRows(InputRows(in, 1, frame), slots, rows.rows());
  rows.Finish();
}

void CombineParts(const std::vector<CombinePart>& parts, const RowMap& out) {
  if (out.rows == 0 || out.cols == 0) return;
  int64_t slots = 0;
  for (const CombinePart& part : parts) slots += part.slots.First(out.rows);
  const bool stream = Streams(out);
  ParallelFor(out.rows, Grain(RowBytes(out), out.rows, slots),
              [&](int64_t begin, int64_t end) { CombineRange(parts, out, stream, begin, end); });
}

void SpreadRows(const RowMap& in, const SlotTable& slots, int64_t tokens, const RowMap* out, const RowMap* other,
                void* dots) {
  const int64_t n = slots.First(tokens);
  if (out != nullptr) {
    const Coverage coverage = Cover(slots, n);
    if (!coverage.distinct) {
      in.dtype == DType::kF64 ? SpreadSums<double>(in, slots, tokens, *out)
                              : SpreadSums<float>(in, slots, tokens, *out);
      out = nullptr;
    } else {
      ZeroUncovered(coverage, *out);
    }
  }
  if (out == nullptr && dots == nullptr) return;
  const bool stream = out != nullptr && Streams(*out);
  ParallelFor(tokens, Grain(RowBytes(in), tokens, n),
              [&](int64_t begin, int64_t end) { SpreadRange(in, slots, out, other, dots, stream, begin, end); });
}

void SpreadRows(const TensorView& in, const SlotTable& slots, const TensorView& out) {
  ScratchFrame frame;
  const RowMap from = InputRows(in, 1, frame);
  const OutputRows rows(out, 1, frame);
  SpreadRows(from, slots, from.rows, &rows.rows(), nullptr, nullptr);
  rows.Finish();
}

void SumByRow(const RowMap& in, const SlotTable& slots, int64_t tokens, const RowMap& out) {
  in.dtype == DType::kF64 ? SpreadSums<double>(in, slots, tokens, out) : SpreadSums<float>(in, slots, tokens, out);
}

SlotsByRow GroupByRow(const int32_t* rows, int64_t n, int64_t limit) {
  // Dropped slots sort behind all rows.
  std::vector<int64_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = rows[i] >= 0 && rows[i] < limit ? rows[i] : limit;
  SlotsByRow by_row;
  by_row.slots.resize(static_cast<size_t>(n));
  SortSlots(ids.data(), n, by_row.slots.data(), nullptr);
  const std::vector<int64_t> counts = CountIds(ids.data(), n, limit);
  by_row.begin.assign(1, 0);
  for (const int64_t count : counts) by_row.begin.push_back(by_row.begin.back() + count);
  return by_row;
}

}  // namespace jumar
