// The packed product against fp64, on every SIMD level.
#include "kernels/gemm/gemm.h"

#include <cmath>
#include <cstring>
#include <tuple>

#include "kernels/gemm/gemm_kernel.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

struct Shape {
  int64_t m, n, k;
};

std::string Text(const Shape& s) { return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k); }

// rows x cols, row-major or column-major, with `gap` unused elements between the major rows.
Buffer Matrix(DType dtype, int64_t rows, int64_t cols, bool column_major, int64_t gap) {
  if (column_major) return Buffer(dtype, {rows, cols}, {1, rows + gap});
  return Buffer(dtype, {rows, cols}, {cols + gap, 1});
}

struct Oracle {
  std::vector<double> value;
  std::vector<double> magnitude;  // sum of |a b|
};

Oracle Product(const Buffer& a, const Buffer& b, const Buffer* bias) {
  const int64_t m = a.view().size[0];
  const int64_t k = a.view().size[1];
  const int64_t n = b.view().size[1];
  const std::vector<double> av = a.ToDoubles();
  const std::vector<double> bv = b.ToDoubles();
  Oracle oracle{std::vector<double>(static_cast<size_t>(m * n)), std::vector<double>(static_cast<size_t>(m * n))};
  for (int64_t i = 0; i < m; ++i) {
    double* value = oracle.value.data() + i * n;
    double* magnitude = oracle.magnitude.data() + i * n;
    for (int64_t j = 0; j < n; ++j) {
      value[j] = bias == nullptr ? 0 : bias->Get(j);
      magnitude[j] = std::abs(value[j]);
    }
    for (int64_t p = 0; p < k; ++p) {
      const double x = av[static_cast<size_t>(i * k + p)];
      const double* y = bv.data() + p * n;
      for (int64_t j = 0; j < n; ++j) {
        value[j] += x * y[j];
        magnitude[j] += std::abs(x * y[j]);
      }
    }
  }
  return oracle;
}

// Half an ulp for the store and (block + K / block + 2) roundings of the accumulation type on the sum of magnitudes.
void ExpectClose(const Buffer& c, const Oracle& oracle, int64_t k, const std::string& what) {
  const DType dtype = c.view().dtype;
  const double eps = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
  const double roundings = static_cast<double>(std::min<int64_t>(k, 512) + k / 256 + 2);
  double worst = 0;
  int64_t at = 0;
  for (int64_t i = 0; i < c.numel(); ++i) {
    const auto index = static_cast<size_t>(i);
    // The oracle's own roundings count for fp64.
    const double bound =
        0.5 * UlpSize(dtype, oracle.value[index]) * (1 + 1e-3) +
        (dtype == DType::kF64 ? 2 * static_cast<double>(k) + 2 : roundings) * eps * oracle.magnitude[index];
    const double ratio = std::abs(c.Get(i) - oracle.value[index]) / bound;
    if (!(ratio <= worst)) {
      worst = ratio;
      at = i;
    }
    if (std::isnan(ratio)) break;
  }
  EXPECT_LE(worst, 1.0) << what << ": element " << at << " is " << c.Get(at) << ", expected "
                        << oracle.value[static_cast<size_t>(at)];
}

std::vector<uint8_t> Bytes(const Buffer& c) {
  const auto* data = static_cast<const uint8_t*>(c.view().data);
  return {data, data + static_cast<size_t>(c.numel()) * SizeOf(c.view().dtype)};
}

const std::vector<Shape>& OddShapes() {
  static const std::vector<Shape> shapes = {{1, 1, 1},      {1, 7, 8},     {7, 1, 9},     {8, 9, 7},     {9, 8, 15},
                                            {15, 17, 33},   {17, 15, 31},  {31, 33, 63},  {33, 31, 65},  {63, 65, 17},
                                            {65, 63, 1},    {6, 16, 64},   {14, 32, 100}, {13, 64, 257}, {15, 48, 255},
                                            {2, 100, 300},  {16, 96, 513}, {100, 3, 257}, {3, 100, 257}, {257, 40, 70},
                                            {129, 130, 40}, {1, 257, 700}, {257, 1, 70},  {40, 40, 1}};
  return shapes;
}

