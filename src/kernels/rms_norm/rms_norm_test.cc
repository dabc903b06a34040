#include "kernels/rms_norm/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/heap_buffer.h"
#include "base/widen.h"
#include "kernels/rms_norm/rms_norm_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "npu_rms_norm";

// What one comparison may be off, in ulps of the stored dtype. 16-bit: the rounding and a trace of fp32 error. fp32 and
// fp64 carry three products and rstd's own rounding.
double Bound(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 ? 0.51 : 3.0; }

// fp32 error of terms that cancel: eps times the size of the largest term.
double Eps(DType dtype) { return dtype == DType::kF64 ? 0x1p-50 : 0x1p-21; }

double MaxAbs(const std::vector<double>& v) {
  double m = 0;
  for (const double x : v) m = std::max(m, std::abs(x));
  return m;
}

enum class Kind { kPlain, kOnePlus, kGated, kAdd };

struct Case {
  Kind kind;
  DType dtype;
  DType gamma_dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// Runs forward and backward of a case and compares every output with the oracle.
void Check(const Case& c, uint64_t seed) {
  const int64_t cols = c.sizes.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < c.sizes.size(); ++i) rows *= c.sizes[i];
  std::vector<int64_t> rstd_sizes = c.sizes;
  rstd_sizes.back() = 1;
  const double epsilon = 1e-6;
  const double offset = c.kind == Kind::kOnePlus ? 1.0 : 0.0;
  const DType wide = ComputeType(c.dtype);

  Buffer x(c.dtype, c.sizes, c.strides), second(c.dtype, c.sizes), gamma(c.gamma_dtype, {cols});
  Buffer y(c.dtype, c.sizes), rstd(wide, rstd_sizes), sum(c.dtype, c.sizes);
  x.FillRandom(seed, 2.0, 0.25);
  // A constant row and a zero row.
  for (int64_t i = 0; i < cols && rows > 2; ++i) {
    x.Set(i, 1.5);
    x.Set((rows - 1) * cols + i, 0.0);
  }
  second.FillRandom(seed + 1, 1.5);
  gamma.FillRandom(seed + 2);
  const auto u_rows = static_cast<size_t>(rows);
  const auto u_cols = static_cast<size_t>(cols);

  ref::Doubles source = x.ToDoubles();
  ref::Doubles gate;
  const TensorView rstd_view = rstd.view();
  switch (c.kind) {
    case Kind::kGated:
      gate = second.ToDoubles();
      RmsNormGated(kOp, x.view(), second.view(), gamma.view(), epsilon, y.view(), rstd_view);
      break;
    case Kind::kAdd:
      AddRmsNorm(kOp, x.view(), second.view(), gamma.view(), epsilon, y.view(), rstd_view, sum.view());
      for (size_t i = 0; i < source.size(); ++i) {
        source[i] = RoundTo(c.dtype, source[i] + second.Get(static_cast<int64_t>(i)));
      }
      ExpectUlp(sum, source, 0.0, "sum");
      break;
    default:
      RmsNorm(kOp, x.view(), gamma.view(), epsilon, offset, y.view(), rstd_view);
  }
  ref::Doubles weight = gamma.ToDoubles();
  if (offset == 1.0 && wide == DType::kF32) {
    // The operator is specified with 1 + gamma in fp32.
    for (double& w : weight) w = RoundTo(DType::kF32, 1.0 + w) - 1.0;
  }
  const ref::RmsForward expected = ref::RmsNorm(source, gate, weight, epsilon, offset, u_rows, u_cols);
  // rstd: fp32 squares summed in lanes.
  ExpectUlp(rstd, expected.rstd, 4.0, "rstd");
  ExpectUlp(y, expected.y, Bound(c.dtype) + (c.kind == Kind::kGated && c.dtype == wide ? 4.0 : 2.0 * (c.dtype == wide)),
            "y", c.dtype == DType::kF16 ? 0x1p-40 : 0.0);

