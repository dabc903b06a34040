#include "kernels/router/balance.h"

#include <cmath>

#include "kernels/router/router_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr const char* kOp = "load_balance_loss";

DType ComputeOfDType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Distinct logits, so that no choice hangs on a rounding.
void FillLogits(Buffer& logits, int64_t experts, int64_t seed) {
  logits.Fill([&](int64_t i) {
    return static_cast<double>((i % experts * 29 + i / experts * 7 + seed) % experts) * 0.03125 - 0.5;
  });
}

ref::Doubles RowOf(const Buffer& b, int64_t row, int64_t cols) {
  ref::Doubles out;
  for (int64_t c = 0; c < cols; ++c) out.push_back(b.Get(row * cols + c));
  return out;
}

void CheckLoss(DType dtype, int64_t rows, int64_t experts, int64_t top_k, int layers, const DType* mask_dtype,
               bool strided = false) {
  const std::string what = std::string(Name(dtype)) + " " + std::to_string(rows) + "x" + std::to_string(experts) +
                           " k=" + std::to_string(top_k) + " layers=" + std::to_string(layers) +
                           (mask_dtype != nullptr ? std::string(" mask ") + Name(*mask_dtype) : "");
  SCOPED_TRACE(what);
  const DType compute = ComputeOfDType(dtype);
  const double eps = compute == DType::kF64 ? 0x1p-53 : 0x1p-24;
  std::vector<Buffer> logits;
  std::vector<Buffer> grads;
  std::vector<TensorView> views;
  std::vector<TensorView> grad_views;
  std::vector<ref::Doubles> all;
  ref::Doubles weights;
  Buffer mask(mask_dtype != nullptr ? *mask_dtype : DType::kF32, {rows});
  mask.Fill([](int64_t i) { return i % 4 == 1 ? 0.0 : static_cast<double>(1 + i % 3); });
  for (int l = 0; l < layers; ++l) {
    logits.push_back(strided ? Buffer(dtype, {rows, experts}, {1, rows + 2}) : Buffer(dtype, {rows, experts}));
    FillLogits(logits.back(), experts, 5 * l);
    grads.emplace_back(dtype, std::vector<int64_t>{rows, experts});
  }
  for (int l = 0; l < layers; ++l) {
    views.push_back(logits[static_cast<size_t>(l)].view());
    grad_views.push_back(grads[static_cast<size_t>(l)].view());
    for (int64_t r = 0; r < rows; ++r) {
      all.push_back(RowOf(logits[static_cast<size_t>(l)], r, experts));
      weights.push_back(mask_dtype != nullptr ? mask.Get(r) : 1.0);
    }
  }
  Buffer loss(compute, {});
  Buffer tokens(compute, {experts});
  const TensorView* m = mask_dtype != nullptr ? &mask.view() : nullptr;
  LoadBalanceLoss(kOp, views, experts, top_k, m, loss.view(), tokens.view());
  const ref::Balanced want = ref::LoadBalance(all, weights, static_cast<size_t>(experts), top_k);
  ExpectUlp(loss, {want.loss}, 1, what + " loss", 12 * eps * want.loss);
  ExpectUlp(tokens, want.tokens, 0.51, what + " tokens");

  Buffer grad(compute, {});
  grad.Set(0, 1.5);
  LoadBalanceLossBackward(kOp, grad.view(), views, m, tokens.view(), grad_views);
  for (int l = 0; l < layers; ++l) {
    ref::Doubles dx;
    double largest = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const ref::Doubles p = ref::Scores(all[static_cast<size_t>(l * rows + r)], Scoring::kSoftmax);
      ref::Doubles v;
      double mean = 0;
      for (int64_t e = 0; e < experts; ++e) {
        const double w = weights[static_cast<size_t>(l * rows + r)];
        v.push_back(1.5 * w * static_cast<double>(experts) * tokens.Get(e) / want.total);
        largest = std::max(largest, v.back());
        mean += p[static_cast<size_t>(e)] * v.back();
      }
      for (size_t e = 0; e < p.size(); ++e) dx.push_back(p[e] * (v[e] - mean));
    }
    ExpectUlp(grads[static_cast<size_t>(l)], dx, 0.51, what + " gradient", 20 * eps * largest);
    grads[static_cast<size_t>(l)].CheckRedZones(what);
  }
  for (const Buffer* b : {&loss, &tokens, &mask}) b->CheckRedZones(what);
}

