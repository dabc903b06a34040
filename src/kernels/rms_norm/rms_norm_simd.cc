#include "base/simd_dispatch.h"
#include "kernels/rms_norm/rms_norm_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rms_norm/rms_norm_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Elements whose sum stays in vector lanes before it goes to fp64.
constexpr size_t kBlock = 4096;
// Rows whose dgamma terms are added in the compute type before they go to fp64.
constexpr int64_t kFlushRows = 32;

// Sum over [0, n) of term(load) where load(p) reads p + i widened. Four sums hide the latency of the additions.
template <class D, class Term>
HWY_INLINE double SumRow(D d, size_t n, const Term& term) {
  const size_t lanes = hn::Lanes(d);
  double total = 0;
  for (size_t block = 0; block < n; block += kBlock) {
    const size_t end = HWY_MIN(block + kBlock, n);
    auto s0 = hn::Zero(d);
    auto s1 = hn::Zero(d);
    auto s2 = hn::Zero(d);
    auto s3 = hn::Zero(d);
    size_t i = block;
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      s0 = hn::Add(s0, term([&](const auto* p) HWY_ATTR { return LoadWide(d, p + i); }));
      s1 = hn::Add(s1, term([&](const auto* p) HWY_ATTR { return LoadWide(d, p + i + lanes); }));
      s2 = hn::Add(s2, term([&](const auto* p) HWY_ATTR { return LoadWide(d, p + i + 2 * lanes); }));
      s3 = hn::Add(s3, term([&](const auto* p) HWY_ATTR { return LoadWide(d, p + i + 3 * lanes); }));
    }
    for (; i + lanes <= end; i += lanes) {
      s0 = hn::Add(s0, term([&](const auto* p) HWY_ATTR { return LoadWide(d, p + i); }));
    }
    if (i < end) {
      s1 = hn::Add(s1, term([&](const auto* p) HWY_ATTR { return LoadWideN(d, p + i, end - i); }));
    }
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)))));
  }
  return total;
}

// gate * sigmoid(gate)
template <class D, class V>
HWY_INLINE V Silu(D d, V gate) {
  return hn::Mul(gate, SigmoidOf(d, gate));
}

template <typename T, bool kAdd, bool kGate>
void ForwardRows(const RmsForwardRows& a, int64_t begin, int64_t end) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const auto n = static_cast<size_t>(a.x->cols);
  const C* gamma = static_cast<const C*>(a.gamma);
  C* rstd_out = static_cast<C*>(a.rstd);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = a.x->Row<const T>(r);
    T* y = a.y->Row<T>(r);
    if constexpr (kAdd) {
      const T* x2 = a.add->Row<const T>(r);
      T* sum = a.sum->Row<T>(r);
      ForEachVector(d, n,
                    [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Add(load(x), load(x2)), sum); });
      x = sum;
    }
    const double squares = SumRow(d, n, [&](const auto& load) HWY_ATTR {
      const auto v = load(x);
      return hn::Mul(v, v);
    });
    // The root is taken in fp64 so that rstd carries only its own rounding.
    const C rstd = static_cast<C>(1.0 / std::sqrt(squares / static_cast<double>(n) + a.epsilon));
    rstd_out[r] = rstd;
    const auto scale = hn::Set(d, rstd);
    if constexpr (kGate) {
      const T* gate = a.gate->Row<const T>(r);
      ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
        const auto normed = hn::Mul(hn::Mul(load(x), scale), load(gamma));
        store(hn::Mul(normed, Silu(d, load(gate))), y);
      });
    } else {
      ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
        store(hn::Mul(hn::Mul(load(x), scale), load(gamma)), y);
      });
    }
  }
}

