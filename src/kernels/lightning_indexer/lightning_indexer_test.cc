#include "kernels/lightning_indexer/lightning_indexer.h"

#include <cmath>
#include <limits>

#include "kernels/lightning_indexer/lightning_indexer_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Config {
  DType dtype = DType::kF32;
  int64_t batch = 1, rows = 5, keys = 7, heads = 3, d = 8, count = 4;
  int64_t n = 2, da = 8, dr = 0, kv = 1;  // of the attention
  bool causal = true;
  bool whole = false;  // small whole numbers: exact, and many alike
};

double Get(const TensorView& x, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  int i = 0;
  for (const int64_t k : index) at += k * x.stride[i++];
  return LoadAsDouble(x.data, x.dtype, at);
}

class Call {
 public:
  Call(const Config& config, uint64_t seed)
      : c(config),
        compute(c.dtype == DType::kF64 ? DType::kF64 : DType::kF32),
        // [B, N, S, D] and [B, D, S] in memory.
        q(c.dtype, {c.batch, c.rows, c.heads, c.d}, {c.rows * c.heads * c.d, c.d, c.rows * c.d, 1}),
        k(c.dtype, {c.batch, c.keys, 1, c.d}, {c.keys * c.d, 1, 1, c.keys}),
        w(c.dtype, {c.batch, c.rows, c.heads}),
        dq(c.dtype, {c.batch, c.rows, c.heads, c.d}),
        dk(c.dtype, {c.batch, c.keys, 1, c.d}),
        dw(c.dtype, {c.batch, c.rows, c.heads}),
        values(c.dtype, {c.batch, c.rows, 1, c.count}),
        dy(c.dtype, {c.batch, c.rows, c.count}),
        max(compute, {c.batch, c.rows}),
        sum(compute, {c.batch, c.rows}),
        aq(c.dtype, {c.batch, c.rows, c.n, c.da}),
        ak(c.dtype, {c.batch, c.keys, c.kv, c.da}),
        rq(c.dtype, {c.batch, c.rows, c.n, std::max<int64_t>(c.dr, 1)}),
        rk(c.dtype, {c.batch, c.keys, c.kv, std::max<int64_t>(c.dr, 1)}),
        amax(compute, {c.batch, c.rows, c.n}),
        asum(compute, {c.batch, c.rows, c.n}),
        ids(static_cast<size_t>(c.batch * c.rows * c.count), 77) {
    uint64_t at = seed * 100;
    Random random(seed);
    for (Buffer* x : {&q, &k, &w, &dy, &aq, &ak, &rq, &rk, &amax}) x->FillRandom(++at);
    if (c.whole) {
      for (Buffer* x : {&q, &k, &w}) x->Fill([&](int64_t) { return std::round(2.4 * random.Uniform()); });
    }
    asum.Fill([&](int64_t) { return 3 + random.Uniform(); });
    in.query = q.view();
    in.key = k.view();
    in.weights = w.view();
    in.causal = c.causal;
    for (int64_t b = 0; b < c.batch; ++b) in.sequences.push_back({b, 0, c.rows, 0, c.keys});
    teacher = {aq.view(), ak.view(), {}, {}, amax.view(), asum.view(), 0.2};
    if (c.dr > 0) {
      teacher.query_rope = rq.view();
      teacher.key_rope = rk.view();
    }
  }

  TensorView Indices() { return Contiguous(ids.data(), DType::kI32, {c.batch, c.rows, 1, c.count}); }
  TensorView Slots() { return Contiguous(ids.data(), DType::kI32, {c.batch, c.rows, c.count}); }
  IndexerGradients Gradients() const { return {dq.view(), dk.view(), dw.view()}; }
  // Slots in no order, some of them -1, hidden or twice there.
  void DrawSlots(uint64_t seed, int64_t limit) {
    Random random(seed);
    for (int32_t& id : ids) id = static_cast<int32_t>(random.Next() % static_cast<uint64_t>(limit + 1)) - 1;
  }
  void Choose() { LightningIndexer("op", in, Indices(), &values.view()); }

  template <typename F>
  void ForEachRow(const F& body) const {
    for (const SequencePair& s : in.sequences) {
      for (int64_t i = 0; i < s.q_len; ++i) body(s, i, s.batch * c.rows + s.q_begin + i);
    }
  }
  // Rounding of a sum in the compute type; scores are sums of d and of heads.
  double Unit(double terms) const { return terms * (compute == DType::kF64 ? 0x1p-53 : 0x1p-24); }
  double ScoreUnit() const { return Unit(static_cast<double>(c.d + c.heads + 1)); }

