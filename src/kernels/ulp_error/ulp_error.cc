#include "kernels/ulp_error/ulp_error.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "base/widen.h"

namespace jumar {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kGrain = 8192;

struct Format {
  int digits;          // significand bits with the hidden one
  int min_exp;         // of the smallest normal value, 2^min_exp
  int max_exp;         // of the largest finite value
  double to_infinity;  // the smallest magnitude that rounds to infinity
};

Format FormatOf(DType dtype) {
  const auto make = [](int digits, int min_exp, int max_exp) {
    return Format{digits, min_exp, max_exp, std::ldexp(2.0 - std::ldexp(1.0, -digits), max_exp)};
  };
  switch (dtype) {
    case DType::kBF16:
      return make(8, -126, 127);
    case DType::kF16:
      return make(11, -14, 15);
    case DType::kF32:
      return make(24, -126, 127);
    default:
      return Format{53, -1022, 1023, kInfinity};
  }
}

// 2^e for an e whose power is a normal or subnormal double.
double PowerOfTwo(int e) {
  if (e >= -1022) return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52);
  return std::bit_cast<double>(uint64_t{1} << std::max(e + 1074, 0));
}

double UlpAt(const Format& f, double value) {
  const int biased = static_cast<int>(std::bit_cast<uint64_t>(value) >> 52 & 0x7FF);
  return PowerOfTwo(std::clamp(biased - 1023, f.min_exp, f.max_exp) - f.digits + 1);
}

double ErrorOf(const Format& f, double actual, double expected, double slack) {
  if (actual == expected) return 0;
  const bool nan = std::isnan(actual);
  if (nan || std::isnan(expected)) return nan && std::isnan(expected) ? 0 : kInfinity;
  if (std::isinf(expected)) return kInfinity;
  if (std::isinf(actual)) {
    const bool overflow = std::abs(expected) >= f.to_infinity && std::signbit(actual) == std::signbit(expected);
    return overflow ? 0 : kInfinity;
  }
  return std::abs(actual - expected) / (UlpAt(f, expected) + (std::isfinite(slack) ? slack : 0));
}

template <typename T>
UlpErrorResult Scan(const Format& f, const T* actual, const double* expected, const double* slack, int64_t n) {
  UlpErrorResult worst;
  for (int64_t i = 0; i < n; ++i) {
    const double a = actual[i];
    const double error = ErrorOf(f, a, expected[i], slack == nullptr ? 0 : slack[i]);
    worst.nan_mismatches += std::isnan(a) != std::isnan(expected[i]);
    if (worst.index < 0 || error > worst.max_ulp) {
      worst.max_ulp = error;
      worst.index = i;
    }
  }
  return worst;
}

}  // namespace

UlpErrorResult UlpError(const char* op, const TensorView& actual, const TensorView& expected, const TensorView* slack) {
  JUMAR_CHECK(op, IsFloating(actual.dtype), "actual should be float32, bfloat16, float16 or float64, got ",
              Name(actual.dtype));
  JUMAR_CHECK(op, SameShape(actual, expected) && expected.dtype == DType::kF64, "expected should be float64",
              ShapeString(actual), ", got ", Describe(expected));
  if (slack != nullptr) {
    JUMAR_CHECK(op, SameShape(actual, *slack) && slack->dtype == DType::kF64, "slack should be float64",
                ShapeString(actual), ", got ", Describe(*slack));
  }
  const int64_t n = actual.numel();
  UlpErrorResult total;
  if (n == 0) return total;

  ScratchFrame frame;
  const RowMap a = InputRows(actual, actual.rank, frame);
  const auto* e = InputRows(expected, expected.rank, frame).Row<const double>(0);
  const double* s = slack == nullptr ? nullptr : InputRows(*slack, slack->rank, frame).Row<const double>(0);
  const Format format = FormatOf(actual.dtype);
  const DType wide = ComputeType(actual.dtype);
  const int64_t chunks = FixedChunks(n, kGrain);
  std::vector<UlpErrorResult> parts(static_cast<size_t>(chunks));
  ParallelChunks(chunks, [&](int64_t c) {
    const int64_t begin = ChunkBegin(n, chunks, c);
    const int64_t length = ChunkBegin(n, chunks, c + 1) - begin;
    ScratchFrame mine;
    TensorView part = Contiguous(a.data, a.dtype, {length});
    part.data = static_cast<char*>(a.data) + static_cast<size_t>(begin) * SizeOf(a.dtype);
    const void* values = WidenAll(part, wide, 0.0, mine);
    const double* slacks = s == nullptr ? nullptr : s + begin;
    UlpErrorResult& result = parts[static_cast<size_t>(c)];
    result = wide == DType::kF64 ? Scan(format, static_cast<const double*>(values), e + begin, slacks, length)
                                 : Scan(format, static_cast<const float*>(values), e + begin, slacks, length);
    result.index += begin;
  });
  total = parts[0];
  for (size_t c = 1; c < parts.size(); ++c) {
    const int64_t mismatches = total.nan_mismatches + parts[c].nan_mismatches;
    if (parts[c].max_ulp > total.max_ulp) total = parts[c];
    total.nan_mismatches = mismatches;
  }
  return total;
}

}  // namespace jumar
