#include "kernels/swiglu/swiglu.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/swiglu/swiglu_ref.h"
#include "kernels/swiglu/swiglu_simd.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

// The reference: in long double, rounded to double once, where results are fp64; for the other dtypes double has 29
// bits to spare (and long double is slow, in an emulator most of all).
struct Ref {
  using L = long double;
  explicit Ref(DType dtype) : wide(dtype == DType::kF64) {}
  double Swiglu(double gate, double up) const {
    return wide ? static_cast<double>(ref::Swiglu<L>(gate, up)) : ref::Swiglu(gate, up);
  }
  double Dup(double grad, double gate) const {
    return wide ? static_cast<double>(ref::SwigluDup<L>(grad, gate)) : ref::SwigluDup(grad, gate);
  }
  double Dgate(double grad, double gate, double up) const {
    return wide ? static_cast<double>(ref::SwigluDgate<L>(grad, gate, up)) : ref::SwigluDgate(grad, gate, up);
  }
  double DgateSize(double grad, double gate, double up) const { return ref::SwigluDgateSize(grad, gate, up); }
  bool wide;
};

// The bounds of docs/ops/npu_swiglu.md in ulps of the output dtype. dgate has an additional part relative to the size
// of its two terms, which cancel near gate = -1.278.
struct Bounds {
  double out, dup, dgate, dgate_terms;
};
Bounds BoundsOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return {4, 5, 0.5, 0x1p-21};
    case DType::kF64:
      return {4, 5, 0.5, 0x1p-50};
    default:
      return {0.505, 0.505, 0.5, 0x1p-19};
  }
}

struct Case {
  Buffer gate, up, grad;
  Case(DType dtype, const std::vector<int64_t>& sizes, uint64_t seed, double scale = 2.0)
      : gate(dtype, sizes), up(dtype, sizes), grad(dtype, sizes) {
    gate.FillRandom(seed, scale);
    up.FillRandom(seed + 1);
    grad.FillRandom(seed + 2);
  }
};

template <typename F>
std::vector<double> Expected(int64_t n, const F& f) {
  std::vector<double> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = f(i);
  return values;
}

void CheckForward(const Buffer& gate, const Buffer& up, const Buffer& out, const std::string& what) {
  const Ref ref(out.view().dtype);
  const auto expected = Expected(out.numel(), [&](int64_t i) { return ref.Swiglu(gate.Get(i), up.Get(i)); });
  ExpectUlp(out, expected, BoundsOf(out.view().dtype).out, what);
  out.CheckRedZones(what);
}

void CheckBackward(const Buffer& grad, const Buffer& gate, const Buffer& up, const Buffer& dgate, const Buffer& dup,
                   const std::string& what) {
  const DType dtype = gate.view().dtype;
  const Bounds bounds = BoundsOf(dtype);
  const Ref ref(dtype);
  const auto expected_dup = Expected(dup.numel(), [&](int64_t i) { return ref.Dup(grad.Get(i), gate.Get(i)); });
  ExpectUlp(dup, expected_dup, bounds.dup, what + " dup");
  for (int64_t i = 0; i < dgate.numel(); ++i) {
    const double e = ref.Dgate(grad.Get(i), gate.Get(i), up.Get(i));
    const double size = ref.DgateSize(grad.Get(i), gate.Get(i), up.Get(i));
    const double limit = bounds.dgate * UlpSize(dtype, e) + bounds.dgate_terms * size + 2 * UlpSize(DType::kF32, 0);
    ASSERT_LE(std::abs(dgate.Get(i) - e), limit)
        << what << " dgate[" << i << "] of " << Describe(dgate.view()) << ": got " << dgate.Get(i) << ", expected " << e
        << " at gate " << gate.Get(i);
  }
  dgate.CheckRedZones(what);
  dup.CheckRedZones(what);
}

const std::vector<int64_t>& Sizes() {
  static const std::vector<int64_t> sizes = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 511, 513, 4095, 4097};
  return sizes;
}

TEST(Swiglu, EverySizeDtypeTarget) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t n : Sizes()) {
        const Case c(dtype, {n}, static_cast<uint64_t>(n));
        const auto before = std::make_pair(c.gate.ToDoubles(), c.up.ToDoubles());
        const Buffer out(dtype, {n}), dgate(dtype, {n}), dup(dtype, {n});
        Swiglu("swiglu_gate_up", c.gate.view(), c.up.view(), out.view());
        CheckForward(c.gate, c.up, out, "size " + std::to_string(n));
        SwigluBackward("swiglu_gate_up_backward", c.grad.view(), c.gate.view(), c.up.view(), dgate.view(), dup.view());
        CheckBackward(c.grad, c.gate, c.up, dgate, dup, "size " + std::to_string(n));
        EXPECT_EQ(before, std::make_pair(c.gate.ToDoubles(), c.up.ToDoubles())) << "an input was written";
      }
    }
  });
}

