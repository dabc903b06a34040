#include "kernels/rotary/rotary.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/rotary/rotary_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

using Shape = std::vector<int64_t>;
constexpr RotaryMode kModes[] = {RotaryMode::kHalf, RotaryMode::kInterleave};

// Element of a table row that serves logical element `i` of x.
int64_t TableIndex(const TensorView& x, const TensorView& table, int64_t i) {
  int64_t index = 0;
  int64_t step = 1;
  for (int d = x.rank - 1; d >= 0; --d) {
    const int64_t at = i % x.size[d];
    i /= x.size[d];
    if (table.size[d] != 1) index += at * step;
    step *= table.size[d];
  }
  return index;
}

// One rounding at the store plus the fp32 (fp64) roundings of products and sum, which are relative to the terms.
double Limit(DType dtype, double expected, double terms) {
  const double unit = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
  return 0.5 * UlpSize(dtype, expected) + 2.01 * unit * terms;
}

// Checks every element of out = RotaryMul(x) or, with `backward`, of dx for the incoming gradient x.
void CheckRotated(const Buffer& x, const Buffer& cos, const Buffer& sin, RotaryMode mode, bool backward,
                  const Buffer& out, const std::string& what) {
  using L = long double;
  const TensorView& v = x.view();
  const int64_t dim = v.size[v.rank - 1];
  const int64_t width = cos.view().size[v.rank - 1];
  const auto n = static_cast<size_t>(dim);
  std::vector<L> row(n), c(n), s(n), row_size(n), c_size(n), s_size(n);
  for (int64_t start = 0; start < x.numel(); start += dim) {
    const int64_t table = TableIndex(v, cos.view(), start);
    for (int64_t j = 0; j < dim; ++j) {
      const auto at = static_cast<size_t>(j);
      row[at] = x.Get(start + j);
      row_size[at] = std::abs(row[at]);
      if (j >= width) continue;
      c[at] = cos.Get(table + j);
      s[at] = sin.Get(table + j);
    }
    for (int64_t j = 0; j < dim; ++j) {
      const auto at = static_cast<size_t>(j);
      const double actual = out.Get(start + j);
      if (j >= width) {
        ASSERT_EQ(actual, x.Get(start + j)) << what << ": element " << start + j << " should be copied";
        continue;
      }
      const int64_t from = ref::RotateAt(mode, width, j).from;
      const L sine = backward ? s[static_cast<size_t>(from)] : s[at];
      const auto terms =
          static_cast<double>(row_size[at] * std::abs(c[at]) + row_size[static_cast<size_t>(from)] * std::abs(sine));
      const auto e = static_cast<double>(backward ? ref::RotaryDx(mode, width, row.data(), c.data(), s.data(), j)
                                                  : ref::RotaryMul(mode, width, row.data(), c.data(), s.data(), j));
      ASSERT_LE(std::abs(actual - e), Limit(v.dtype, e, terms))
          << what << ": element " << start + j << " of " << Describe(v) << ", width " << width << ": got " << actual
          << ", expected " << e;
    }
  }
  out.CheckRedZones(what);
}

void CheckSums(const Buffer& grad, const Buffer& x, RotaryMode mode, const Buffer& dcos, const Buffer& dsin,
               const std::string& what) {
  const TensorView& v = x.view();
  const int64_t dim = v.size[v.rank - 1];
  const int64_t width = dcos.view().size[v.rank - 1];
  const auto n = static_cast<size_t>(dcos.numel());
  std::vector<long double> c(n), s(n);
  std::vector<double> c_terms(n), s_terms(n);
  int64_t count = 0;
  for (int64_t start = 0; start < x.numel(); start += dim) {
    const int64_t table = TableIndex(v, dcos.view(), start);
    count += table == 0 ? 1 : 0;
    for (int64_t j = 0; j < width; ++j) {
      const ref::Rotated r = ref::RotateAt(mode, width, j);
      const long double g = grad.Get(start + j);
      const long double tc = g * x.Get(start + j);
      const long double ts = g * r.sign * x.Get(start + r.from);
      const auto at = static_cast<size_t>(table + j);
      c[at] += tc;
      s[at] += ts;
      c_terms[at] += static_cast<double>(std::abs(tc));
      s_terms[at] += static_cast<double>(std::abs(ts));
    }
  }
  for (size_t i = 0; i < n; ++i) {
    const auto at = static_cast<int64_t>(i);
    const DType dtype = dcos.view().dtype;
    const double ec = static_cast<double>(c[i]), es = static_cast<double>(s[i]);
    const double scale = static_cast<double>(count) + 1;
    ASSERT_LE(std::abs(dcos.Get(at) - ec), Limit(dtype, ec, scale * c_terms[i]))
        << what << ": dcos " << i << " got " << dcos.Get(at) << ", expected " << ec;
    ASSERT_LE(std::abs(dsin.Get(at) - es), Limit(dtype, es, scale * s_terms[i]))
        << what << ": dsin " << i << " got " << dsin.Get(at) << ", expected " << es;
  }
  dcos.CheckRedZones(what);
  dsin.CheckRedZones(what);
}