  void CheckChoice(const std::string& what) {
    Choose();
    ForEachRow([&](const SequencePair& s, int64_t i, int64_t row) {
      const ref::IndexerRow exact = ref::IndexerScores(in, s, i, Get);
      const std::vector<int64_t> best = ref::IndexerChoice(exact, c.count);
      std::vector<char> taken(static_cast<size_t>(c.keys), 0);
      double lowest = kInfinity;
      double last = kInfinity;
      for (int64_t j = 0; j < c.count; ++j) {
        const int64_t id = ids[static_cast<size_t>(row * c.count + j)];
        const double value = values.Get(row * c.count + j);
        if (j >= static_cast<int64_t>(best.size())) {
          ASSERT_EQ(id, -1) << what << " row " << row << " slot " << j;
          ASSERT_EQ(value, -kInfinity) << what;
          continue;
        }
        ASSERT_TRUE(id >= 0 && id < exact.limit && taken[static_cast<size_t>(id)] == 0) << what << " " << id;
        const auto at = static_cast<size_t>(id);
        taken[at] = 1;
        const double room = ScoreUnit() * exact.sizes[at];
        ASSERT_NEAR(value, exact.scores[at], 0.51 * UlpSize(c.dtype, exact.scores[at]) + room) << what;
        ASSERT_LE(value, last) << what;
        last = value;
        lowest = std::min(lowest, exact.scores[at] + room);
        if (!c.whole) continue;
        ASSERT_EQ(id, best[static_cast<size_t>(j)]) << what << " row " << row << " slot " << j;
      }
      for (int64_t t = 0; t < exact.limit; ++t) {
        const auto at = static_cast<size_t>(t);
        if (taken[at] != 0) continue;
        ASSERT_LE(exact.scores[at] - ScoreUnit() * exact.sizes[at], lowest) << what << " " << t;
      }
    });
    CheckZones(what);
  }

  void CheckGrad(const std::string& what) {
    DrawSlots(3, c.keys);
    LightningIndexerGrad("op", in, dy.view(), Slots(), dq.view(), dk.view(), dw.view());
    ref::IndexerGradientSums exact(in);
    ForEachRow([&](const SequencePair& s, int64_t i, int64_t row) {
      for (int64_t j = 0; j < c.count; ++j) {
        const int64_t id = ids[static_cast<size_t>(row * c.count + j)];
        const double slope = dy.Get(row * c.count + j);
        if (id >= 0) ref::AddSlope(in, s, i, id, slope, std::abs(slope), Get, exact);
      }
    });
    Compare(exact, Unit(static_cast<double>(c.d + c.count + c.rows * c.heads + 4)), what);
  }

  void CheckSoftmax(const std::string& what) {
    IndexerSoftmax("op", in, max.view(), sum.view());
    ForEachRow([&](const SequencePair& s, int64_t i, int64_t row) {
      const ref::IndexerRow exact = ref::IndexerScores(in, s, i, Get);
      double top = kLowestIndexScore, total = 0, room = Unit(static_cast<double>(c.keys + 8));
      for (int64_t t = 0; t < exact.limit; ++t) top = std::max(top, exact.scores[static_cast<size_t>(t)]);
      for (int64_t t = 0; t < exact.limit; ++t) {
        total += std::exp(exact.scores[static_cast<size_t>(t)] - top);
        room = std::max(room, 4 * ScoreUnit() * exact.sizes[static_cast<size_t>(t)]);
      }
      ASSERT_NEAR(max.Get(row), top, exact.limit == 0 ? 0 : room) << what << " max of row " << row;
      ASSERT_NEAR(sum.Get(row), total, 2 * room * total) << what << " sum of row " << row;
    });
  }

  // Keys of a row, the attention's share of each, the indexer's.
  struct Shares {
    std::vector<int64_t> at;
    std::vector<double> p, y;
  };

  // fill(row, scores, shares, add): add(id, y) adds a key.
  template <typename F>
  void CheckLoss(double loss, const std::string& what, const F& fill) {
    ref::IndexerGradientSums exact(in);
    double room = 0;
    ForEachRow([&](const SequencePair& s, int64_t i, int64_t row) {
      const ref::IndexerRow scores = ref::IndexerScores(in, s, i, Get);
      Shares shares;
      fill(row, scores, shares, [&](int64_t id, double y) {
        shares.at.push_back(id);
        shares.p.push_back(ref::TeacherShare(teacher, s, i, id, Get));
        shares.y.push_back(y);
        room = std::max(room, scores.sizes[static_cast<size_t>(id)]);
      });
      if (!shares.at.empty()) ref::AddLoss(in, s, i, shares.at, shares.p, shares.y, Get, exact);
    });
    CompareLoss(exact, loss, room, what);
  }

