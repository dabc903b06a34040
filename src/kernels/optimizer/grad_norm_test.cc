#include "kernels/optimizer/grad_norm.h"

#include <cmath>
#include <limits>

#include "kernels/optimizer/optimizer_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<TensorView> Views(const std::vector<Buffer>& buffers) {
  std::vector<TensorView> views;
  for (const Buffer& b : buffers) views.push_back(b.view());
  return views;
}

TEST(GradNorm, EveryPowerDtypeTarget) {
  ForEachSimdTarget([](const std::string&) {
    for (const double p : {1.0, 2.0, 3.0, 0.5, 2.5, kInf}) {
      std::vector<Buffer> buffers;
      std::vector<int64_t> groups;
      std::vector<std::vector<double>> values(3);
      for (const DType dtype : FloatDTypes()) {
        for (const int64_t n : {0, 1, 3, 8, 9, 16, 33, 4096, 4097, 9001}) {
          buffers.emplace_back(dtype, std::vector<int64_t>{n});
          buffers.back().FillRandom(static_cast<uint64_t>(n) + 1);
          groups.push_back(n % 2);
          for (const double v : buffers.back().ToDoubles()) values[static_cast<size_t>(n % 2)].push_back(v);
        }
      }
      const auto sums = GradPowerSums("norm", Views(buffers), groups, 3, p);
      for (size_t g = 0; g < 3; ++g) {
        const auto expected = static_cast<double>(ref::PowerSum(values[g], p));
        EXPECT_LE(std::abs(sums[g] - expected), 0x1p-46 * expected) << "power " << p << ", group " << g;
      }
    }
  });
}

TEST(GradNorm, StridesAndNonFinite) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      Buffer x(dtype, {3, 700}, {1, 3}), expanded(dtype, {3, 700}, {0, 1});
      x.FillRandom(1);
      expanded.FillRandom(2);
      for (const double p : {1.0, 2.0, 3.0, kInf}) {
        const auto sums = GradPowerSums("norm", {x.view(), expanded.view()}, {0, 1}, 2, p);
        EXPECT_NEAR(sums[0], static_cast<double>(ref::PowerSum(x.ToDoubles(), p)), 1e-11 * sums[0]);
        EXPECT_NEAR(sums[1], static_cast<double>(ref::PowerSum(expanded.ToDoubles(), p)), 1e-11 * sums[1]);
      }
      for (const int64_t at : {0, 17, 2099}) {
        for (const double bad : {std::nan(""), -kInf}) {
          Buffer y(dtype, {2100});
          y.FillRandom(1);
          y.Set(at, bad);
          for (const double p : {1.0, 2.0, 3.0, kInf}) {
            const double sum = GradPowerSums("norm", {y.view()}, {0}, 1, p)[0];
            EXPECT_EQ(std::isnan(sum), std::isnan(bad)) << p << " at " << at;
            EXPECT_EQ(std::isinf(sum), std::isinf(bad)) << p << " at " << at;
          }
        }
      }
    }
  });
}

TEST(GradNorm, SameForEveryThreadCount) {
  std::vector<Buffer> buffers;
  for (const int64_t n : {5, 150001, 1, 90000}) {
    buffers.emplace_back(DType::kF32, std::vector<int64_t>{n});
    buffers.back().FillRandom(static_cast<uint64_t>(n));
  }
  for (const double p : {1.0, 2.0, kInf}) {
    double first = -1;
    for (const int threads : {1, 2, 3, 5}) {
      WithThreads(threads, [&] {
        const double sum = GradPowerSums("norm", Views(buffers), {0, 0, 0, 0}, 1, p)[0];
        if (first < 0) first = sum;
        EXPECT_EQ(first, sum) << threads << " threads";
      });
    }
  }
}

TEST(GradNorm, Scale) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t n : {0, 1, 7, 9, 17, 4097}) {
        Buffer x(dtype, {n}), strided(dtype, {n}, {3});
        x.FillRandom(4);
        strided.Fill([&](int64_t i) { return x.Get(i); });
        const std::vector<double> before = x.ToDoubles();
        const double factor = dtype == DType::kF64 ? 0.3 : static_cast<double>(0.3f);
        ScaleAll("scale", {x.view(), strided.view()}, 0.3);
        for (int64_t i = 0; i < n; ++i) {
          const double exact = before[static_cast<size_t>(i)] * factor;
          const double single = dtype == DType::kF64 ? exact : static_cast<float>(exact);
          EXPECT_EQ(x.Get(i), RoundTo(dtype, single));
          EXPECT_EQ(strided.Get(i), x.Get(i));
        }
        x.CheckRedZones("x");
      }
    }
  });
}

TEST(GradNorm, Errors) {
  const Buffer x(DType::kF32, {4}), ints(DType::kI64, {4}), expanded(DType::kF32, {4, 4}, {0, 1});
  ExpectError([&] { GradPowerSums("norm", {x.view(), ints.view()}, {0, 0}, 1, 2); }, "norm", "grad[1] must be");
  ExpectError([&] { GradPowerSums("norm", {x.view()}, {0}, 1, -1); }, "norm", "got -1");
  ExpectError([&] { GradPowerSums("norm", {x.view()}, {1}, 1, 2); }, "norm", "group 1 of grad[0]");
  ExpectError([&] { GradPowerSums("norm", {x.view()}, {}, 1, 2); }, "norm", "got 0");
  ExpectError([&] { ScaleAll("scale", {expanded.view()}, 2); }, "scale", "grad[0] overlaps itself");
  ExpectError([&] { ScaleAll("scale", {x.view(), x.view()}, 2); }, "scale", "overlap in memory");
}

}  // namespace
}  // namespace jumar::testing
