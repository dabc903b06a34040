// The stable sort behind mixture of experts: slots (token, k) in the order of their expert ids.
#pragma once

#include <cstdint>
#include <vector>

namespace jumar {

// Sorts n <= 2^31 - 1 slots by ids[slot] >= 0, ascending; slots of one id stay in ascending order.
//   order[row] = the slot that lands in row            rows[slot] = the row where the slot lands
// Either result may be null. A counting sort while ids are small, else a comparison sort, so that memory grows with n
// alone. Multithreaded; the result is unique.
void SortSlots(const int64_t* ids, int64_t n, int32_t* order, int32_t* rows);

// How many of n ids have each value of [0, groups); ids outside of it are not counted. Multithreaded.
std::vector<int64_t> CountIds(const int64_t* ids, int64_t n, int64_t groups);

}  // namespace jumar