// A small test takes the large shapes in one layout for each dtype, in turn.
bool Skipped(const Shape& s, size_t turn, int layout) {
  return SmallTests() && s.m * s.n * s.k > 100000 && turn % 4 != static_cast<size_t>(layout);
}

TEST(Gemm, MatchesOracleInEveryLayoutAndDtype) {
  const std::vector<std::tuple<DType, DType, DType>> dtypes = {
      {DType::kF32, DType::kF32, DType::kF32},   {DType::kBF16, DType::kBF16, DType::kBF16},
      {DType::kF16, DType::kF16, DType::kF16},   {DType::kF64, DType::kF64, DType::kF64},
      {DType::kBF16, DType::kBF16, DType::kF32}, {DType::kF32, DType::kBF16, DType::kF16},
      {DType::kF16, DType::kF32, DType::kBF16},  {DType::kBF16, DType::kF16, DType::kF32}};
  size_t turn = 0;
  for (const auto& [ta, tb, tc] : dtypes) {
    ++turn;
    for (const Shape& s : OddShapes()) {
      ++turn;
      for (int layout = 0; layout < 4; ++layout) {
        if (Skipped(s, turn, layout)) continue;
        const bool with_bias = (s.m + layout) % 2 == 0;
        Buffer a = Matrix(ta, s.m, s.k, (layout & 1) != 0, layout == 3 ? 5 : 0);
        Buffer b = Matrix(tb, s.k, s.n, (layout & 2) != 0, layout == 0 ? 3 : 0);
        a.FillRandom(static_cast<uint64_t>(s.m + 1));
        b.FillRandom(static_cast<uint64_t>(s.n + 100));
        Buffer bias(tc, {s.n});
        bias.FillRandom(5);
        const Oracle oracle = Product(a, b, with_bias ? &bias : nullptr);
        ForEachSimdTarget([&](const std::string& target) {
          const std::string what = std::string(Name(ta)) + " " + Name(tb) + " " + Name(tc) + " " + Text(s) +
                                   " layout " + std::to_string(layout) + " " + target;
          Buffer c(tc, {s.m, s.n}, {s.n + layout, 1});
          Gemm("gemm", a.view(), b.view(), with_bias ? &bias.view() : nullptr, c.view());
          ExpectClose(c, oracle, s.k, what);
          a.CheckRedZones(what);
          b.CheckRedZones(what);
          c.CheckRedZones(what);
          // Gaps between the rows of C are still the NaN that fresh memory holds.
          if (layout > 0) {
            for (int64_t i = 0; i + 1 < s.m; ++i) {
              for (int64_t j = 0; j < layout; ++j) {
                ASSERT_TRUE(std::isnan(LoadAsDouble(c.view().data, tc, i * (s.n + layout) + s.n + j))) << what;
              }
            }
          }
        });
      }
    }
  }
}

// Small integers: every sum is exact in fp32, so the result must be too, also across the borders of all blocks.
TEST(Gemm, IntegersAreExact) {
  size_t turn = 0;
  for (const DType dtype : FloatDTypes()) {
    for (const Shape& s :
         std::vector<Shape>{{150, 300, 270}, {5, 330, 2100}, {300, 20, 600}, {1050, 40, 70}, {40, 1050, 40}}) {
      ++turn;
      for (int layout = 0; layout < 4; ++layout) {
        if (Skipped(s, turn, layout)) continue;
        Buffer a = Matrix(dtype, s.m, s.k, (layout & 1) != 0, 0);
        Buffer b = Matrix(dtype, s.k, s.n, (layout & 2) != 0, 0);
        a.Fill([](int64_t i) { return static_cast<double>(i * 7 % 11 - 5); });
        b.Fill([](int64_t i) { return static_cast<double>(i * 5 % 13 - 6); });
        Buffer bias(dtype, {s.n});
        bias.Fill([](int64_t i) { return static_cast<double>(i % 9 - 4); });
        const Oracle oracle = Product(a, b, &bias);
        const DType out = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
        ForEachSimdTarget([&](const std::string& target) {
          Buffer c(out, {s.m, s.n});
          Gemm("gemm", a.view(), b.view(), &bias.view(), c.view());
          for (int64_t i = 0; i < c.numel(); ++i) {
            ASSERT_EQ(c.Get(i), oracle.value[static_cast<size_t>(i)])
                << Name(dtype) << " " << Text(s) << " layout " << layout << " " << target << " element " << i;
          }
          c.CheckRedZones(Text(s));
        });
      }
    }
  }
}

