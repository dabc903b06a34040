// Routers of mixtures of experts: scores, top-k, weights, and their gradient.
//
//   s       = softmax or sigmoid of a row of logits
//   choice  = s + bias;  softmax without bias and groups: the logits themselves, so that the order is exact
//   groups  : E / groups neighbours each; the kept_groups with the largest score (largest choice, or the sum of the
//             two largest) stay, the choices of the others become `fill`
//   indices = the k largest choices, descending; equal ones by their number, lowest first
//   w       = s[indices];  renorm: w / (sum of w + eps);  then w * scale
//
//   dlogits: of w and, where given, of s.  d = scale * dw, q = w / scale, S = sum of w before renorm:
//     u[j]    = d[j], or with renorm (d[j] - sum of d q) / (S + eps), for the chosen experts, 0 for the others
//     softmax   s * (u + ds - sum of s (u + ds)),   sigmoid   s * (1 - s) * (u + ds)
//
// logits [.., E]: fp32, bf16, fp16, fp64, any strides. Computed in fp32 (fp64 for fp64), one rounding at the store.
// Weights are within half an ulp of their dtype plus (M + 8) roundings of the compute type, M the largest distance of
// two logits of the row; gradients within that much of the sum of the magnitudes of their terms.
//
// Order. Indices depend on neither threads nor, without bias, groups and sigmoid, the SIMD target. Softmax: experts
// more than 104 (746 in fp64) below the largest logit have a probability of 0 and are equal. NaN is the largest choice.
// A softmax of NaN, +infinity or nothing but -infinity is NaN throughout, so that its indices are 0 .. k - 1.
//
// Throws jumar::Error, with `op` first, before any memory is written.
#pragma once

#include <limits>

#include "jumar/tensor.h"

namespace jumar {

enum class Scoring { kSoftmax, kSigmoid };
enum class GroupScore { kMax, kTop2 };

// "softmax" or "sigmoid"; "max" or "top2". Throws for other texts.
Scoring ParseScoring(const char* op, const std::string& text);
GroupScore ParseGroupScore(const char* op, const std::string& text);

struct RouterOptions {
  int64_t k = 1;
  Scoring scoring = Scoring::kSoftmax;
  bool renorm = false;
  // Softmax: experts of probability 0 are ordered by their logits too.
  bool all_by_logits = false;
  double scale = 1;
  double eps = 0;
  int64_t groups = 1;
  int64_t kept_groups = 1;
  GroupScore group_score = GroupScore::kTop2;
  double fill = -std::numeric_limits<double>::infinity();
};

// logits [.., E]; bias [E] of any floating dtype (fp64 with fp64 only), may be null; finished [..] bool, may be null:
// where it is true the indices are E. weights [.., k]: dtype of logits or the compute type; indices [.., k] int32 or
// int64; scores [.., E] in the compute type, may be null; row_index, may be null: int32 like indices, element j of row
// r is j * rows + r. Outputs are contiguous.
struct RouterTensors {
  TensorView logits;
  const TensorView* bias = nullptr;
  const TensorView* finished = nullptr;
  TensorView weights;
  TensorView indices;
  const TensorView* scores = nullptr;
  const TensorView* row_index = nullptr;
};

void RouterTopK(const char* op, const RouterTensors& tensors, const RouterOptions& options);

// source [.., E]: the logits, or, with from_scores, s. grad_weights [.., k] and grad_scores [.., E]: either may be
// null; any floating dtype (fp64 goes with fp64). indices: as the forward gave them; a row of E alone is one that was
// finished, whose experts are chosen again by options.k and options.all_by_logits. An index that occurs twice counts
// twice. dlogits: contiguous, [.., E], any floating dtype (fp64 goes with fp64).
struct RouterGradTensors {
  TensorView source;
  bool from_scores = false;
  const TensorView* grad_weights = nullptr;
  const TensorView* grad_scores = nullptr;
  TensorView indices;
  TensorView dlogits;
};

void RouterTopKBackward(const char* op, const RouterGradTensors& tensors, const RouterOptions& options);

}  // namespace jumar
