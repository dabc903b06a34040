#include "kernels/optimizer/adamw.h"

#include <cmath>
#include <limits>

#include "kernels/optimizer/optimizer_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

AdamWNumbers Numbers(int64_t step, double lr = 1e-3, double weight_decay = 0.1, bool maximize = false) {
  const auto t = static_cast<double>(step);
  return {lr, 0.9, 0.95, 1e-8, weight_decay, maximize, 1 - std::pow(0.9, t), 1 - std::pow(0.95, t)};
}

// One entry with its memory, and what it held before the step.
struct Entry {
  Buffer param, grad, exp_avg, exp_avg_sq;
  std::vector<double> before[3];
  AdamWNumbers numbers;

  Entry(DType p, DType g, DType moments, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
        uint64_t seed, AdamWNumbers numbers)
      : param(p, sizes, strides),
        grad(g, sizes, strides),
        exp_avg(moments, sizes, strides),
        exp_avg_sq(moments, sizes, strides),
        numbers(numbers) {
    param.FillRandom(seed);
    grad.FillRandom(seed + 1, 0.1);
    exp_avg.FillRandom(seed + 2, 0.1);
    Random random(seed + 3);
    exp_avg_sq.Fill([&](int64_t) { return std::pow(random.Normal() * 0.1, 2); });
    Remember();
  }
  Entry(DType dtype, const std::vector<int64_t>& sizes, uint64_t seed, AdamWNumbers numbers)
      : Entry(dtype, dtype, dtype, sizes, {}, seed, numbers) {}

  void Remember() {
    before[0] = param.ToDoubles();
    before[1] = exp_avg.ToDoubles();
    before[2] = exp_avg_sq.ToDoubles();
  }
  AdamWTensors Tensors() const {
    return {param.view(), grad.view(), exp_avg.view(), exp_avg_sq.view(), {}, {}, numbers};
  }

  // `maximum`: the values of max_exp_avg_sq.
  void Check(const std::string& what, const std::vector<double>& maximum = {}) const {
    for (size_t i = 0; i < before[0].size(); ++i) {
      const double g = grad.Get(static_cast<int64_t>(i));
      const ref::AdamWState s =
          ref::AdamW(numbers, g, {before[0][i], before[1][i], before[2][i]}, maximum.empty() ? -1 : maximum[i]);
      // fp64 rounds the terms themselves.
      const auto near = [&](const Buffer& out, long double expected, double terms, const char* name) {
        const auto e = static_cast<double>(expected);
        const double got = out.Get(static_cast<int64_t>(i));
        ASSERT_LE(std::abs(got - e), 0.52 * UlpSize(out.view().dtype, e) + 0x1p-50 * terms)
            << what << " " << name << "[" << i << "] of " << Describe(out.view()) << ": " << got << ", not " << e;
      };
      const double update = before[0][i] - static_cast<double>(s.param);
      near(exp_avg, s.exp_avg, std::abs(before[1][i]) + std::abs(g), "exp_avg");
      near(exp_avg_sq, s.exp_avg_sq, static_cast<double>(s.exp_avg_sq), "exp_avg_sq");
      // A first moment that cancels makes an update that is as far off.
      const double shaky = numbers.lr / numbers.correction1 * (std::abs(before[1][i]) + std::abs(g)) /
                           (std::sqrt(static_cast<double>(s.exp_avg_sq)) + numbers.eps);
      near(param, s.param, std::abs(before[0][i]) + std::abs(update) + shaky, "param");
    }
    for (const Buffer* b : {&param, &grad, &exp_avg, &exp_avg_sq}) b->CheckRedZones(what);
  }
};

std::vector<AdamWTensors> All(const std::vector<Entry>& entries) {
  std::vector<AdamWTensors> tensors;
  for (const Entry& e : entries) tensors.push_back(e.Tensors());
  return tensors;
}

TEST(AdamW, EverySizeDtypeTarget) {
  ForEachSimdTarget([](const std::string&) {
    std::vector<Entry> entries;
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t n : {0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 511, 4096, 4097}) {
        const int64_t step = n % 2 == 0 ? 1 : n * 1000;
        entries.emplace_back(dtype, std::vector<int64_t>{n}, seed += 7, Numbers(step, 1e-3, n % 3 * 0.1, n % 5 == 1));
      }
    }
    AdamW("adamw", All(entries));
    for (const Entry& e : entries) e.Check("size " + std::to_string(e.param.numel()));
  });
}

