#include "kernels/ulp_error/ulp_error.h"

#include <cmath>
#include <limits>

#include "kernels/ulp_error/ulp_error_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

UlpErrorResult Compare(DType dtype, const std::vector<double>& actual, const std::vector<double>& expected) {
  const auto n = static_cast<int64_t>(actual.size());
  Buffer a(dtype, {n});
  Buffer e(DType::kF64, {n});
  a.Fill([&](int64_t i) { return actual[static_cast<size_t>(i)]; });
  e.Fill([&](int64_t i) { return expected[static_cast<size_t>(i)]; });
  return UlpError("ulp_error", a.view(), e.view(), nullptr);
}

TEST(UlpError, KnownDistances) {
  // bf16 has 8 significand bits: its neighbours above 1 are 2^-7 apart, below 1 half of that.
  const UlpErrorResult up = Compare(DType::kBF16, {2.0, 1.0 + 0x1p-7}, {2.0, 1.0});
  EXPECT_EQ(up.max_ulp, 1.0);
  EXPECT_EQ(up.index, 1);
  EXPECT_EQ(Compare(DType::kBF16, {1.0}, {1.0 - 0x1p-8}).max_ulp, 1.0);
  EXPECT_EQ(Compare(DType::kBF16, {1.0}, {1.0 + 0x1p-8}).max_ulp, 0.5);
  EXPECT_EQ(Compare(DType::kF16, {-1.0}, {1.0}).max_ulp, 2048.0);
  EXPECT_EQ(Compare(DType::kF32, {0x1p-149}, {0.0}).max_ulp, 1.0);
  EXPECT_EQ(Compare(DType::kF16, {0x1p-24}, {0x1p-26}).max_ulp, 0.75);
  EXPECT_EQ(Compare(DType::kF64, {1.0 + 0x1p-52}, {1.0}).max_ulp, 1.0);
  EXPECT_EQ(Compare(DType::kF64, {0x1p-1074}, {0.0}).max_ulp, 1.0);
}

TEST(UlpError, NanAndInfinity) {
  const double nan = std::nan("");
  EXPECT_EQ(Compare(DType::kF32, {nan}, {nan}).max_ulp, 0.0);
  const UlpErrorResult lost = Compare(DType::kF32, {1.0, nan, 3.0, 4.0}, {1.0, 2.0, nan, 4.0});
  EXPECT_EQ(lost.max_ulp, kInf);
  EXPECT_EQ(lost.index, 1);
  EXPECT_EQ(lost.nan_mismatches, 2);
  EXPECT_EQ(Compare(DType::kF32, {kInf}, {kInf}).max_ulp, 0.0);
  EXPECT_EQ(Compare(DType::kF32, {kInf}, {-kInf}).max_ulp, kInf);
  EXPECT_EQ(Compare(DType::kF32, {1.0}, {kInf}).max_ulp, kInf);
  EXPECT_EQ(Compare(DType::kF16, {kInf}, {65519.0}).max_ulp, kInf);
  EXPECT_EQ(Compare(DType::kF16, {kInf}, {65520.0}).max_ulp, 0.0);
  EXPECT_EQ(Compare(DType::kF16, {-kInf}, {65520.0}).max_ulp, kInf);
  EXPECT_EQ(Compare(DType::kF16, {65504.0}, {65536.0}).max_ulp, 1.0);
}

TEST(UlpError, NothingToCompare) {
  const UlpErrorResult none = Compare(DType::kBF16, {}, {});
  EXPECT_EQ(none.max_ulp, 0.0);
  EXPECT_EQ(none.index, -1);
  EXPECT_EQ(Compare(DType::kBF16, {3.0, 4.0}, {3.0, 4.0}).index, 0);
}

TEST(UlpError, AgreesWithTheDefinition) {
  for (const DType dtype : FloatDTypes()) {
    // Strided, larger than one chunk, over many binades.
    Buffer actual(dtype, {301, 67}, {1, 301});
    Buffer expected(DType::kF64, {301, 67}, {134, 2});
    Buffer slack(DType::kF64, {301, 67});
    Random random(7);
    expected.Fill([&](int64_t) { return std::ldexp(random.Normal(), static_cast<int>(random.Uniform() * 30)); });
    actual.Fill([&](int64_t i) { return expected.Get(i) * (1 + 0.01 * random.Uniform()); });
    slack.Fill([&](int64_t i) { return i % 5 == 0 ? kInf : std::abs(expected.Get(i)) * 1e-3; });
    for (const bool with_slack : {false, true}) {
      double worst = -1;
      int64_t at = -1;
      for (int64_t i = 0; i < actual.numel(); ++i) {
        const double s = with_slack && i % 5 != 0 ? slack.Get(i) : 0;
        const double error = ref::UlpError(dtype, actual.Get(i), expected.Get(i), s);
        if (error > worst) {
          worst = error;
          at = i;
        }
      }
      for (const int threads : {1, 3}) {
        WithThreads(threads, [&] {
          const UlpErrorResult got =
              UlpError("ulp_error", actual.view(), expected.view(), with_slack ? &slack.view() : nullptr);
          EXPECT_EQ(got.max_ulp, worst) << Name(dtype);
          EXPECT_EQ(got.index, at) << Name(dtype);
          EXPECT_EQ(got.nan_mismatches, 0);
        });
      }
    }
  }
}

TEST(UlpError, Errors) {
  const Buffer f32(DType::kF32, {2});
  const Buffer f64(DType::kF64, {2});
  const Buffer other(DType::kF64, {3});
  const Buffer index(DType::kI64, {2});
  ExpectError([&] { UlpError("ulp_error", index.view(), f64.view(), nullptr); }, "ulp_error", "int64");
  ExpectError([&] { UlpError("ulp_error", f32.view(), f32.view(), nullptr); }, "ulp_error", "expected");
  ExpectError([&] { UlpError("ulp_error", f32.view(), other.view(), nullptr); }, "ulp_error", "float64[2]");
  ExpectError([&] { UlpError("ulp_error", f32.view(), f64.view(), &other.view()); }, "ulp_error", "slack");
}

}  // namespace
}  // namespace jumar::testing
