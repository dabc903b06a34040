#include "kernels/limits/limits.h"

#include "testing/test_util.h"

namespace jumar::testing {
namespace {

TEST(Limits, PeaksArePlausible) {
  ForEachSimdTarget([](const std::string& target) {
    const double fma = MeasureFmaGflops(1, 0.01);
    EXPECT_GT(fma, 0.001) << target;  // QEMU emulates a vector at 0.02
    EXPECT_LT(fma, 2000) << target;
    const double bf16 = MeasureBf16Gflops(1, 0.01);
    std::printf("%s: fp32 %.1f GFLOP/s, bf16 %.1f GFLOP/s\n", target.c_str(), fma, bf16);
    if (target == "AVX3_SPR" || target == "AVX3_ZEN4") {
      EXPECT_GT(bf16, 0.5) << target;
    } else {
      EXPECT_EQ(bf16, 0) << target;
    }
  });
}

TEST(Limits, CopyBandwidthIsPlausible) {
  const double copy = MeasureCopyGBs(1, 0.02, 8);
  std::printf("copy %.1f GB/s\n", copy);
  EXPECT_GT(copy, 0.001);
  EXPECT_LT(copy, 5000);
}

}  // namespace
}  // namespace jumar::testing
