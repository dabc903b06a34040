#include <algorithm>
#include <cmath>

#include "base/simd_dispatch.h"
#include "kernels/rms_norm/rms_norm_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rms_norm/rms_norm_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
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

template <typename T, bool kAdd, bool kGate, bool kStream>
void ForwardRows(const RmsForwardRows& a, int64_t begin, int64_t end) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  using V = hn::Vec<decltype(d)>;
  const auto n = static_cast<size_t>(a.x->cols);
  const C* gamma = static_cast<const C*>(a.gamma);
  C* rstd_out = static_cast<C*>(a.rstd);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = a.x->Row<const T>(r);
    T* y = a.y->Row<T>(r);
    if constexpr (kAdd) {
      const T* x2 = a.add->Row<const T>(r);
      T* sum = a.sum->Row<T>(r);
      ForEachTwo(d, n, [&](const auto& load, const auto& store, const auto& /*keep*/) HWY_ATTR {
        V a0 = hn::Zero(d), a1 = hn::Zero(d), b0 = hn::Zero(d), b1 = hn::Zero(d);
        load(x, a0, a1);
        load(x2, b0, b1);
        store(hn::Add(a0, b0), hn::Add(a1, b1), sum);
      });
      x = sum;
    }
    const double squares = SumRow(d, n, [&](const auto& load) HWY_ATTR {
      const V v = load(x);
      return hn::Mul(v, v);
    });
    // The root is taken in fp64 so that rstd carries only its own rounding.
    const C rstd = static_cast<C>(1.0 / std::sqrt(squares / static_cast<double>(n) + a.epsilon));
    rstd_out[r] = rstd;
    const V scale = hn::Set(d, rstd);
    const T* gate = kGate ? a.gate->Row<const T>(r) : nullptr;
    ForEachTwo<kStream>(d, n, [&](const auto& load, const auto& store, const auto& /*keep*/) HWY_ATTR {
      V x0 = hn::Zero(d), x1 = hn::Zero(d), w0 = hn::Zero(d), w1 = hn::Zero(d);
      load(x, x0, x1);
      load(gamma, w0, w1);
      V y0 = hn::Mul(hn::Mul(x0, scale), w0);
      V y1 = hn::Mul(hn::Mul(x1, scale), w1);
      if constexpr (kGate) {
        V z0 = hn::Zero(d), z1 = hn::Zero(d);
        load(gate, z0, z1);
        y0 = hn::Mul(y0, hn::Mul(z0, SigmoidOf(d, z0)));
        y1 = hn::Mul(y1, hn::Mul(z1, SigmoidOf(d, z1)));
      }
      store(y0, y1, y);
    });
  }
  if constexpr (kStream) hwy::FlushStream();
}