  void CheckSparseLoss(const std::string& what) {
    DrawSlots(4, c.keys);
    const double loss = SparseIndexerLoss("op", in, teacher, Slots(), Gradients());
    CheckLoss(loss, what + " sparse", [&](int64_t row, const ref::IndexerRow& scores, Shares& shares, const auto& add) {
      for (int64_t j = 0; j < c.count; ++j) {
        const int64_t id = ids[static_cast<size_t>(row * c.count + j)];
        if (id >= 0 && id < scores.limit) add(id, scores.scores[static_cast<size_t>(id)]);
      }
      if (shares.at.empty()) return;
      const double top = *std::max_element(shares.y.begin(), shares.y.end());
      for (double& x : shares.y) x = std::exp(x - top);
      const auto divide = [](std::vector<double>& x) {
        double total = 0;
        for (const double v : x) total += v;
        for (double& v : x) v = total == 0 ? v : v / total;
      };
      divide(shares.p);
      divide(shares.y);
    });
  }

  void CheckDenseLoss(const std::string& what) {
    IndexerSoftmax("op", in, max.view(), sum.view());
    const double loss = DenseIndexerLoss("op", in, teacher, max.view(), sum.view(), Gradients());
    CheckLoss(loss, what + " dense", [&](int64_t row, const ref::IndexerRow& scores, Shares&, const auto& add) {
      for (int64_t t = 0; t < scores.limit; ++t) {
        add(t, std::exp(scores.scores[static_cast<size_t>(t)] - max.Get(row)) / sum.Get(row));
      }
    });
  }

  void CheckZones(const std::string& what) const {
    for (const Buffer* x : {&q, &k, &w, &dq, &dk, &dw, &values, &max, &sum}) x->CheckRedZones(what);
  }

  Config c;
  DType compute;
  Buffer q, k, w, dq, dk, dw, values, dy, max, sum, aq, ak, rq, rk, amax, asum;
  std::vector<int32_t> ids;
  IndexerInputs in;
  IndexerTeacher teacher;

 private:
  // Errors of scores, of magnitude `room`, move probabilities by as much.
  void CompareLoss(const ref::IndexerGradientSums& exact, double loss, double room, const std::string& what) {
    const double attention = Unit(8 * static_cast<double>(c.da + c.dr));
    const double unit =
        3 * (ScoreUnit() * room + attention) + Unit(static_cast<double>(c.keys + c.rows * c.heads + 16));
    Compare(exact, unit, what);
    ASSERT_NEAR(loss, exact.loss, unit * exact.loss_size) << what << " loss";
  }

  void Compare(const ref::IndexerGradientSums& exact, double unit, const std::string& what) {
    const auto near = [&](const Buffer& x, const std::vector<double>& want, const std::vector<double>& size,
                          const char* name) {
      for (int64_t i = 0; i < x.numel(); ++i) {
        const auto at = static_cast<size_t>(i);
        ASSERT_LE(std::abs(x.Get(i) - want[at]), 0.51 * UlpSize(c.dtype, want[at]) + unit * size[at])
            << what << " " << name << " at " << i;
      }
    };
    near(dq, exact.dq, exact.dq_size, "dq");
    near(dk, exact.dk, exact.dk_size, "dk");
    near(dw, exact.dw, exact.dw_size, "dw");
    CheckZones(what);
  }
};

std::vector<Config> Shapes() {
  std::vector<Config> all;
  const auto add = [&](Config c) { all.push_back(c); };
  add({.batch = 1, .rows = 1, .keys = 1, .heads = 1, .d = 1, .count = 1, .n = 1, .da = 1});
  add({.batch = 2, .rows = 5, .keys = 7, .heads = 3, .d = 8, .count = 4, .n = 2, .da = 8, .dr = 4});
  add({.batch = 1, .rows = 9, .keys = 6, .heads = 9, .d = 33, .count = 11, .n = 3, .da = 5, .dr = 0});
  add({.batch = 1, .rows = 7, .keys = 140, .heads = 17, .d = 8, .count = 135, .n = 18, .da = 20, .dr = 3});
  if (!SmallTests()) add({.batch = 1, .rows = 70, .keys = 300, .heads = 4, .d = 8, .count = 20, .n = 4, .da = 8});
  return all;
}