  Buffer dy(c.dtype, c.sizes), dsum(c.dtype, c.sizes), dx(c.dtype, c.sizes), dgate(c.dtype, c.sizes);
  Buffer dgamma(wide, {cols});
  dy.FillRandom(seed + 3);
  dsum.FillRandom(seed + 4);
  switch (c.kind) {
    case Kind::kGated:
      RmsNormGatedBackward(kOp, dy.view(), x.view(), second.view(), gamma.view(), rstd_view, dx.view(), dgate.view(),
                           dgamma.view());
      break;
    case Kind::kAdd:
      AddRmsNormBackward(kOp, dy.view(), dsum.view(), sum.view(), gamma.view(), rstd_view, dx.view(), dgamma.view());
      break;
    default:
      RmsNormBackward(kOp, dy.view(), x.view(), gamma.view(), rstd_view, offset, dx.view(), dgamma.view());
  }
  ref::RmsBackward grads =
      ref::RmsNormBackward(dy.ToDoubles(), source, gate, weight, rstd.ToDoubles(), offset, u_rows, u_cols);
  if (c.kind == Kind::kAdd) {
    for (size_t i = 0; i < grads.dx.size(); ++i) grads.dx[i] += dsum.Get(static_cast<int64_t>(i));
  }
  for (int64_t r = 0; r < rows; ++r) {
    // Each row has its own scale (the zero row has rstd 1000), so each is checked with its own floor.
    const auto begin = grads.dx.begin() + r * cols;
    const std::vector<double> row(begin, begin + cols);
    Buffer got(c.dtype, {cols});
    got.Fill([&](int64_t i) { return dx.Get(r * cols + i); });
    const double scale = rstd.Get(r) * 8.0 + (c.kind == Kind::kAdd ? 4.0 : 0.0);
    ExpectUlp(got, row, Bound(c.dtype), "dx row " + std::to_string(r), Eps(c.dtype) * std::max(scale, MaxAbs(row)));
  }
  if (c.kind == Kind::kGated) {
    ExpectUlp(dgate, grads.dgate, Bound(c.dtype), "dgate", Eps(c.dtype) * MaxAbs(grads.dgate));
  }
  ExpectUlp(dgamma, grads.dgamma, 1.0, "dgamma", Eps(c.dtype) * std::sqrt(static_cast<double>(rows)) * 8.0);
  for (const Buffer* b : {&y, &rstd, &sum, &dx, &dgate, &dgamma}) b->CheckRedZones("output");
}

TEST(RmsNorm, MatchesTheOracle) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 1;
    Kind long_kind = Kind::kPlain;  // in small tests: each dtype has many rows with another kind
    for (const DType dtype : FloatDTypes()) {
      for (const Kind kind : {Kind::kPlain, Kind::kOnePlus, Kind::kGated, Kind::kAdd}) {
        for (const int64_t cols : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 127, 300}) {
          SCOPED_TRACE(std::string(Name(dtype)) + " kind " + std::to_string(static_cast<int>(kind)) + " cols " +
                       std::to_string(cols));
          Check({kind, dtype, dtype, {5, cols}, {}}, seed++);
        }
        Check({kind, dtype, dtype, {2, 1, 3, 129}, {}}, seed++);
        // Long rows cross the block of the row sum; many rows cross the chunks of dgamma.
        Check({kind, dtype, dtype, {3, 4099}, {}}, seed++);
        if (!SmallTests() || kind == long_kind) Check({kind, dtype, dtype, {700, 65}, {}}, seed);
        ++seed;
      }
      long_kind = static_cast<Kind>(static_cast<int>(long_kind) + 1);
    }
  });
}

TEST(RmsNorm, AnyStrides) {
  uint64_t seed = 50;
  for (const DType dtype : FloatDTypes()) {
    for (const Kind kind : {Kind::kPlain, Kind::kGated, Kind::kAdd}) {
      Check({kind, dtype, dtype, {6, 20}, {31, 1}}, seed++);         // padded rows
      Check({kind, dtype, dtype, {6, 20}, {1, 6}}, seed++);          // transposed
      Check({kind, dtype, dtype, {4, 3, 20}, {20, 80, 1}}, seed++);  // permuted rows
      Check({kind, dtype, dtype, {4, 20}, {40, 2}}, seed++);         // every second column
    }
  }
}

TEST(RmsNorm, MixedGammaDTypes) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType gamma : {DType::kF32, DType::kBF16, DType::kF16}) {
      Check({Kind::kPlain, dtype, gamma, {4, 33}, {}}, 99);
      Check({Kind::kOnePlus, dtype, gamma, {4, 33}, {}}, 98);
    }
  }
}

TEST(RmsNorm, ExpandedGradientAndInput) {
  Buffer x(DType::kF32, {4, 9}), gamma(DType::kF32, {9}), rstd(DType::kF32, {4, 1}), y(DType::kF32, {4, 9});
  x.FillRandom(3);
  gamma.FillRandom(4);
  RmsNorm(kOp, x.view(), gamma.view(), 1e-6, 0, y.view(), rstd.view());
  Buffer one(DType::kF32, {4, 9}, {0, 0}), dense(DType::kF32, {4, 9});
  one.Set(0, 0.75);
  dense.Fill([](int64_t) { return 0.75; });
  Buffer dx1(DType::kF32, {4, 9}), dx2(DType::kF32, {4, 9}), dg1(DType::kF32, {9}), dg2(DType::kF32, {9});
  RmsNormBackward(kOp, one.view(), x.view(), gamma.view(), rstd.view(), 0, dx1.view(), dg1.view());
  RmsNormBackward(kOp, dense.view(), x.view(), gamma.view(), rstd.view(), 0, dx2.view(), dg2.view());
  ExpectUlp(dx1, dx2.ToDoubles(), 0.0, "dx");
  ExpectUlp(dg1, dg2.ToDoubles(), 0.0, "dgamma");
}

