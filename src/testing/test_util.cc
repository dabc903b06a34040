#include "testing/test_util.h"

#include <omp.h>

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numbers>
#include <sstream>

#include "jumar/error.h"

namespace jumar::testing {
namespace {

constexpr size_t kRedZone = 256;
constexpr uint8_t kRedByte = 0xA5;

struct Format {
  int digits;   // significand bits with the hidden one
  int min_exp;  // of the smallest normal, as in 2^min_exp
  int max_exp;  // of the largest finite
};

Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return {8, -126, 127};
    case DType::kF16:
      return {11, -14, 15};
    case DType::kF32:
      return {24, -126, 127};
    default:
      return {53, -1022, 1023};
  }
}

template <typename To, typename From>
To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace

double UlpSize(DType dtype, double value) {
  const Format f = FormatOf(dtype);
  const double a = std::abs(value);
  if (!std::isfinite(a)) return std::ldexp(1.0, f.max_exp - f.digits + 1);
  int exponent = a == 0 ? f.min_exp : std::ilogb(a);
  exponent = std::min(std::max(exponent, f.min_exp), f.max_exp);
  return std::ldexp(1.0, exponent - f.digits + 1);
}

// Rounds the quotient value / ulp, which is exact, to nearest even.
double RoundTo(DType dtype, double value) {
  if (dtype == DType::kF64 || !std::isfinite(value) || value == 0) return value;
  const Format f = FormatOf(dtype);
  const double ulp = UlpSize(dtype, value);
  const double rounded = std::nearbyint(value / ulp) * ulp;
  const double limit = std::ldexp(2.0 - std::ldexp(1.0, 1 - f.digits), f.max_exp);
  if (std::abs(rounded) > limit) return std::copysign(INFINITY, value);
  return rounded;
}

double LoadAsDouble(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF64:
      return static_cast<const double*>(data)[i];
    case DType::kBF16:
      return BitsAs<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
    case DType::kF16: {
      const uint16_t h = static_cast<const uint16_t*>(data)[i];
      const int exponent = (h >> 10) & 31;
      const int mantissa = h & 1023;
      const double sign = (h & 0x8000) != 0 ? -1.0 : 1.0;
      if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
      if (exponent == 0) return sign * std::ldexp(mantissa, -24);
      return sign * std::ldexp(1024 + mantissa, exponent - 25);
    }
    case DType::kI32:
      return static_cast<const int32_t*>(data)[i];
    case DType::kBool:
      return static_cast<const uint8_t*>(data)[i];
    default:
      return static_cast<double>(static_cast<const int64_t*>(data)[i]);
  }
}

void StoreFromDouble(void* data, DType dtype, int64_t i, double v) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(v);
      return;
    case DType::kF64:
      static_cast<double*>(data)[i] = v;
      return;
    case DType::kBF16: {
      uint16_t bits =
          std::isnan(v) ? 0x7FC0 : static_cast<uint16_t>(BitsAs<uint32_t>(static_cast<float>(RoundTo(dtype, v))) >> 16);
      static_cast<uint16_t*>(data)[i] = bits;
      return;
    }
    case DType::kF16: {
      const double r = RoundTo(dtype, v);
      const uint16_t sign = std::signbit(r) ? 0x8000 : 0;
      const double a = std::abs(r);
      uint16_t bits;
      if (std::isnan(v)) {
        bits = 0x7E00;
      } else if (std::isinf(a)) {
        bits = 0x7C00;
      } else if (a < 0x1p-14) {
        bits = static_cast<uint16_t>(std::ldexp(a, 24));
      } else {
        const int e = std::ilogb(a);
        bits = static_cast<uint16_t>(((e + 15) << 10) + (static_cast<int>(std::ldexp(a, 10 - e)) - 1024));
      }
      static_cast<uint16_t*>(data)[i] = bits | sign;
      return;
    }
    case DType::kI32:
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(v);
      return;
    case DType::kBool:
      static_cast<uint8_t*>(data)[i] = v != 0 ? 1 : 0;
      return;
    default:
      static_cast<int64_t*>(data)[i] = static_cast<int64_t>(v);
  }
}

Buffer::Buffer(DType dtype, const std::vector<int64_t>& sizes) : Buffer(dtype, sizes, {}) {}

Buffer::Buffer(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides)
    : view_(Contiguous(nullptr, dtype, sizes)) {
  int64_t extent = view_.numel() == 0 ? 0 : 1;
  for (int i = 0; i < view_.rank; ++i) {
    if (!strides.empty()) view_.stride[i] = strides[static_cast<size_t>(i)];
    if (extent > 0) extent += (view_.size[i] - 1) * view_.stride[i];
  }
  bytes_ = static_cast<size_t>(extent) * SizeOf(dtype);
  memory_.assign(bytes_ + 2 * kRedZone + 64, kRedByte);
  // Element-aligned but, on purpose, not vector-aligned.
  const auto base = reinterpret_cast<uintptr_t>(memory_.data());
  begin_ = kRedZone + (64 - base % 64) % 64 + SizeOf(dtype);
  view_.data = memory_.data() + begin_;
  for (int64_t i = 0; i < extent; ++i) StoreFromDouble(view_.data, dtype, i, IsFloating(dtype) ? NAN : -1.0);
}