TEST(LightningIndexer, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (Config c : Shapes()) {
        c.dtype = dtype;
        for (const bool causal : {true, false}) {
          c.causal = causal;
          for (const bool whole : {false, true}) {
            c.whole = whole;
            Call(c, seed++).CheckChoice("choice");
          }
          c.whole = false;
          Call(c, seed++).CheckGrad("grad");
          Call(c, seed++).CheckSoftmax("softmax");
          Call(c, seed++).CheckSparseLoss("loss");
          Call(c, seed).CheckDenseLoss("loss");
          if (c.n % 2 == 0) c.kv = c.n / 2;
          Call(c, seed++).CheckDenseLoss("grouped loss");
          c.kv = 1;
        }
      }
    }
  });
}

// Rows of more keys than candidates have room for.
TEST(LightningIndexer, LongRows) {
  ForEachSimdTarget([&](const std::string&) {
    for (const int64_t count : {1, 3, 300, 1500, 3000}) {
      Config c;
      c.rows = 2;
      c.keys = SmallTests() ? 1600 : 2600;
      c.heads = 1;
      c.d = 1;
      c.count = count;
      c.causal = false;
      for (const int kind : {0, 1, 2, 3}) {
        Call call(c, 5);
        call.q.Fill([](int64_t) { return 1; });
        call.w.Fill([](int64_t) { return 1; });
        // Rising, falling, all alike, in waves: each has its own way of filling the room.
        call.k.Fill([&](int64_t i) {
          const auto x = static_cast<double>(i);
          return kind == 0 ? x : kind == 1 ? 5000 - x : kind == 2 ? 3.0 : static_cast<double>(i * 37 % 101);
        });
        call.c.whole = true;
        call.CheckChoice("kind " + std::to_string(kind));
      }
    }
  });
}

TEST(LightningIndexer, PackedSequences) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.rows = 40;
    c.keys = 60;
    c.count = 10;
    Call call(c, 5);
    call.in.sequences = {{0, 0, 9, 0, 20}, {0, 9, 0, 20, 4}, {0, 9, 20, 24, 0}, {0, 29, 8, 24, 30}};
    call.CheckChoice("packed");
    call.CheckSoftmax("packed");
    call.CheckDenseLoss("packed");
    // Rows of no sequence, and rows without keys.
    call.Choose();
    for (const int64_t row : {10, 20, 38, 39}) {
      for (int64_t j = 0; j < c.count; ++j) {
        EXPECT_EQ(call.ids[static_cast<size_t>(row * c.count + j)], -1);
        EXPECT_EQ(call.values.Get(row * c.count + j), -kInfinity);
      }
      EXPECT_EQ(call.max.Get(row), kLowestIndexScore);
      EXPECT_EQ(call.sum.Get(row), 0);
      EXPECT_EQ(call.dw.Get(row * c.heads), 0);
    }
  });
}

TEST(LightningIndexer, NotANumberComesFirstAndHiddenKeysDoNotLeak) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.rows = c.keys = 30;
    c.count = 8;
    c.whole = true;
    Call clean(c, 3), dirty(c, 3);
    for (const int64_t key : {20, 25}) dirty.k.Set(key * c.d, std::nan(""));
    dirty.k.Set(28 * c.d, kInfinity);
    clean.Choose();
    dirty.Choose();
    for (int64_t i = 0; i < 20 * c.count; ++i) {
      ASSERT_EQ(dirty.ids[static_cast<size_t>(i)], clean.ids[static_cast<size_t>(i)]) << i;
    }
    EXPECT_EQ(dirty.ids[static_cast<size_t>(29 * c.count)], 20);
    EXPECT_EQ(dirty.ids[static_cast<size_t>(29 * c.count + 1)], 25);
    for (Call* call : {&clean, &dirty}) {
      IndexerSoftmax("op", call->in, call->max.view(), call->sum.view());
      DenseIndexerLoss("op", call->in, call->teacher, call->max.view(), call->sum.view(), call->Gradients());
    }
    for (int64_t i = 0; i < 20 * c.heads * c.d; ++i) ASSERT_EQ(dirty.dq.Get(i), clean.dq.Get(i)) << i;
  });
}

TEST(LightningIndexer, ResultsDoNotDependOnThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Config c;
    c.dtype = dtype;
    c.batch = 2;
    c.rows = SmallTests() ? 140 : 300;
    c.keys = SmallTests() ? 150 : 320;
    c.count = 60;
    std::vector<std::vector<double>> first;
    for (const int threads : {1, 2, 7}) {
      WithThreads(threads, [&] {
        Call call(c, 2);
        call.Choose();
        std::vector<std::vector<double>> all = {call.values.ToDoubles(), {call.ids.begin(), call.ids.end()}};
        const auto take = [&](double loss) {
          all.push_back({loss});
          for (const Buffer* b : {&call.dq, &call.dk, &call.dw}) all.push_back(b->ToDoubles());
        };
        take(SparseIndexerLoss("op", call.in, call.teacher, call.Slots(), call.Gradients()));
        IndexerSoftmax("op", call.in, call.max.view(), call.sum.view());
        take(DenseIndexerLoss("op", call.in, call.teacher, call.max.view(), call.sum.view(), call.Gradients()));
        if (first.empty()) first = all;
        EXPECT_EQ(all, first) << threads;
      });
    }
  }
}

