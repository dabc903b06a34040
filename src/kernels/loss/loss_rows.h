// What the losses do with one row of classes, in SIMD. Elements of a row are adjacent; `dtype`s are floating.
#pragma once

#include <cstdint>
#include <limits>

#include "jumar/tensor.h"

namespace jumar {

// Of the elements x of one row or of a part of it. Partial sums in the compute type, blocks of them in fp64.
struct RowStats {
  double max;      // -infinity for no elements
  double sum_exp;  // of e^(x - max); NaN when an element is NaN or +infinity
  double sum;      // of x
};

RowStats LossRowStats(DType dtype, const void* x, int64_t n);

// log of the sum of e^x over everything that was added, in fp64.
class LogSumExp {
 public:
  void Add(const RowStats& part);
  double Value() const;

 private:
  double max_ = -std::numeric_limits<double>::infinity();
  double sum_ = 0;
};

// sum of w[i] * x[i]; w in the compute type of `dtype`.
double LossWeightedSum(DType dtype, const void* x, const void* w, int64_t n);

// out = x - lse, rounded once, where out has the dtype of x.
void LogProbRow(DType dtype, const void* x, double lse, void* out, int64_t n);

// out[i] = scale * e^(x[i] - lse) - shift * w[i], with x[i] <= lse but for rounding; powers under 2^-100 are 0 in fp32;
// w is in the compute type of x, null for ones. x and out are both fp64 or both of other dtypes. out may be x itself
// when its elements are not wider.
struct SoftmaxGrad {
  DType dtype;
  const void* x;
  double lse;
  double scale;
  double shift;
  const void* w;
  DType out_dtype;
  void* out;
  int64_t n;
};

void SoftmaxGradRow(const SoftmaxGrad& row);

// out = x, rounded once; fp32 to any but fp64, or fp64 to fp64.
void NarrowRow(DType from, const void* x, DType to, void* out, int64_t n);

// Single elements, widened or rounded (nearest even).
double LossLoad(DType dtype, const void* data, int64_t index);
void LossStore(DType dtype, void* data, int64_t index, double value);

}  // namespace jumar
