// Error bounds of math-inl.h: over every float for e^x, sigmoid and 1/sqrt on the best target (JUMAR_LONG_TESTS set),
// over every 509th float otherwise, and over random doubles.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/simd_dispatch.h"
#include "testing/test_util.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/math_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void Apply(int function, const T* in, size_t n, T* out) {
  const hn::ScalableTag<T> d;
  ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
    const auto x = load(in);
    switch (function) {
      case 0:
        return store(ExpOf(d, x), out);
      case 1:
        return store(SigmoidOf(d, x), out);
      case 2:
        return store(RsqrtOf(d, x), out);
      case 3:
        return store(ExpNegAbs(d, x), out);
      case 4:
        return store(ScoreExp(d, x), out);
      default:
        if constexpr (sizeof(T) == 4) {
          return store(function == 5 ? CoarseExpNeg<5>(d, x) : CoarseExpNeg<4>(d, x), out);
        }
    }
  });
}
void ApplyF32(int function, const float* in, size_t n, float* out) { Apply(function, in, n, out); }
void ApplyF64(int function, const double* in, size_t n, double* out) { Apply(function, in, n, out); }

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(ApplyF32);
HWY_EXPORT(ApplyF64);

namespace testing {
namespace {

long double Oracle(int function, double x) {
  const long double w = x;
  if (function == 0) return std::exp(w);
  if (function == 1) return 1.0L / (1.0L + std::exp(-w));
  if (function == 2) return 1.0L / std::sqrt(w);
  if (function == 4) return std::exp(w);
  return std::exp(-std::abs(w));
}

constexpr const char* kName[] = {
    "exp", "sigmoid", "rsqrt", "exp(-|x|)", "exp of scores", "exp(-x), degree 5", "exp(-x), degree 4"};
// Ulps; see math-inl.h.
constexpr double kBoundF32[] = {1.0, 2.5, 1.5, 1.5, 1.5, 96.0, 128.0};
constexpr double kBoundF64[] = {1.5, 2.5, 1.5, 1.5, 1.5};

TEST(Math, F32Bounds) {
#if HWY_ARCH_ARM || defined(__SANITIZE_ADDRESS__)
  constexpr uint64_t kStep = 16127;  // tests for Arm run in QEMU, 30 times slower
#else
  constexpr uint64_t kStep = 509;
#endif
  const uint64_t step = std::getenv("JUMAR_LONG_TESTS") != nullptr ? 1 : kStep;
  constexpr size_t kBlock = 4096;
  std::vector<float> in(kBlock), out(kBlock);
  ForEachSimdTarget([&](const std::string& target) {
    if (target == "AVX3_SPR" || target == "AVX3_ZEN4") return;  // same code as AVX3
    for (int function = 0; function < 7; ++function) {
      double worst = 0;
      float worst_at = 0;
      for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += step * kBlock) {
        for (size_t i = 0; i < kBlock; ++i) {
          const auto b = static_cast<uint32_t>(bits + i * step);
          std::memcpy(&in[i], &b, sizeof(b));
        }
        JUMAR_DISPATCH(ApplyF32)(function, in.data(), kBlock, out.data());
        for (size_t i = 0; i < kBlock; ++i) {
          // double carries 29 more bits than float: its own error does not show.
          const double x = in[i];
          const double e = function == 0   ? std::exp(x)
                           : function == 1 ? 1 / (1 + std::exp(-x))
                           : function == 2 ? 1 / std::sqrt(x)
                           : function == 3 ? std::exp(-std::abs(x))
                           : function == 4 ? std::exp(std::min(x, 70.0))
                                           : std::exp(-x);
          if ((function == 3 || function >= 5) && std::isnan(x)) continue;
          if (function >= 5 && x > 40) {
            ASSERT_TRUE(out[i] >= 0 && out[i] < 0x1p-57f) << x;
            continue;
          }
          if (std::isnan(e)) {
            ASSERT_TRUE(std::isnan(out[i])) << kName[function] << "(" << x << ")";
            continue;
          }
          if (std::isinf(RoundTo(DType::kF32, e))) {
            ASSERT_EQ(static_cast<double>(out[i]), e > 0 ? INFINITY : -INFINITY) << kName[function] << "(" << x << ")";
            continue;
          }
          if (std::abs(e) < 0x1p-126) {
            // ScoreExp rounds once there: half of the smallest number beside what were 1.5 ulp.
            const double bound = function != 4 ? 0x1p-126 : x > -104 ? 0x1.4p-149 : e;
            ASSERT_LE(std::abs(out[i] - e), bound) << kName[function] << "(" << x << ")";
            continue;
          }
          const double error = std::abs(out[i] - e) / UlpSize(DType::kF32, e);
          if (!(error <= worst)) {
            worst = error;
            worst_at = in[i];
          }
        }
      }
      EXPECT_LE(worst, kBoundF32[function]) << kName[function] << "(" << worst_at << ")";
      RecordProperty(std::string(kName[function]) + "_" + target, std::to_string(worst));
      std::printf("%s %s: %.3f ulp at %g\n", target.c_str(), kName[function], worst, worst_at);
    }
  });
}

TEST(Math, F64Bounds) {
  constexpr size_t kCount = 200000;
  std::vector<double> in(kCount), out(kCount);
  ForEachSimdTarget([&](const std::string& target) {
    for (int function = 0; function < 5; ++function) {
      Random random(7);
      for (double& x : in) {
        x = random.Uniform() * 700;
        if (function == 2) x = std::abs(x) + 1e-300;
      }
      in[0] = 0;
      JUMAR_DISPATCH(ApplyF64)(function, in.data(), kCount, out.data());
      double worst = 0;
      for (size_t i = 0; i < kCount; ++i) {
        const long double e = Oracle(function, in[i]);
        if (std::isinf(static_cast<double>(e))) {
          ASSERT_TRUE(std::isinf(out[i]));
          continue;
        }
        const auto error = static_cast<double>(std::abs(out[i] - e)) / UlpSize(DType::kF64, static_cast<double>(e));
        worst = error <= worst ? worst : error;
      }
      EXPECT_LE(worst, kBoundF64[function]) << kName[function] << " on " << target;
    }
  });
}

}  // namespace
}  // namespace testing
}  // namespace jumar
#endif  // HWY_ONCE