// Steps large enough to cancel what the param holds, and moments that cancel the gradient.
TEST(AdamW, Cancellation) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      Entry e(dtype, {2000}, 3, Numbers(7, 0.5, 0.25));
      e.grad.Fill([&](int64_t i) { return e.exp_avg.Get(i) * -9 * (1 + 0x1p-9 * static_cast<double>(i % 9 - 4)); });
      e.param.Fill([&](int64_t i) {
        const auto s = ref::AdamW(e.numbers, e.grad.Get(i),
                                  {0, e.before[1][static_cast<size_t>(i)], e.before[2][static_cast<size_t>(i)]});
        return -static_cast<double>(s.param) / 0.875 * (1 + 0x1p-8 * static_cast<double>(i % 5 - 2));
      });
      e.Remember();
      AdamW("adamw", {e.Tensors()});
      e.Check("cancellation");
    }
  });
}

// An update that takes all but 2^-18 of the parameter away: its own error must not show in what is left.
TEST(AdamW, CancellationOfTheParameter) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (uint64_t seed = 1; seed < 40; seed += 3) {
        Entry e(dtype, {19}, seed, Numbers(5));
        for (Buffer* b : {&e.param, &e.grad, &e.exp_avg, &e.exp_avg_sq}) {
          const double first = std::abs(b->Get(0));
          b->Fill([&](int64_t) { return first; });
        }
        e.Remember();
        AdamWNumbers one = e.numbers;
        one.lr = 1;
        one.weight_decay = 0;
        const double p = e.param.Get(0);
        const auto s = ref::AdamW(one, e.grad.Get(0), {0, e.exp_avg.Get(0), e.exp_avg_sq.Get(0)});
        e.numbers.lr = p * (1 - 0x1p-18) / (e.numbers.weight_decay * p - static_cast<double>(s.param));
        AdamW("adamw", {e.Tensors()});
        e.Check("seed " + std::to_string(seed));
      }
    }
  });
}

// Roots below what fp32 holds of v, beside an eps that does not hide them.
TEST(AdamW, SmallRoots) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
      for (const double eps : {0.0, 1e-30, 1e-24, 1e-20}) {
        AdamWNumbers numbers = Numbers(1, 1e-3);
        numbers.eps = eps;
        Entry e(dtype, {200}, 3, numbers);
        e.grad.Fill([](int64_t i) { return std::ldexp(i % 2 == 0 ? 1.25 : -1.5, static_cast<int>(-i / 2 - 30)); });
        e.exp_avg.Fill([](int64_t) { return 0.0; });
        e.exp_avg_sq.Fill([](int64_t) { return 0.0; });
        e.Remember();
        AdamW("adamw", {e.Tensors()});
        e.Check("eps " + std::to_string(eps));
      }
    }
  });
}

// exp_avg = 1 + k u, the gradient 2 u above it: a quarter of the way is half a unit in the last place.
TEST(AdamW, TiesGoToEven) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const double u = dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10;
      Entry e(dtype, {100}, 5, {1e-3, 0.75, 0.95, 1e-8, 0.1, false, 0.5, 0.5});
      e.exp_avg.Fill([&](int64_t i) { return 1 + static_cast<double>(i) * u; });
      e.grad.Fill([&](int64_t i) { return 1 + static_cast<double>(i + 2) * u; });
      AdamW("adamw", {e.Tensors()});
      for (int64_t i = 0; i < 100; ++i) {
        EXPECT_EQ(e.exp_avg.Get(i), 1 + static_cast<double>((i + 1) / 2 * 2) * u) << i;
      }
    }
  });
}

TEST(AdamW, MixedDtypesAndMaximum) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType p : FloatDTypes()) {
      for (const DType g : FloatDTypes()) {
        for (const DType m : FloatDTypes()) {
          Entry e(p, g, m, {203}, {}, 5, Numbers(3));
          AdamW("adamw", {e.Tensors()});
          e.Check("mixed");
          e.Remember();
          Buffer maximum(m, {203});
          maximum.FillRandom(8, 0.01, 0.01);
          AdamWTensors t = e.Tensors();
          t.max_exp_avg_sq = maximum.view();
          AdamW("adamw", {t});
          e.Check("maximum", maximum.ToDoubles());
        }
      }
    }
  });
}