int64_t Buffer::Offset(int64_t i) const {
  int64_t offset = 0;
  for (int d = view_.rank - 1; d >= 0; --d) {
    offset += i % view_.size[d] * view_.stride[d];
    i /= view_.size[d];
  }
  return offset;
}

std::vector<double> Buffer::ToDoubles() const {
  std::vector<double> values(static_cast<size_t>(numel()));
  for (int64_t i = 0; i < numel(); ++i) values[static_cast<size_t>(i)] = Get(i);
  return values;
}

void Buffer::Fill(const std::function<double(int64_t)>& value) {
  for (int64_t i = 0; i < numel(); ++i) Set(i, value(i));
}

void Buffer::FillRandom(uint64_t seed, double scale, double shift) {
  Random random(seed);
  Fill([&](int64_t) { return random.Normal() * scale + shift; });
}

void Buffer::CheckRedZones(const std::string& what) const {
  for (size_t i = 0; i < memory_.size(); ++i) {
    if (i >= begin_ && i < begin_ + bytes_) continue;
    ASSERT_EQ(memory_[i], kRedByte) << what << ": byte " << static_cast<int64_t>(i) - static_cast<int64_t>(begin_)
                                    << " of a buffer of " << bytes_ << " bytes was written";
  }
}

uint64_t Random::Next() {
  state_ ^= state_ << 13;
  state_ ^= state_ >> 7;
  state_ ^= state_ << 17;
  return state_ * 0x2545F4914F6CDD1Dull;
}

double Random::Normal() {
  const double u = (Uniform() + 1.0) * 0.5 + 0x1p-54;
  const double v = Uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(std::numbers::pi * v);
}

double ExpectUlp(const Buffer& actual, const std::vector<double>& expected, double max_ulp, const std::string& what,
                 double abs_floor) {
  EXPECT_EQ(actual.numel(), static_cast<int64_t>(expected.size())) << what;
  double worst = 0;
  int64_t worst_at = -1;
  for (int64_t i = 0; i < actual.numel(); ++i) {
    const double a = actual.Get(i);
    const double e = expected[static_cast<size_t>(i)];
    double error;
    if (std::isnan(a) || std::isnan(e)) {
      error = std::isnan(a) && std::isnan(e) ? 0 : INFINITY;
    } else if (std::isinf(a) || std::isinf(RoundTo(actual.view().dtype, e))) {
      error = a == RoundTo(actual.view().dtype, e) ? 0 : INFINITY;
    } else {
      error = std::max(0.0, std::abs(a - e) - abs_floor) / UlpSize(actual.view().dtype, e);
    }
    if (!(error <= worst)) {
      worst = error;
      worst_at = i;
    }
  }
  EXPECT_LE(worst, max_ulp) << what << ": worst element " << worst_at << " of " << Describe(actual.view()) << ": got "
                            << (worst_at < 0 ? 0 : actual.Get(worst_at)) << ", expected "
                            << (worst_at < 0 ? 0 : expected[static_cast<size_t>(worst_at)]);
  return worst;
}

namespace {

// Is `name` one of the words of `list`?
bool Listed(const char* list, const std::string& name) {
  std::istringstream words(list);
  std::string word;
  while (words >> word) {
    if (word == name) return true;
  }
  return false;
}

}  // namespace

void ForEachSimdTarget(const std::function<void(const std::string&)>& body) {
  const char* only = std::getenv("JUMAR_TEST_TARGETS");
  bool any = false;
  for (const std::string& target : SimdTargets()) {
    if (only != nullptr && !Listed(only, target)) continue;
    any = true;
    SCOPED_TRACE("SIMD target " + target);
    SetSimdTarget(target);
    body(target);
    if (::testing::Test::HasFatalFailure()) break;
  }
  SetSimdTarget("");
  EXPECT_TRUE(any) << "JUMAR_TEST_TARGETS=\"" << only << "\" names no usable target";
}

bool SmallTests() { return std::getenv("JUMAR_TEST_SMALL") != nullptr; }

void WithThreads(int threads, const std::function<void()>& body) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  body();
  omp_set_num_threads(before);
}

void ExpectError(const std::function<void()>& f, const std::string& op, const std::string& part) {
  try {
    f();
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_EQ(text.rfind(op, 0), 0u) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
    return;
  }
  ADD_FAILURE() << op << ": no error; expected one with \"" << part << "\"";
}

}  // namespace jumar::testing