TEST(LightningIndexer, Errors) {
  Config c;
  const auto fails = [&](const std::function<void(Call&)>& change, const std::string& part) {
    Call call(c, 1);
    change(call);
    ExpectError([&] { call.Choose(); }, "op", part);
  };
  fails([](Call& x) { x.in.key.size[3] = 7; }, "key must have query's batch and head size");
  fails([](Call& x) { x.in.key.size[1] = 0; }, "must not be empty");
  fails([](Call& x) { x.in.weights.size[2] = 2; }, "weights must be");
  fails([](Call& x) { x.in.key.dtype = DType::kBF16; }, "one floating dtype");
  fails([](Call& x) { x.in.weights.dtype = DType::kF64; }, "weights must be float32");
  Call call(c, 1);
  for (const int bad : {-2, 7}) {
    call.DrawSlots(1, c.keys);
    call.ids[6] = bad;
    const std::string part = "sparse_indices is " + std::to_string(bad) + " at position [0, 1, 2]";
    ExpectError([&] { SparseIndexerLoss("op", call.in, call.teacher, call.Slots(), call.Gradients()); }, "op", part);
    ExpectError(
        [&] {
          LightningIndexerGrad("op", call.in, call.dy.view(), call.Slots(), call.dq.view(), call.dk.view(),
                               call.dw.view());
        },
        "op", part);
  }
  call.DrawSlots(1, c.keys);
  call.teacher.sum.size[2] = 1;
  ExpectError([&] { SparseIndexerLoss("op", call.in, call.teacher, call.Slots(), call.Gradients()); }, "op",
              "softmax_sum");
}

// With more threads than rows, keys are shared out between them.
TEST(LightningIndexer, FewRowsWithManyKeys) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Config c;
    c.dtype = dtype;
    c.rows = 5;
    c.keys = 2600;
    c.count = 300;
    std::vector<std::vector<double>> first;
    for (const int threads : {1, 2, 7}) {
      WithThreads(threads, [&] {
        Call call(c, 2);
        call.in.sequences = {{0, 0, 2, 0, 1500}, {0, 2, 1, 1500, 0}, {0, 3, 2, 1500, 1100}};
        call.CheckChoice("few rows");
        IndexerSoftmax("op", call.in, call.max.view(), call.sum.view());
        const std::vector<std::vector<double>> all = {
            {call.ids.begin(), call.ids.end()}, call.values.ToDoubles(), call.max.ToDoubles(), call.sum.ToDoubles()};
        if (first.empty()) first = all;
        EXPECT_EQ(all, first) << threads;
      });
    }
  }
}

// Whichever thread comes first; and no result has been written. Rows of no sequence are not looked at.
TEST(LightningIndexer, NamesTheFirstWrongSlot) {
  Config c;
  c.rows = c.keys = 400;
  c.count = 50;
  for (const int threads : {1, 2, 7}) {
    WithThreads(threads, [&] {
      Call call(c, 1);
      call.in.sequences = {{0, 1, 399, 0, 390}};
      call.DrawSlots(1, 390);
      call.dq.Fill([](int64_t) { return 3; });
      const std::vector<double> before = call.dq.ToDoubles();
      for (const size_t at : {20, 390 * 50 + 7, 250 * 50 + 3, 250 * 50 + 2, 399 * 50}) call.ids[at] = -9;
      const std::string part = "sparse_indices is -9 at position [0, 250, 2], neither -1 nor within [0, ";
      ExpectError([&] { SparseIndexerLoss("op", call.in, call.teacher, call.Slots(), call.Gradients()); }, "op",
                  part + "400)");
      const auto grad = [&] {
        LightningIndexerGrad("op", call.in, call.dy.view(), call.Slots(), call.dq.view(), call.dk.view(),
                             call.dw.view());
      };
      ExpectError(grad, "op", part + "390)");
      call.ids[3 * 50 + 4] = 390;
      ExpectError(grad, "op", "sparse_indices is 390 at position [0, 3, 4]");
      EXPECT_EQ(call.dq.ToDoubles(), before);
    });
  }
}

}  // namespace
}  // namespace jumar::testing