// The fp32 copy is stepped, param is its rounding, and a param that was changed elsewhere wins.
TEST(AdamW, Master) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      for (const DType grad : {DType::kF32, dtype}) {
        Entry e(dtype, grad, DType::kF32, {517}, {}, 5, Numbers(3));
        Buffer master(DType::kF32, {517});
        master.Fill([&](int64_t i) {
          const double p = e.param.Get(i);
          return p + 0.4 * UlpSize(dtype, p * 0.99) * static_cast<double>(i % 3 - 1);
        });
        std::vector<double> start = master.ToDoubles();
        for (const int64_t i : {0, 5, 516}) {
          e.param.Set(i, 7.0);
          start[static_cast<size_t>(i)] = 7.0;
        }
        e.before[0] = start;
        AdamWTensors t = e.Tensors();
        t.master = master.view();
        AdamW("adamw", {t});
        for (int64_t i = 0; i < 517; ++i) {
          const auto at = static_cast<size_t>(i);
          const auto s = ref::AdamW(e.numbers, e.grad.Get(i), {start[at], e.before[1][at], e.before[2][at]});
          const auto expected = static_cast<double>(s.param);
          ASSERT_LE(std::abs(master.Get(i) - expected), 0.51 * UlpSize(DType::kF32, expected)) << i;
          ASSERT_EQ(e.param.Get(i), RoundTo(dtype, master.Get(i))) << i;
        }
        master.CheckRedZones("master");
        e.param.CheckRedZones("param");
      }
    }
  });
}

TEST(AdamW, AnyStrides) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      std::vector<Entry> entries;
      for (const std::vector<int64_t>& strides :
           {std::vector<int64_t>{1560, 520, 1}, {1, 2, 6}, {2000, 600, 1}, {3120, 1040, 2}}) {
        entries.emplace_back(dtype, dtype, dtype, std::vector<int64_t>{2, 3, 520}, strides, 9, Numbers(2));
      }
      AdamW("adamw", All(entries));
      for (const Entry& e : entries) {
        e.Check("strided");
        EXPECT_EQ(e.param.ToDoubles(), entries[0].param.ToDoubles());
      }
      // Layouts that differ within an entry, and an expanded gradient.
      Entry e(dtype, {2, 3, 520}, 9, Numbers(2));
      Buffer grad(dtype, {2, 3, 520}, {0, 0, 1});
      grad.FillRandom(4, 0.1);
      Buffer moment(dtype, {2, 3, 520}, {1, 2, 6});
      moment.Fill([&](int64_t i) { return e.exp_avg.Get(i); });
      AdamWTensors t = e.Tensors();
      t.grad = grad.view();
      t.exp_avg = moment.view();
      AdamW("adamw", {t});
      e.grad.Fill([&](int64_t i) { return grad.Get(i); });
      e.exp_avg.Fill([&](int64_t i) { return moment.Get(i); });
      e.Check("layouts that differ");
    }
  });
}

TEST(AdamW, SameForEveryThreadCount) {
  std::vector<double> first;
  for (const int threads : {1, 2, 5}) {
    std::vector<Entry> entries;
    for (const int64_t n : {3, 200001, 1, 70000, 4096}) {
      entries.emplace_back(DType::kF32, std::vector<int64_t>{n}, static_cast<uint64_t>(n), Numbers(2));
    }
    WithThreads(threads, [&] { AdamW("adamw", All(entries)); });
    std::vector<double> all;
    for (const Entry& e : entries) {
      for (const Buffer* b : {&e.param, &e.exp_avg, &e.exp_avg_sq}) {
        for (const double v : b->ToDoubles()) all.push_back(v);
      }
    }
    if (first.empty()) first = all;
    EXPECT_TRUE(first == all) << threads << " threads";
  }
}

TEST(AdamW, NonFinite) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      Entry e(dtype, {23}, 1, Numbers(1));
      e.grad.Set(4, std::nan(""));
      e.grad.Set(9, kInf);
      e.grad.Set(21, -kInf);
      e.exp_avg.Set(11, kInf);  // torch's lerp: inf + w * (g - inf) is NaN
      AdamW("adamw", {e.Tensors()});
      for (int64_t i = 0; i < 23; ++i) {
        const bool bad = i == 4 || i == 9 || i == 11 || i == 21;
        EXPECT_EQ(std::isnan(e.param.Get(i)), bad) << i;
        EXPECT_EQ(std::isnan(e.exp_avg.Get(i)), i == 4 || i == 11) << i;
        EXPECT_EQ(std::isnan(e.exp_avg_sq.Get(i)), i == 4) << i;
      }
      EXPECT_EQ(e.exp_avg.Get(9), kInf);
      EXPECT_EQ(e.exp_avg.Get(21), -kInf);
      EXPECT_EQ(e.exp_avg_sq.Get(21), kInf);
    }
  });
}

