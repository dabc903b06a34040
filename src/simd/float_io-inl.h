// Loads that widen to the compute type and stores that narrow with one rounding.
//
// A kernel is a template over the stored type T (float, BF16, F16, double) and computes in ComputeOf<T>: float, or
// double for double. Narrowing rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN (made quiet,
// sign and upper payload bits kept). No load or store touches memory outside the given elements.
#include <algorithm>
#include <type_traits>

#include "hwy/highway.h"
#include "jumar/tensor.h"

#if !defined(JUMAR_SIMD_COMPUTE_OF)
#define JUMAR_SIMD_COMPUTE_OF
namespace jumar {
template <typename T>
using ComputeOf = std::conditional_t<std::is_same_v<T, double>, double, float>;
}  // namespace jumar
#endif

#if defined(JUMAR_SIMD_FLOAT_IO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef JUMAR_SIMD_FLOAT_IO_INL_H_
#undef JUMAR_SIMD_FLOAT_IO_INL_H_
#else
#define JUMAR_SIMD_FLOAT_IO_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// f(value of the stored type) for those whose compute type is C.
template <typename C, typename F>
HWY_INLINE auto WithStored(DType dtype, const F& f) {
  if constexpr (std::is_same_v<C, double>) {
    return f(double());
  } else {
    switch (dtype) {
      case DType::kBF16:
        return f(BF16());
      case DType::kF16:
        return f(F16());
      default:
        return f(float());
    }
  }
}

// f(value of the stored type) for every floating dtype.
template <typename F>
HWY_INLINE auto WithFloat(DType dtype, const F& f) {
  return dtype == DType::kF64 ? f(double()) : WithStored<float>(dtype, f);
}

// bf16 bits -> float, exact.
template <class D, class V16>
HWY_INLINE hn::Vec<D> WidenBF16(D d, V16 bits) {
  const hn::RebindToUnsigned<D> du32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

// The float whose upper 16 bits are the rounded bf16 (lower ones are garbage): add 0x7FFF plus the lowest kept bit.
// kCleanNaN: the lower 16 bits of a NaN in v are known to be 0, so that the addition leaves it a NaN. That holds for
// every result of arithmetic on widened bf16 and ordinary constants: a NaN that the CPU makes or passes on is such.
template <bool kCleanNaN = false, class D, class V>
HWY_INLINE auto RoundToBF16Bits(D /*d*/, V v) {
  const hn::RebindToUnsigned<D> du32;
  const auto bits = hn::BitCast(du32, v);
  const auto lsb = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(lsb, hn::Set(du32, 0x7FFFu)));
  if constexpr (kCleanNaN) {
    return rounded;
  } else {
    const auto quiet = hn::Or(bits, hn::Set(du32, 0x00400000u));
    return hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(v)), quiet, rounded);
  }
}

// float -> bf16 bits.
template <class D, class V>
HWY_INLINE auto NarrowBF16(D d, V v) {
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<uint16_t, D> du16;
  return hn::DemoteTo(du16, hn::BitCast(di32, hn::ShiftRight<16>(RoundToBF16Bits(d, v))));
}

// fp16 bits -> float, exact (subnormals included). Integer steps, so that it is the same on targets without F16C.
template <class D, class V16>
HWY_INLINE hn::Vec<D> WidenF16(D d, V16 bits) {
#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
  const hn::RebindToUnsigned<D> du32;
  const auto h = hn::PromoteTo(du32, bits);
  const auto sign = hn::ShiftLeft<16>(hn::And(h, hn::Set(du32, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(h, hn::Set(du32, 0x7FFFu)));
  // Scaling by 2^112 re-biases the exponent and normalises subnormals; infinities and NaN get the full exponent.
  const auto scaled =
      hn::BitCast(du32, hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 5192296858534827628530496329220096.0f)));
  const auto special =
      hn::Gt(hn::BitCast(hn::RebindToSigned<D>(), magnitude), hn::Set(hn::RebindToSigned<D>(), 0x0F7FFFFF));
  const auto inf_nan = hn::Or(magnitude, hn::Set(du32, 0x7F800000u));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(hn::RebindMask(du32, special), inf_nan, scaled)));
#else
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::BitCast(df16, bits));
#endif
}