// Every bf16 and fp16 gate, and floats over the whole range, subnormal results included.
TEST(Swiglu, EveryGate) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      // A small test takes every 7th value.
      const int64_t step = SmallTests() ? 7 : 1;
      const int64_t n = 65536 / step;
      const Ref ref(dtype);
      Buffer gate(dtype, {n}), up(dtype, {n}), grad(dtype, {n});
      gate.Fill([&](int64_t i) {
        if (dtype == DType::kF32) return (static_cast<double>(i * step) - 32768) * 0.00314;
        const auto bits = static_cast<uint16_t>(i * step);
        const double v = LoadAsDouble(&bits, dtype, 0);
        return std::isfinite(v) ? v : 1.0;
      });
      up.Fill([](int64_t i) { return i % 2 == 0 ? 1.0 : -0.7421875; });
      grad.Fill([](int64_t i) { return i % 3 == 0 ? 1.0 : 1.5; });
      const Buffer out(dtype, {n}), dgate(dtype, {n}), dup(dtype, {n});
      Swiglu("swiglu_gate_up", gate.view(), up.view(), out.view());
      SwigluBackward("swiglu_gate_up_backward", grad.view(), gate.view(), up.view(), dgate.view(), dup.view());
      for (int64_t i = 0; i < n; ++i) {
        const double g = gate.Get(i);
        // e^-|gate| is subnormal below -87.3 and keeps an absolute error of 2^-149 there; for 16 bits it is 0 below
        // -88.7, so what is lost is at most 89 e^-88.7.
        const double floor = g > -87 ? 0 : dtype == DType::kF32 ? 0x1p-148 * std::abs(g) : 0x1p-121;
        const double y = ref.Swiglu(g, up.Get(i));
        ASSERT_LE(std::abs(out.Get(i) - y), BoundsOf(dtype).out * UlpSize(dtype, y) + floor) << "gate " << g;
        const double d = ref.Dup(grad.Get(i), g);
        if (std::isinf(RoundTo(dtype, d))) continue;
        ASSERT_LE(std::abs(dup.Get(i) - d), BoundsOf(dtype).dup * UlpSize(dtype, d) + 2 * floor) << "gate " << g;
      }
      // The largest bf16 gates overflow when multiplied by 1.5; infinity is then right.
      for (int64_t i = 0; i < n; ++i) {
        const double g = gate.Get(i);
        if (std::abs(g) > 1e4) continue;
        const double e = ref.Dgate(grad.Get(i), g, up.Get(i));
        const double size = ref.DgateSize(grad.Get(i), g, up.Get(i));
        const double floor = g > -87 ? 0 : dtype == DType::kF32 ? 0x1p-147 * std::abs(g) : 0x1p-120;
        ASSERT_LE(std::abs(dgate.Get(i) - e),
                  BoundsOf(dtype).dgate * UlpSize(dtype, e) + BoundsOf(dtype).dgate_terms * size + floor)
            << "gate " << g;
      }
    }
  });
}