TEST(Gemm, SameBitsForEveryThreadCount) {
  std::vector<Shape> shapes = {{200, 300, 257}, {3, 700, 900}, {700, 3, 900}, {50, 40, 5000}, {1, 1, 3000}};
  if (SmallTests()) shapes = {{100, 300, 257}, {3, 700, 300}, {700, 3, 300}, {20, 40, 2500}, {1, 1, 3000}};
  for (const DType dtype : FloatDTypes()) {
    for (const Shape& s : shapes) {
      Buffer a(dtype, {s.m, s.k});
      Buffer b = Matrix(dtype, s.k, s.n, true, 0);
      a.FillRandom(1);
      b.FillRandom(2);
      ForEachSimdTarget([&](const std::string& target) {
        std::vector<uint8_t> first;
        for (const int threads : SmallTests() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3}) {
          WithThreads(threads, [&] {
            Buffer c(dtype, {s.m, s.n});
            Gemm("gemm", a.view(), b.view(), nullptr, c.view());
            if (first.empty()) {
              first = Bytes(c);
            } else {
              EXPECT_EQ(first, Bytes(c)) << Name(dtype) << " " << Text(s) << " " << target << " " << threads;
            }
          });
        }
      });
    }
  }
}

TEST(Gemm, AnyStrides) {
  for (const DType dtype : FloatDTypes()) {
    // Every second column, expanded rows, expanded columns, one value everywhere; a strided result.
    Buffer spaced(dtype, {20, 50}, {103, 2});
    Buffer row(dtype, {20, 50}, {0, 1});
    Buffer column(dtype, {20, 50}, {1, 0});
    Buffer scalar(dtype, {20, 50}, {0, 0});
    Buffer b(dtype, {50, 37}, {80, 2});
    b.FillRandom(3);
    for (Buffer* a : {&spaced, &row, &column, &scalar}) {
      a->FillRandom(4);
      const Oracle oracle = Product(*a, b, nullptr);
      ForEachSimdTarget([&](const std::string& target) {
        for (const std::vector<int64_t>& strides : std::vector<std::vector<int64_t>>{{37, 1}, {1, 20}, {120, 3}}) {
          Buffer c(dtype, {20, 37}, strides);
          Gemm("gemm", a->view(), b.view(), nullptr, c.view());
          ExpectClose(c, oracle, 50, std::string(Name(dtype)) + " " + target);
          c.CheckRedZones(target);
        }
      });
    }
  }
}

