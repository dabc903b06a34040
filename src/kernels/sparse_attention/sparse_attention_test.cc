#include "kernels/sparse_attention/sparse_attention.h"

#include <cmath>
#include <limits>

#include "kernels/sparse_attention/sparse_attention_ref.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

struct Config {
  DType dtype = DType::kF32;
  int64_t batch = 1, heads = 4, kv_heads = 1, queries = 6, keys = 9, d = 8, dr = 0, dv = 8;
  int64_t ids = 5, block = 1;
  bool causal = true, sinks = false, shared = false;
  int64_t spread = 0;
  DType index = DType::kI32;
};

class Call {
 public:
  Call(const Config& config, uint64_t seed)
      : c(config),
        compute(c.dtype == DType::kF64 ? DType::kF64 : DType::kF32),
        q(Tokens(c.queries, c.heads, c.d)),
        k(Tokens(c.keys, c.kv_heads, c.d)),
        v(Tokens(c.keys, c.kv_heads, c.dv)),
        q_rope(Tokens(c.queries, c.heads, c.dr)),
        k_rope(Tokens(c.keys, c.kv_heads, c.dr)),
        dy(Tokens(c.queries, c.heads, c.dv)),
        out(Tokens(c.queries, c.heads, c.dv)),
        dq(Tokens(c.queries, c.heads, c.d)),
        dk(Tokens(c.keys, c.kv_heads, c.d)),
        dv(Tokens(c.keys, c.kv_heads, c.dv)),
        dq_rope(Tokens(c.queries, c.heads, c.dr)),
        dk_rope(Tokens(c.keys, c.kv_heads, c.dr)),
        indices(c.index, {c.batch, c.queries, c.kv_heads, c.ids}),
        max(compute, {c.batch, c.kv_heads, c.queries, c.heads / c.kv_heads}),
        sum(compute, {c.batch, c.kv_heads, c.queries, c.heads / c.kv_heads}),
        sinks(compute, {c.heads}),
        dsinks(compute, {c.heads}) {
    for (Buffer* x : {&q, &k, &v, &q_rope, &k_rope, &dy, &sinks}) x->FillRandom(seed++);
    Random random(seed);
    const int64_t blocks = (c.keys + c.block - 1) / c.block;
    // A fifth of the ids is -1, and so is one whole row; some come twice.
    indices.Fill([&](int64_t i) {
      if (i / c.ids % (c.queries * c.kv_heads) == c.queries / 2) return -1.0;
      const double x = random.Uniform() * 0.5 + 0.5;
      return x < 0.2 ? -1.0 : std::floor((x - 0.2) / 0.8 * static_cast<double>(blocks));
    });
    in.q = q.view();
    in.k = k.view();
    in.v = c.shared ? k.view() : v.view();
    if (c.dr > 0) {
      in.q_rope = q_rope.view();
      in.k_rope = k_rope.view();
    }
    in.indices = indices.view();
    if (c.sinks) in.sinks = sinks.view();
    in.scale = 0.4;
    in.block_size = c.block;
    in.causal = c.causal;
    for (int64_t b = 0; b < c.batch; ++b) in.sequences.push_back({b, 0, c.queries, 0, c.keys});
  }

  void Forward() { SparseAttention("op", in, out.view(), max.view(), sum.view()); }
  void Backward() {
    SparseAttentionGradients g{dq.view(), dk.view(), dv.view(), {}, {}, {}};
    if (c.dr > 0) {
      g.dq_rope = dq_rope.view();
      g.dk_rope = dk_rope.view();
    }
    if (c.sinks) g.dsinks = dsinks.view();
    SparseAttentionBackward("op", in, dy.view(), out.view(), max.view(), sum.view(), g);
  }

  ref::SparseAttentionResult Exact() const {
    return ref::SparseAttention(
        in, dy.view(), [](const TensorView& x, int64_t b, int64_t i, int64_t h, int64_t j) -> double {
          const int64_t last = j * x.stride[x.rank - 1];
          const int64_t at = x.rank == 1 ? last : b * x.stride[0] + i * x.stride[1] + h * x.stride[2] + last;
          if (x.dtype == DType::kI32) return x.ptr<int32_t>()[at];
          if (x.dtype == DType::kI64) return static_cast<double>(x.ptr<int64_t>()[at]);
          return LoadAsDouble(x.data, x.dtype, at);
        });
  }