// Above 16 MB outputs are streamed; odd offsets exercise the unaligned start and end. A small test asks for streaming
// itself.
TEST(Swiglu, StreamedOutputs) {
  for (const DType dtype : FloatDTypes()) {
    const bool small = SmallTests();
    const int64_t n = small ? 3037 : (int64_t{16} << 20) / static_cast<int64_t>(SizeOf(dtype)) + 37;
    const Ref ref(dtype);
    const Case few(dtype, {1021}, 5);
    Buffer gate(dtype, {n}), up(dtype, {n}), grad(dtype, {n});
    gate.Fill([&](int64_t i) { return few.gate.Get(i % 1021); });
    up.Fill([&](int64_t i) { return few.up.Get(i % 1021); });
    grad.Fill([&](int64_t i) { return few.grad.Get(i % 1021); });
    const Buffer out(dtype, {n}), dgate(dtype, {n}), dup(dtype, {n});
    ForEachSimdTarget([&](const std::string& target) {
      if (target == "AVX3_SPR" || target == "AVX3_ZEN4") return;  // same code as AVX3
      if (small) {
        const auto data = [](const Buffer& b) { return b.view().data; };
        SwigluBlock(dtype, data(gate), data(up), data(out), n, true);
        SwigluBackwardBlock(dtype, data(grad), data(gate), data(up), data(dgate), data(dup), n, true);
        StreamFence();
      } else {
        Swiglu("swiglu_gate_up", gate.view(), up.view(), out.view());
        SwigluBackward("swiglu_gate_up_backward", grad.view(), gate.view(), up.view(), dgate.view(), dup.view());
      }
      const Bounds bounds = BoundsOf(dtype);
      for (int64_t i = 0; i < n; i += i < 9000 || i > n - 9000 ? 1 : 97) {
        const double y = ref.Swiglu(gate.Get(i), up.Get(i));
        ASSERT_LE(std::abs(out.Get(i) - y), bounds.out * UlpSize(dtype, y)) << i;
        const double d = ref.Dup(grad.Get(i), gate.Get(i));
        ASSERT_LE(std::abs(dup.Get(i) - d), bounds.dup * UlpSize(dtype, d)) << i;
      }
      out.CheckRedZones("out");
      dgate.CheckRedZones("dgate");
      dup.CheckRedZones("dup");
      // No element may be a leftover of the previous target.
      std::memset(out.view().data, 0xFF, static_cast<size_t>(n) * SizeOf(dtype));
      std::memset(dup.view().data, 0xFF, static_cast<size_t>(n) * SizeOf(dtype));
    });
  }
}

TEST(Swiglu, PackedOverEveryDim) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (int dim = 0; dim < 3; ++dim) {
        // The last has several blocks along dim 0 and a long row along dim 1.
        for (const std::vector<int64_t>& shape :
             {std::vector<int64_t>{4, 6, 10}, {2, 2, 2}, {6, SmallTests() ? 350 : 700, 4}}) {
          Buffer input(dtype, shape), dinput(dtype, shape);
          input.FillRandom(static_cast<uint64_t>(dim) + 3, 2.0);
          std::vector<int64_t> half = shape;
          half[static_cast<size_t>(dim)] /= 2;
          Buffer out(dtype, half), grad(dtype, half);
          grad.FillRandom(9);
          SwigluPacked(input.view(), dim - 3, out.view());
          SwigluPackedBackward(grad.view(), input.view(), dim, dinput.view());
          // The halves as tensors of their own, by plain indexing.
          int64_t after = 1;
          for (size_t i = static_cast<size_t>(dim) + 1; i < 3; ++i) after *= shape[i];
          const int64_t block = half[static_cast<size_t>(dim)] * after;
          Buffer gate(dtype, half), up(dtype, half), dgate(dtype, half), dup(dtype, half);
          for (int64_t i = 0; i < gate.numel(); ++i) {
            const int64_t at = i / block * 2 * block + i % block;
            gate.Set(i, input.Get(at));
            up.Set(i, input.Get(at + block));
            dgate.Set(i, dinput.Get(at));
            dup.Set(i, dinput.Get(at + block));
          }
          CheckForward(gate, up, out, "dim " + std::to_string(dim));
          CheckBackward(grad, gate, up, dgate, dup, "dim " + std::to_string(dim));
          dinput.CheckRedZones("dinput");
        }
      }
    }
  });
}

// Transposed, padded, every-other and expanded views agree bit for bit with contiguous ones.
TEST(Swiglu, AnyStrides) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      const std::vector<int64_t> shape = {2, 3, 520};
      const std::vector<std::vector<int64_t>> layouts = {{1560, 520, 1}, {1, 2, 6},   {2000, 600, 1}, {3120, 1040, 2},
                                                         {3, 1, 6},      {0, 520, 1}, {0, 0, 0},      {1, 0, 2}};
      const Case base(dtype, shape, 11);
      for (size_t i = 0; i < layouts.size(); ++i) {
        for (const size_t j : {i, (i + 3) % layouts.size()}) {
          if (SmallTests() && (i == j) != (i % 2 == 0)) continue;
          const auto& gate_strides = layouts[i];
          const auto& grad_strides = layouts[j];
          Buffer gate(dtype, shape, gate_strides), grad(dtype, shape, grad_strides);
          gate.Fill([&](int64_t k) { return base.gate.Get(k); });
          grad.Fill([&](int64_t k) { return base.grad.Get(k); });
          const Buffer out(dtype, shape, {1, 2, 6}), dgate(dtype, shape, {2000, 600, 1}), dup(dtype, shape);
          Swiglu("swiglu_gate_up", gate.view(), base.up.view(), out.view());
          CheckForward(gate, base.up, out, "strided");
          SwigluBackward("swiglu_gate_up_backward", grad.view(), gate.view(), base.up.view(), dgate.view(), dup.view());
          CheckBackward(grad, gate, base.up, dgate, dup, "strided");
        }
      }
    }
  });
}

