#include "kernels/attention/attention.h"

#include <cmath>
#include <limits>

#include "kernels/attention/attention_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

// Shapes and rules of one call; sequences of [rows, keys] are the batch.
struct Config {
  DType dtype = DType::kF32;
  int64_t batch = 1, heads = 2, kv_heads = 1, rows = 5, keys = 5, d = 8, dv = 8;
  double scale = 0.4;
  int64_t low = -kUnboundedBand, high = kUnboundedBand, prefix = 0;
  double hidden = 0;      // share of the mask that hides; 0: no mask
  int64_t mask_rows = 0;  // 1: one row of the mask serves all
  int64_t pse_rows = 0;   // 0: no pse
  int64_t pse_first = 0;  // the query of its first row
  bool sink = false;
  double keep_prob = 1;
  int64_t rope = 0;
};

class Call {
 public:
  Call(const Config& config, uint64_t seed)
      : c(config),
        compute(c.dtype == DType::kF64 ? DType::kF64 : DType::kF32),
        q(c.dtype, {c.batch, c.heads, c.rows, c.d}, Spread(c.heads, c.rows, c.d)),
        k(c.dtype, {c.batch, c.kv_heads, c.keys, c.d}, Spread(c.kv_heads, c.keys, c.d)),
        v(c.dtype, {c.batch, c.kv_heads, c.keys, c.dv}),
        dy(c.dtype, {c.batch, c.heads, c.rows, c.dv}),
        out(c.dtype, {c.batch, c.heads, c.rows, c.dv}, Spread(c.heads, c.rows, c.dv)),
        max(compute, {c.batch, c.heads, c.rows, 8}),
        sum(compute, {c.batch, c.heads, c.rows, 8}),
        dq(c.dtype, {c.batch, c.heads, c.rows, c.d}),
        dk(c.dtype, {c.batch, c.kv_heads, c.keys, c.d}, Spread(c.kv_heads, c.keys, c.d)),
        dv(c.dtype, {c.batch, c.kv_heads, c.keys, c.dv}),
        q_rope(c.dtype, {c.batch, c.heads, c.rows, c.rope}, Spread(c.heads, c.rows, c.rope)),
        k_rope(c.dtype, {c.batch, c.kv_heads, c.keys, c.rope}),
        dq_rope(c.dtype, {c.batch, c.heads, c.rows, c.rope}, Spread(c.heads, c.rows, c.rope)),
        dk_rope(c.dtype, {c.batch, c.kv_heads, c.keys, c.rope}),
        pse(c.dtype, {c.batch, c.heads, std::max<int64_t>(c.pse_rows, 1), c.keys}),
        dpse(c.dtype, {c.batch, c.heads, std::max<int64_t>(c.pse_rows, 1), c.keys}),
        sink(compute, {c.heads}),
        dsink(compute, {c.heads}) {
    q.FillRandom(seed);
    k.FillRandom(seed + 1);
    v.FillRandom(seed + 2);
    dy.FillRandom(seed + 3);
    pse.FillRandom(seed + 4);
    sink.FillRandom(seed + 5);
    q_rope.FillRandom(seed + 8);
    k_rope.FillRandom(seed + 9);
    if (c.rope > 0) {
      in.q_rope = q_rope.view();
      in.k_rope = k_rope.view();
    }
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    in.scale = c.scale;
    for (int64_t b = 0; b < c.batch; ++b) {
      in.sequences.push_back({b, b, 0, c.rows, 0, c.keys, c.low, c.high, c.prefix});
    }
    if (c.hidden > 0) {
      const int64_t mask_rows = c.mask_rows == 1 ? 1 : c.rows;
      Random random(seed + 6);
      mask.resize(static_cast<size_t>(c.batch * mask_rows * c.keys));
      for (uint8_t& x : mask) x = std::abs(random.Uniform()) < c.hidden ? 3 : 0;
      in.mask = {mask.data(), {c.batch, 1, mask_rows, c.keys}, {mask_rows * c.keys, 0, mask_rows == 1 ? 0 : c.keys, 1}};
    }
    if (c.pse_rows > 0) {
      in.pse = pse.view();
      in.pse_first = c.pse_first;
      if (c.pse_rows == 1) in.pse.stride[2] = 0;
    }
    if (c.sink) in.sink = sink.view();
    in.dropout = {c.keep_prob, 7, 9, nullptr};
    if (c.keep_prob < 1) {
      Random random(seed + 7);
      bits.resize(static_cast<size_t>(c.batch * c.heads * c.rows * c.keys + 7) / 8);
      for (uint8_t& x : bits) x = static_cast<uint8_t>(random.Next());
      in.dropout.bits = bits.data();
    }
  }