  void Check(const std::string& what) {
    Forward();
    Backward();
    const ref::SparseAttentionResult exact = Exact();
    const double u = c.dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
    // Scores are sums of terms of at most a few units, and shift all of a row's probabilities.
    const double score = 40.0 * static_cast<double>(c.d + c.dr + 16) * in.scale * u;
    const double unit = 4 * score + static_cast<double>(c.ids * c.block + c.queries * c.heads + 16) * u;
    const double half = c.dtype == DType::kBF16 ? 0x1p-8 : c.dtype == DType::kF16 ? 0x1p-11 : 0;
    Near(out, exact.out, exact.out_size, unit, what + " out");
    Near(dv, exact.dv, exact.dv_size, 2 * unit, what + " dv");
    Near(dq, exact.dq, exact.dq_size, 4 * unit + half, what + " dq");
    Near(dk, exact.dk, exact.dk_size, 4 * unit + half, what + " dk");
    if (c.dr > 0) {
      Near(dq_rope, exact.dq_rope, exact.dq_rope_size, 4 * unit + half, what + " dq_rope");
      Near(dk_rope, exact.dk_rope, exact.dk_rope_size, 4 * unit + half, what + " dk_rope");
    }
    for (size_t i = 0; i < exact.max.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      ASSERT_NEAR(max.Get(at), exact.max[i], score + 4 * u * std::abs(exact.max[i])) << what << " max " << i;
      ASSERT_NEAR(sum.Get(at), exact.sum[i], unit * exact.sum[i]) << what << " sum " << i;
    }
    for (int64_t h = 0; h < c.heads && c.sinks; ++h) {
      ASSERT_NEAR(dsinks.Get(h), exact.dsinks[static_cast<size_t>(h)],
                  static_cast<double>(c.batch * c.queries * c.dv) * 4 * (unit + half))
          << what << " dsinks";
    }
    for (const Buffer* x : {&q, &k, &v, &q_rope, &k_rope, &dy, &out, &dq, &dk, &dv, &dq_rope, &dk_rope, &max, &sum}) {
      x->CheckRedZones(what);
    }
  }

  Config c;
  DType compute;
  Buffer q, k, v, q_rope, k_rope, dy, out, dq, dk, dv, dq_rope, dk_rope, indices, max, sum, sinks, dsinks;
  SparseAttentionInputs in;

 private:
  // With `spread`, heads before tokens in memory and every so many columns.
  Buffer Tokens(int64_t rows, int64_t heads, int64_t cols) const {
    const std::vector<int64_t> sizes{c.batch, rows, heads, cols};
    if (c.spread == 0) return Buffer(c.dtype, sizes);
    return Buffer(c.dtype, sizes, {heads * rows * cols * c.spread, cols * c.spread, rows * cols * c.spread, c.spread});
  }

  static void Near(const Buffer& actual, const std::vector<double>& exact, const std::vector<double>& size, double unit,
                   const std::string& what) {
    for (int64_t i = 0; i < actual.numel(); ++i) {
      const auto at = static_cast<size_t>(i);
      const double allowed = 0.51 * UlpSize(actual.view().dtype, exact[at]) + unit * size[at];
      ASSERT_LE(std::abs(actual.Get(i) - exact[at]), allowed) << what << " at " << i;
    }
  }
};

TEST(SparseAttention, MatchesTheOracleOnEveryTarget) {
  ForEachSimdTarget([&](const std::string&) {
    uint64_t seed = 1;
    for (const DType dtype : FloatDTypes()) {
      Config c;
      c.dtype = dtype;
      Call(c, seed += 20).Check("small");
      c.spread = 2;
      c.batch = 2;
      c.index = DType::kI64;
      Call(c, seed += 20).Check("strides");
      c.heads = 20;
      c.kv_heads = 2;
      Call(c, seed += 20).Check("strides, ten heads");
      c = Config();
      c.dtype = dtype;
      c.heads = 40;
      c.d = c.dv = 64;
      c.dr = 32;
      Call(c, seed += 20).Check("columns of whole panels");
      c.spread = 1;
      Call(c, seed += 20).Check("columns of whole panels, heads before tokens");
      for (int64_t* columns : {&c.d, &c.dr, &c.dv}) {
        --*columns;
        Call(c, seed += 20).Check("one odd number of columns");
        ++*columns;
      }
      c.heads = 52;
      Call(c, seed += 20).Check("a second panel of two vectors");
      c = Config();
      c.dtype = dtype;
      c.sinks = true;
      for (const int64_t heads : {1, 6, 17, 40}) {
        c.heads = heads;
        c.d = heads == 6 ? 300 : 33;
        c.dr = heads == 17 ? 9 : 0;
        c.dv = heads == 17 ? 1 : 20;
        c.queries = 13;
        c.keys = 29;
        c.ids = heads == 6 ? 260 : 11;  // more slots than a run of sums
        Call(c, seed += 20).Check(std::to_string(heads) + " heads");
      }
      c.heads = 12;
      c.kv_heads = 3;
      c.block = 4;
      c.keys = 26;
      c.ids = 5;
      c.causal = false;
      Call(c, seed += 20).Check("groups, blocks");
      c.causal = true;
      c.queries = 31;  // the first queries are before all keys
      Call(c, seed += 20).Check("more queries than keys");
      c.ids = 0;
      Call(c, seed += 20).Check("no ids");
    }
  });
}

