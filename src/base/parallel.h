// The only threading in the library. It uses OpenMP and so joins the pool (and the thread count) that torch set up.
#pragma once

#include <cstdint>
#include <functional>

namespace jumar {

// Calls body(begin, end) on disjoint ranges that cover [0, n), each of at least `grain` elements except the last.
// Ranges depend on the number of threads: use this only where every element is computed on its own.
// An exception thrown by a body is rethrown here after all ranges ended.
void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

// Calls body(chunk) once for each chunk in [0, chunks), handed out dynamically in ascending order. The caller fixes
// what a chunk is, from sizes alone, so that sums per chunk are the same for every thread count.
void ParallelChunks(int64_t chunks, const std::function<void(int64_t)>& body);

// Number of fixed chunks for n items whose per-chunk partial results are summed afterwards: about `target` chunks of at
// least `min_items` items, from n alone. Chunk c covers [ChunkBegin(n, chunks, c), ChunkBegin(n, chunks, c + 1)).
int64_t FixedChunks(int64_t n, int64_t min_items, int64_t target = 64);
inline int64_t ChunkBegin(int64_t n, int64_t chunks, int64_t c) {
  return n / chunks * c + (c < n % chunks ? c : n % chunks);
}

}  // namespace jumar