// Forward and backward of one configuration. Strides may be empty (contiguous).
void CheckAll(DType dtype, DType table_dtype, RotaryMode mode, const Shape& shape, const Shape& table_shape,
              const Shape& x_strides, const Shape& out_strides, const Shape& grad_strides, const Shape& table_strides,
              const std::string& what) {
  Buffer x(dtype, shape, x_strides), grad(dtype, shape, grad_strides);
  Buffer cos(table_dtype, table_shape, table_strides), sin(table_dtype, table_shape, table_strides);
  x.FillRandom(1);
  grad.FillRandom(2);
  cos.FillRandom(3);
  sin.FillRandom(4);
  const std::vector<double> before = x.ToDoubles();
  const Buffer out(dtype, shape, out_strides), dx(dtype, shape, out_strides);
  const Buffer dcos(table_dtype, table_shape, table_strides), dsin(table_dtype, table_shape, table_strides);
  RotaryMul(x.view(), cos.view(), sin.view(), mode, out.view());
  CheckRotated(x, cos, sin, mode, false, out, what + " forward");
  RotaryMulBackward(grad.view(), x.view(), cos.view(), sin.view(), mode, dx.view(), &dcos.view(), &dsin.view());
  CheckRotated(grad, cos, sin, mode, true, dx, what + " dx");
  CheckSums(grad, x, mode, dcos, dsin, what);
  ASSERT_EQ(before, x.ToDoubles()) << "the input was written";
}