// Enough keys and slots for several blocks of keys, units enough for several groups.
TEST(SparseAttention, BlocksOfKeys) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.queries = 20;
    c.keys = 640;
    c.d = 216;
    c.dv = 9;
    c.ids = 200;
    c.sinks = true;
    Call(c, 3).Check("blocks");
    c.causal = false;
    c.heads = 18;
    c.kv_heads = 2;
    c.batch = 2;
    c.queries = 9;
    c.dr = 3;
    c.dtype = DType::kBF16;
    Call(c, 4).Check("two heads of keys");
    c = Config();
    c.queries = 20;
    c.keys = 640;
    c.d = 216;
    c.ids = 200;
    Call packed(c, 5);
    packed.indices.Fill([](int64_t i) { return static_cast<double>(i * 7 % 280); });
    packed.in.sequences = {{0, 0, 8, 0, 300}, {0, 8, 12, 300, 340}};
    packed.Check("packed");
  });
}

// Few queries with many slots: a query is computed in parts.
TEST(SparseAttention, FewQueries) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.keys = 1300;
    c.ids = 1100;
    c.d = c.dv = 20;
    for (const int64_t queries : {1, 2, 15, 16}) {
      c.queries = queries;
      c.sinks = queries == 2;
      c.heads = queries == 15 ? 3 : 9;
      c.dtype = queries == 2 ? DType::kBF16 : DType::kF32;
      Call(c, 3).Check(std::to_string(queries) + " queries");
      Call none(c, 4);
      // All slots in the last part, and none at all.
      none.indices.Fill(
          [&](int64_t i) { return i < c.ids && i % c.ids >= c.ids - 40 ? static_cast<double>(i) : -1.0; });
      none.Check("empty parts");
    }
  });
}

// Fewer slots than keys: only the rows that are picked are widened.
TEST(SparseAttention, FewSlots) {
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Config c;
      c.dtype = dtype;
      c.batch = 2;
      c.queries = 3;
      c.keys = 90;
      c.kv_heads = 2;
      c.ids = 9;
      c.d = 19;
      c.dr = 5;
      c.dv = 7;
      Call(c, 8).Check("few slots");
      c.dv = c.d;
      c.shared = true;
      Call(c, 9).Check("few slots, keys that are values");
    }
  });
}

TEST(SparseAttention, KeysThatAreValues) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.shared = true;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      c.dtype = dtype;
      Call(c, 7).Check("shared");
    }
  });
}

// Lengths of a padded batch, and sequences in one row of tokens, an empty one among them.
TEST(SparseAttention, Sequences) {
  ForEachSimdTarget([&](const std::string&) {
    Config c;
    c.queries = 20;
    c.keys = 30;
    Call packed(c, 5);
    packed.in.sequences = {{0, 0, 7, 0, 12}, {0, 7, 0, 12, 4}, {0, 7, 13, 16, 14}};
    packed.Check("packed");
    c.batch = 2;
    Call padded(c, 6);
    padded.in.sequences = {{0, 0, 12, 0, 30}, {1, 0, 20, 0, 3}};
    padded.Check("padded");
  });
}

TEST(SparseAttention, KeysThatAreNoSlotDoNotLeak) {
  ForEachSimdTarget([&](const std::string&) {
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      Config c;
      c.dr = 4;
      if (std::isnan(bad)) {
        c.dtype = DType::kBF16;
        c.heads = 9;
      }
      Call clean(c, 3), dirty(c, 3);
      for (Call* call : {&clean, &dirty}) {
        call->indices.Fill([&](int64_t i) { return static_cast<double>(i % 5 == 3 ? 8 : i % 5); });
      }
      // Token 3 is nobody's, token 8 the last query's alone.
      for (Buffer* x : {&dirty.k, &dirty.v, &dirty.k_rope}) {
        const int64_t cols = x->view().size[3];
        for (int64_t i = 0; i < cols; ++i) x->Set(3 * cols + i, bad);
      }
      for (Call* call : {&clean, &dirty}) {
        call->Forward();
        call->Backward();
      }
      EXPECT_EQ(dirty.out.ToDoubles(), clean.out.ToDoubles());
      EXPECT_EQ(dirty.dq.ToDoubles(), clean.dq.ToDoubles());
      EXPECT_EQ(dirty.dk.ToDoubles(), clean.dk.ToDoubles());
      EXPECT_EQ(dirty.dv.ToDoubles(), clean.dv.ToDoubles());
    }
  });
}

