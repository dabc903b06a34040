#include "kernels/gemm/linear.h"

#include <cmath>

#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "npu_linear";

double Eps(DType dtype) { return dtype == DType::kF64 ? 0x1p-52 : 0x1p-24; }

// sum over p of f(i, j, p), compared with half an ulp plus one rounding per term.
void ExpectSums(const Buffer& c, int64_t n, int64_t terms, const std::function<double(int64_t, int64_t, int64_t)>& f,
                const std::string& what) {
  for (int64_t i = 0; i < c.numel(); ++i) {
    double value = 0;
    double magnitude = 0;
    for (int64_t p = 0; p < terms; ++p) {
      const double term = f(i / n, i % n, p);
      value += term;
      magnitude += std::abs(term);
    }
    const double bound =
        0.501 * UlpSize(c.view().dtype, value) + static_cast<double>(terms + 2) * Eps(c.view().dtype) * magnitude;
    ASSERT_LE(std::abs(c.Get(i) - value), bound) << what << " element " << i << ": " << c.Get(i) << " for " << value;
  }
}

// x of the given leading sizes and strides, tokens in row-major order.
struct Case {
  std::vector<int64_t> lead;
  std::vector<int64_t> x_strides;   // empty: contiguous
  std::vector<int64_t> dy_strides;  // likewise
};

TEST(Linear, ForwardAndGradients) {
  constexpr int64_t kIn = 37;
  constexpr int64_t kOut = 21;
  const std::vector<Case> cases = {
      {{}, {}, {}},                                          // rank 1
      {{5}, {}, {}},                                         // rank 2
      {{2, 3}, {}, {}},                                      // rank 3
      {{2, 3}, {kIn, 2 * kIn, 1}, {0, 0, 0}},                // transposed tokens; gradient of sum()
      {{2, 3}, {3 * 80, 80, 2}, {0, kOut, 1}},               // spaced; gradient expanded over the batch
      {{2, 1, 3, 2}, {}, {kOut * 6, 7, kOut, 3 * kOut, 1}},  // rank 5
      {{0, 4}, {}, {}},                                      // no tokens
  };
  for (const DType dtype : FloatDTypes()) {
    for (const Case& c : cases) {
      std::vector<int64_t> x_size = c.lead;
      x_size.push_back(kIn);
      std::vector<int64_t> y_size = c.lead;
      y_size.push_back(kOut);
      Buffer x(dtype, x_size, c.x_strides);
      Buffer dy(dtype, y_size, c.dy_strides);
      Buffer w(dtype, {kOut, kIn});
      Buffer bias(dtype, {kOut});
      x.FillRandom(1);
      dy.FillRandom(2);
      w.FillRandom(3);
      bias.FillRandom(4);
      const std::vector<double> xs = x.ToDoubles();
      const std::vector<double> dys = dy.ToDoubles();
      const int64_t tokens = x.numel() / kIn;
      const auto x_at = [&](int64_t t, int64_t i) { return xs[static_cast<size_t>(t * kIn + i)]; };
      const auto dy_at = [&](int64_t t, int64_t o) { return dys[static_cast<size_t>(t * kOut + o)]; };
      ForEachSimdTarget([&](const std::string& target) {
        const std::string what = std::string(Name(dtype)) + " " + ShapeString(x.view()) + " " + target;
        Buffer y(dtype, y_size);
        Linear(kOp, x.view(), w.view(), &bias.view(), y.view());
        ExpectSums(
            y, kOut, kIn + 1,
            [&](int64_t t, int64_t o, int64_t i) { return i == kIn ? bias.Get(o) : x_at(t, i) * w.Get(o * kIn + i); },
            what + " y");
        Buffer dx(dtype, x_size);
        LinearDgrad(kOp, dy.view(), w.view(), dx.view());
        ExpectSums(
            dx, kIn, kOut, [&](int64_t t, int64_t i, int64_t o) { return dy_at(t, o) * w.Get(o * kIn + i); },
            what + " dx");
        Buffer dw(dtype, {kOut, kIn});
        LinearWgrad(kOp, dy.view(), x.view(), dw.view());
        ExpectSums(
            dw, kIn, tokens, [&](int64_t o, int64_t i, int64_t t) { return dy_at(t, o) * x_at(t, i); }, what + " dw");
        Buffer db(dtype, {kOut});
        LinearBiasGrad(kOp, dy.view(), db.view());
        ExpectSums(
            db, kOut, tokens, [&](int64_t, int64_t o, int64_t t) { return dy_at(t, o); }, what + " db");
        for (const Buffer* b : {&x, &dy, &w, &bias, &y, &dx, &dw, &db}) b->CheckRedZones(what);
        EXPECT_EQ(x.ToDoubles(), xs) << what;
        EXPECT_EQ(dy.ToDoubles(), dys) << what;
      });
    }
  }
}