// float -> fp16 bits, nearest even.
template <class D, class V>
HWY_INLINE auto NarrowF16([[maybe_unused]] D d, V v) {
  const hn::Rebind<uint16_t, D> du16;
#if HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
  const hn::RebindToUnsigned<D> du32;
  const hn::RebindToSigned<D> di32;
  const auto bits = hn::BitCast(du32, v);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7FFFFFFFu));
  const auto m = hn::BitCast(di32, magnitude);
  // Normal results: round the 13 dropped bits and re-bias the exponent by 112.
  const auto lsb = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du32, 1u));
  const auto rounded = hn::Add(magnitude, hn::Add(lsb, hn::Set(du32, 0x0FFFu)));
  const auto normal = hn::Sub(hn::ShiftRight<13>(rounded), hn::Set(du32, 112u << 10));
  // Results below 2^-14: adding 0.5 places the last fp16 subnormal bit at the float's last bit, so the FPU rounds.
  const auto half = hn::Set(d, 0.5f);
  const auto tiny = hn::Sub(hn::BitCast(du32, hn::Add(hn::BitCast(d, magnitude), half)), hn::BitCast(du32, half));
  const auto is_tiny = hn::RebindMask(du32, hn::Lt(m, hn::Set(di32, 113 << 23)));
  const auto is_big = hn::RebindMask(du32, hn::Gt(m, hn::Set(di32, 0x477FEFFF)));
  const auto is_nan = hn::RebindMask(du32, hn::IsNaN(v));
  const auto nan = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du32, 0x03FFu)), hn::Set(du32, 0x7E00u));
  auto out = hn::IfThenElse(is_tiny, tiny, normal);
  out = hn::IfThenElse(is_big, hn::Set(du32, 0x7C00u), out);
  out = hn::IfThenElse(is_nan, nan, out);
  return hn::DemoteTo(du16, hn::BitCast(di32, hn::Or(out, sign)));
#else
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::BitCast(du16, hn::DemoteTo(df16, v));
#endif
}

// Lanes(d) elements from p, widened.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadWide(D d, const T* HWY_RESTRICT p) {
  if constexpr (std::is_same_v<T, BF16> || std::is_same_v<T, F16>) {
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(p));
    if constexpr (std::is_same_v<T, BF16>) {
      return WidenBF16(d, bits);
    } else {
      return WidenF16(d, bits);
    }
  } else {
    return hn::LoadU(d, p);
  }
}

// Lanes(d) elements to p, rounded once.
template <class D, typename T>
HWY_INLINE void StoreNarrow(D d, hn::Vec<D> v, T* HWY_RESTRICT p) {
  if constexpr (std::is_same_v<T, BF16>) {
    hn::StoreU(NarrowBF16(d, v), hn::Rebind<uint16_t, D>(), reinterpret_cast<uint16_t*>(p));
  } else if constexpr (std::is_same_v<T, F16>) {
    hn::StoreU(NarrowF16(d, v), hn::Rebind<uint16_t, D>(), reinterpret_cast<uint16_t*>(p));
  } else {
    hn::StoreU(v, d, p);
  }
}

// The first n < Lanes(d) elements; the other lanes are 0.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadWideN(D d, const T* HWY_RESTRICT p, size_t n) {
  HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
  for (size_t i = 0; i < n; ++i) buffer[i] = p[i];
  return LoadWide(d, buffer);
}

