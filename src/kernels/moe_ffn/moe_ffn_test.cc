#include "kernels/moe_ffn/moe_ffn.h"

#include <cmath>

#include "base/slot_sort.h"
#include "kernels/gemm/gemm.h"
#include "kernels/moe_ffn/moe_ffn_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

using reference::Bounded;
using reference::MoeOracle;
using reference::MoeSizes;

constexpr const char* kOp = "moe_ffn";

enum class Layout { kJoined, kJoinedColumns, kApart, kApartColumns };
constexpr Layout kLayouts[] = {Layout::kJoined, Layout::kJoinedColumns, Layout::kApart, Layout::kApartColumns};

bool Columns(Layout layout) { return layout == Layout::kJoinedColumns || layout == Layout::kApartColumns; }
bool Joined(Layout layout) { return layout == Layout::kJoined || layout == Layout::kJoinedColumns; }

// Weights, or gradients of them, with the memory that they view.
struct Weights {
  Weights(DType dtype, const MoeSizes& s, Layout layout)
      : gate(Stack(dtype, s.experts, s.hidden, Joined(layout) ? 2 * s.inner : s.inner, Columns(layout))),
        up(Stack(dtype, Joined(layout) ? 0 : s.experts, s.hidden, s.inner, Columns(layout))),
        down(Stack(dtype, s.experts, s.inner, s.hidden, Columns(layout))) {
    views = {Matrices(gate), Matrices(up), Matrices(down)};
  }
  static Buffer Stack(DType dtype, int64_t e, int64_t rows, int64_t cols, bool columns) {
    return columns ? Buffer(dtype, {e, rows, cols}, {rows * cols, 1, rows}) : Buffer(dtype, {e, rows, cols});
  }
  static std::vector<TensorView> Matrices(const Buffer& stack) {
    std::vector<TensorView> list;
    for (int64_t e = 0; e < stack.view().size[0]; ++e) {
      TensorView m = Narrow(stack.view(), 0, e, 1);
      m.rank = 2;
      for (int i = 0; i < 2; ++i) {
        m.size[i] = m.size[i + 1];
        m.stride[i] = m.stride[i + 1];
      }
      list.push_back(m);
    }
    return list;
  }
  // [E, H, I] of gate (0) or up (1), whatever the layout.
  std::vector<double> Half(const MoeSizes& s, int which) const {
    if (up.numel() > 0 || s.experts * s.hidden * s.inner == 0) return (which == 0 ? gate : up).ToDoubles();
    std::vector<double> out;
    const std::vector<double> all = gate.ToDoubles();
    for (int64_t r = 0; r < s.experts * s.hidden; ++r) {
      for (int64_t i = 0; i < s.inner; ++i) {
        out.push_back(all[static_cast<size_t>(r * 2 * s.inner + which * s.inner + i)]);
      }
    }
    return out;
  }
  Buffer gate, up, down;
  ExpertWeights views;
};

void ExpectBounded(const std::vector<double>& got, DType dtype, const std::vector<Bounded>& expected,
                   const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const Bounded& b = expected[i];
    const double bound = b.error + (b.value == 0 ? 0 : 0.502 * UlpSize(dtype, b.value));
    ASSERT_LE(std::abs(got[i] - b.value), bound) << what << " element " << i << ": " << got[i] << " for " << b.value;
  }
}

struct Case {
  MoeSizes sizes;
  std::vector<int64_t> ids;  // empty: drawn, with slots of no expert
  bool spaced = false;       // rows with gaps, expanded gradient
};

