#include "squared_relu_glu.h"

#include <cmath>

#include "squared_relu_glu_ref.h"
#include "testing/test_util.h"

namespace jumar::example {
namespace {

using namespace jumar::testing;  // NOLINT: the helpers of every kernel test

constexpr const char* kOp = "squared_relu_glu";

// As the contract says.
double Bound(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 ? 0.51 : 2.0; }

struct Case {
  DType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // of input and dy; empty: contiguous
};

void Check(const Case& c, uint64_t seed) {
  Buffer input(c.dtype, c.sizes, c.strides), dy(c.dtype, c.sizes, c.strides);
  Buffer gate(c.dtype, c.sizes), y(c.dtype, c.sizes), dinput(c.dtype, c.sizes), dgate(c.dtype, c.sizes);
  input.FillRandom(seed, 2.0);
  gate.FillRandom(seed + 1);
  dy.FillRandom(seed + 2);
  const std::vector<double> before = input.ToDoubles();

  SquaredReluGlu(kOp, input.view(), gate.view(), y.view());
  SquaredReluGluBackward(kOp, dy.view(), input.view(), gate.view(), dinput.view(), dgate.view());

  // fp16 results may be subnormal, where the fp32 error of the last bit decides ties: a floor of a millionth of an ulp.
  const double floor = c.dtype == DType::kF16 ? 0x1p-44 : 0;
  ExpectUlp(y, ref::SquaredReluGlu(input.ToDoubles(), gate.ToDoubles()), Bound(c.dtype), "y", floor);
  const ref::Gradients expected = ref::SquaredReluGluBackward(dy.ToDoubles(), input.ToDoubles(), gate.ToDoubles());
  ExpectUlp(dinput, expected.dinput, Bound(c.dtype), "dinput", floor);
  ExpectUlp(dgate, expected.dgate, Bound(c.dtype), "dgate", floor);
  EXPECT_EQ(input.ToDoubles(), before) << "an input was written";
  for (const Buffer* b : {&input, &gate, &dy, &y, &dinput, &dgate}) b->CheckRedZones("squared_relu_glu");
}

TEST(SquaredReluGlu, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t n : {0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 130}) Check({dtype, {n}, {}}, seed++);
      Check({dtype, {9, 700}, {}}, seed++);  // more than one block
    }
  });
}

TEST(SquaredReluGlu, AnyStrides) {
  uint64_t seed = 100;
  for (const DType dtype : FloatDTypes()) {
    Check({dtype, {}, {}}, seed++);                       // 0-dim
    Check({dtype, {6, 20}, {31, 1}}, seed++);             // padded rows
    Check({dtype, {6, 20}, {1, 6}}, seed++);              // transposed
    Check({dtype, {2, 3, 4, 5}, {1, 40, 2, 8}}, seed++);  // permuted
  }
}

TEST(SquaredReluGlu, ExpandedGradient) {
  Buffer input(DType::kF32, {5, 9}), gate(DType::kF32, {5, 9}), one(DType::kF32, {5, 9}, {0, 0});
  Buffer dinput(DType::kF32, {5, 9}), dgate(DType::kF32, {5, 9});
  input.FillRandom(1);
  gate.FillRandom(2);
  one.Set(0, 0.75);
  SquaredReluGluBackward(kOp, one.view(), input.view(), gate.view(), dinput.view(), dgate.view());
  const auto expected = ref::SquaredReluGluBackward(std::vector<double>(45, 0.75), input.ToDoubles(), gate.ToDoubles());
  ExpectUlp(dinput, expected.dinput, 2.0, "dinput");
  ExpectUlp(dgate, expected.dgate, 2.0, "dgate");
}

TEST(SquaredReluGlu, KeepsNaN) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      Buffer input(dtype, {3}), gate(dtype, {3}), y(dtype, {3});
      input.Fill([](int64_t i) { return i == 0 ? NAN : 1.0; });
      gate.Fill([](int64_t i) { return i == 1 ? NAN : 1.0; });
      SquaredReluGlu(kOp, input.view(), gate.view(), y.view());
      EXPECT_TRUE(std::isnan(y.Get(0)) && std::isnan(y.Get(1))) << Name(dtype);
      EXPECT_EQ(y.Get(2), 1.0);
    }
  });
}

TEST(SquaredReluGlu, SameForEveryThreadCount) {
  Buffer input(DType::kF32, {301, 97}), gate(DType::kF32, {301, 97}), y(DType::kF32, {301, 97});
  input.FillRandom(3);
  gate.FillRandom(4);
  std::vector<double> first;
  for (const int threads : {1, 2, 5}) {
    WithThreads(threads, [&] { SquaredReluGlu(kOp, input.view(), gate.view(), y.view()); });
    if (first.empty()) first = y.ToDoubles();
    EXPECT_EQ(y.ToDoubles(), first) << threads << " threads";
  }
}

TEST(SquaredReluGlu, Errors) {
  Buffer input(DType::kF32, {2, 4}), bf16(DType::kBF16, {2, 4}), longer(DType::kF32, {2, 5}), ints(DType::kI32, {2, 4});
  Buffer y(DType::kF32, {2, 4});
  ExpectError([&] { SquaredReluGlu(kOp, input.view(), bf16.view(), y.view()); },
              "squared_relu_glu: ", "gate must be like input, float32[2, 4], but is bfloat16[2, 4]");
  ExpectError([&] { SquaredReluGlu(kOp, input.view(), longer.view(), y.view()); },
              "squared_relu_glu: ", "gate must be like input, float32[2, 4], but is float32[2, 5]");
  ExpectError([&] { SquaredReluGlu(kOp, ints.view(), ints.view(), ints.view()); }, "squared_relu_glu: ", "int32");
  EXPECT_TRUE(std::isnan(y.Get(0))) << "an output was touched before the error";
}

}  // namespace
}  // namespace jumar::example