// The first n < Lanes(d) elements.
template <class D, typename T>
HWY_INLINE void StoreNarrowN(D d, hn::Vec<D> v, T* HWY_RESTRICT p, size_t n) {
  HWY_ALIGN T buffer[HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
  StoreNarrow(d, v, buffer);
  for (size_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// Calls body(i, load, store) over [0, n) in whole vectors and one partial: load(p) reads at p + i, store(v, p) writes
// at p + i. One source for body and tail.
template <class D, class Body>
HWY_INLINE void ForEachVector(D d, size_t n, const Body& body) {
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    body([&](const auto* p) HWY_ATTR { return LoadWide(d, p + i); },
         [&](hn::Vec<D> v, auto* p) HWY_ATTR { StoreNarrow(d, v, p + i); });
  }
  if (i < n) {
    const size_t rest = n - i;
    body([&](const auto* p) HWY_ATTR { return LoadWideN(d, p + i, rest); },
         [&](hn::Vec<D> v, auto* p) HWY_ATTR { StoreNarrowN(d, v, p + i, rest); });
  }
}

// 2 * Lanes(d) adjacent elements as two vectors, for elementwise work. Which vector holds which element is up to the
// type (bf16: even ones in `a`, odd ones in `b`, which costs one instruction each); StorePair is the exact inverse.
template <class D, typename T>
HWY_INLINE void LoadPair(D d, const T* HWY_RESTRICT p, hn::Vec<D>& a, hn::Vec<D>& b) {
  if constexpr (std::is_same_v<T, BF16>) {
    const hn::RebindToUnsigned<D> du32;
    const hn::Repartition<uint16_t, D> du16;
    const auto bits = hn::BitCast(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(p)));
    a = hn::BitCast(d, hn::ShiftLeft<16>(bits));
    b = hn::BitCast(d, hn::And(bits, hn::Set(du32, 0xFFFF0000u)));
  } else {
    a = LoadWide(d, p);
    b = LoadWide(d, p + hn::Lanes(d));
  }
}

// kStream: past the caches (non-temporal); p must then be aligned to a vector. kCleanNaN: see RoundToBF16Bits.
template <bool kStream = false, bool kCleanNaN = false, class D, typename T>
HWY_INLINE void StorePair(D d, hn::Vec<D> a, hn::Vec<D> b, T* HWY_RESTRICT p) {
  if constexpr (std::is_same_v<T, BF16> || std::is_same_v<T, F16>) {
    const hn::Repartition<uint16_t, D> du16;
    auto out = hn::Zero(du16);
    if constexpr (std::is_same_v<T, BF16>) {
      const auto even = hn::ShiftRight<16>(RoundToBF16Bits<kCleanNaN>(d, a));
      out = hn::OddEven(hn::BitCast(du16, RoundToBF16Bits<kCleanNaN>(d, b)), hn::BitCast(du16, even));
    } else {
      out = hn::Combine(du16, NarrowF16(d, b), NarrowF16(d, a));
    }
    if constexpr (kStream) {
      hn::Stream(out, du16, reinterpret_cast<uint16_t*>(p));
    } else {
      hn::StoreU(out, du16, reinterpret_cast<uint16_t*>(p));
    }
  } else if constexpr (kStream) {
    hn::Stream(a, d, p);
    hn::Stream(b, d, p + hn::Lanes(d));
  } else {
    hn::StoreU(a, d, p);
    hn::StoreU(b, d, p + hn::Lanes(d));
  }
}

// 2 * Lanes(d) adjacent elements in order: a holds the first half, b the second.
template <class D, typename T>
HWY_INLINE void LoadTwo(D d, const T* HWY_RESTRICT p, hn::Vec<D>& a, hn::Vec<D>& b) {
  a = LoadWide(d, p);
  b = LoadWide(d, p + hn::Lanes(d));
}

// The inverse of LoadTwo, rounded once. kStream: past the caches; p must then be aligned to a vector.
template <bool kStream = false, class D, typename T>
HWY_INLINE void StoreTwo(D d, hn::Vec<D> a, hn::Vec<D> b, T* HWY_RESTRICT p) {
  if constexpr (std::is_same_v<T, BF16>) {
    const hn::Repartition<uint16_t, D> du16;
    // The upper halves of the rounded floats are the odd 16-bit lanes.
    const auto out =
        hn::ConcatOdd(du16, hn::BitCast(du16, RoundToBF16Bits(d, b)), hn::BitCast(du16, RoundToBF16Bits(d, a)));
    if constexpr (kStream) {
      hn::Stream(out, du16, reinterpret_cast<uint16_t*>(p));
    } else {
      hn::StoreU(out, du16, reinterpret_cast<uint16_t*>(p));
    }
  } else {
    StorePair<kStream>(d, a, b, p);
  }
}

// Calls body(load, store, keep) over [0, n), two vectors at a time: load(p, a, b) reads at p + i, store(a, b, p) and
// keep(a, b, p) write at p + i; the rest goes through buffers. kStream: stores go past the caches, so their pointers
// are aligned to vectors and the caller ends with hwy::FlushStream(); what is kept, working arrays, stays in them.
template <bool kStream = false, class D, class Body>
HWY_INLINE void ForEachTwo(D d, size_t n, const Body& body) {
  using V = hn::Vec<D>;
  const size_t step = 2 * hn::Lanes(d);
  size_t i = 0;
  for (; i + step <= n; i += step) {
    body([&](const auto* p, V& a, V& b) HWY_ATTR { LoadTwo(d, p + i, a, b); },
         [&](V a, V b, auto* p) HWY_ATTR { StoreTwo<kStream>(d, a, b, p + i); },
         [&](V a, V b, auto* p) HWY_ATTR { StoreTwo(d, a, b, p + i); });
  }
  if (i < n) {
    const size_t rest = n - i;
    const auto store = [&](V a, V b, auto* p) HWY_ATTR {
      std::remove_cvref_t<decltype(*p)> buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)];
      StoreTwo(d, a, b, buffer);
      std::copy(buffer, buffer + rest, p + i);
    };
    body(
        [&](const auto* p, V& a, V& b) HWY_ATTR {
          std::remove_cvref_t<decltype(*p)> buffer[2 * HWY_MAX_BYTES / sizeof(hn::TFromD<D>)] = {};
          std::copy(p + i, p + i + rest, buffer);
          LoadTwo(d, buffer, a, b);
        },
        store, store);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