template <typename T, bool kAdd, bool kGate>
void BackwardRows(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  const auto n = static_cast<size_t>(a.x->cols);
  const C* gamma = static_cast<const C*>(a.gamma);
  const C* rstd_in = static_cast<const C*>(a.rstd);
  ScratchFrame frame;
  C* partial = frame.Alloc<C>(a.x->cols);
  // dy * silu(gate) of the row, for the second pass.
  C* gated_dy = kGate ? frame.Alloc<C>(a.x->cols) : nullptr;
  std::fill(a.dgamma, a.dgamma + n, 0.0);
  std::fill(partial, partial + n, C(0));
  for (int64_t r = begin; r < end; ++r) {
    const T* dy_row = a.dy->Row<const T>(r);
    const T* x = a.x->Row<const T>(r);
    T* dx = a.dx->Row<T>(r);
    const auto rstd = hn::Set(d, rstd_in[r]);
    if constexpr (kGate) {
      const T* gate = a.gate->Row<const T>(r);
      T* dgate = a.dgate->Row<T>(r);
      const auto one = hn::Set(d, C(1));
      ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
        const auto dy = load(dy_row);
        const auto z = load(gate);
        const auto s = SigmoidOf(d, z);
        const auto normed = hn::Mul(hn::Mul(load(x), rstd), load(gamma));
        const auto slope = hn::Mul(s, hn::MulAdd(z, hn::Sub(one, s), one));
        store(hn::Mul(dy, hn::Mul(z, s)), gated_dy);
        store(hn::Mul(hn::Mul(dy, normed), slope), dgate);
      });
    }
    const auto backward = [&](const auto* dy) HWY_ATTR {
      const double dot = SumRow(d, n, [&](const auto& load) HWY_ATTR {
        return hn::Mul(hn::Mul(load(dy), load(gamma)), hn::Mul(load(x), rstd));
      });
      const auto mean = hn::Set(d, static_cast<C>(dot / static_cast<double>(n)));
      const T* add = kAdd ? a.add->Row<const T>(r) : nullptr;
      ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
        const auto g = load(dy);
        const auto xhat = hn::Mul(load(x), rstd);
        store(hn::MulAdd(g, xhat, load(partial)), partial);
        auto out = hn::Mul(rstd, hn::NegMulAdd(xhat, mean, hn::Mul(g, load(gamma))));
        if constexpr (kAdd) out = hn::Add(out, load(add));
        store(out, dx);
      });
    };
    if constexpr (kGate) {
      backward(static_cast<const C*>(gated_dy));
    } else {
      backward(dy_row);
    }
    if ((r - begin) % kFlushRows == kFlushRows - 1 || r == end - 1) {
      for (size_t i = 0; i < n; ++i) {
        a.dgamma[i] += static_cast<double>(partial[i]);
        partial[i] = C(0);
      }
    }
  }
}

template <typename T>
void Forward(const RmsForwardRows& a, int64_t begin, int64_t end) {
  if (a.add != nullptr) {
    ForwardRows<T, true, false>(a, begin, end);
  } else if (a.gate != nullptr) {
    ForwardRows<T, false, true>(a, begin, end);
  } else {
    ForwardRows<T, false, false>(a, begin, end);
  }
}

template <typename T>
void Backward(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  if (a.add != nullptr) {
    BackwardRows<T, true, false>(a, begin, end);
  } else if (a.gate != nullptr) {
    BackwardRows<T, false, true>(a, begin, end);
  } else {
    BackwardRows<T, false, false>(a, begin, end);
  }
}

void ForwardAny(const RmsForwardRows& a, int64_t begin, int64_t end) {
  switch (a.x->dtype) {
    case DType::kF32:
      return Forward<float>(a, begin, end);
    case DType::kBF16:
      return Forward<BF16>(a, begin, end);
    case DType::kF16:
      return Forward<F16>(a, begin, end);
    default:
      return Forward<double>(a, begin, end);
  }
}

void BackwardAny(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  switch (a.x->dtype) {
    case DType::kF32:
      return Backward<float>(a, begin, end);
    case DType::kBF16:
      return Backward<BF16>(a, begin, end);
    case DType::kF16:
      return Backward<F16>(a, begin, end);
    default:
      return Backward<double>(a, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(ForwardAny);
HWY_EXPORT(BackwardAny);

void RmsForward(const RmsForwardRows& args, int64_t begin, int64_t end) {
  JUMAR_DISPATCH(ForwardAny)(args, begin, end);
}
void RmsBackward(const RmsBackwardRows& args, int64_t begin, int64_t end) {
  JUMAR_DISPATCH(BackwardAny)(args, begin, end);
}

}  // namespace jumar
#endif  // HWY_ONCE