DType TableOf(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

TEST(Rotary, EveryWidthDtypeModeTarget) {
  ForEachSimdTarget([](const std::string&) {
    for (const RotaryMode mode : kModes) {
      for (const DType dtype : FloatDTypes()) {
        for (const DType table : {dtype, TableOf(dtype)}) {
          for (const int64_t dim : {2, 4, 6, 14, 16, 18, 30, 34, 64, 80, 96, 128, 192, 256}) {
            for (const int64_t width : {dim, dim / 4 * 2}) {
              CheckAll(dtype, table, mode, {2, 3, dim}, {2, 1, width}, {}, {}, {}, {}, "width");
            }
          }
        }
      }
    }
  });
}

// Every documented form of the tables, for tensors that lie in memory as [B, S, N, D] or as [B, N, S, D].
TEST(Rotary, EveryLayoutAndBroadcastForm) {
  const int64_t b = 2, n = 3, s = 5, d = 16;
  struct Form {
    const char* layout;
    Shape x, memory_of_transposed;
    std::vector<Shape> tables;
  };
  const std::vector<Form> forms = {
      {"BNSD", {b, n, s, d}, {s * n * d, d, n * d, 1}, {{1, 1, s, d}, {b, 1, s, d}, {b, n, s, d}}},
      {"BSND", {b, s, n, d}, {n * s * d, d, s * d, 1}, {{1, s, 1, d}, {b, s, 1, d}, {b, s, n, d}}},
      {"SBND", {s, b, n, d}, {n * d, s * n * d, d, 1}, {{s, 1, 1, d}, {s, b, 1, d}, {s, b, n, d}}},
      {"TND", {s, n, d}, {d, s * d, 1}, {{s, 1, d}, {s, n, d}, {1, 1, d}}},
      {"other", {b, n, s, d}, {1, s * b, b, n * s * b}, {{1, n, 1, d}, {b, n, 1, d}, {1, 1, 1, d}, {b, 1, 1, 8}}},
  };
  ForEachSimdTarget([&](const std::string&) {
    for (const RotaryMode mode : kModes) {
      for (const DType dtype : FloatDTypes()) {
        for (const Form& form : forms) {
          for (const Shape& table : form.tables) {
            CheckAll(dtype, TableOf(dtype), mode, form.x, table, {}, {}, {}, {}, form.layout);
            CheckAll(dtype, dtype, mode, form.x, table, form.memory_of_transposed, form.memory_of_transposed, {}, {},
                     std::string(form.layout) + " transposed");
          }
        }
      }
    }
  });
}

TEST(Rotary, AnyStrides) {
  ForEachSimdTarget([](const std::string&) {
    for (const RotaryMode mode : kModes) {
      for (const DType dtype : FloatDTypes()) {
        const Shape x = {2, 3, 4, 20}, table = {1, 1, 4, 12};
        CheckAll(dtype, TableOf(dtype), mode, x, table, {1000, 250, 50, 2}, {}, {0, 0, 0, 0}, {}, "expanded gradient");
        CheckAll(dtype, TableOf(dtype), mode, x, table, {1, 40, 10, 120}, {1000, 250, 50, 2}, {0, 80, 20, 1},
                 {0, 0, 30, 2}, "stepped");
        CheckAll(dtype, TableOf(dtype), mode, x, table, {300, 100, 25, 1}, {1, 40, 10, 120}, {80, 0, 20, 1},
                 {96, 48, 12, 1}, "padded");
      }
    }
  });
}

// Ranks 2 and 8, and more rows than fit one block or one chunk of sums.
TEST(Rotary, RanksAndManyRows) {
  ForEachSimdTarget([](const std::string&) {
    for (const RotaryMode mode : kModes) {
      CheckAll(DType::kF32, DType::kF32, mode, {7, 10}, {7, 10}, {}, {}, {}, {}, "rank 2");
      CheckAll(DType::kF32, DType::kF32, mode, {7, 10}, {1, 10}, {}, {}, {}, {}, "rank 2");
      CheckAll(DType::kBF16, DType::kF32, mode, {2, 1, 3, 1, 2, 1, 2, 6}, {1, 1, 3, 1, 2, 1, 1, 4}, {}, {}, {}, {},
               "rank 8");
    }
    CheckAll(DType::kBF16, DType::kF32, RotaryMode::kHalf, {1, 1100, 128}, {1, 1, 128}, {}, {}, {}, {}, "one table");
    CheckAll(DType::kF32, DType::kBF16, RotaryMode::kInterleave, {300, 2, 128}, {300, 1, 128}, {}, {}, {}, {}, "many");
  });
}

// Large outputs are streamed where rows are aligned: the same bits as row by row.
TEST(Rotary, StreamedOutputs) {
  ForEachSimdTarget([](const std::string& target) {
    if (target == "AVX3_SPR" || target == "AVX3_ZEN4") return;  // same code as AVX3
    size_t turn = 0;
    for (const RotaryMode mode : kModes) {
      ++turn;
      for (const DType dtype : FloatDTypes()) {
        if (SmallTests() && turn++ % 2 == 0) continue;
        const int64_t dim = 128, rows = (int64_t{16} << 20) / (dim * static_cast<int64_t>(SizeOf(dtype)));
        Buffer x(dtype, {rows, dim}), cos(TableOf(dtype), {1, dim}), sin(TableOf(dtype), {1, dim}),
            some(dtype, {97, dim});
        some.FillRandom(1);
        cos.FillRandom(2);
        sin.FillRandom(3);
        const size_t row_bytes = dim * SizeOf(dtype);
        for (int64_t r = 0; r < rows; ++r) {
          std::memcpy(x.view().ptr<char>() + static_cast<size_t>(r) * row_bytes,
                      some.view().ptr<char>() + static_cast<size_t>(r % 97) * row_bytes, row_bytes);
        }
        // An output that is aligned to cache lines, with guards of a line each.
        std::vector<char> memory(static_cast<size_t>(rows) * row_bytes + 192, 0x5A);
        const size_t shift = 64 + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        TensorView out = x.view();
        out.data = memory.data() + shift;
        RotaryMul(x.view(), cos.view(), sin.view(), mode, out);
        const Buffer few(dtype, {97, dim});
        RotaryMul(some.view(), cos.view(), sin.view(), mode, few.view());
        for (int64_t r = 0; r < rows; ++r) {
          ASSERT_EQ(std::memcmp(out.ptr<char>() + static_cast<size_t>(r) * row_bytes,
                                few.view().ptr<char>() + static_cast<size_t>(r % 97) * row_bytes, row_bytes),
                    0)
              << Name(dtype) << " row " << r;
        }
        for (size_t i = 0; i < memory.size(); ++i) {
          if (i == shift) i += static_cast<size_t>(rows) * row_bytes;
          ASSERT_EQ(memory[i], 0x5A) << "outside the output";
        }
      }
    }
  });
}

TEST(Rotary, SameForEveryThreadCount) {
  const Shape shape = {2, 8, 700, 64}, table = {1, 1, 700, 64};
  Buffer x(DType::kBF16, shape), grad(DType::kBF16, shape), cos(DType::kF32, table), sin(DType::kF32, table);
  x.FillRandom(1);
  grad.FillRandom(2);
  cos.FillRandom(3);
  sin.FillRandom(4);
  std::vector<double> first;
  for (const int threads : SmallTests() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 3}) {
    const Buffer out(DType::kBF16, shape), dx(DType::kBF16, shape), dcos(DType::kF32, table), dsin(DType::kF32, table);
    WithThreads(threads, [&] {
      RotaryMul(x.view(), cos.view(), sin.view(), RotaryMode::kHalf, out.view());
      RotaryMulBackward(grad.view(), x.view(), cos.view(), sin.view(), RotaryMode::kHalf, dx.view(), &dcos.view(),
                        &dsin.view());
    });
    std::vector<double> all;
    for (const Buffer* b : {&out, &dx, &dcos, &dsin}) {
      for (const double v : b->ToDoubles()) all.push_back(v);
    }
    if (first.empty()) first = all;
    EXPECT_EQ(first, all) << threads << " threads";
  }
}