// dgate of one row, and dy * silu(gate) for the second pass.
template <typename T, class D>
HWY_INLINE void GateRow(D d, size_t n, const T* dy_row, const T* x, const T* gate, hn::TFromD<D> rstd_value,
                        const hn::TFromD<D>* gamma, hn::TFromD<D>* gated_dy, T* dgate) {
  const auto one = hn::Set(d, hn::TFromD<D>(1));
  const auto rstd = hn::Set(d, rstd_value);
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

template <typename T, bool kAdd, bool kGate, bool kStream>
void BackwardRows(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  using C = ComputeOf<T>;
  const hn::ScalableTag<C> d;
  using V = hn::Vec<decltype(d)>;
  const auto n = static_cast<size_t>(a.x->cols);
  const C* gamma = static_cast<const C*>(a.gamma);
  const C* rstd_in = static_cast<const C*>(a.rstd);
  ScratchFrame frame;
  C* partial = frame.Alloc<C>(a.x->cols);
  C* gated_dy = kGate ? frame.Alloc<C>(a.x->cols) : nullptr;
  std::fill(a.dgamma, a.dgamma + n, 0.0);
  std::fill(partial, partial + n, C(0));
  for (int64_t r = begin; r < end; ++r) {
    const T* dy_row = a.dy->Row<const T>(r);
    const T* x = a.x->Row<const T>(r);
    T* dx = a.dx->Row<T>(r);
    const V rstd = hn::Set(d, rstd_in[r]);
    if constexpr (kGate) {
      GateRow(d, n, dy_row, x, a.gate->Row<const T>(r), rstd_in[r], gamma, gated_dy, a.dgate->Row<T>(r));
    }
    const T* add = kAdd ? a.add->Row<const T>(r) : nullptr;
    const auto backward = [&](const auto* dy) HWY_ATTR {
      const double dot = SumRow(d, n, [&](const auto& load) HWY_ATTR {
        return hn::Mul(hn::Mul(load(dy), load(gamma)), hn::Mul(load(x), rstd));
      });
      const V mean = hn::Set(d, static_cast<C>(dot / static_cast<double>(n)));
      ForEachTwo<kStream>(d, n, [&](const auto& load, const auto& store, const auto& keep) HWY_ATTR {
        V g0 = hn::Zero(d), g1 = hn::Zero(d), x0 = hn::Zero(d), x1 = hn::Zero(d);
        V w0 = hn::Zero(d), w1 = hn::Zero(d), p0 = hn::Zero(d), p1 = hn::Zero(d);
        load(dy, g0, g1);
        load(x, x0, x1);
        load(gamma, w0, w1);
        load(partial, p0, p1);
        x0 = hn::Mul(x0, rstd);
        x1 = hn::Mul(x1, rstd);
        keep(hn::MulAdd(g0, x0, p0), hn::MulAdd(g1, x1, p1), partial);
        V out0 = hn::Mul(rstd, hn::NegMulAdd(x0, mean, hn::Mul(g0, w0)));
        V out1 = hn::Mul(rstd, hn::NegMulAdd(x1, mean, hn::Mul(g1, w1)));
        if constexpr (kAdd) {
          V a0 = hn::Zero(d), a1 = hn::Zero(d);
          load(add, a0, a1);
          out0 = hn::Add(out0, a0);
          out1 = hn::Add(out1, a1);
        }
        store(out0, out1, dx);
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
  if constexpr (kStream) hwy::FlushStream();
}

// Output rows that may be written past the caches: too large to be read back from there, 16-bit or fp32 rows whose
// addresses are all aligned.
bool CanStream(const RowMap& out) {
  constexpr int64_t kStreamBytes = int64_t{32} << 20;
  const auto size = static_cast<int64_t>(SizeOf(out.dtype));
  if (out.dtype == DType::kF64 || out.rows * out.cols * size < kStreamBytes) return false;
  const auto bytes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<uint8_t>()));
  if (reinterpret_cast<uintptr_t>(out.data) % static_cast<uintptr_t>(bytes) != 0) return false;
  for (int i = 0; i < out.rank; ++i) {
    if (out.stride[i] * size % bytes != 0) return false;
  }
  return true;
}

template <typename T, bool kStream>
void ForwardForm(const RmsForwardRows& a, int64_t begin, int64_t end) {
  if (a.add != nullptr) {
    ForwardRows<T, true, false, kStream>(a, begin, end);
  } else if (a.gate != nullptr) {
    ForwardRows<T, false, true, kStream>(a, begin, end);
  } else {
    ForwardRows<T, false, false, kStream>(a, begin, end);
  }
}

template <typename T, bool kStream>
void BackwardForm(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  if (a.add != nullptr) {
    BackwardRows<T, true, false, kStream>(a, begin, end);
  } else if (a.gate != nullptr) {
    BackwardRows<T, false, true, kStream>(a, begin, end);
  } else {
    BackwardRows<T, false, false, kStream>(a, begin, end);
  }
}

template <typename T>
void Forward(const RmsForwardRows& a, int64_t begin, int64_t end) {
  if constexpr (!std::is_same_v<T, double>) {
    if (CanStream(*a.y)) return ForwardForm<T, true>(a, begin, end);
  }
  ForwardForm<T, false>(a, begin, end);
}

template <typename T>
void Backward(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  if constexpr (!std::is_same_v<T, double>) {
    if (CanStream(*a.dx)) return BackwardForm<T, true>(a, begin, end);
  }
  BackwardForm<T, false>(a, begin, end);
}

void ForwardAny(const RmsForwardRows& a, int64_t begin, int64_t end) {
  WithFloat(a.x->dtype, [&](auto type) HWY_ATTR { Forward<decltype(type)>(a, begin, end); });
}

void BackwardAny(const RmsBackwardRows& a, int64_t begin, int64_t end) {
  WithFloat(a.x->dtype, [&](auto type) HWY_ATTR { Backward<decltype(type)>(a, begin, end); });
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