void CheckCase(const Case& c, DType dtype, DType probs_dtype, Layout layout) {
  const MoeSizes& s = c.sizes;
  std::vector<int64_t> ids = c.ids;
  Random random(7);
  while (static_cast<int64_t>(ids.size()) < s.tokens * s.top_k) {
    ids.push_back(static_cast<int64_t>(random.Next() % static_cast<uint64_t>(s.experts + 1)));
  }
  const TensorView id_view = Contiguous(ids.data(), DType::kI64, {s.tokens, s.top_k});
  const auto rows = [&](int64_t cols) {
    return c.spaced ? Buffer(dtype, {s.tokens, cols}, {2 * cols + 1, 2}) : Buffer(dtype, {s.tokens, cols});
  };
  Buffer x = rows(s.hidden);
  Buffer dy = c.spaced ? Buffer(dtype, {s.tokens, s.hidden}, {0, 0}) : rows(s.hidden);
  Buffer probs(probs_dtype, {s.tokens, s.top_k});
  Weights w(dtype, s, layout);
  x.FillRandom(1);
  dy.FillRandom(2);
  probs.FillRandom(3);
  w.gate.FillRandom(4, 0.5);
  w.up.FillRandom(5, 0.5);
  w.down.FillRandom(6, 0.5);
  const bool f64 = dtype == DType::kF64;
  const double eps = f64 ? 0x1p-52 : 0x1p-24;
  const double narrow = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0;
  // Values of fp16 may be subnormal.
  const double tiny = dtype == DType::kF16 ? 0x1p-24 : 0;
  const MoeOracle oracle(s, eps, narrow, x.ToDoubles(), ids, probs.ToDoubles(), w.Half(s, 0), w.Half(s, 1),
                         w.down.ToDoubles());
  std::vector<Bounded> expected = oracle.Forward();
  for (Bounded& b : expected) b.error += tiny * static_cast<double>(s.inner * s.top_k);
  std::vector<int32_t> order(ids.size());
  std::vector<int32_t> row_of(ids.size());
  SortSlots(ids.data(), static_cast<int64_t>(ids.size()), order.data(), row_of.data());
  ForEachSimdTarget([&](const std::string& target) {
    const std::string what = target + " " + Name(dtype) + " probs " + Name(probs_dtype) + " layout " +
                             std::to_string(static_cast<int>(layout)) + " tokens " + std::to_string(s.tokens);
    Buffer y = rows(s.hidden);
    Buffer plain = rows(s.hidden);
    Buffer saved(dtype, {s.tokens * s.top_k, 2 * s.inner});
    MoeFfn(kOp, x.view(), id_view, probs.view(), w.views, y.view(), &saved.view());
    MoeFfn(kOp, x.view(), id_view, probs.view(), w.views, plain.view(), nullptr);
    EXPECT_EQ(y.ToDoubles(), plain.ToDoubles()) << what;
    ExpectBounded(y.ToDoubles(), dtype, expected, what + " y");
    const auto saved_at = [&](int64_t slot, int64_t i) {
      return saved.Get(row_of[static_cast<size_t>(slot)] * 2 * s.inner + i);
    };
    auto grads = oracle.Backward(dy.ToDoubles(), saved_at);
    const double slots = static_cast<double>(s.tokens * s.top_k + s.inner);
    for (auto* list : {&grads.hidden, &grads.gate, &grads.up, &grads.down}) {
      for (Bounded& b : *list) b.error += 4 * tiny * slots;
    }
    Buffer dx = rows(s.hidden);
    Buffer dprobs(probs_dtype, {s.tokens, s.top_k});
    Weights dw(dtype, s, layout);
    MoeFfnBackward(kOp, dy.view(), x.view(), id_view, probs.view(), w.views, saved.view(), &dx.view(), &dprobs.view(),
                   dw.views);
    ExpectBounded(dx.ToDoubles(), dtype, grads.hidden, what + " dhidden");
    ExpectBounded(dprobs.ToDoubles(), probs_dtype, grads.probs, what + " dprobs");
    ExpectBounded(dw.Half(s, 0), dtype, grads.gate, what + " dgate");
    ExpectBounded(dw.Half(s, 1), dtype, grads.up, what + " dup");
    ExpectBounded(dw.down.ToDoubles(), dtype, grads.down, what + " ddown");
    Weights only(dtype, s, layout);  // one gradient without the others
    MoeFfnBackward(kOp, dy.view(), x.view(), id_view, probs.view(), w.views, saved.view(), nullptr, nullptr,
                   {{}, {}, only.views.down});
    EXPECT_EQ(only.down.ToDoubles(), dw.down.ToDoubles()) << what;
    for (const Buffer* b : {&y, &saved, &dx, &dprobs, &dw.gate, &dw.up, &dw.down}) b->CheckRedZones(what);
  });
}