// D = 4, rotary width 2, position 1 (angle 1 rad for the only pair): the pair is (0, 1), not (0, 2).
TEST(Rotary, PartialPairsWithinTheWidth) {
  for (const RotaryMode mode : kModes) {
    Buffer x(DType::kF32, {1, 4}), cos(DType::kF32, {1, 2}), sin(DType::kF32, {1, 2});
    x.Fill([](int64_t i) { return static_cast<double>(i + 1); });
    cos.Fill([](int64_t) { return std::cos(1.0); });
    sin.Fill([](int64_t) { return std::sin(1.0); });
    const Buffer out(DType::kF32, {1, 4});
    RotaryMul(x.view(), cos.view(), sin.view(), mode, out.view());
    EXPECT_NEAR(out.Get(0), -1.142640, 1e-6);
    EXPECT_NEAR(out.Get(1), 1.922076, 1e-6);
    EXPECT_EQ(out.Get(2), 3);
    EXPECT_EQ(out.Get(3), 4);
  }
}

// x = [1, 2, 3, 4], cos = [1, 10, 100, 1000], sin = [2, 20, 200, 2000]: each term shows in the digits.
TEST(Rotary, LiteralTerms) {
  const double half[] = {1 - 3 * 2, 20 - 4 * 20, 300 + 1 * 200, 4000 + 2 * 2000};
  const double interleave[] = {1 - 2 * 2, 20 + 1 * 20, 300 - 4 * 200, 4000 + 3 * 2000};
  // R^T(g sin) with g = x.
  const double half_dx[] = {1 + 3 * 200, 20 + 4 * 2000, 300 - 1 * 2, 4000 - 2 * 20};
  const double interleave_dx[] = {1 + 2 * 20, 20 - 1 * 2, 300 + 4 * 2000, 4000 - 3 * 200};
  Buffer x(DType::kF64, {1, 4}), cos(DType::kF64, {1, 4}), sin(DType::kF64, {1, 4});
  x.Fill([](int64_t i) { return static_cast<double>(i + 1); });
  cos.Fill([](int64_t i) { return std::pow(10.0, static_cast<double>(i)); });
  sin.Fill([](int64_t i) { return 2 * std::pow(10.0, static_cast<double>(i)); });
  for (const RotaryMode mode : kModes) {
    const Buffer out(DType::kF64, {1, 4}), dx(DType::kF64, {1, 4}), dcos(DType::kF64, {1, 4}),
        dsin(DType::kF64, {1, 4});
    RotaryMul(x.view(), cos.view(), sin.view(), mode, out.view());
    RotaryMulBackward(x.view(), x.view(), cos.view(), sin.view(), mode, dx.view(), &dcos.view(), &dsin.view());
    const bool is_half = mode == RotaryMode::kHalf;
    const double rotated[2][4] = {{-2, 1, -4, 3}, {-3, -4, 1, 2}};
    for (int64_t j = 0; j < 4; ++j) {
      EXPECT_EQ(out.Get(j), is_half ? half[j] : interleave[j]);
      EXPECT_EQ(dx.Get(j), is_half ? half_dx[j] : interleave_dx[j]);
      EXPECT_EQ(dcos.Get(j), x.Get(j) * x.Get(j));
      EXPECT_EQ(dsin.Get(j), x.Get(j) * rotated[is_half ? 1 : 0][j]);
    }
  }
}