  void Forward() { Attention("op", in, out.view(), max.view(), sum.view()); }
  void Backward() { AttentionBackward("op", in, dy.view(), out.view(), max.view(), sum.view(), Grads()); }
  AttentionGrads Grads() {
    return {dq.view(),
            dk.view(),
            dv.view(),
            dq_rope.view(),
            dk_rope.view(),
            c.pse_rows > 0 ? dpse.view() : TensorView{},
            c.sink ? dsink.view() : TensorView{}};
  }

  ref::AttentionResult Exact() const {
    ref::AttentionReader read;
    read.get = [](const TensorView& x, int64_t b, int64_t h, int64_t i, int64_t j) {
      if (x.rank == 1) return LoadAsDouble(x.data, x.dtype, j * x.stride[0]);
      return LoadAsDouble(x.data, x.dtype, b * x.stride[0] + h * x.stride[1] + i * x.stride[2] + j * x.stride[3]);
    };
    read.keep = [this](const AttentionSequence& s, int64_t h, int64_t i, int64_t j) {
      if (c.keep_prob >= 1) return 1.0;
      const int64_t bit = ((s.index * c.heads + h) * c.rows + i) * c.keys + j;
      return (bits[static_cast<size_t>(bit / 8)] >> (bit % 8) & 1) != 0 ? 1 / c.keep_prob : 0.0;
    };
    return ref::Attention(in, dy.view(), read);
  }

  void Check(const std::string& what) {
    Forward();
    Backward();
    const ref::AttentionResult exact = Exact();
    const double u = c.dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
    // Scores are sums of d terms of at most a few units, and shift all of a row's probabilities.
    const double score = 40.0 * static_cast<double>(c.d + c.rope + 16) * std::abs(c.scale) * u;
    const double unit = 4 * score + static_cast<double>(c.keys + c.rows * c.heads + 16) * u;
    const double half = c.dtype == DType::kBF16 ? 0x1p-8 : c.dtype == DType::kF16 ? 0x1p-11 : 0;
    Near(out, exact.out, exact.out_size, unit, what + " out");
    Near(dv, exact.dv, exact.dv_size, 2 * unit, what + " dv");
    Near(dq, exact.dq, exact.dq_size, 4 * unit + half, what + " dq");
    Near(dk, exact.dk, exact.dk_size, 4 * unit + half, what + " dk");
    if (c.rope > 0) {
      Near(dq_rope, exact.dq_rope, exact.dq_rope_size, 4 * unit + half, what + " dq_rope");
      Near(dk_rope, exact.dk_rope, exact.dk_rope_size, 4 * unit + half, what + " dk_rope");
    }
    for (size_t i = 0; i < exact.max.size(); ++i) {
      for (int64_t e = 0; e < 8; ++e) {
        const auto at = static_cast<int64_t>(i) * 8 + e;
        ASSERT_NEAR(max.Get(at), exact.max[i], score + 4 * u * std::abs(exact.max[i])) << what << " max " << i;
        ASSERT_NEAR(sum.Get(at), exact.sum[i], unit * (1 + exact.sum[i])) << what << " sum " << i;
      }
    }
    if (c.pse_rows > 0) CheckPse(exact, unit + half, what);
    if (c.sink) {
      for (int64_t h = 0; h < c.heads; ++h) {
        ASSERT_NEAR(dsink.Get(h), exact.dsink[static_cast<size_t>(h)],
                    static_cast<double>(c.batch * c.rows * c.dv) * 4 * (unit + half))
            << what << " dsink";
      }
    }
    for (const Buffer* b : {&q, &k, &v, &dy, &out, &max, &sum, &dq, &dk, &dv, &q_rope, &k_rope, &dq_rope, &dk_rope,
                            &pse, &dpse, &sink, &dsink}) {
      b->CheckRedZones(what);
    }
  }

  Config c;
  DType compute;
  Buffer q, k, v, dy, out, max, sum, dq, dk, dv, q_rope, k_rope, dq_rope, dk_rope, pse, dpse, sink, dsink;
  std::vector<uint8_t> mask, bits;
  AttentionInputs in;