TEST(RmsNorm, GammaOfTwoDimensions) {
  Buffer x(DType::kF32, {3, 4, 5}), gamma(DType::kF32, {4, 5}), y(DType::kF32, {3, 4, 5}), rstd(DType::kF32, {3, 1, 1});
  x.FillRandom(5);
  gamma.FillRandom(6);
  RmsNorm(kOp, x.view(), gamma.view(), 1e-5, 0, y.view(), rstd.view());
  const auto expected = ref::RmsNorm(x.ToDoubles(), {}, gamma.ToDoubles(), 1e-5, 0, 3, 20);
  ExpectUlp(y, expected.y, 3.0, "y");
  ExpectUlp(rstd, expected.rstd, 2.0, "rstd");
}

TEST(RmsNorm, SameForEveryThreadCount) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    std::vector<std::vector<double>> first;
    for (const int threads : SmallTests() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3, 5}) {
      Buffer x(dtype, {1000, 96}), dy(dtype, {1000, 96}), gamma(dtype, {96}), y(dtype, {1000, 96}),
          dx(dtype, {1000, 96});
      Buffer rstd(DType::kF32, {1000, 1}), dgamma(DType::kF32, {96});
      x.FillRandom(8);
      dy.FillRandom(9);
      gamma.FillRandom(10);
      WithThreads(threads, [&] {
        RmsNorm(kOp, x.view(), gamma.view(), 1e-6, 0, y.view(), rstd.view());
        RmsNormBackward(kOp, dy.view(), x.view(), gamma.view(), rstd.view(), 0, dx.view(), dgamma.view());
      });
      std::vector<std::vector<double>> all = {y.ToDoubles(), rstd.ToDoubles(), dx.ToDoubles(), dgamma.ToDoubles()};
      if (first.empty()) first = all;
      EXPECT_EQ(all, first) << threads << " threads, " << Name(dtype);
    }
  }
}

// Field log D13: one rounding gives these bits; rounding xhat first gives -1.875, 0.1904296875, -1.90625.
TEST(RmsNorm, RoundsOnce) {
  Buffer x(DType::kBF16, {1, 4}), gamma(DType::kBF16, {4}), y(DType::kBF16, {1, 4}), rstd(DType::kF32, {1, 1});
  const double xs[] = {-4, -.75, 3.25, -3.75}, ws[] = {1.5, 1.75, .1875, 1.625};
  x.Fill([&](int64_t i) { return xs[i]; });
  gamma.Fill([&](int64_t i) { return ws[i]; });
  ForEachSimdTarget([&](const std::string&) {
    RmsNorm(kOp, x.view(), gamma.view(), 1e-6, 0, y.view(), rstd.view());
    EXPECT_EQ(y.ToDoubles(), (std::vector<double>{-1.8671875, -0.408203125, 0.189453125, -1.8984375}));
  });
}

// Field log D14: a zero-centred weight of 0 leaves the normed input; D17: zero rows and eps.
TEST(RmsNorm, ZeroCentredWeightAndZeroRows) {
  Buffer x(DType::kF32, {2, 5}), gamma(DType::kF32, {5}), y(DType::kF32, {2, 5}), rstd(DType::kF32, {2, 1});
  x.Fill([](int64_t i) { return i < 5 ? 0.0 : 3.0; });
  gamma.Fill([](int64_t) { return 0.0; });
  RmsNorm(kOp, x.view(), gamma.view(), 1e-6, 1.0, y.view(), rstd.view());
  for (int64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(y.Get(i), 0.0);
    EXPECT_NEAR(y.Get(5 + i), 1.0, 1e-6);
  }
  RmsNorm(kOp, x.view(), gamma.view(), 0.0, 1.0, y.view(), rstd.view());
  EXPECT_TRUE(std::isnan(y.Get(0)));
  EXPECT_TRUE(std::isinf(rstd.Get(0)));
}