// Both branches of the interpolation, no decay, no moments: literal values.
TEST(AdamW, LiteralValues) {
  for (const double beta1 : {0.0, 0.25, 0.75}) {
    Entry e(DType::kF64, {1}, 1, {0.5, beta1, 0.5, 0.0, 0.0, false, 0.75, 0.25});
    e.param.Set(0, 10);
    e.grad.Set(0, 2);
    e.exp_avg.Set(0, 6);
    e.exp_avg_sq.Set(0, 4);
    AdamW("adamw", {e.Tensors()});
    const double m = beta1 * 6 + (1 - beta1) * 2;
    EXPECT_DOUBLE_EQ(e.exp_avg.Get(0), m);
    EXPECT_DOUBLE_EQ(e.exp_avg_sq.Get(0), 4);
    EXPECT_DOUBLE_EQ(e.param.Get(0), 10 - 0.5 / 0.75 * m / (2 / 0.5));
  }
}

// A large moment that has no weight leaves nothing behind.
TEST(AdamW, NoFirstMoment) {
  ForEachSimdTarget([](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      Entry e(dtype, {37}, 1, {1e-3, 0.0, 0.5, 1e-3, 0.0, false, 1.0, 0.5});
      e.grad.Fill([](int64_t i) { return 0.25 + static_cast<double>(i); });
      e.exp_avg.Fill([&](int64_t) { return dtype == DType::kF16 ? 60000.0 : 0x1p70; });
      AdamW("adamw", {e.Tensors()});
      EXPECT_EQ(e.exp_avg.ToDoubles(), e.grad.ToDoubles());
    }
  });
}

TEST(AdamW, Errors) {
  const Buffer memory(DType::kF32, {64});
  const auto at = [&](int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    TensorView view = Contiguous(memory.view().ptr<float>() + offset, DType::kF32, sizes);
    for (size_t i = 0; i < strides.size(); ++i) view.stride[i] = strides[i];
    return view;
  };
  std::vector<Entry> entries;
  for (int i = 0; i < 2; ++i) entries.emplace_back(DType::kF32, std::vector<int64_t>{4, 4}, 1, Numbers(1));
  const auto expect = [&](const std::string& part, const std::function<void(std::vector<AdamWTensors>&)>& spoil) {
    std::vector<AdamWTensors> tensors = All(entries);
    spoil(tensors);
    ExpectError([&] { AdamW("adamw", tensors); }, "adamw", part);
    for (const Entry& e : entries) EXPECT_EQ(e.param.ToDoubles(), e.before[0]) << part << ": something was written";
  };
  const Buffer ints(DType::kI32, {4, 4}), small(DType::kF32, {4, 3}), wide(DType::kF64, {4, 4});
  expect("grad[1] must be float32, bfloat16", [&](auto& t) { t[1].grad = ints.view(); });
  expect("exp_avg_sq[1] must have the shape [4, 4] of its param, got [4, 3]",
         [&](auto& t) { t[1].exp_avg_sq = small.view(); });
  expect("param[1] must be bfloat16 or float16 to have a master", [&](auto& t) { t[1].master = wide.view(); });
  expect("param[1] overlaps itself", [&](auto& t) { t[1].param = at(0, {4, 4}, {0, 1}); });
  expect("overlap in memory", [&](auto& t) { t[1].param = t[0].param; });
  expect("overlap in memory", [&](auto& t) { t[1].grad = t[0].exp_avg; });
  expect("param[1] and param[0] overlap", [&](auto& t) {
    t[0].param = at(0, {4, 4}, {8, 1});
    t[1].param = at(3, {4, 4}, {8, 1});
  });
  // Columns of one matrix interleave and do not overlap; gradients may share memory among themselves.
  std::vector<AdamWTensors> tensors = All(entries);
  tensors[0].param = at(0, {4, 4}, {8, 1});
  tensors[1].param = at(4, {4, 4}, {8, 1});
  tensors[1].grad = tensors[0].grad;
  AdamW("adamw", tensors);
}

}  // namespace
}  // namespace jumar::testing