TEST(Rotary, NonFiniteStaysInItsPair) {
  ForEachSimdTarget([](const std::string&) {
    for (const RotaryMode mode : kModes) {
      for (const DType dtype : FloatDTypes()) {
        for (int64_t bad = 0; bad < 20; ++bad) {
          Buffer x(dtype, {1, 20}), cos(TableOf(dtype), {1, 18}), sin(TableOf(dtype), {1, 18});
          x.FillRandom(1);
          cos.FillRandom(2);
          sin.FillRandom(3);
          x.Set(bad, std::nan(""));
          const Buffer out(dtype, {1, 20});
          RotaryMul(x.view(), cos.view(), sin.view(), mode, out.view());
          const int64_t partner = bad >= 18 ? bad : ref::RotateAt(mode, 18, bad).from;
          for (int64_t j = 0; j < 20; ++j)
            EXPECT_EQ(std::isnan(out.Get(j)), j == bad || j == partner) << bad << " " << j;
        }
      }
    }
  });
}

TEST(Rotary, ZeroSizes) {
  const Buffer x(DType::kBF16, {0, 3, 8}), table(DType::kF32, {1, 3, 8}), none(DType::kF32, {1, 3, 0});
  RotaryMul(x.view(), table.view(), table.view(), RotaryMode::kHalf, x.view());
  // A sum over nothing is 0.
  const Buffer dcos(DType::kF32, {1, 3, 8}), dsin(DType::kF32, {1, 3, 8});
  RotaryMulBackward(x.view(), x.view(), table.view(), table.view(), RotaryMode::kHalf, x.view(), &dcos.view(),
                    &dsin.view());
  EXPECT_EQ(dcos.ToDoubles(), std::vector<double>(24, 0.0));
  EXPECT_EQ(dsin.ToDoubles(), std::vector<double>(24, 0.0));
  // A rotary width of 0 copies.
  Buffer y(DType::kBF16, {1, 3, 8}), out(DType::kBF16, {1, 3, 8});
  y.FillRandom(1);
  RotaryMul(y.view(), none.view(), none.view(), RotaryMode::kInterleave, out.view());
  EXPECT_EQ(y.ToDoubles(), out.ToDoubles());
}

// The matrices of the two modes give what the modes give; any other matrix follows the formula.
TEST(Rotary, Matrix) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      const int64_t dim = 10;
      Buffer x(dtype, {2, 3, dim}, {90, 30, 2}), cos(TableOf(dtype), {2, 1, dim}), sin(TableOf(dtype), {2, 1, dim});
      Buffer any(TableOf(dtype), {dim, dim});
      x.FillRandom(1);
      cos.FillRandom(2);
      sin.FillRandom(3);
      any.FillRandom(4);
      for (const RotaryMode mode : kModes) {
        Buffer matrix(TableOf(dtype), {dim, dim}, {1, dim});
        matrix.Fill([](int64_t) { return 0.0; });
        for (int64_t j = 0; j < dim; ++j) {
          const ref::Rotated r = ref::RotateAt(mode, dim, j);
          matrix.Set(r.from * dim + j, r.sign);
        }
        const Buffer out(dtype, {2, 3, dim});
        RotaryMulMatrix(x.view(), cos.view(), sin.view(), matrix.view(), out.view());
        CheckRotated(x, cos, sin, mode, false, out, "matrix of a mode");
      }
      const Buffer out(dtype, {2, 3, dim}, {1, 2, 6});
      RotaryMulMatrix(x.view(), cos.view(), sin.view(), any.view(), out.view());
      out.CheckRedZones("matrix");
      for (int64_t i = 0; i < out.numel(); ++i) {
        const int64_t row = i / dim * dim, table = i / (3 * dim) * dim, j = i % dim;
        double sum = 0, size = std::abs(x.Get(i) * cos.Get(table + j));
        for (int64_t k = 0; k < dim; ++k) {
          sum += x.Get(row + k) * any.Get(k * dim + j);
          size += std::abs(x.Get(row + k) * any.Get(k * dim + j) * sin.Get(table + j));
        }
        const double e = x.Get(i) * cos.Get(table + j) + sum * sin.Get(table + j);
        EXPECT_LE(std::abs(out.Get(i) - e), Limit(dtype, e, (dim + 2) * size)) << i;
      }
    }
  });
}

