// fp64 oracle of one slot after another: values and, for each, how far the stated roundings may carry it.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace jumar::reference {

// A value with an error bound that grows with what is added.
struct Bounded {
  double value = 0;
  double error = 0;
};

struct MoeSizes {
  int64_t tokens, top_k, experts, hidden, inner;
};

// All arguments row by row, gate, up [E, H, I], down [E, I, H], as double. eps: a rounding of sums, narrow: one of
// stored values. Sums are allowed one rounding a term.
class MoeOracle {
 public:
  using Doubles = std::vector<double>;

  MoeOracle(const MoeSizes& s, double eps, double narrow, const Doubles& x, const std::vector<int64_t>& ids,
            const Doubles& probs, const Doubles& gate, const Doubles& up, const Doubles& down)
      : s_(s), eps_(eps), narrow_(narrow), x_(x), ids_(ids), probs_(probs), gate_(gate), up_(up), down_(down) {}

  static double Sigmoid(double v) { return 1 / (1 + std::exp(-v)); }

  std::vector<Bounded> Forward() const {
    std::vector<Bounded> y(static_cast<size_t>(s_.tokens * s_.hidden));
    for (int64_t slot = 0; slot < s_.tokens * s_.top_k; ++slot) {
      const int64_t e = ids_[static_cast<size_t>(slot)];
      if (e == s_.experts) continue;
      const int64_t t = slot / s_.top_k;
      const double p = probs_[static_cast<size_t>(slot)];
      for (int64_t i = 0; i < s_.inner; ++i) {
        const Bounded g = Inner(gate_, t, e, i);
        const Bounded u = Inner(up_, t, e, i);
        const double silu = g.value * Sigmoid(g.value);
        const double h = silu * u.value;
        const double off =
            1.1 * g.error * std::abs(u.value) + std::abs(silu) * u.error + (narrow_ + 8 * eps_) * std::abs(h);
        for (int64_t j = 0; j < s_.hidden; ++j) {
          const double w = down_[static_cast<size_t>((e * s_.inner + i) * s_.hidden + j)];
          Bounded& out = y[static_cast<size_t>(t * s_.hidden + j)];
          out.value += p * h * w;
          out.error += std::abs(p * w) * (off + std::abs(h) * eps_ * static_cast<double>(s_.inner + s_.top_k + 2));
        }
      }
    }
    return y;
  }

  struct Gradients {
    std::vector<Bounded> hidden, probs, gate, up, down;
  };

  // g and u of a slot as they were saved, by `saved(slot, i)` and `saved(slot, inner + i)`.
  template <typename Saved>
  Gradients Backward(const Doubles& dy, const Saved& saved) const {
    Gradients out;
    out.hidden.resize(static_cast<size_t>(s_.tokens * s_.hidden));
    out.probs.resize(static_cast<size_t>(s_.tokens * s_.top_k));
    for (auto* w : {&out.gate, &out.up, &out.down}) w->resize(gate_.size());
    const double terms = eps_ * static_cast<double>(s_.tokens * s_.top_k + s_.hidden + 2 * s_.inner + 8);
    for (int64_t slot = 0; slot < s_.tokens * s_.top_k; ++slot) {
      const int64_t e = ids_[static_cast<size_t>(slot)];
      if (e == s_.experts) continue;
      const int64_t t = slot / s_.top_k;
      const double p = probs_[static_cast<size_t>(slot)];
      for (int64_t i = 0; i < s_.inner; ++i) {
        double d = 0;
        double d_size = 0;
        for (int64_t j = 0; j < s_.hidden; ++j) {
          const double term = dy[At(t, s_.hidden, j)] * down_[static_cast<size_t>((e * s_.inner + i) * s_.hidden + j)];
          d += term;
          d_size += std::abs(term);
        }
        const double g = saved(slot, i);
        const double u = saved(slot, s_.inner + i);
        const double sg = Sigmoid(g);
        const double h = g * sg * u;
        Add(&out.probs[static_cast<size_t>(slot)], d * h, std::abs(h) * d_size * (terms + 0.02 * narrow_));
        const double slope = sg * (1 + g * (1 - sg));
        const double dg = p * d * slope * u;
        const double du = p * d * g * sg;
        const double dg_off = std::abs(p * slope * u) * d_size * terms + (std::abs(dg) + std::abs(p * d * u)) * narrow_;
        const double du_off = std::abs(p * g * sg) * d_size * terms + std::abs(du) * narrow_;
        for (int64_t j = 0; j < s_.hidden; ++j) {
          const auto at = static_cast<size_t>((e * s_.hidden + j) * s_.inner + i);
          const double x = x_[At(t, s_.hidden, j)];
          Add(&out.gate[at], x * dg, std::abs(x) * (dg_off + std::abs(dg) * terms));
          Add(&out.up[at], x * du, std::abs(x) * (du_off + std::abs(du) * terms));
          Bounded& dx = out.hidden[At(t, s_.hidden, j)];
          Add(&dx, dg * gate_[at], std::abs(gate_[at]) * (dg_off + std::abs(dg) * terms));
          Add(&dx, du * up_[at], std::abs(up_[at]) * (du_off + std::abs(du) * terms));
          const double v = p * h * dy[At(t, s_.hidden, j)];
          Add(&out.down[static_cast<size_t>((e * s_.inner + i) * s_.hidden + j)], v, std::abs(v) * (terms + narrow_));
        }
      }
    }
    return out;
  }

 private:
  static size_t At(int64_t row, int64_t width, int64_t col) { return static_cast<size_t>(row * width + col); }
  static void Add(Bounded* b, double value, double error) {
    b->value += value;
    b->error += error;
  }
  Bounded Inner(const Doubles& w, int64_t t, int64_t e, int64_t i) const {
    Bounded sum;
    double size = 0;
    for (int64_t j = 0; j < s_.hidden; ++j) {
      const double term = x_[At(t, s_.hidden, j)] * w[static_cast<size_t>((e * s_.hidden + j) * s_.inner + i)];
      sum.value += term;
      size += std::abs(term);
    }
    sum.error = size * eps_ * static_cast<double>(s_.hidden + 2);
    return sum;
  }

  const MoeSizes s_;
  const double eps_;
  const double narrow_;
  const Doubles x_;
  const std::vector<int64_t> ids_;
  const Doubles probs_, gate_, up_, down_;
};

}  // namespace jumar::reference