 private:
  // [B, S, N, D] in memory.
  static std::vector<int64_t> Spread(int64_t heads, int64_t rows, int64_t cols) {
    return {rows * heads * cols, cols, heads * cols, 1};
  }

  static void Near(const Buffer& actual, const std::vector<double>& exact, const std::vector<double>& size, double unit,
                   const std::string& what) {
    for (int64_t i = 0; i < actual.numel(); ++i) {
      const auto at = static_cast<size_t>(i);
      const double allowed = 0.51 * UlpSize(actual.view().dtype, exact[at]) + unit * size[at];
      ASSERT_LE(std::abs(actual.Get(i) - exact[at]), allowed) << what << " at " << i;
    }
  }

  // Every element of pse gets what its scores get.
  void CheckPse(const ref::AttentionResult& exact, double unit, const std::string& what) {
    std::vector<double> want(static_cast<size_t>(dpse.numel()), 0);
    for (int64_t b = 0; b < c.batch * c.heads; ++b) {
      for (int64_t i = 0; i < c.rows; ++i) {
        const int64_t shift = std::max<int64_t>(0, c.pse_first - i);
        const int64_t row = c.pse_rows == 1 ? 0 : i + shift - c.pse_first;
        for (int64_t j = 0; j + shift < c.keys; ++j) {
          want[static_cast<size_t>((b * c.pse_rows + row) * c.keys + j + shift)] +=
              exact.dpse[static_cast<size_t>((b * c.rows + i) * c.keys + j)];
        }
      }
    }
    const double terms = static_cast<double>(c.dv * (c.pse_rows < c.rows ? c.rows : 1)) * 20;
    for (int64_t i = 0; i < dpse.numel(); ++i) {
      const double exactly = want[static_cast<size_t>(i)];
      ASSERT_NEAR(dpse.Get(i), exactly, 0.51 * UlpSize(c.dtype, exactly) + 4 * unit * terms) << what << " dpse " << i;
    }
  }
};

TEST(Attention, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      for (const auto& [rows, keys] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {5, 7}, {17, 16}, {33, 140}}) {
        for (const int64_t d : {1, 8, 33}) {
          Config c;
          c.dtype = dtype;
          c.batch = rows < 10 ? 2 : 1;
          c.heads = 4;
          c.kv_heads = 2;
          c.rows = rows;
          c.keys = keys;
          c.d = d;
          c.dv = d == 33 ? 20 : d;
          Call(c, seed++).Check("full");
          if (SmallTests() && d != 8) continue;
          c.high = keys - rows;
          Call(c, seed++).Check("causal");
        }
      }
    }
  });
}

TEST(Attention, RulesMasksBiasAndSink) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 100;
    for (const DType dtype : FloatDTypes()) {
      Config base;
      base.dtype = dtype;
      base.batch = 2;
      base.rows = SmallTests() ? 35 : 70;
      base.keys = SmallTests() ? 35 : 150;
      Config c = base;
      c.low = -20;
      c.high = 3;
      Call(c, seed++).Check("band");
      c.low = 4;
      c.high = 30;
      Call(c, seed++).Check("band aside");
      c = base;
      c.high = -10;
      c.prefix = 6;
      Call(c, seed++).Check("prefix");
      c = base;
      c.high = -10;
      Call(c, seed++).Check("rows without keys");
      c = base;
      c.scale = -0.3;
      Call(c, seed++).Check("negative scale");
      for (const double hidden : {0.3, 0.97, 1.1}) {
        for (const int64_t mask_rows : {0, 1}) {
          c = base;
          c.hidden = hidden;
          c.mask_rows = mask_rows;
          Call(c, seed++).Check("mask");
        }
      }
      for (const int64_t pse_rows : {base.rows, int64_t{1}}) {
        c = base;
        c.pse_rows = pse_rows;
        c.sink = true;
        c.hidden = 0.2;
        c.keep_prob = 0.7;
        c.scale = -0.3;
        Call(c, seed++).Check("pse, sink, dropout");
      }
    }
  });
}

TEST(Attention, Ropes) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 200;
    for (const DType dtype : FloatDTypes()) {
      for (const auto& [d, rope] : std::vector<std::pair<int64_t, int64_t>>{{7, 3}, {16, 8}, {33, 18}}) {
        Config c;
        c.dtype = dtype;
        c.heads = 4;
        c.kv_heads = 2;
        c.rows = 40;
        c.keys = 140;
        c.high = 100;
        c.d = d;
        c.rope = rope;
        c.hidden = d == 16 ? 0.2 : 0;
        Call(c, seed++).Check("rope");
      }
    }
  });
}