TEST(MoeFfn, MatchesTheOracleOnEveryTarget) {
  std::vector<Case> cases = {
      {{5, 2, 3, 7, 5}, {}},
      {{1, 1, 1, 1, 1}, {0}},
      {{0, 2, 3, 4, 4}, {}},
      {{3, 2, 2, 4, 4}, {2, 2, 2, 2, 2, 2}},              // no slot has an expert
      {{4, 2, 3, 5, 6}, {1, 2, 1, 2, 1, 2, 1, 2}, true},  // an expert of no slot
      {{9, 3, 4, 33, 140}, {}, true},                     // several cells of dprobs
  };
  if (!SmallTests()) cases.push_back({{70, 2, 2, 270, 20}, {}});
  for (const DType dtype : FloatDTypes()) {
    for (const Case& c : cases) {
      for (const Layout layout : kLayouts) {
        CheckCase(c, dtype, dtype == DType::kF64 ? DType::kF64 : DType::kF32, layout);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    CheckCase(cases[0], dtype, dtype == DType::kF64 ? DType::kF32 : DType::kBF16, Layout::kJoined);
    CheckCase(cases[0], dtype, DType::kF64, Layout::kApart);
  }
}

std::vector<double> Everything(const MoeSizes& s, DType dtype, Layout layout, std::vector<int64_t> ids, const Buffer& x,
                               const Buffer& dy, const Buffer& probs, const Weights& w) {
  const TensorView id_view = Contiguous(ids.data(), DType::kI64, {s.tokens, s.top_k});
  Buffer y(dtype, {s.tokens, s.hidden});
  Buffer saved(dtype, {s.tokens * s.top_k, 2 * s.inner});
  Buffer dx(dtype, {s.tokens, s.hidden});
  Buffer dprobs(DType::kF32, {s.tokens, s.top_k});
  Weights dw(dtype, s, layout);
  MoeFfn(kOp, Narrow(x.view(), 0, 0, s.tokens), id_view, Narrow(probs.view(), 0, 0, s.tokens), w.views, y.view(),
         &saved.view());
  MoeFfnBackward(kOp, Narrow(dy.view(), 0, 0, s.tokens), Narrow(x.view(), 0, 0, s.tokens), id_view,
                 Narrow(probs.view(), 0, 0, s.tokens), w.views, saved.view(), &dx.view(), &dprobs.view(), dw.views);
  std::vector<double> all = y.ToDoubles();
  for (const Buffer* b : {&dx, &dprobs, &dw.gate, &dw.up, &dw.down}) {
    for (const double v : b->ToDoubles()) all.push_back(v);
  }
  return all;
}

std::vector<int64_t> DrawIds(int64_t n, int64_t experts) {
  Random random(3);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int64_t>(random.Next() % static_cast<uint64_t>(experts)));
  return ids;
}

TEST(MoeFfn, SameBitsForEveryThreadCount) {
  const MoeSizes s{SmallTests() ? 90 : 600, 2, 3, 70, SmallTests() ? 60 : 300};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Buffer x(dtype, {s.tokens, s.hidden});
    Buffer dy(dtype, {s.tokens, s.hidden});
    Buffer probs(DType::kF32, {s.tokens, s.top_k});
    Weights w(dtype, s, Layout::kJoinedColumns);
    uint64_t seed = 1;
    for (Buffer* b : {&x, &dy, &probs, &w.gate, &w.down}) b->FillRandom(seed++);
    std::vector<std::vector<double>> results;
    for (const int threads : {1, 2, 3, 7}) {
      WithThreads(threads, [&] {
        results.push_back(
            Everything(s, dtype, Layout::kJoinedColumns, DrawIds(s.tokens * s.top_k, s.experts), x, dy, probs, w));
      });
    }
    for (const auto& other : results) ASSERT_EQ(results[0], other) << Name(dtype);
  }
}