TEST(Rotary, OneTableGradientAlone) {
  Buffer x(DType::kF32, {3, 2, 8}), cos(DType::kF32, {3, 1, 8});
  x.FillRandom(1);
  cos.FillRandom(2);
  const Buffer dx(DType::kF32, {3, 2, 8}), dcos(DType::kF32, {3, 1, 8}), dsin(DType::kF32, {3, 1, 8});
  RotaryMulBackward(x.view(), x.view(), cos.view(), cos.view(), RotaryMode::kHalf, dx.view(), nullptr, nullptr);
  RotaryMulBackward(x.view(), x.view(), cos.view(), cos.view(), RotaryMode::kHalf, dx.view(), &dcos.view(), nullptr);
  RotaryMulBackward(x.view(), x.view(), cos.view(), cos.view(), RotaryMode::kHalf, dx.view(), nullptr, &dsin.view());
  CheckSums(x, x, RotaryMode::kHalf, dcos, dsin, "alone");
}

TEST(Rotary, Errors) {
  const Buffer x(DType::kBF16, {2, 3, 8}), t(DType::kF32, {2, 1, 8}), t6(DType::kF32, {2, 1, 6});
  const Buffer odd(DType::kF32, {2, 1, 7}), wide(DType::kF32, {2, 1, 10}), two(DType::kF32, {2, 2, 8});
  const Buffer rank2(DType::kF32, {2, 8}), t64(DType::kF64, {2, 1, 8}), ints(DType::kI64, {2, 3, 8});
  const Buffer x7(DType::kF32, {2, 3, 7}), x32(DType::kF32, {2, 3, 8});
  const auto run = [](const Buffer& a, const Buffer& c, const Buffer& s) {
    return [&] { RotaryMul(a.view(), c.view(), s.view(), RotaryMode::kHalf, a.view()); };
  };
  const std::string op = "npu_rotary_mul: ";
  ExpectError([] { ParseRotaryMode("npu_rotary_mul", "quarter"); }, op,
              "The rotary_mode of npu_rotary_mul should be half or interleave, but got quarter");
  EXPECT_EQ(ParseRotaryMode("npu_rotary_mul", "half"), RotaryMode::kHalf);
  EXPECT_EQ(ParseRotaryMode("npu_rotary_mul", "interleave"), RotaryMode::kInterleave);
  ExpectError(run(x, t, t6), op, "one shape, got [2, 1, 8] and [2, 1, 6]");
  ExpectError(run(x, odd, odd), op, "must be even, got 7");
  ExpectError(run(x7, t6, t6), op, "must be even, got 7");
  ExpectError(run(x, wide, wide), op, "got 10 and 8");
  ExpectError(run(x, two, two), op, "dimension 1 of r1 and r2 must be 1 or that of input, got [2, 2, 8]");
  ExpectError(run(x, rank2, rank2), op, "rank of input");
  ExpectError(run(rank2, rank2, t), op, "one shape");
  ExpectError(run(x, t64, t64), op, "float64 does not go with input of bfloat16");
  ExpectError(run(ints, t, t), op, "int64");
  ExpectError([&] { RotaryMul(x.view(), t.view(), t.view(), RotaryMode::kHalf, x32.view()); }, op,
              "got float32 and bfloat16");
  ExpectError([&] { RotaryMulMatrix(x.view(), t.view(), t.view(), rank2.view(), x.view()); }, op,
              "rotate must be [8, 8], got [2, 8]");
  ExpectError(
      [&] {
        RotaryMulBackward(x32.view(), x.view(), t.view(), t.view(), RotaryMode::kHalf, x.view(), nullptr, nullptr);
      },
      "npu_rotary_mul_backward: ", "grad and input must have one dtype, got float32 and bfloat16");
  ExpectError(
      [&] {
        RotaryMulBackward(x.view(), x.view(), t.view(), t.view(), RotaryMode::kHalf, x.view(), &x32.view(), nullptr);
      },
      "npu_rotary_mul_backward: ", "shape of r1");
}

}  // namespace
}  // namespace jumar::testing
