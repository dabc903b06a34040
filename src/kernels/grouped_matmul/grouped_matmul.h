// Matrix products of groups of rows, each group with a weight of its own: the experts of a mixture.
//
//   forward          y[t, n]     = sum over k of x[t, k] * weight[g, k, n]  + bias[g, n]     for t in group g
//   grad of x        dx[t, k]    = sum over n of dy[t, n] * weight[g, k, n]
//   grad of weight   dw[g, k, n] = sum over t in group g of x[t, k] * dy[t, n]
//   grad of bias     db[g, n]    = sum over t in group g of dy[t, n]
//
// x [T, K], dy and y [T, N], weights [K, N], any strides, transposed and expanded ones included; nothing but panels of
// a tile is copied. Rows that belong to no group are zero in y and dx, and are never read; groups without rows give
// zero weight gradients. All groups are computed in one parallel region, so that unequal groups keep every thread busy.
//
// dtypes and numbers are those of gemm.h: fp32, bf16 and fp16 in any mixture or all fp64, products summed in fp32
// (fp64) in an order that depends on K alone, the bias added, one rounding. Results do not depend on the thread count.
//
// All functions throw jumar::Error, with `op` first in the text, before any memory is written.
#pragma once

#include <cstdint>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// Rows [begin, end) of the grouped dimension for each group. Groups do not overlap.
struct RowGroups {
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };
  std::vector<Range> ranges;
  int64_t used = 0;  // rows [0, used) belong to groups

  int64_t count() const { return static_cast<int64_t>(ranges.size()); }
};

// Reads a group list, int32 or int64, for a grouped dimension of `rows`:
//   type 0: [E], the end of each group, not decreasing;
//   type 1: [E], the size of each group;
//   type 2: [E, 2], pairs of a group's index and its size, in the order of the rows; a group that is not named is
//   empty.
// Negative and decreasing values, more rows than there are, and a group named twice are errors that give the value.
RowGroups ParseGroups(const char* op, const TensorView& group_list, int64_t type, int64_t rows);

// One weight a group; `biases` is empty or has one [N] a group, of any floating dtype. y [T, N].
void GroupedMatmul(const char* op, const TensorView& x, const std::vector<TensorView>& weights,
                   const std::vector<TensorView>& biases, const RowGroups& groups, const TensorView& y);

// dx [T, K].
void GroupedMatmulDgrad(const char* op, const TensorView& dy, const std::vector<TensorView>& weights,
                        const RowGroups& groups, const TensorView& dx);

// One dw [K, N] a group. With `add` the products are added to what is there: fp32 (fp64) sums start at it, 16-bit
// values are added to the sum before the one rounding.
void GroupedMatmulWgrad(const char* op, const TensorView& x, const TensorView& dy, const RowGroups& groups,
                        const std::vector<TensorView>& dw, bool add);

// One db [N] a group.
void GroupedMatmulBiasGrad(const char* op, const TensorView& dy, const RowGroups& groups,
                           const std::vector<TensorView>& db);

// Products that have nothing in common: y[i] [M, N] = x[i] [M, K] * weights[i] [K, N] (+ biases[i] [N]), every size of
// every product its own.
void SeparateProducts(const char* op, const std::vector<TensorView>& x, const std::vector<TensorView>& weights,
                      const std::vector<TensorView>& biases, const std::vector<TensorView>& y);

// The E matrices of [E, K, N].
std::vector<TensorView> Unstack(const TensorView& stacked);

}  // namespace jumar
