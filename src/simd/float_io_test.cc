// Narrowing and widening, exhaustively for every 16-bit value and for a dense sample of all floats.
#include <cmath>
#include <cstring>

#include "base/simd_dispatch.h"
#include "testing/test_util.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/float_io_test.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "simd/float_io-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void WidenAll(const T* in, size_t n, float* out) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(load(in), out); });
}
template <typename T>
void NarrowAll(const float* in, size_t n, T* out) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, n, [&](const auto& load, const auto& store) HWY_ATTR { store(load(in), out); });
}
void WidenBF16s(const BF16* in, size_t n, float* out) { WidenAll(in, n, out); }
void WidenF16s(const F16* in, size_t n, float* out) { WidenAll(in, n, out); }
void NarrowBF16s(const float* in, size_t n, BF16* out) { NarrowAll(in, n, out); }
void NarrowF16s(const float* in, size_t n, F16* out) { NarrowAll(in, n, out); }

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(WidenBF16s);
HWY_EXPORT(WidenF16s);
HWY_EXPORT(NarrowBF16s);
HWY_EXPORT(NarrowF16s);

namespace testing {
namespace {

float FromBits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

TEST(FloatIo, WidenIsExactForEveryValue) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> out(all.size());
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      if (dtype == DType::kBF16) {
        JUMAR_DISPATCH(WidenBF16s)(reinterpret_cast<const BF16*>(all.data()), all.size(), out.data());
      } else {
        JUMAR_DISPATCH(WidenF16s)(reinterpret_cast<const F16*>(all.data()), all.size(), out.data());
      }
      for (size_t i = 0; i < all.size(); ++i) {
        const double expected = LoadAsDouble(all.data(), dtype, static_cast<int64_t>(i));
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(out[i])) << Name(dtype) << " bits " << i;
        } else {
          ASSERT_EQ(static_cast<double>(out[i]), expected) << Name(dtype) << " bits " << i;
          ASSERT_EQ(std::signbit(out[i]), std::signbit(expected)) << Name(dtype) << " bits " << i;
        }
      }
    }
  });
}

// Every exponent and sign, with the significands around each rounding boundary: 2^32 floats differ only in bits that
// these patterns cover.
std::vector<float> NarrowInputs() {
  std::vector<float> values;
  for (uint32_t high = 0; high < 65536; ++high) {
    for (const uint32_t low :
         {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu, 0x1000u, 0x0FFFu, 0x1001u, 0x3000u}) {
      values.push_back(FromBits(high << 16 | low));
    }
  }
  return values;
}

TEST(FloatIo, NarrowIsNearestEvenAndKeepsNaN) {
  const std::vector<float> in = NarrowInputs();
  std::vector<uint16_t> out(in.size());
  ForEachSimdTarget([&](const std::string&) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      if (dtype == DType::kBF16) {
        JUMAR_DISPATCH(NarrowBF16s)(in.data(), in.size(), reinterpret_cast<BF16*>(out.data()));
      } else {
        JUMAR_DISPATCH(NarrowF16s)(in.data(), in.size(), reinterpret_cast<F16*>(out.data()));
      }
      for (size_t i = 0; i < in.size(); ++i) {
        const double got = LoadAsDouble(out.data(), dtype, static_cast<int64_t>(i));
        if (std::isnan(in[i])) {
          ASSERT_TRUE(std::isnan(got)) << Name(dtype) << " element " << i;
        } else {
          ASSERT_EQ(got, RoundTo(dtype, in[i])) << Name(dtype) << " of " << in[i];
          ASSERT_EQ(std::signbit(got), std::signbit(in[i])) << Name(dtype) << " of " << in[i];
        }
      }
    }
  });
}

TEST(FloatIo, PartialVectorsTouchOnlyTheirElements) {
  ForEachSimdTarget([&](const std::string&) {
    for (int64_t n = 0; n <= 70; ++n) {
      Buffer in(DType::kF32, {n});
      Buffer out(DType::kBF16, {n});
      in.FillRandom(static_cast<uint64_t>(n));
      JUMAR_DISPATCH(NarrowBF16s)(in.view().ptr<float>(), static_cast<size_t>(n), out.view().ptr<BF16>());
      out.CheckRedZones("narrow");
      ExpectUlp(out, in.ToDoubles(), 0.5, "narrow");
    }
  });
}

TEST(FloatIo, OracleRounding) {
  EXPECT_EQ(RoundTo(DType::kBF16, 1.00390625), 1.0);
  EXPECT_EQ(RoundTo(DType::kBF16, 1.01171875), 1.015625);
  EXPECT_EQ(RoundTo(DType::kF16, 65519.0), 65504.0);
  EXPECT_TRUE(std::isinf(RoundTo(DType::kF16, 65520.0)));
  EXPECT_EQ(RoundTo(DType::kF16, 0x1p-25), 0.0);
  EXPECT_EQ(RoundTo(DType::kF16, 0x1.8p-25), 0x1p-24);
}

}  // namespace
}  // namespace testing
}  // namespace jumar
#endif  // HWY_ONCE