// More rows than a unit of the backward: several units of one head, and of several heads, add to the same keys.
TEST(Attention, ManyUnits) {
  uint64_t seed = 300;
  for (const int64_t pse_rows : {0, 1}) {
    for (const auto& [rows, keys, high] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
             {1100, 300, -300}, {1100, 1100, 0}, {300, 500, 150}, {1050, 40, kUnboundedBand}}) {
      Config c;
      c.dtype = pse_rows == 0 ? DType::kF32 : DType::kF64;
      c.heads = 4;
      c.kv_heads = 2;
      c.rows = rows;
      c.keys = keys;
      c.high = high;
      c.low = high == 0 ? -200 : -kUnboundedBand;
      c.d = c.dv = 4;
      c.pse_rows = pse_rows;
      if (SmallTests() && rows * keys > 200000) continue;
      for (const int threads : {1, 3}) {
        WithThreads(threads, [&] { Call(c, seed++).Check("many units"); });
      }
    }
  }
}

// The last rows of a bias that depends on i - j alone stand for all of them.
TEST(Attention, CompressedPse) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 400;
    for (const int64_t rows : SmallTests() ? std::vector<int64_t>{60} : std::vector<int64_t>{60, 560}) {
      Config c;
      c.dtype = rows == 60 ? DType::kF32 : DType::kF64;
      c.batch = 2;
      c.rows = c.keys = rows;
      c.high = 0;
      c.d = c.dv = 4;
      c.pse_rows = 20;
      c.pse_first = rows - 20;
      Call(c, seed++).Check("compressed pse");
    }
  });
}

// Documents in one row of tokens, empty ones among them.
TEST(Attention, PackedSequences) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.rows = 50;
    c.keys = 60;
    Call call(c, 5);
    call.in.sequences = {{0, 0, 0, 9, 0, 20, -kUnboundedBand, 11, 0},
                         {0, 1, 9, 0, 20, 4, -kUnboundedBand, 0, 0},
                         {0, 2, 9, 30, 24, 0, -kUnboundedBand, 0, 0},
                         {0, 3, 39, 11, 24, 36, -5, 0, 0}};
    call.Check("packed");
  });
}

// One thread packs short sequences block by block as it comes to them; for many threads these are too few, and their
// keys are packed by all of them. Both give the same bits.
TEST(Attention, ShortSequences) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Config c;
    c.dtype = dtype;
    c.kv_heads = 2;
    c.d = c.dv = 4;
    const std::vector<int64_t> lengths = {280, 7, 140, 1, 0, 33, 64};
    for (const int64_t n : lengths) c.rows += n;
    c.keys = c.rows -= 5;
    std::vector<double> first;
    for (const int threads : {1, 16}) {
      WithThreads(threads, [&] {
        Call call(c, 6);
        call.in.sequences.clear();
        int64_t begin = 0;
        for (const int64_t n : lengths) {
          const auto index = static_cast<int64_t>(call.in.sequences.size());
          call.in.sequences.push_back({0, index, begin, n, begin, n, -kUnboundedBand, 0, 0});
          begin += n;
        }
        call.Check("short");
        if (first.empty()) first = call.out.ToDoubles();
        EXPECT_EQ(call.out.ToDoubles(), first) << threads;
      });
    }
  }
}