TEST(LoadBalance, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t experts : {1, 5, 8, 17, 64}) CheckLoss(dtype, 9, experts, (experts + 1) / 2, 2, nullptr);
      for (const DType mask : {DType::kI64, DType::kI32, DType::kBool, DType::kF32, DType::kBF16, DType::kF64}) {
        CheckLoss(dtype, 13, 16, 3, 3, &mask);
      }
      const DType mask = DType::kI64;
      CheckLoss(dtype, 13, 16, 2, 1, &mask, true);
    }
    // Several chunks of rows.
    CheckLoss(DType::kF32, SmallTests() ? 200 : 1500, 8, 2, 1, nullptr);
  });
}

TEST(LoadBalance, LayersMayHaveDifferentRowsAndNone) {
  Buffer a(DType::kF32, {4, 6});
  Buffer b(DType::kF32, {0, 6});
  Buffer loss(DType::kF32, {});
  Buffer tokens(DType::kF32, {6});
  FillLogits(a, 6, 0);
  LoadBalanceLoss(kOp, {a.view(), b.view()}, 6, 2, nullptr, loss.view(), tokens.view());
  const float both = static_cast<float>(loss.Get(0));
  LoadBalanceLoss(kOp, {a.view()}, 6, 2, nullptr, loss.view(), tokens.view());
  EXPECT_EQ(static_cast<float>(loss.Get(0)), both);
  LoadBalanceLoss(kOp, {b.view()}, 6, 2, nullptr, loss.view(), tokens.view());
  EXPECT_TRUE(std::isnan(loss.Get(0)));
}

TEST(LoadBalance, MaskedRowsAreNotRead) {
  ForEachSimdTarget([&](const std::string&) {
    Buffer logits(DType::kF32, {3, 6});
    Buffer mask(DType::kI64, {3});
    Buffer loss(DType::kF32, {}), tokens(DType::kF32, {6}), grad(DType::kF32, {}), dlogits(DType::kF32, {3, 6});
    FillLogits(logits, 6, 0);
    logits.Set(7, NAN);
    mask.Fill([](int64_t i) { return i == 1 ? 0.0 : 1.0; });
    grad.Set(0, 1);
    LoadBalanceLoss(kOp, {logits.view()}, 6, 2, &mask.view(), loss.view(), tokens.view());
    LoadBalanceLossBackward(kOp, grad.view(), {logits.view()}, &mask.view(), tokens.view(), {dlogits.view()});
    EXPECT_TRUE(std::isfinite(loss.Get(0)));
    for (int64_t i = 0; i < 18; ++i) {
      EXPECT_TRUE(std::isfinite(dlogits.Get(i))) << i;
      EXPECT_EQ(dlogits.Get(i) == 0, i / 6 == 1) << i;
    }
    mask.Set(1, 1);
    LoadBalanceLoss(kOp, {logits.view()}, 6, 2, &mask.view(), loss.view(), tokens.view());
    LoadBalanceLossBackward(kOp, grad.view(), {logits.view()}, &mask.view(), tokens.view(), {dlogits.view()});
    EXPECT_TRUE(std::isnan(loss.Get(0)));
    EXPECT_TRUE(std::isnan(dlogits.Get(8)));
  });
}

TEST(LoadBalance, TheSameForEveryThreadCount) {
  Buffer logits(DType::kBF16, {2100, 40});
  logits.FillRandom(1);
  const auto run = [&](int threads) {
    Buffer loss(DType::kF32, {}), tokens(DType::kF32, {40}), z(DType::kF32, {});
    WithThreads(threads, [&] {
      LoadBalanceLoss(kOp, {logits.view()}, 40, 4, nullptr, loss.view(), tokens.view());
      RouterZLoss("router_z_loss", logits.view(), z.view());
    });
    return std::vector<double>{loss.Get(0), z.Get(0), tokens.Get(3)};
  };
  const std::vector<double> one = run(1);
  for (const int threads : {2, 3, 7}) EXPECT_EQ(run(threads), one) << threads;
}

TEST(LoadBalance, Errors) {
  Buffer logits(DType::kF32, {3, 6});
  Buffer other(DType::kBF16, {3, 6});
  Buffer narrow(DType::kF32, {3, 5});
  Buffer mask(DType::kI64, {4});
  Buffer loss(DType::kF32, {});
  Buffer tokens(DType::kF32, {6});
  const auto expect = [&](const std::vector<TensorView>& layers, int64_t k, const TensorView* m,
                          const std::string& text) {
    ExpectError([&] { LoadBalanceLoss(kOp, layers, 6, k, m, loss.view(), tokens.view()); }, kOp, text);
  };
  expect({}, 2, nullptr, "at least one layer");
  expect({logits.view()}, 0, nullptr, "top_k must be in [1, 6], the number of experts, got 0");
  expect({logits.view()}, 7, nullptr, "got 7");
  expect({logits.view(), narrow.view()}, 2, nullptr, "gate_logits[1] must be [rows, 6], got [3, 5]");
  expect({logits.view(), other.view()}, 2, nullptr, "one dtype, got float32 and bfloat16");
  expect({logits.view()}, 2, &mask.view(), "attention_mask [4] has 4 elements, layer 0 has 3 rows");
  EXPECT_TRUE(std::isnan(loss.Get(0)));
}