// Infinities and NaN among what is read come out where plain sums have them.
TEST(SparseAttention, InfinitiesStayInfinities) {
  std::vector<std::vector<int>> first;
  ForEachSimdTarget([&](const std::string&) {
    std::vector<std::vector<int>> classes;
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      for (Buffer Call::*where : {&Call::k, &Call::v, &Call::q, &Call::dy}) {
        Config c;
        c.dtype = DType::kBF16;
        c.heads = 18;
        c.kv_heads = 2;
        c.d = c.dv = 70;
        c.queries = 10;
        Call call(c, 11);
        (call.*where).Set(c.heads * c.d + 3, bad);
        call.Forward();
        call.Backward();
        if (std::isnan(bad)) {
          const std::vector<double> out = call.out.ToDoubles(), exact = call.Exact().out;
          for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(std::isnan(out[i]), std::isnan(exact[i])) << i;
        }
        for (const Buffer* x : {&call.out, &call.dq, &call.dk, &call.dv}) {
          std::vector<int> kinds;
          for (const double value : x->ToDoubles()) {
            kinds.push_back(std::isnan(value) ? 2 : std::isinf(value) ? (value > 0 ? 1 : -1) : 0);
          }
          classes.push_back(kinds);
        }
      }
    }
    if (first.empty()) first = classes;
    EXPECT_EQ(classes, first);
  });
}

TEST(SparseAttention, FewQueriesDoNotDependOnThreads) {
  Config c;
  c.queries = 2;
  c.keys = 1300;
  c.ids = 1100;
  std::vector<double> first;
  for (const int threads : {1, 2, 7}) {
    WithThreads(threads, [&] {
      Call call(c, 2);
      call.Forward();
      if (first.empty()) first = call.out.ToDoubles();
      EXPECT_EQ(call.out.ToDoubles(), first) << threads;
    });
  }
}

TEST(SparseAttention, ResultsDoNotDependOnThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Config c;
    c.dtype = dtype;
    c.queries = SmallTests() ? 40 : 150;
    c.keys = 1400;
    c.ids = 150;
    c.heads = 18;
    c.d = 48;
    c.dr = 8;
    std::vector<std::vector<double>> first;
    for (const int threads : {1, 2, 7}) {
      WithThreads(threads, [&] {
        Call call(c, 2);
        call.Forward();
        call.Backward();
        std::vector<std::vector<double>> all;
        for (const Buffer* x : {&call.out, &call.max, &call.sum, &call.dq, &call.dk, &call.dv, &call.dk_rope}) {
          all.push_back(x->ToDoubles());
        }
        if (first.empty()) first = all;
        EXPECT_EQ(all, first) << threads;
      });
    }
  }
}

TEST(SparseAttention, NamesTheFirstWrongId) {
  Config c;
  c.queries = c.keys = 700;
  c.ids = 60;
  for (const DType index : {DType::kI32, DType::kI64}) {
    c.index = index;
    for (const int threads : {1, 2, 7}) {
      WithThreads(threads, [&] {
        Call call(c, 1);
        for (const int64_t at : {699 * 60, 350 * 60 + 9, 350 * 60 + 8, 600 * 60}) call.indices.Set(at, 700);
        ExpectError([&] { call.Forward(); }, "op", "sparse_indices 700 at position [0, 350, 0, 8]");
      });
    }
  }
}

TEST(SparseAttention, Errors) {
  const Config c;
  const auto fails = [&](const std::function<void(Call&)>& change, const std::string& part) {
    Call call(c, 1);
    change(call);
    ExpectError([&] { call.Forward(); }, "op", part);
  };
  fails([](Call& x) { x.in.k.size[2] = 3; }, "multiple");
  fails([](Call& x) { x.in.k.size[3] = 7; }, "key must be");
  fails([](Call& x) { x.in.v.dtype = DType::kF64; }, "value must be");
  fails([](Call& x) { x.in.q_rope = x.q.view(); }, "come together");
  fails([](Call& x) { x.in.indices.dtype = DType::kF32; }, "sparse_indices must be");
  fails([](Call& x) { x.in.block_size = 0; }, "sparse_block_size");
  fails([](Call& x) { x.in.sinks = x.dsinks.view(), x.in.sinks.size[0] = 3; }, "sinks");
  fails([](Call& x) { x.indices.Set(13, -2); }, "-2 at position [0, 2, 0, 3]");
  fails([](Call& x) { x.indices.Set(29, 9); }, "9 at position [0, 5, 0, 4]");
  Call call(c, 1);
  call.Forward();
  TensorView bad = call.dq.view();
  bad.size[2] = 3;
  ExpectError(
      [&] {
        SparseAttentionBackward("op", call.in, call.dy.view(), call.out.view(), call.max.view(), call.sum.view(),
                                {bad, call.dk.view(), call.dv.view(), {}, {}, {}});
      },
      "op", "dq");
}

}  // namespace
}  // namespace jumar::testing
