#include <atomic>
#include <mutex>

#include "jumar/runtime.h"

namespace jumar {
namespace {

struct Counters {
  std::mutex mutex;
  // Nodes of a map stay where they are, so counters may keep pointers to the values.
  std::map<std::string, std::atomic<int64_t>> calls;
};

Counters& All() {
  static Counters* counters = new Counters;  // outlives every static destructor
  return *counters;
}

}  // namespace

CallCounter::CallCounter(const char* op) {
  Counters& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  slot_ = &all.calls.try_emplace(op, 0).first->second;
}

void CallCounter::Add() { static_cast<std::atomic<int64_t>*>(slot_)->fetch_add(1, std::memory_order_relaxed); }

std::map<std::string, int64_t> CallCounts() {
  Counters& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::map<std::string, int64_t> counts;
  for (const auto& [op, calls] : all.calls) {
    if (calls.load() > 0) counts[op] = calls.load();
  }
  return counts;
}

void ResetCallCounts() {
  Counters& all = All();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto& [op, calls] : all.calls) calls = 0;
}

}  // namespace jumar
