// Products that add to their result.
#include <cmath>

#include "kernels/gemm/gemm.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

TEST(GemmAdd, AddsToTheResult) {
  ForEachSimdTarget([&](const std::string& target) {
    for (const DType dtype : FloatDTypes()) {
      const DType sums = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
      for (const auto& [m, n, k] : {std::tuple{1, 1, 1}, {5, 3, 7}, {70, 3, 33}, {33, 130, 600}, {4, 6, 0}}) {
        Buffer a(dtype, {m, k});
        Buffer b(dtype, {k, n});
        Buffer c(sums, {m, n}, {n + 3, 1});
        a.FillRandom(1);
        b.FillRandom(2);
        c.FillRandom(3);
        const std::vector<double> before = c.ToDoubles();
        GemmAdd("gemm", a.view(), b.view(), c.view());
        const double eps = sums == DType::kF64 ? 0x1p-53 : 0x1p-24;
        for (int64_t i = 0; i < c.numel(); ++i) {
          double expected = before[static_cast<size_t>(i)];
          double size = std::abs(expected);
          for (int64_t p = 0; p < k; ++p) {
            const double term = a.Get(i / n * k + p) * b.Get(p * n + i % n);
            expected += term;
            size += std::abs(term);
          }
          ASSERT_LE(std::abs(c.Get(i) - expected), (k + 2) * eps * size) << target << " " << Name(dtype) << " " << i;
        }
        c.CheckRedZones(target);
      }
    }
  });
}

TEST(GemmAdd, Errors) {
  Buffer a(DType::kBF16, {2, 3});
  Buffer b(DType::kBF16, {3, 4});
  Buffer narrow(DType::kBF16, {2, 4});
  Buffer columns(DType::kF32, {2, 4}, {1, 2});
  ExpectError([&] { GemmAdd("op", a.view(), b.view(), narrow.view()); }, "op", "sums must be in float32");
  ExpectError([&] { GemmAdd("op", a.view(), b.view(), columns.view()); }, "op", "adjacent columns");
}

}  // namespace
}  // namespace jumar::testing