TEST(Swiglu, ZeroSizes) {
  const Buffer a(DType::kBF16, {0, 8}), b(DType::kBF16, {0, 4}), c(DType::kBF16, {3, 0});
  SwigluPacked(a.view(), 1, b.view());
  SwigluPacked(c.view(), 1, c.view());
  SwigluPackedBackward(b.view(), a.view(), -1, a.view());
  Swiglu("swiglu_gate_up", c.view(), c.view(), c.view());
}

TEST(Swiglu, SameForEveryThreadCount) {
  const Case c(DType::kBF16, {37, 5000}, 3);
  std::vector<double> first;
  for (const int threads : SmallTests() ? std::vector<int>{1, 3} : std::vector<int>{1, 2, 5}) {
    const Buffer out(DType::kBF16, {37, 5000}), dgate(DType::kBF16, {37, 5000}), dup(DType::kBF16, {37, 5000});
    WithThreads(threads, [&] {
      Swiglu("swiglu_gate_up", c.gate.view(), c.up.view(), out.view());
      SwigluBackward("swiglu_gate_up_backward", c.grad.view(), c.gate.view(), c.up.view(), dgate.view(), dup.view());
    });
    std::vector<double> all = out.ToDoubles();
    for (const Buffer* more : {&dgate, &dup}) {
      for (const double v : more->ToDoubles()) all.push_back(v);
    }
    if (first.empty()) first = all;
    EXPECT_EQ(first, all) << threads << " threads";
  }
}

// As torch: silu(-inf) is NaN (-inf * 0), silu(inf) is inf, NaN passes through, -0 stays -0.
TEST(Swiglu, NonFinite) {
  static constexpr double kInf = std::numeric_limits<double>::infinity();
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (int64_t shift = 0; shift < 7; ++shift) {  // every value in every lane
        Buffer gate(dtype, {41}), up(dtype, {41}), grad(dtype, {41});
        const double values[] = {-kInf, kInf, std::nan(""), -200.0, 200.0, -0.0, 0.0};
        gate.Fill([&](int64_t i) { return values[(i + shift) % 7]; });
        up.Fill([](int64_t) { return 1.0; });
        grad.Fill([](int64_t) { return 1.0; });
        const Buffer out(dtype, {41}), dgate(dtype, {41}), dup(dtype, {41});
        Swiglu("swiglu_gate_up", gate.view(), up.view(), out.view());
        SwigluBackward("swiglu_gate_up_backward", grad.view(), gate.view(), up.view(), dgate.view(), dup.view());
        for (int64_t i = 0; i < 41; ++i) {
          const double g = gate.Get(i);
          const double y = out.Get(i);
          if (std::isnan(g) || g == -kInf) {
            EXPECT_TRUE(std::isnan(y) && std::isnan(dup.Get(i)) && std::isnan(dgate.Get(i))) << g;
          } else if (g == kInf) {
            EXPECT_EQ(y, kInf);
            EXPECT_TRUE(std::isnan(dgate.Get(i)));  // inf * (1 - sigmoid(inf)) = inf * 0, as in torch
          } else if (g == -200.0 && dtype != DType::kF64) {
            EXPECT_EQ(y, 0);
          } else if (g == 200.0) {
            EXPECT_EQ(y, 200);
            EXPECT_EQ(dgate.Get(i), 1);
          } else if (g == 0) {
            EXPECT_EQ(y, 0);
            EXPECT_EQ(std::signbit(y), std::signbit(g));
            EXPECT_EQ(dgate.Get(i), 0.5);
          }
        }
        // A NaN or infinity in up or grad reaches what it must, and nothing else.
        gate.Fill([](int64_t) { return 1.0; });
        up.Set(shift, std::nan(""));
        grad.Set(shift + 20, kInf);
        Swiglu("swiglu_gate_up", gate.view(), up.view(), out.view());
        SwigluBackward("swiglu_gate_up_backward", grad.view(), gate.view(), up.view(), dgate.view(), dup.view());
        for (int64_t i = 0; i < 41; ++i) {
          EXPECT_EQ(std::isnan(out.Get(i)), i == shift);
          EXPECT_EQ(std::isnan(dgate.Get(i)), i == shift);
          EXPECT_EQ(std::isinf(dup.Get(i)), i == shift + 20);
        }
      }
    }
  });
}

