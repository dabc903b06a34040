// One slice of work each; the result is a value that keeps the work alive.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jumar {

struct PeakKernel {
  double flops_per_round = 0;
  float (*run)(int64_t rounds) = nullptr;
};

PeakKernel PeakAvx512Bf16();  // run is null where it was not compiled
PeakKernel PeakAmx();

}  // namespace jumar
