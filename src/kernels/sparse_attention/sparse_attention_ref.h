// Sparse attention in plain fp64 loops, from the formulas of sparse_attention.h: the oracle of the test.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/sparse_attention/sparse_attention.h"
#include "simd/panel.h"

namespace jumar::ref {

// Row-major, with sums of magnitudes beside them: what errors are measured against.
struct SparseAttentionResult {
  std::vector<double> out, max, sum, dq, dk, dv, dq_rope, dk_rope, dsinks;
  std::vector<double> out_size, dq_size, dk_size, dv_size, dq_rope_size, dk_rope_size;
};

// get(x, b, i, h, c): an element of a view as double.
using SparseReader = std::function<double(const TensorView&, int64_t, int64_t, int64_t, int64_t)>;

inline SparseAttentionResult SparseAttention(const SparseAttentionInputs& in, const TensorView& dy,
                                             const SparseReader& get) {
  const int64_t queries = in.q.size[1], heads = in.q.size[2], kv_heads = in.k.size[2], dv = in.v.size[3];
  const int64_t group = heads / kv_heads;
  SparseAttentionResult r;
  const auto at = [](const TensorView& x, int64_t b, int64_t i, int64_t h, int64_t c) {
    return static_cast<size_t>(((b * x.size[1] + i) * x.size[2] + h) * x.size[3] + c);
  };
  const auto zeros = [](const TensorView& x, std::initializer_list<std::vector<double>*> all) {
    for (auto* v : all) v->assign(x.rank == 0 ? 0 : static_cast<size_t>(x.numel()), 0);
  };
  zeros(dy, {&r.out, &r.out_size});
  zeros(in.q, {&r.dq, &r.dq_size});
  zeros(in.k, {&r.dk, &r.dk_size});
  zeros(in.v, {&r.dv, &r.dv_size});
  zeros(in.q_rope, {&r.dq_rope, &r.dq_rope_size});
  zeros(in.k_rope, {&r.dk_rope, &r.dk_rope_size});
  const bool sink = in.sinks.rank != 0;
  const auto sink_of = [&](int64_t h) { return get(in.sinks, 0, 0, 0, h); };
  const auto statistic = [&](int64_t b, int64_t i, int64_t h) {
    return static_cast<size_t>(((b * kv_heads + h / group) * queries + i) * group + h % group);
  };
  r.max.assign(static_cast<size_t>(in.q.size[0] * queries * heads), kLowestScore);
  r.sum.assign(r.max.size(), sink ? 1 : 0);
  for (int64_t b = 0; b < in.q.size[0] && sink; ++b) {
    for (int64_t i = 0; i < queries; ++i) {
      for (int64_t h = 0; h < heads; ++h) r.max[statistic(b, i, h)] = sink_of(h);
    }
  }
  r.dsinks.assign(static_cast<size_t>(heads), 0);
  // Columns of q and k: those of the ropes follow.
  struct Columns {
    const TensorView& q;
    const TensorView& k;
    std::vector<double>&dq, &dq_size, &dk, &dk_size;
  };
  const Columns parts[] = {{in.q, in.k, r.dq, r.dq_size, r.dk, r.dk_size},
                           {in.q_rope, in.k_rope, r.dq_rope, r.dq_rope_size, r.dk_rope, r.dk_rope_size}};
  for (const SequencePair& s : in.sequences) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kh = h / group;
      for (int64_t i = 0; i < s.q_len; ++i) {
        const int64_t row = s.q_begin + i;
        const int64_t limit = in.causal ? std::min(s.k_len, i + s.k_len - s.q_len + 1) : s.k_len;
        std::vector<int64_t> slots;
        for (int64_t j = 0; j < in.indices.size[3]; ++j) {
          const auto id = static_cast<int64_t>(get(in.indices, s.batch, row, kh, j));
          for (int64_t o = 0; o < in.block_size && id >= 0; ++o) {
            if (id * in.block_size + o < limit) slots.push_back(s.k_begin + id * in.block_size + o);
          }
        }
        std::vector<double> p;
        double max = sink ? sink_of(h) : kLowestScore;
        for (const int64_t t : slots) {
          double dot = 0;
          for (const Columns& c : parts) {
            for (int64_t x = 0; x < (c.q.rank == 0 ? 0 : c.q.size[3]); ++x) {
              dot += get(c.q, s.batch, row, h, x) * get(c.k, s.batch, t, kh, x);
            }
          }
          p.push_back(dot * in.scale);
          max = std::max(max, p.back());
        }
        double sum = sink ? std::exp(sink_of(h) - max) : 0;
        for (double& x : p) sum += x = std::exp(x - max);
        r.max[statistic(s.batch, row, h)] = max;
        r.sum[statistic(s.batch, row, h)] = sum;
        double delta = 0, delta_size = 0;
        for (int64_t c = 0; c < dv; ++c) {
          const size_t o = at(dy, s.batch, row, h, c);
          for (size_t j = 0; j < slots.size(); ++j) {
            const double term = p[j] / sum * get(in.v, s.batch, slots[j], kh, c);
            r.out[o] += term;
            r.out_size[o] += std::abs(term);
          }
          const double g = get(dy, s.batch, row, h, c);
          delta += g * r.out[o];
          delta_size += std::abs(g) * r.out_size[o];
        }
        if (sink) r.dsinks[static_cast<size_t>(h)] -= std::exp(sink_of(h) - max) / sum * delta;
        for (size_t j = 0; j < slots.size(); ++j) {
          const double w = p[j] / sum;
          double dp = 0, dp_size = 0;
          for (int64_t c = 0; c < dv; ++c) {
            const double g = get(dy, s.batch, row, h, c);
            const double v = get(in.v, s.batch, slots[j], kh, c);
            dp += g * v;
            dp_size += std::abs(g * v);
            r.dv[at(in.v, s.batch, slots[j], kh, c)] += w * g;
            r.dv_size[at(in.v, s.batch, slots[j], kh, c)] += std::abs(w * g);
          }
          const double ds = w * (dp - delta) * in.scale;
          const double size = std::abs(w * in.scale) * (dp_size + delta_size);
          for (const Columns& c : parts) {
            for (int64_t x = 0; x < (c.q.rank == 0 ? 0 : c.q.size[3]); ++x) {
              const double q = get(c.q, s.batch, row, h, x);
              const double k = get(c.k, s.batch, slots[j], kh, x);
              c.dq[at(c.q, s.batch, row, h, x)] += ds * k;
              c.dq_size[at(c.q, s.batch, row, h, x)] += size * std::abs(k);
              c.dk[at(c.k, s.batch, slots[j], kh, x)] += ds * q;
              c.dk_size[at(c.k, s.batch, slots[j], kh, x)] += size * std::abs(q);
            }
          }
        }
      }
    }
  }
  return r;
}

}  // namespace jumar::ref
