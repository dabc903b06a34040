// C entry points of the limits meter, for `jumar bench`. They return a negative number when the measurement fails.
#include "kernels/limits/limits.h"

#include <exception>

#define JUMAR_API extern "C" __attribute__((visibility("default")))

namespace {

template <typename F>
double Measure(const F& f) {
  try {
    return f();
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace

JUMAR_API double jumar_measure_fma_gflops(int threads, double seconds) {
  return Measure([&] { return jumar::MeasureFmaGflops(threads, seconds); });
}
JUMAR_API double jumar_measure_bf16_gflops(int threads, double seconds) {
  return Measure([&] { return jumar::MeasureBf16Gflops(threads, seconds); });
}
JUMAR_API double jumar_measure_copy_gbs(int threads, double seconds, int megabytes) {
  return Measure([&] { return jumar::MeasureCopyGBs(threads, seconds, megabytes); });
}