TEST(ZLoss, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const int64_t experts : {1, 3, 8, 17, 64}) {
        const DType compute = ComputeOfDType(dtype);
        const double eps = compute == DType::kF64 ? 0x1p-53 : 0x1p-24;
        Buffer logits(dtype, {3, 50, experts});
        logits.FillRandom(2, 2.0, 1.0);
        Buffer loss(compute, {}), grad(compute, {}), dlogits(dtype, {3, 50, experts});
        RouterZLoss("router_z_loss", logits.view(), loss.view());
        grad.Set(0, 2.5);
        RouterZLossBackward("router_z_loss_backward", grad.view(), logits.view(), dlogits.view());
        double total = 0;
        ref::Doubles dx;
        for (int64_t r = 0; r < 150; ++r) {
          const ref::Doubles x = RowOf(logits, r, experts);
          const double lse = ref::LogSumExp(x);
          total += lse * lse;
          for (const double p : ref::Scores(x, Scoring::kSoftmax)) dx.push_back(2 * 2.5 * lse / 150 * p);
        }
        ExpectUlp(loss, {total / 150}, 1, "z-loss", 20 * eps * total / 150);
        ExpectUlp(dlogits, dx, 0.51, "gradient of the z-loss", 20 * eps);
        dlogits.CheckRedZones("z-loss");
      }
    }
  });
  Buffer none(DType::kF32, {0, 4}), loss(DType::kF32, {});
  RouterZLoss("router_z_loss", none.view(), loss.view());
  EXPECT_TRUE(std::isnan(loss.Get(0)));
  Buffer empty(DType::kF32, {4, 0});
  ExpectError([&] { RouterZLoss("router_z_loss", empty.view(), loss.view()); }, "router_z_loss", "have no experts");
}

TEST(ExpertBias, IsTorchtitansRuleAndDeepSeeks) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : FloatDTypes()) {
      for (const DType counts : {DType::kI64, DType::kI32, DType::kF32}) {
        Buffer bias(dtype, {2, 5});
        Buffer tokens(counts, {2, 5});
        Buffer out(dtype, {2, 5});
        bias.FillRandom(4);
        const double load[] = {10, 20, 30, 40, 0, 7, 7, 7, 7, 7};
        tokens.Fill([&](int64_t i) { return load[i]; });
        const double signs[] = {1, 0, -1, -1, 1, 0, 0, 0, 0, 0};
        for (const bool center : {false, true}) {
          ExpertBiasUpdate("expert_bias_update", bias.view(), tokens.view(), 0.001, center, out.view());
          ref::Doubles want;
          for (int64_t i = 0; i < 10; ++i) {
            want.push_back(bias.Get(i) + 0.001 * signs[i]);  // the steps of these loads have a mean of 0
          }
          ExpectUlp(out, want, 0.51, "bias");
        }
        tokens.Set(1, 15);  // mean 19: signs 1, 1, -1, -1, 1
        ExpertBiasUpdate("expert_bias_update", bias.view(), tokens.view(), 0.5, true, out.view());
        ref::Doubles want;
        const double steps[] = {0.5 - 0.1, 0.5 - 0.1, -0.5 - 0.1, -0.5 - 0.1, 0.5 - 0.1, 0, 0, 0, 0, 0};
        for (int64_t i = 0; i < 10; ++i) want.push_back(bias.Get(i) + steps[i]);
        ExpectUlp(out, want, 0.51, "centred bias", 4 * 0x1p-53);
        out.CheckRedZones("bias");
      }
    }
  });
  Buffer bias(DType::kF32, {4}), tokens(DType::kF32, {5}), out(DType::kF32, {4});
  ExpectError([&] { ExpertBiasUpdate("expert_bias_update", bias.view(), tokens.view(), 1, true, out.view()); },
              "expert_bias_update", "tokens_per_expert float32[5] does not match bias float32[4]");
}

}  // namespace
}  // namespace jumar::testing
