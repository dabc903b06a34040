#include "base/parallel.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "jumar/runtime.h"

namespace jumar {
namespace {

// Keeps the first exception of a parallel region, which must not leave it.
class ErrorSlot {
 public:
  template <typename F>
  void Run(const F& f) {
    try {
      f();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
  void Rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

int NumThreads() { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t threads = std::min<int64_t>(NumThreads(), (n + grain - 1) / grain);
  if (threads <= 1) {
    body(0, n);
    return;
  }
  ErrorSlot error;
#pragma omp parallel num_threads(static_cast <int>(threads))
  {
    const int64_t team = omp_get_num_threads();
    const int64_t t = omp_get_thread_num();
    const int64_t begin = ChunkBegin(n, team, t);
    const int64_t end = ChunkBegin(n, team, t + 1);
    if (begin < end) error.Run([&] { body(begin, end); });
  }
  error.Rethrow();
}

void ParallelChunks(int64_t chunks, const std::function<void(int64_t)>& body) {
  const int64_t threads = std::min<int64_t>(NumThreads(), chunks);
  if (threads <= 1) {
    for (int64_t c = 0; c < chunks; ++c) body(c);
    return;
  }
  ErrorSlot error;
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast <int>(threads))
  {
    for (int64_t c = next++; c < chunks; c = next++) error.Run([&] { body(c); });
  }
  error.Rethrow();
}

int64_t FixedChunks(int64_t n, int64_t min_items, int64_t target) {
  if (n <= 0) return 0;
  return std::clamp<int64_t>(n / std::max<int64_t>(min_items, 1), 1, target);
}

}  // namespace jumar
