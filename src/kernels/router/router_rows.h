// The routers' work on rows, in SIMD, between the checks in router.cc and balance.cc and the arithmetic in
// router_simd.cc. Rows of all maps are adjacent elements. Thread-safe for disjoint ranges of rows.
#pragma once

#include "base/rows.h"
#include "kernels/router/router.h"

namespace jumar {

struct RouteBatch {
  RouterOptions options;
  RowMap logits;
  const void* bias = nullptr;        // compute type
  const RowMap* finished = nullptr;  // one column
  RowMap weights;
  RowMap indices;
  const RowMap* scores = nullptr;
};

void RouteRows(const RouteBatch& batch, int64_t begin, int64_t end);

struct RouteGradBatch {
  RouterOptions options;
  RowMap source;
  bool from_scores = false;
  const RowMap* grad_weights = nullptr;
  const RowMap* grad_scores = nullptr;
  RowMap indices;
  RowMap dlogits;
};

void RouteGradRows(const RouteGradBatch& batch, int64_t begin, int64_t end);

// Adds mask[r] to tokens[e] for the top_k experts of each row, and mask[r] * softmax to probs. mask: one column of any
// dtype, null for ones. Rows whose mask is 0 are not read.
void BalanceRows(const RowMap& logits, const RowMap* mask, int64_t top_k, int64_t begin, int64_t end, double* tokens,
                 double* probs);

// dlogits = mask * p * (v - sum of p v), p = softmax; v in the compute type of logits.
void BalanceGradRows(const RowMap& logits, const RowMap* mask, const void* v, const RowMap& dlogits, int64_t begin,
                     int64_t end);

// Sum of a column of any dtype.
double MaskColumnSum(const RowMap& mask);

// Row of `to` = bias + d, or bias + d - mean of d, d = rate * sign(mean of tokens - tokens); tokens of any dtype.
void BiasRow(const RowMap& bias, const RowMap& tokens, double rate, bool center, const RowMap& to, int64_t row);

// Sum of lse^2.
double ZLossRows(const RowMap& logits, int64_t begin, int64_t end);
// dlogits = scale * lse * softmax.
void ZLossGradRows(const RowMap& logits, double scale, const RowMap& dlogits, int64_t begin, int64_t end);

}  // namespace jumar