// A literal case whose gradients are easily swapped.
TEST(Swiglu, GradientsAreNotSwapped) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    Buffer gate(dtype, {1}), up(dtype, {1}), grad(dtype, {1});
    gate.Set(0, 2);
    up.Set(0, 3);
    grad.Set(0, 1);
    const Buffer out(dtype, {1}), dgate(dtype, {1}), dup(dtype, {1});
    Swiglu("swiglu_gate_up", gate.view(), up.view(), out.view());
    SwigluBackward("swiglu_gate_up_backward", grad.view(), gate.view(), up.view(), dgate.view(), dup.view());
    EXPECT_NEAR(out.Get(0), 5.284782, 1e-6);  // 5.715445 with the halves swapped
    EXPECT_NEAR(dgate.Get(0), 3.272352, 1e-6);
    EXPECT_NEAR(dup.Get(0), 1.761594, 1e-6);
    // Packed: the first half is the one that is activated.
    Buffer packed(dtype, {1, 2}), dpacked(dtype, {1, 2}), y(dtype, {1, 1}), dy(dtype, {1, 1});
    packed.Set(0, 2);
    packed.Set(1, 3);
    dy.Set(0, 1);
    SwigluPacked(packed.view(), -1, y.view());
    SwigluPackedBackward(dy.view(), packed.view(), -1, dpacked.view());
    EXPECT_NEAR(y.Get(0), 5.284782, 1e-6);
    EXPECT_NEAR(dpacked.Get(0), 3.272352, 1e-6);
    EXPECT_NEAR(dpacked.Get(1), 1.761594, 1e-6);
  }
}

// Three different rows: every row's gradient is its own, element by element.
TEST(Swiglu, EveryRowHasItsOwnGradient) {
  Buffer packed(DType::kF32, {3, 4}), grad(DType::kF32, {3, 2});
  packed.Fill([](int64_t i) { return 0.25 * static_cast<double>(i) - 1; });
  grad.Fill([](int64_t i) { return 1 + static_cast<double>(i); });
  const Buffer dpacked(DType::kF32, {3, 4});
  const Ref ref(DType::kF32);
  SwigluPackedBackward(grad.view(), packed.view(), 1, dpacked.view());
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t j = 0; j < 2; ++j) {
      const double g = packed.Get(row * 4 + j), u = packed.Get(row * 4 + 2 + j), y = grad.Get(row * 2 + j);
      EXPECT_NEAR(dpacked.Get(row * 4 + j), ref.Dgate(y, g, u), 1e-5);
      EXPECT_NEAR(dpacked.Get(row * 4 + 2 + j), ref.Dup(y, g), 1e-5);
    }
  }
}

TEST(Swiglu, Errors) {
  const Buffer x(DType::kF32, {2, 4}), odd(DType::kF32, {2, 5}), half(DType::kF32, {2, 2}), ints(DType::kI32, {2, 4});
  const Buffer bf(DType::kBF16, {2, 4}), scalar(DType::kF32, {});
  ExpectError([&] { SwigluPacked(x.view(), 2, half.view()); }, "npu_swiglu", "dim out of range: 2");
  ExpectError([&] { SwigluPacked(x.view(), -3, half.view()); }, "npu_swiglu", "dim out of range: -3");
  ExpectError([&] { SwigluPacked(scalar.view(), 0, half.view()); }, "npu_swiglu", "0-d");
  ExpectError([&] { SwigluPacked(odd.view(), -1, half.view()); }, "npu_swiglu", "must be even, got 5");
  ExpectError([&] { SwigluPacked(ints.view(), -1, half.view()); }, "npu_swiglu", "int32");
  ExpectError([&] { SwigluPackedBackward(x.view(), x.view(), -1, x.view()); }, "npu_swiglu_backward", "[2, 2]");
  ExpectError([&] { Swiglu("swiglu_gate_up", x.view(), bf.view(), x.view()); }, "swiglu_gate_up",
              "got bfloat16 and float32");
  ExpectError([&] { Swiglu("swiglu_gate_up", x.view(), half.view(), x.view()); }, "swiglu_gate_up",
              "got [2, 2] and [2, 4]");
  ExpectError([&] { SwigluBackward("swiglu_gate_up_backward", bf.view(), x.view(), x.view(), x.view(), x.view()); },
              "swiglu_gate_up_backward", "grad_output");
}

}  // namespace
}  // namespace jumar::testing
