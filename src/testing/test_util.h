// What every kernel test shares: guarded buffers, seeded data, the ulp comparison, and a loop over SIMD targets.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "jumar/runtime.h"
#include "jumar/tensor.h"

namespace jumar::testing {

// Values as double, the oracle's type, converted from and to any floating dtype. Narrowing is nearest even.
double LoadAsDouble(const void* data, DType dtype, int64_t index);
void StoreFromDouble(void* data, DType dtype, int64_t index, double value);
double RoundTo(DType dtype, double value);

// Distance to the next representable value of `dtype` at |value| (the smallest subnormal's size near 0).
double UlpSize(DType dtype, double value);

// A tensor that owns its memory. Each end is a red zone that Check() verifies; fresh memory is NaN.
class Buffer {
 public:
  Buffer(DType dtype, const std::vector<int64_t>& sizes);
  // A view with the given strides (elements) over just enough guarded memory.
  Buffer(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

  const TensorView& view() const { return view_; }
  int64_t numel() const { return view_.numel(); }
  // Logical (row-major) index.
  double Get(int64_t i) const { return LoadAsDouble(view_.data, view_.dtype, Offset(i)); }
  void Set(int64_t i, double v) { StoreFromDouble(view_.data, view_.dtype, Offset(i), v); }
  std::vector<double> ToDoubles() const;
  void Fill(const std::function<double(int64_t)>& value);
  // Signed, roughly normal data, rounded to the dtype; the same for every platform.
  void FillRandom(uint64_t seed, double scale = 1.0, double shift = 0.0);
  // Fails the test when bytes outside the view were written.
  void CheckRedZones(const std::string& what) const;

 private:
  int64_t Offset(int64_t i) const;
  TensorView view_;
  std::vector<uint8_t> memory_;
  size_t begin_ = 0;
  size_t bytes_ = 0;
};

// A deterministic stream of doubles in (-1, 1).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  uint64_t Next();
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-52 - 1.0; }
  double Normal();

 private:
  uint64_t state_;
};

// Fails unless every element is within `max_ulp` ulps (of the output's dtype, at the expected value) of the oracle plus
// `abs_floor`; NaN must meet NaN. Reports the worst element with its index. Returns the largest error in ulps.
double ExpectUlp(const Buffer& actual, const std::vector<double>& expected, double max_ulp, const std::string& what,
                 double abs_floor = 0.0);

// Runs body once for each usable SIMD target, with SCOPED_TRACE of its name, then restores the choice. The environment
// variable JUMAR_TEST_TARGETS, names separated by spaces, picks some of them.
void ForEachSimdTarget(const std::function<void(const std::string&)>& body);

// True where JUMAR_TEST_SMALL is set, as make test-arm does: an emulator is some 30 to 300 times slower than a CPU.
// Tests then leave out what repeats the same code on more data; each dtype, layout, tail and block border still has its
// case.
bool SmallTests();

// Runs body with the given OpenMP thread count.
void WithThreads(int threads, const std::function<void()>& body);

inline const std::vector<DType>& FloatDTypes() {
  static const std::vector<DType> all = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  return all;
}

// Expects f() to throw jumar::Error whose text starts with `op` and contains `part`.
void ExpectError(const std::function<void()>& f, const std::string& op, const std::string& part);

}  // namespace jumar::testing