// Sums of more slots than fit are made slab by slab of columns: the same bits as for the first few tokens alone.
TEST(MoeFfn, ManyTokens) {
  if (SmallTests()) GTEST_SKIP() << "half a gigabyte of sums";
  const MoeSizes many{17000, 2, 2, 600, 3};
  const MoeSizes few{20, 2, 2, 600, 3};
  Buffer x(DType::kF32, {many.tokens, many.hidden});
  Buffer dy(DType::kF32, {many.tokens, many.hidden});
  Buffer probs(DType::kF32, {many.tokens, many.top_k});
  Weights w(DType::kF32, many, Layout::kApart);
  uint64_t seed = 1;
  for (Buffer* b : {&x, &dy, &probs, &w.gate, &w.up, &w.down}) b->FillRandom(seed++);
  const std::vector<int64_t> ids = DrawIds(many.tokens * many.top_k, many.experts);
  const std::vector<double> all = Everything(many, DType::kF32, Layout::kApart, ids, x, dy, probs, w);
  const std::vector<double> part = Everything(few, DType::kF32, Layout::kApart,
                                              {ids.begin(), ids.begin() + few.tokens * few.top_k}, x, dy, probs, w);
  for (int64_t i = 0; i < few.tokens * few.hidden; ++i) {
    ASSERT_EQ(part[static_cast<size_t>(i)], all[static_cast<size_t>(i)]) << "y " << i;
    ASSERT_EQ(part[static_cast<size_t>(few.tokens * few.hidden + i)],
              all[static_cast<size_t>(many.tokens * many.hidden + i)])
        << "dhidden " << i;
  }
}

TEST(MoeFfn, Errors) {
  const MoeSizes s{3, 2, 2, 4, 5};
  Buffer x(DType::kF32, {3, 4});
  Buffer y(DType::kF32, {3, 4});
  Buffer probs(DType::kF32, {3, 2});
  Buffer wide(DType::kF32, {3, 5});
  Weights w(DType::kF32, s, Layout::kApart);
  Weights half(DType::kBF16, s, Layout::kApart);
  std::vector<int64_t> ids = {0, 1, 1, 0, 2, 1};
  const auto view = [&] { return Contiguous(ids.data(), DType::kI64, {3, 2}); };
  const auto run = [&](const TensorView& in, const ExpertWeights& weights, const TensorView& p) {
    MoeFfn(kOp, in, view(), p, weights, y.view(), nullptr);
  };
  run(x.view(), w.views, probs.view());
  ExpectError([&] { run(wide.view(), w.views, probs.view()); }, kOp, "[5, 5]");
  ExpectError([&] { run(x.view(), half.views, probs.view()); }, kOp, "one dtype, got bfloat16 and float32");
  ExpectError([&] { run(x.view(), w.views, x.view()); }, kOp, "probs must be floating and like ids [3, 2]");
  ExpertWeights two = w.views;
  two.gate.pop_back();
  ExpectError([&] { run(x.view(), two, probs.view()); }, kOp, "gate has 1 experts, expected 2");
  ids[3] = 3;
  ExpectError([&] { run(x.view(), w.views, probs.view()); }, kOp, "3");
  ids[3] = -1;
  ExpectError([&] { run(x.view(), w.views, probs.view()); }, kOp, "-1");
}

}  // namespace
}  // namespace jumar::testing
