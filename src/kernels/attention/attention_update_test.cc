#include "kernels/attention/attention_update.h"

#include <cmath>
#include <limits>

#include "kernels/attention/attention.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Part {
  Part(DType dtype, bool packed, int64_t batch, int64_t heads, int64_t rows, int64_t cols)
      : out(dtype, packed ? std::vector<int64_t>{rows, heads, cols} : std::vector<int64_t>{rows, batch, heads * cols}),
        max(Compute(dtype), Statistics(packed, batch, heads, rows)),
        sum(Compute(dtype), Statistics(packed, batch, heads, rows)) {}
  static DType Compute(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  static std::vector<int64_t> Statistics(bool packed, int64_t batch, int64_t heads, int64_t rows) {
    return packed ? std::vector<int64_t>{rows, heads, 8} : std::vector<int64_t>{batch, heads, rows, 8};
  }
  void Fill(uint64_t seed) {
    out.FillRandom(seed);
    Random random(seed + 1);
    double m = 0, l = 0;
    for (int64_t i = 0; i < max.numel(); ++i) {
      if (i % 8 == 0) {
        m = 5 * random.Normal();
        l = 1 + std::abs(random.Normal());
      }
      max.Set(i, m);
      sum.Set(i, l);
    }
  }
  // Statistics of a row that saw nothing; out is NaN there.
  void Hide(int64_t index, double lowest, const std::vector<int64_t>& columns) {
    for (int64_t e = 0; e < 8; ++e) {
      max.Set(index * 8 + e, lowest);
      sum.Set(index * 8 + e, 0);
    }
    for (const int64_t c : columns) out.Set(c, std::nan(""));
  }
  AttentionPart part() const { return {out.view(), max.view(), sum.view()}; }
  Buffer out, max, sum;
};

TEST(AttentionUpdate, RingOnEveryTarget) {
  ForEachSimdTarget([](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (const bool packed : {false, true}) {
        for (const std::string order : {"", packed ? "TND" : "SBH"}) {
          const int64_t batch = packed ? 1 : 2, heads = 3, rows = 37, cols = 19;
          Part a(dtype, packed, batch, heads, rows, cols), b(dtype, packed, batch, heads, rows, cols),
              r(dtype, packed, batch, heads, rows, cols);
          a.Fill(seed++);
          b.Fill(seed++);
          // Where the numbers of (b, h, row) lie in the statistics, and the first of its columns.
          const auto at = [&](int64_t n, int64_t h, int64_t i) {
            if (!packed) return (n * heads + h) * rows + i;
            return order.empty() ? h * rows + i : i * heads + h;
          };
          const auto column = [&](int64_t n, int64_t h, int64_t i) {
            return packed ? (i * heads + h) * cols : (i * batch + n) * heads * cols + h * cols;
          };
          for (int64_t h = 0; h < heads; ++h) {
            std::vector<int64_t> columns(static_cast<size_t>(cols));
            for (int64_t c = 0; c < cols; ++c) columns[static_cast<size_t>(c)] = column(0, h, 4) + c;
            a.Hide(at(0, h, 4), h == 0 ? -kInf : kLowestScore, columns);
            if (h == 2) b.Hide(at(0, h, 4), kLowestScore, columns);
          }
          RingAttentionUpdate("op", a.part(), b.part(), packed ? "TND" : "SBH", order, r.part());
          const double u = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
          for (int64_t n = 0; n < batch; ++n) {
            for (int64_t h = 0; h < heads; ++h) {
              for (int64_t i = 0; i < rows; ++i) {
                const int64_t s = at(n, h, i) * 8;
                const double m = std::max(a.max.Get(s), b.max.Get(s));
                const double wa = a.sum.Get(s) == 0 ? 0 : a.sum.Get(s) * std::exp(a.max.Get(s) - m);
                const double wb = b.sum.Get(s) == 0 ? 0 : b.sum.Get(s) * std::exp(b.max.Get(s) - m);
                for (int64_t e = 0; e < 8; ++e) {
                  ASSERT_EQ(r.max.Get(s + e), m);
                  ASSERT_NEAR(r.sum.Get(s + e), wa + wb, 8 * u * (wa + wb));
                }
                for (int64_t c = column(n, h, i); c < column(n, h, i) + cols; ++c) {
                  const double x = wa == 0 ? 0 : wa / (wa + wb) * a.out.Get(c);
                  const double y = wb == 0 ? 0 : wb / (wa + wb) * b.out.Get(c);
                  ASSERT_NEAR(r.out.Get(c), x + y, 0.51 * UlpSize(dtype, x + y) + 10 * u * (std::abs(x) + std::abs(y)))
                      << h << " " << i;
                }
              }
            }
          }
          for (const Buffer* x : {&r.out, &r.max, &r.sum}) x->CheckRedZones("ring");
        }
      }
    }
  });
}

