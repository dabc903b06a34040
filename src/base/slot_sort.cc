#include "base/slot_sort.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/parallel.h"

namespace jumar {
namespace {

constexpr int64_t kChunk = 1 << 13;
constexpr int64_t kMaxChunks = 32;
// Tables of counts have at most so many entries for few slots; for many, twice as many as there are slots.
constexpr int64_t kSmallTable = 1 << 13;

int64_t TableLimit(int64_t n) { return std::max(kSmallTable, 2 * n); }

void CountingSort(const int64_t* ids, int64_t n, int64_t groups, int32_t* order, int32_t* rows) {
  const int64_t chunks = std::max<int64_t>(1, std::min(FixedChunks(n, kChunk, kMaxChunks), TableLimit(n) / groups));
  // next[chunk][group]: first the chunk's count, then the row of its next slot of the group.
  std::vector<int32_t> next(static_cast<size_t>(chunks * groups));
  ParallelChunks(chunks, [&](int64_t c) {
    int32_t* count = &next[static_cast<size_t>(c * groups)];
    for (int64_t i = ChunkBegin(n, chunks, c); i < ChunkBegin(n, chunks, c + 1); ++i) ++count[ids[i]];
  });
  int32_t row = 0;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t c = 0; c < chunks; ++c) row += std::exchange(next[static_cast<size_t>(c * groups + g)], row);
  }
  ParallelChunks(chunks, [&](int64_t c) {
    int32_t* at = &next[static_cast<size_t>(c * groups)];
    for (int64_t i = ChunkBegin(n, chunks, c); i < ChunkBegin(n, chunks, c + 1); ++i) {
      const int32_t r = at[ids[i]]++;
      if (order != nullptr) order[r] = static_cast<int32_t>(i);
      if (rows != nullptr) rows[i] = r;
    }
  });
}

}  // namespace

void SortSlots(const int64_t* ids, int64_t n, int32_t* order, int32_t* rows) {
  if (n == 0) return;
  const int64_t largest = *std::max_element(ids, ids + n);
  if (largest < TableLimit(n)) return CountingSort(ids, n, largest + 1, order, rows);
  std::vector<int32_t> own;
  if (order == nullptr) {
    own.resize(static_cast<size_t>(n));
    order = own.data();
  }
  std::iota(order, order + n, 0);
  std::stable_sort(order, order + n, [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  if (rows == nullptr) return;
  for (int64_t r = 0; r < n; ++r) rows[order[r]] = static_cast<int32_t>(r);
}

std::vector<int64_t> CountIds(const int64_t* ids, int64_t n, int64_t groups) {
  const int64_t chunks =
      std::max<int64_t>(1, std::min(FixedChunks(n, kChunk, kMaxChunks), TableLimit(n) / std::max<int64_t>(groups, 1)));
  std::vector<int64_t> counts(static_cast<size_t>(chunks * groups));
  ParallelChunks(chunks, [&](int64_t c) {
    int64_t* count = counts.data() + c * groups;
    for (int64_t i = ChunkBegin(n, chunks, c); i < ChunkBegin(n, chunks, c + 1); ++i) {
      if (ids[i] >= 0 && ids[i] < groups) ++count[ids[i]];
    }
  });
  for (int64_t c = 1; c < chunks; ++c) {
    for (int64_t g = 0; g < groups; ++g) counts[static_cast<size_t>(g)] += counts[static_cast<size_t>(c * groups + g)];
  }
  counts.resize(static_cast<size_t>(groups));
  return counts;
}

}  // namespace jumar