// bf16 activations and gradients with fp32 weights and weight gradients.
TEST(Linear, MixedDtypes) {
  Buffer x(DType::kBF16, {19, 40});
  Buffer w(DType::kF32, {50, 40});
  Buffer dy(DType::kBF16, {19, 50});
  x.FillRandom(1);
  w.FillRandom(2);
  dy.FillRandom(3);
  ForEachSimdTarget([&](const std::string& target) {
    Buffer y(DType::kBF16, {19, 50});
    Linear(kOp, x.view(), w.view(), nullptr, y.view());
    ExpectSums(
        y, 50, 40, [&](int64_t t, int64_t o, int64_t i) { return x.Get(t * 40 + i) * w.Get(o * 40 + i); }, target);
    Buffer dw(DType::kF32, {50, 40});
    LinearWgrad(kOp, dy.view(), x.view(), dw.view());
    ExpectSums(
        dw, 40, 19, [&](int64_t o, int64_t i, int64_t t) { return dy.Get(t * 50 + o) * x.Get(t * 40 + i); }, target);
  });
}

TEST(Linear, StridedOutput) {
  Buffer x(DType::kF32, {2, 3, 8});
  Buffer w(DType::kF32, {5, 8});
  x.FillRandom(1);
  w.FillRandom(2);
  Buffer y(DType::kF32, {2, 3, 5});
  Buffer strided(DType::kF32, {2, 3, 5}, {5, 10, 1});
  Linear(kOp, x.view(), w.view(), nullptr, y.view());
  Linear(kOp, x.view(), w.view(), nullptr, strided.view());
  EXPECT_EQ(y.ToDoubles(), strided.ToDoubles());
}

TEST(Linear, Errors) {
  Buffer x(DType::kF32, {2, 3, 8});
  Buffer w(DType::kF32, {5, 8});
  Buffer y(DType::kF32, {2, 3, 5});
  Buffer bias(DType::kF32, {8});
  Buffer narrow(DType::kF32, {2, 3, 7});
  Buffer flat(DType::kF32, {6, 5});
  Buffer f64(DType::kF64, {5, 8});
  Buffer ints(DType::kI64, {5, 8});
  Buffer scalar(DType::kF32, {});
  Buffer vector(DType::kF32, {8});
  ExpectError([&] { Linear(kOp, narrow.view(), w.view(), nullptr, y.view()); }, kOp,
              "last dimension of input [2, 3, 7] does not match weight [5, 8], expected 8");
  ExpectError([&] { Linear(kOp, x.view(), vector.view(), nullptr, y.view()); }, kOp, "got [8]");
  ExpectError([&] { Linear(kOp, scalar.view(), w.view(), nullptr, y.view()); }, kOp, "at least one dimension");
  ExpectError([&] { Linear(kOp, x.view(), w.view(), &bias.view(), y.view()); }, kOp, "bias [8]");
  ExpectError([&] { Linear(kOp, x.view(), w.view(), nullptr, flat.view()); }, kOp, "[6, 5]");
  ExpectError([&] { Linear(kOp, x.view(), f64.view(), nullptr, y.view()); }, kOp, "float32 and float64");
  ExpectError([&] { Linear(kOp, x.view(), ints.view(), nullptr, y.view()); }, kOp, "int64");
  ExpectError([&] { LinearDgrad(kOp, x.view(), w.view(), x.view()); }, kOp, "last dimension of grad [2, 3, 8]");
  ExpectError([&] { LinearWgrad(kOp, flat.view(), x.view(), w.view()); }, kOp, "[6, 5]");
  ExpectError([&] { LinearBiasGrad(kOp, y.view(), bias.view()); }, kOp, "[2, 3, 5]");
}

}  // namespace
}  // namespace jumar::testing