// Results of 32 MiB and more go past the caches.
TEST(RmsNorm, LargeResultsAreThoseOfTheirRows) {
  constexpr int64_t kCols = 1024;
  constexpr int64_t kBytes = int64_t{32} << 20;
  constexpr int64_t kPart = 16;
  ForEachSimdTarget([&](const std::string& target) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto size = static_cast<int64_t>(SizeOf(dtype));
      const int64_t rows = kBytes / size / kCols;
      HeapBuffer memory[4] = {HeapBuffer(kBytes), HeapBuffer(kBytes), HeapBuffer(kBytes), HeapBuffer(kBytes)};
      Buffer gamma(DType::kF32, {kCols}), dgamma(DType::kF32, {kCols}), rstd(DType::kF32, {rows, 1});
      Buffer y_part(dtype, {kPart, kCols}), dx_part(dtype, {kPart, kCols}), rstd_part(DType::kF32, {kPart, 1});
      gamma.FillRandom(1);
      TensorView views[4];
      for (int i = 0; i < 4; ++i) views[i] = Contiguous(memory[i].data(), dtype, {rows, kCols});
      const TensorView &x = views[0], &dy = views[1], &y = views[2], &dx = views[3];
      for (int64_t i = 0; i < rows * kCols; ++i) {
        StoreFromDouble(x.data, dtype, i, static_cast<double>(i * 37 % 101 - 50) / 16);
        StoreFromDouble(dy.data, dtype, i, static_cast<double>(i * 53 % 89 - 44) / 16);
      }
      RmsNorm(kOp, x, gamma.view(), 1e-6, 0, y, rstd.view());
      RmsNormBackward(kOp, dy, x, gamma.view(), rstd.view(), 0, dx, dgamma.view());
      for (const int64_t row : {int64_t{0}, rows / 2 + 5, rows - kPart}) {
        const auto at = [&](const TensorView& all) {
          return Contiguous(static_cast<char*>(all.data) + row * kCols * size, dtype, {kPart, kCols});
        };
        RmsNorm(kOp, at(x), gamma.view(), 1e-6, 0, y_part.view(), rstd_part.view());
        RmsNormBackward(kOp, at(dy), at(x), gamma.view(), rstd_part.view(), 0, dx_part.view(), dgamma.view());
        const auto bytes = static_cast<size_t>(kPart * kCols * size);
        EXPECT_EQ(std::memcmp(at(y).data, y_part.view().data, bytes), 0) << target << " y from row " << row;
        EXPECT_EQ(std::memcmp(at(dx).data, dx_part.view().data, bytes), 0) << target << " dx from row " << row;
      }
    }
  });
}

TEST(RmsNorm, EmptyInputs) {
  for (const DType dtype : FloatDTypes()) {
    Buffer none(dtype, {0, 8}), gamma(dtype, {8}), rstd(ComputeType(dtype), {0, 1}), dgamma(ComputeType(dtype), {8});
    gamma.FillRandom(1);
    RmsNorm(kOp, none.view(), gamma.view(), 1e-6, 0, none.view(), rstd.view());
    RmsNormBackward(kOp, none.view(), none.view(), gamma.view(), rstd.view(), 0, none.view(), dgamma.view());
    for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(dgamma.Get(i), 0.0);
    Buffer flat(dtype, {3, 0}), no_gamma(dtype, {0}), rows(ComputeType(dtype), {3, 1}),
        no_dgamma(ComputeType(dtype), {0});
    RmsNorm(kOp, flat.view(), no_gamma.view(), 1e-6, 0, flat.view(), rows.view());
    RmsNormBackward(kOp, flat.view(), flat.view(), no_gamma.view(), rows.view(), 0, flat.view(), no_dgamma.view());
  }
}

TEST(RmsNorm, Errors) {
  Buffer x(DType::kF32, {2, 4}), y(DType::kF32, {2, 4}), rstd(DType::kF32, {2, 1});
  Buffer wrong(DType::kF32, {5}), scalar(DType::kF32, {}), deep(DType::kF32, {1, 2, 4}), f64(DType::kF64, {4});
  Buffer ints(DType::kI32, {4}), gamma(DType::kF32, {4}), bf16(DType::kBF16, {2, 4});
  const auto run = [&](const Buffer& g) {
    return [&] { RmsNorm(kOp, x.view(), g.view(), 1e-6, 0, y.view(), rstd.view()); };
  };
  ExpectError(run(wrong), "npu_rms_norm: ", "gamma [5] does not match the trailing dimensions of the input [2, 4]");
  ExpectError(run(scalar), "npu_rms_norm: ", "at least 1 dimension");
  ExpectError(run(deep), "npu_rms_norm: ", "The gamma shape should not be bigger than self shape.");
  ExpectError(run(f64), "npu_rms_norm: ", "float64");
  ExpectError(run(ints), "npu_rms_norm: ", "int32");
  ExpectError([&] { AddRmsNorm(kOp, x.view(), bf16.view(), gamma.view(), 1e-6, y.view(), rstd.view(), y.view()); },
              "npu_rms_norm: ", "x2 should be like the input, float32[2, 4], but is bfloat16[2, 4]");
  ExpectError([&] { RmsNormGated(kOp, x.view(), bf16.view(), gamma.view(), 1e-6, y.view(), rstd.view()); },
              "npu_rms_norm: ", "gate");
  EXPECT_TRUE(std::isnan(y.Get(0))) << "an output was touched before the error";
}

}  // namespace
}  // namespace jumar::testing