// Every bf16 kernel of this CPU by itself, also one that the dispatch passes over.
TEST(Gemm, Bf16Kernels) {
  std::vector<std::pair<const char*, const GemmKernel*>> kernels;
  SetSimdTarget("");
  const GemmKernel& base = ChooseGemmKernel(DType::kF32, DType::kF32);
  if (SimdAllows("AVX3_SPR")) kernels.emplace_back("AMX", GemmKernelAmx(base));
  if (SimdAllows("AVX3_ZEN4")) kernels.emplace_back("AVX512-BF16", GemmKernelAvx512Bf16(base));
  for (const auto& [name, kernel] : kernels) {
    ASSERT_NE(kernel, nullptr) << name;
    for (const Shape& s : OddShapes()) {
      for (int layout = 0; layout < 5; ++layout) {
        Buffer a = layout == 4 ? Buffer(DType::kBF16, {s.m, s.k}, {2 * s.k, 2})
                               : Matrix(DType::kBF16, s.m, s.k, (layout & 1) != 0, layout);
        Buffer b = layout == 4 ? Buffer(DType::kBF16, {s.k, s.n}, {3, 3 * s.k})
                               : Matrix(DType::kBF16, s.k, s.n, (layout & 2) != 0, layout);
        a.FillRandom(static_cast<uint64_t>(s.m + 1));
        b.FillRandom(static_cast<uint64_t>(s.n + 100));
        const Oracle oracle = Product(a, b, nullptr);
        for (const DType out : {DType::kF32, DType::kBF16}) {
          Buffer c(out, {s.m, s.n}, {s.n + 3, 1});
          const GemmOperand left{a.view().data, DType::kBF16, s.m, s.k, a.view().stride[0], a.view().stride[1]};
          const GemmOperand right{b.view().data, DType::kBF16, s.n, s.k, b.view().stride[1], b.view().stride[0]};
          GemmStore store{};
          store.m = s.m;
          store.n = s.n;
          store.out = c.view().data;
          store.dtype = out;
          store.row_stride = c.view().stride[0];
          store.col_stride = 1;
          GemmRun(*kernel, left, right, store);
          const std::string what = std::string(name) + " " + Text(s) + " layout " + std::to_string(layout);
          ExpectClose(c, oracle, s.k, what);
          c.CheckRedZones(what);
          for (int64_t i = 0; i + 1 < s.m; ++i) {
            ASSERT_TRUE(std::isnan(LoadAsDouble(c.view().data, out, i * (s.n + 3) + s.n))) << what;
          }
        }
      }
    }
  }
}

TEST(Gemm, ZeroSizes) {
  for (const DType dtype : FloatDTypes()) {
    ForEachSimdTarget([&](const std::string& target) {
      for (const Shape& s : std::vector<Shape>{{0, 5, 4}, {5, 0, 4}, {0, 0, 0}, {0, 3, 0}}) {
        Buffer a(dtype, {s.m, s.k});
        Buffer b(dtype, {s.k, s.n});
        Buffer c(dtype, {s.m, s.n});
        Gemm("gemm", a.view(), b.view(), nullptr, c.view());
        c.CheckRedZones(target);
      }
      Buffer a(dtype, {3, 0});
      Buffer b(dtype, {0, 70});
      Buffer bias(dtype, {70});
      bias.FillRandom(1);
      for (const bool with_bias : {false, true}) {
        Buffer c(dtype, {3, 70});
        Gemm("gemm", a.view(), b.view(), with_bias ? &bias.view() : nullptr, c.view());
        for (int64_t i = 0; i < c.numel(); ++i) ASSERT_EQ(c.Get(i), with_bias ? bias.Get(i % 70) : 0.0) << target;
      }
    });
  }
}

// A NaN or infinity reaches exactly its row or column.
TEST(Gemm, SpecialValuesPropagate) {
  for (const DType dtype : FloatDTypes()) {
    for (const bool column_major : {false, true}) {
      Buffer a = Matrix(dtype, 20, 37, column_major, 0);
      Buffer b = Matrix(dtype, 37, 45, column_major, 0);
      a.Fill([](int64_t i) { return static_cast<double>(i % 5 + 1); });
      b.Fill([](int64_t i) { return static_cast<double>(i % 3 + 1); });
      a.Set(19 * 37 + 36, NAN);
      a.Set(3 * 37 + 35, INFINITY);
      b.Set(36 * 45 + 44, -INFINITY);
      ForEachSimdTarget([&](const std::string& target) {
        Buffer c(dtype, {20, 45});
        Gemm("gemm", a.view(), b.view(), nullptr, c.view());
        for (int64_t i = 0; i < 20; ++i) {
          for (int64_t j = 0; j < 45; ++j) {
            const double v = c.Get(i * 45 + j);
            if (i == 19 || (i == 3 && j == 44)) {
              ASSERT_TRUE(std::isnan(v)) << target << " " << i << " " << j;
            } else if (i == 3 || j == 44) {
              ASSERT_EQ(v, i == 3 ? INFINITY : -INFINITY) << target << " " << i << " " << j;
            } else {
              ASSERT_TRUE(std::isfinite(v)) << target << " " << i << " " << j;
            }
          }
        }
      });
    }
  }
}

