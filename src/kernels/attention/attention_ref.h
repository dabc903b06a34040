// Attention in plain fp64 loops, from the formulas of attention.h: the oracle of the test.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/attention/attention.h"

namespace jumar::ref {

struct AttentionResult {
  std::vector<double> out, max, sum;                              // [B, Nq, Sq, Dv], [B, Nq, Sq]
  std::vector<double> dq, dk, dv, dq_rope, dk_rope, dpse, dsink;  // dpse [sequences, Nq, Sq, Skv]
  // Sums of magnitudes: what errors are measured against.
  std::vector<double> out_size, dq_size, dk_size, dv_size, dq_rope_size, dk_rope_size;
};

// get(x, b, h, i, j): an element of a view as double. keep(s, h, i, j): 0 or 1 / keep_prob. A row's delta is taken from
// `out_of_forward`, as the gradient's formula has it, or from the exact output where it is empty.
struct AttentionReader {
  std::function<double(const TensorView&, int64_t, int64_t, int64_t, int64_t)> get;
  std::function<double(const AttentionSequence&, int64_t, int64_t, int64_t)> keep;
};

inline bool Sees(const AttentionInputs& in, const AttentionSequence& s, int64_t h, int64_t i, int64_t j) {
  if (j < i + s.low || (j > i + s.high && j >= s.prefix)) return false;
  const AttentionMask& m = in.mask;
  if (m.data == nullptr) return true;
  return m.data[(m.size[0] == 1 ? 0 : s.index * m.stride[0]) + (m.size[1] == 1 ? 0 : h * m.stride[1]) +
                i * m.stride[2] + j * m.stride[3]] == 0;
}

inline AttentionResult Attention(const AttentionInputs& in, const TensorView& dy, const AttentionReader& read) {
  const int64_t heads = in.q.size[1], rows = in.q.size[2], d = in.q.size[3], dv = in.v.size[3];
  const int64_t kv_heads = in.k.size[1], keys = in.k.size[2];
  const auto group = kv_heads > 0 ? heads / kv_heads : 1;
  AttentionResult r;
  const auto at = [](const TensorView& x, int64_t b, int64_t h, int64_t i, int64_t c) {
    return static_cast<size_t>(((b * x.size[1] + h) * x.size[2] + i) * x.size[3] + c);
  };
  TensorView out = in.q;
  out.size[3] = dv;
  for (auto* x : {&r.out, &r.out_size}) x->assign(static_cast<size_t>(out.numel()), 0);
  for (auto* x : {&r.dq, &r.dq_size}) x->assign(static_cast<size_t>(in.q.numel()), 0);
  for (auto* x : {&r.dk, &r.dk_size}) x->assign(static_cast<size_t>(in.k.numel()), 0);
  for (auto* x : {&r.dv, &r.dv_size}) x->assign(static_cast<size_t>(in.v.numel()), 0);
  const bool rope = in.q_rope.rank != 0;
  if (rope) {
    for (auto* x : {&r.dq_rope, &r.dq_rope_size}) x->assign(static_cast<size_t>(in.q_rope.numel()), 0);
    for (auto* x : {&r.dk_rope, &r.dk_rope_size}) x->assign(static_cast<size_t>(in.k_rope.numel()), 0);
  }
  for (auto* x : {&r.max, &r.sum}) x->assign(static_cast<size_t>(in.q.size[0] * heads * rows), 0);
  r.dpse.assign(in.sequences.size() * static_cast<size_t>(heads * rows * keys), 0);
  r.dsink.assign(static_cast<size_t>(heads), 0);
  for (const AttentionSequence& s : in.sequences) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kh = h / group;
      for (int64_t i = 0; i < s.q_len; ++i) {
        const int64_t row = s.q_begin + i;
        std::vector<double> p(static_cast<size_t>(s.k_len), 0), raw(static_cast<size_t>(s.k_len), 0);
        std::vector<char> sees(static_cast<size_t>(s.k_len), 0);
        const bool sink = in.sink.rank != 0;
        const double extra = sink ? read.get(in.sink, 0, 0, 0, h) : 0;
        double max = sink ? extra : kLowestScore;
        for (int64_t j = 0; j < s.k_len; ++j) {
          if (!Sees(in, s, h, i, j)) continue;
          double dot = 0;
          for (int64_t c = 0; c < d; ++c) {
            dot += read.get(in.q, s.batch, h, row, c) * read.get(in.k, s.batch, kh, s.k_begin + j, c);
          }
          for (int64_t c = 0; rope && c < in.q_rope.size[3]; ++c) {
            dot += read.get(in.q_rope, s.batch, h, row, c) * read.get(in.k_rope, s.batch, kh, s.k_begin + j, c);
          }
          if (in.pse.rank != 0) {
            const int64_t shift = std::max<int64_t>(0, in.pse_first - i);
            dot += read.get(in.pse, in.pse.size[0] == 1 ? 0 : s.index, in.pse.size[1] == 1 ? 0 : h,
                            in.pse.size[2] == 1 ? 0 : i + shift - in.pse_first, j + shift);
          }
          const auto k = static_cast<size_t>(j);
          sees[k] = 1;
          raw[k] = dot * in.scale;
          max = std::max(max, raw[k]);
        }
        double sum = sink ? std::exp(extra - max) : 0;
        for (size_t j = 0; j < p.size(); ++j) {
          if (sees[j] != 0) sum += p[j] = std::exp(raw[j] - max);
        }
        const auto stat = static_cast<size_t>((s.batch * heads + h) * rows + row);
        r.max[stat] = max;
        r.sum[stat] = sum;
        double delta = 0;
        for (int64_t c = 0; c < dv; ++c) {
          double total = 0, size = 0;
          for (int64_t j = 0; j < s.k_len; ++j) {
            if (sees[static_cast<size_t>(j)] == 0) continue;
            const double w = p[static_cast<size_t>(j)] / sum * read.keep(s, h, i, j);
            const double v = read.get(in.v, s.batch, kh, s.k_begin + j, c);
            total += w * v;
            size += std::abs(w * v);
          }
          r.out[at(out, s.batch, h, row, c)] = total;
          r.out_size[at(out, s.batch, h, row, c)] = size;
          delta += read.get(dy, s.batch, h, row, c) * total;
        }
        if (sink && sum > 0) r.dsink[static_cast<size_t>(h)] -= std::exp(extra - max) / sum * delta;
        double delta_size = 0;
        for (int64_t c = 0; c < dv; ++c) {
          delta_size += std::abs(read.get(dy, s.batch, h, row, c)) * r.out_size[at(out, s.batch, h, row, c)];
        }
        for (int64_t j = 0; j < s.k_len; ++j) {
          if (sees[static_cast<size_t>(j)] == 0) continue;
          const double w = p[static_cast<size_t>(j)] / sum;
          const double keep = read.keep(s, h, i, j);
          const int64_t key = s.k_begin + j;
          double dp = 0, dp_size = 0;
          for (int64_t c = 0; c < dv; ++c) {
            const double g = read.get(dy, s.batch, h, row, c);
            const double v = read.get(in.v, s.batch, kh, key, c);
            dp += g * v * keep;
            dp_size += std::abs(g * v * keep);
            r.dv[at(in.v, s.batch, kh, key, c)] += w * keep * g;
            r.dv_size[at(in.v, s.batch, kh, key, c)] += std::abs(w * keep * g);
          }
          const double ds = w * (dp - delta) * in.scale;
          const double size = std::abs(w * in.scale) * (dp_size + delta_size);
          r.dpse[static_cast<size_t>(((s.index * heads + h) * rows + i) * keys + j)] += ds;
          const auto spread = [&](const TensorView& q_view, const TensorView& k_view, std::vector<double>& dq,
                                  std::vector<double>& dq_size, std::vector<double>& dk, std::vector<double>& dk_size) {
            for (int64_t c = 0; c < q_view.size[3]; ++c) {
              const double q = read.get(q_view, s.batch, h, row, c);
              const double k = read.get(k_view, s.batch, kh, key, c);
              dq[at(q_view, s.batch, h, row, c)] += ds * k;
              dq_size[at(q_view, s.batch, h, row, c)] += size * std::abs(k);
              dk[at(k_view, s.batch, kh, key, c)] += ds * q;
              dk_size[at(k_view, s.batch, kh, key, c)] += size * std::abs(q);
            }
          };
          spread(in.q, in.k, r.dq, r.dq_size, r.dk, r.dk_size);
          if (rope) spread(in.q_rope, in.k_rope, r.dq_rope, r.dq_rope_size, r.dk_rope, r.dk_rope_size);
        }
      }
    }
  }
  return r;
}

}  // namespace jumar::ref