// Keys from 12 on are hidden from the queries before them, and query 5 sees no key behind it.
TEST(Attention, HiddenKeysDoNotLeak) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        Config c;
        c.dtype = dtype;
        c.rows = c.keys = 20;
        c.high = 0;
        const auto near = [&](const char* what, Buffer& got, Buffer& want, int64_t cols, int64_t begin, int64_t end) {
          for (int64_t i = 0; i < want.numel(); ++i) {
            if (i / cols % c.rows < begin || i / cols % c.rows >= end) continue;
            const double error = dtype == DType::kF32 ? 1e-5 : 0.01 * std::fabs(want.Get(i)) + 1e-3;
            ASSERT_NEAR(got.Get(i), want.Get(i), error) << what << " " << i;
          }
        };
        Call clean(c, 3), keys(c, 3), query(c, 3);
        for (int64_t i = 12 * c.d; i < c.keys * c.d; ++i) {
          keys.k.Set(i, bad);
          keys.v.Set(i, bad);
        }
        for (int64_t i = 5 * c.d; i < 6 * c.d; ++i) query.q.Set(i, bad);
        for (int64_t i = 5 * c.dv; i < 6 * c.dv; ++i) query.dy.Set(i, bad);
        for (Call* call : {&clean, &keys, &query}) {
          for (int64_t i = 0; i < call->dy.numel(); ++i) {
            if (i / c.dv % c.rows >= 12) call->dy.Set(i, 0);
          }
          call->Forward();
          call->Backward();
        }
        near("out", keys.out, clean.out, c.dv, 0, 12);
        near("dq", keys.dq, clean.dq, c.d, 0, 12);
        near("dk", query.dk, clean.dk, c.d, 6, c.keys);
        near("dv", query.dv, clean.dv, c.dv, 6, c.keys);
      }
    }
  });
}

// The generator's pattern depends on where an element is, not on who computes it.
TEST(Attention, DropoutIsTheSameForEveryTargetAndThreadCount) {
  std::vector<double> first;
  ForEachSimdTarget([&](const std::string&) {
    for (const int threads : {1, 3}) {
      WithThreads(threads, [&] {
        Config c;
        c.rows = 40;
        c.keys = 150;
        c.dv = 150;
        c.d = 1;
        Call call(c, 1);
        call.in.dropout = {0.6, 11, 5, nullptr};
        call.q.Fill([](int64_t) { return 0; });
        call.v.Fill([](int64_t i) { return i / 150 % 150 == i % 150 ? 1 : 0; });
        call.Forward();
        std::vector<double> kept;
        double total = 0;
        for (const double x : call.out.ToDoubles()) total += kept.emplace_back(x > 0 ? 1 : 0);
        if (first.empty()) first = kept;
        EXPECT_EQ(kept, first);
        EXPECT_NEAR(total / static_cast<double>(kept.size()), 0.6, 0.02);
      });
    }
  });
}

TEST(Attention, ResultsDoNotDependOnThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Config c;
    c.dtype = dtype;
    c.heads = 4;
    c.rows = c.keys = SmallTests() ? 100 : 1300;
    c.kv_heads = 1;
    c.high = 0;
    c.rope = 4;
    std::vector<std::vector<double>> first;
    for (const int threads : {1, 2, 7}) {
      WithThreads(threads, [&] {
        Call call(c, 2);
        call.Forward();
        call.Backward();
        std::vector<std::vector<double>> all;
        for (const Buffer* b :
             {&call.out, &call.max, &call.sum, &call.dq, &call.dk, &call.dv, &call.dq_rope, &call.dk_rope}) {
          all.push_back(b->ToDoubles());
        }
        if (first.empty()) first = all;
        EXPECT_EQ(all, first) << threads;
      });
    }
  }
}

TEST(Attention, Errors) {
  Config c;
  const auto fails = [&](const std::function<void(Call&)>& change, const std::string& part) {
    Call call(c, 1);
    change(call);
    ExpectError([&] { call.Forward(); }, "op", part);
  };
  fails([](Call& x) { x.in.k.size[1] = 3; }, "multiple");
  fails([](Call& x) { x.in.k.size[3] = 7; }, "key has shape");
  fails([](Call& x) { x.in.v.size[2] = 4; }, "value has shape");
  fails([](Call& x) { x.in.v.dtype = DType::kF64; }, "one dtype");
  fails([](Call& x) { x.in.dropout.keep_prob = 0; }, "keep_prob");
  fails([](Call& x) { x.in.q.rank = 3; }, "4 dimensions");
  Call call(c, 1);
  call.Forward();
  TensorView bad = call.dq.view();
  bad.size[2] = 4;
  AttentionGrads grads = call.Grads();
  grads.dq = bad;
  ExpectError(
      [&] {
        AttentionBackward("op", call.in, call.dy.view(), call.out.view(), call.max.view(), call.sum.view(), grads);
      },
      "op", "dq");
  c.rope = 4;
  fails([](Call& x) { x.in.k_rope.rank = 0; }, "go together");
  fails([](Call& x) { x.in.k_rope.size[3] = 3; }, "key_rope has shape");
}

}  // namespace
}  // namespace jumar::testing