TEST(AttentionUpdate, ByLseOnEveryTarget) {
  ForEachSimdTarget([](const std::string&) {
    uint64_t seed = 50;
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t parts : {1, 2, 5}) {
        const int64_t rows = 70, cols = 33;
        const DType compute = Part::Compute(dtype);
        std::vector<Buffer> lse, out;
        std::vector<TensorView> lse_views, out_views;
        for (int64_t p = 0; p < parts; ++p) {
          lse.emplace_back(compute, std::vector<int64_t>{rows}, std::vector<int64_t>{3});
          out.emplace_back(dtype, std::vector<int64_t>{rows, cols}, std::vector<int64_t>{cols + p, 1});
          lse.back().FillRandom(seed++, 5);
          out.back().FillRandom(seed++);
          lse.back().Set(3, -kInf);
          if (p != 0) lse.back().Set(5, -kInf);
          for (int64_t c = 0; c < cols; ++c) out.back().Set(3 * cols + c, std::nan(""));
        }
        for (int64_t p = 0; p < parts; ++p) {
          lse_views.push_back(lse[static_cast<size_t>(p)].view());
          out_views.push_back(out[static_cast<size_t>(p)].view());
        }
        Buffer result(dtype, {rows, cols}), total(compute, {rows});
        AttentionUpdate("op", lse_views, out_views, result.view(), &total.view());
        const double u = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
        for (int64_t i = 0; i < rows; ++i) {
          double m = -kInf, sum = 0;
          for (const Buffer& x : lse) m = std::max(m, x.Get(i));
          for (const Buffer& x : lse) sum += x.Get(i) == -kInf ? 0 : std::exp(x.Get(i) - m);
          const double want = sum == 0 ? -kInf : m + std::log(sum);
          if (sum == 0) {
            ASSERT_EQ(total.Get(i), want);
          } else {
            ASSERT_NEAR(total.Get(i), want, UlpSize(compute, want) + 4 * u * (1 + std::abs(m)));
          }
          for (int64_t c = 0; c < cols; ++c) {
            double value = 0, size = 0;
            for (size_t p = 0; p < lse.size(); ++p) {
              if (lse[p].Get(i) == -kInf) continue;
              const double term = std::exp(lse[p].Get(i) - m) / sum * out[p].Get(i * cols + c);
              value += term;
              size += std::abs(term);
            }
            ASSERT_NEAR(result.Get(i * cols + c), value, 0.51 * UlpSize(dtype, value) + 16 * u * size);
          }
        }
        result.CheckRedZones("lse");
        total.CheckRedZones("lse");
      }
    }
  });
}

TEST(AttentionUpdate, Errors) {
  Part a(DType::kF32, false, 2, 3, 4, 5);
  const auto ring = [&](AttentionPart p, const std::string& layout, const std::string& order) {
    RingAttentionUpdate("op", a.part(), p, layout, order, a.part());
  };
  ExpectError([&] { ring(a.part(), "BSH", ""); }, "op", "input_layout must be SBH or TND, got 'BSH'");
  ExpectError([&] { ring(a.part(), "SBH", "TND"); }, "op", "input_softmax_layout must be");
  AttentionPart p = a.part();
  p.max.size[2] = 3;
  ExpectError([&] { ring(p, "SBH", ""); }, "op", "cur_softmax_max must be");
  p = a.part();
  p.out.dtype = DType::kBF16;
  ExpectError([&] { ring(p, "SBH", ""); }, "op", "cur_attn_out must be");
  Buffer lse(DType::kF32, {4}), out(DType::kF32, {4, 5}), bad(DType::kF32, {3});
  ExpectError([&] { AttentionUpdate("op", {}, {}, out.view(), nullptr); }, "op", "one length of at least 1");
  ExpectError([&] { AttentionUpdate("op", {bad.view()}, {out.view()}, out.view(), nullptr); }, "op", "lse[0] must be");
}

}  // namespace
}  // namespace jumar::testing
