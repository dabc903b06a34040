// Spreads the blocks of many tensors over threads, by elements and not by tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/blocks.h"

namespace jumar {

// Calls body(tensor, first, end): blocks [first, end) of plans[tensor]. Every block is handed out once. Runs of
// adjacent blocks of adjacent tensors, about kTaskElements elements, are one task, whatever the number of threads.
inline constexpr int64_t kTaskElements = 65536;
void ForEachTask(const std::vector<BlockPlan>& plans,
                 const std::function<void(size_t tensor, int64_t first, int64_t end)>& body);

}  // namespace jumar
