// Between moe_rows.cc and its SIMD code: ranges of tokens on one thread.
#pragma once

#include "kernels/moe/moe_rows.h"

namespace jumar {

// stream: out is written past the caches; its rows are then aligned to 64 bytes.
void CombineRange(const std::vector<CombinePart>& parts, const RowMap& out, bool stream, int64_t first, int64_t last);
void SpreadRange(const RowMap& in, const SlotTable& slots, const RowMap* out, const RowMap* other, void* dots,
                 bool stream, int64_t first, int64_t last);

}  // namespace jumar
