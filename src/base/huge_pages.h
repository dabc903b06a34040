// Large pages for large memory that is about to be written for the first time: a fault for every 4 KB costs several
// times what most operators do.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>

namespace jumar {

inline constexpr size_t kHugePage = size_t{2} << 20;
// From this size on the C library maps memory for itself and gives it back when it is freed (glibc's largest
// threshold), so that the advice does not outlive it.
inline constexpr size_t kOwnMapping = size_t{32} << 20;

// A hint for the whole large pages in [data, data + bytes); failure changes nothing.
inline void AdviseHugePages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jumar
