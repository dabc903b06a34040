// Process-wide facts: SIMD targets, threads, and how often each operator ran.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace jumar {

// SIMD levels are named after Highway targets; AVX3_ZEN4 adds AVX512-BF16 dot products to AVX3 and AVX3_SPR adds AMX
// tiles (both serve the GEMM only). The environment variable JUMAR_SIMD caps the level at the named target; an unknown
// name throws Error on first use.

// Usable here: compiled into this library and supported by this CPU, best first.
std::vector<std::string> SimdTargets();

// The best usable target under the cap.
std::string SimdTarget();

// Caps the level for the whole process ("" removes the cap, JUMAR_SIMD included). Not for use while kernels run.
// Throws Error for a name that is not in SimdTargets().
void SetSimdTarget(const std::string& name);

// True when the level `name` is usable under the cap, e.g. SimdAllows("AVX3_ZEN4").
bool SimdAllows(const std::string& name);

// Threads that the next kernel call of this thread will use at most (OpenMP's setting, which torch.set_num_threads
// changes).
int NumThreads();

// Calls of each operator since start or the last reset; counted where torch enters the kernel, so that a compiled or
// converted model can prove that an operator ran.
std::map<std::string, int64_t> CallCounts();
void ResetCallCounts();

class CallCounter {
 public:
  explicit CallCounter(const char* op);
  void Add();

 private:
  void* slot_;
};

}  // namespace jumar
