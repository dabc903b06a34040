// The rate of a benchmark's case beside the peaks of the machine, measured around it.
#pragma once

#include <benchmark/benchmark.h>

#include "jumar/runtime.h"
#include "jumar/tensor.h"
#include "kernels/limits/limits.h"

namespace jumar {

inline void ReportGflops(benchmark::State& state, DType dtype, double flops) {
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["fma_peak"] = MeasureFmaGflops(NumThreads(), 0.05);
  if (dtype == DType::kBF16) {
    const double bf16 = MeasureBf16Gflops(NumThreads(), 0.05);
    if (bf16 > 0) state.counters["bf16_peak"] = bf16;
  }
}

}  // namespace jumar