// Long K: blocks are packed in several runs and the sums go on.
// 2^24 + 1 is 2^24 in fp32: what follows the large term in its block of K is lost, what lies in others is not.
TEST(Gemm, FewColumnsAreSummedInShortBlocks) {
  ForEachSimdTarget([&](const std::string& target) {
    for (const int64_t m : {int64_t{1}, int64_t{5}, int64_t{90}}) {
      for (const int64_t n : {int64_t{1}, int64_t{8}, kFewColumns}) {
        constexpr int64_t kDepth = 64;
        Buffer a = Matrix(DType::kF32, m, kDepth, false, 0);
        Buffer b = Matrix(DType::kF32, kDepth, n, true, 0);
        Buffer c = Matrix(DType::kF32, m, n, false, 0);
        a.Fill([](int64_t i) { return i % kDepth == 0 ? 0x1p24 : 1.0; });
        b.Fill([](int64_t) { return 1.0; });
        Gemm("test", a.view(), b.view(), nullptr, c.view());
        for (int64_t i = 0; i < c.numel(); ++i) {
          ASSERT_EQ(c.Get(i), 0x1p24 + 48) << target << " " << m << " x " << n << " at " << i;
        }
      }
    }
  });
}

TEST(Gemm, LongK) {
  const int64_t k = SmallTests() ? 4501 : 9001;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (const DType out : {dtype, dtype == DType::kF64 ? DType::kF64 : DType::kF32}) {
      Buffer a = Matrix(dtype, 9, k, true, 0);
      Buffer b(dtype, {k, 70});
      a.FillRandom(8);
      b.FillRandom(9);
      const Oracle oracle = Product(a, b, nullptr);
      ForEachSimdTarget([&](const std::string& target) {
        Buffer c(out, {9, 70});
        Gemm("gemm", a.view(), b.view(), nullptr, c.view());
        ExpectClose(c, oracle, k, target);
      });
    }
  }
}

TEST(Gemm, Errors) {
  Buffer a(DType::kF32, {3, 4});
  Buffer b(DType::kF32, {4, 5});
  Buffer c(DType::kF32, {3, 5});
  Buffer wrong_b(DType::kF32, {5, 5});
  Buffer wrong_c(DType::kF32, {5, 3});
  Buffer cube(DType::kF32, {1, 3, 4});
  Buffer f64(DType::kF64, {4, 5});
  Buffer ints(DType::kI32, {4, 5});
  Buffer bias(DType::kF32, {4});
  ExpectError([&] { Gemm("npu_linear", a.view(), wrong_b.view(), nullptr, c.view()); }, "npu_linear", "[5, 5]");
  ExpectError([&] { Gemm("npu_linear", a.view(), b.view(), nullptr, wrong_c.view()); }, "npu_linear", "[5, 3]");
  ExpectError([&] { Gemm("npu_linear", cube.view(), b.view(), nullptr, c.view()); }, "npu_linear", "[1, 3, 4]");
  ExpectError([&] { Gemm("npu_linear", a.view(), f64.view(), nullptr, c.view()); }, "npu_linear", "float64");
  ExpectError([&] { Gemm("npu_linear", a.view(), ints.view(), nullptr, c.view()); }, "npu_linear", "int32");
  ExpectError([&] { Gemm("npu_linear", a.view(), b.view(), &bias.view(), c.view()); }, "npu_linear", "[4]");
}

}  // namespace
}  // namespace jumar::testing
