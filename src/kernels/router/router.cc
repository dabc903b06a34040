#include "kernels/router/router.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/parallel.h"
#include "base/widen.h"
#include "kernels/router/router_checks.h"
#include "kernels/router/router_rows.h"

namespace jumar {
namespace {

// Elements of a range that is worth a thread.
constexpr int64_t kGrain = 8192;

void CheckOptions(const char* op, const RouterOptions& o, int64_t experts) {
  JUMAR_CHECK(op, o.k >= 0 && o.k <= experts, "k must be in [0, ", experts, "], the number of experts, got ", o.k);
  JUMAR_CHECK(op, o.groups >= 1 && experts % o.groups == 0, "the ", experts, " experts do not form ", o.groups,
              " groups of one size");
  JUMAR_CHECK(op, o.kept_groups >= 1 && o.kept_groups <= o.groups, o.kept_groups, " of ", o.groups,
              " groups cannot be kept");
  if (o.groups == 1) return;
  const int64_t size = experts / o.groups;
  JUMAR_CHECK(op, o.group_score == GroupScore::kMax || size >= 2,
              "the sum of a group's two largest needs groups of at least two experts, got ", experts, " experts in ",
              o.groups, " groups");
  JUMAR_CHECK(op, o.fill > -std::numeric_limits<double>::infinity() || o.k <= o.kept_groups * size, "k = ", o.k,
              " exceeds the ", o.kept_groups * size, " experts of the ", o.kept_groups, " groups that are kept");
}

}  // namespace

Scoring ParseScoring(const char* op, const std::string& text) {
  JUMAR_CHECK(op, text == "softmax" || text == "sigmoid", "scoring must be 'softmax' or 'sigmoid', got '", text, "'");
  return text == "softmax" ? Scoring::kSoftmax : Scoring::kSigmoid;
}

GroupScore ParseGroupScore(const char* op, const std::string& text) {
  JUMAR_CHECK(op, text == "max" || text == "top2", "group_score must be 'max' or 'top2', got '", text, "'");
  return text == "max" ? GroupScore::kMax : GroupScore::kTop2;
}

void RouterTopK(const char* op, const RouterTensors& t, const RouterOptions& options) {
  CheckLogits(op, "logits", t.logits);
  const int64_t experts = t.logits.size[t.logits.rank - 1];
  const DType compute = ComputeType(t.logits.dtype);
  CheckOptions(op, options, experts);
  if (t.bias != nullptr) {
    JUMAR_CHECK(op, t.bias->rank == 1 && t.bias->size[0] == experts, "bias ", ShapeString(*t.bias),
                " does not fit the ", experts, " experts of ", ShapeString(t.logits));
    JUMAR_CHECK(op, IsFloating(t.bias->dtype) && (t.bias->dtype != DType::kF64 || compute == DType::kF64), "a bias of ",
                Name(t.bias->dtype), " does not go with ", Name(t.logits.dtype));
  }
  if (t.finished != nullptr) {
    JUMAR_CHECK(op, t.finished->dtype == DType::kBool, "bool tensor expected for finished, got ",
                Name(t.finished->dtype));
    JUMAR_CHECK(op, RowsMatch(*t.finished, t.logits), "finished ", ShapeString(*t.finished), " does not match ",
                ShapeString(t.logits), ": Input rows shoud be same.");
  }
  CheckRows(op, "weights", t.weights, t.logits, options.k);
  JUMAR_CHECK(op, t.weights.dtype == t.logits.dtype || t.weights.dtype == compute, "weights of ", Name(t.weights.dtype),
              " for logits of ", Name(t.logits.dtype));
  CheckRows(op, "indices", t.indices, t.logits, options.k);
  CheckIndexType(op, t.indices);
  if (t.scores != nullptr) {
    CheckRows(op, "scores", *t.scores, t.logits, experts);
    JUMAR_CHECK(op, t.scores->dtype == compute, "scores of ", Name(t.scores->dtype), ", expected ", Name(compute));
  }
  if (t.row_index != nullptr) {
    CheckRows(op, "row_idx", *t.row_index, t.logits, options.k);
    JUMAR_CHECK(op, t.row_index->dtype == DType::kI32, "row_idx of ", Name(t.row_index->dtype));
  }

  ScratchFrame frame;
  RouteBatch batch;
  batch.options = options;
  batch.logits = InputRows(t.logits, 1, frame);
  const int64_t rows = batch.logits.rows;
  if (rows == 0 || experts == 0) return;
  if (t.bias != nullptr) batch.bias = WidenAll(*t.bias, compute, 0.0, frame);
  RowMap finished;
  if (t.finished != nullptr) {
    finished = InputRows(*t.finished, 0, frame);
    batch.finished = &finished;
  }
  batch.weights = ContiguousRows(t.weights);
  batch.indices = ContiguousRows(t.indices);
  RowMap scores;
  if (t.scores != nullptr) {
    scores = ContiguousRows(*t.scores);
    batch.scores = &scores;
  }
  ParallelFor(rows, 1 + kGrain / experts, [&](int64_t begin, int64_t end) {
    RouteRows(batch, begin, end);
    if (t.row_index == nullptr) return;
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t j = 0; j < options.k; ++j) {
        t.row_index->ptr<int32_t>()[r * options.k + j] = static_cast<int32_t>(j * rows + r);
      }
    }
  });
}

void RouterTopKBackward(const char* op, const RouterGradTensors& t, const RouterOptions& options) {
  CheckLogits(op, t.from_scores ? "scores" : "logits", t.source);
  const int64_t experts = t.source.size[t.source.rank - 1];
  const bool f64 = t.source.dtype == DType::kF64;
  CheckOptions(op, options, experts);
  CheckRows(op, "indices", t.indices, t.source, options.k);
  CheckIndexType(op, t.indices);
  const TensorView* grads[] = {t.grad_weights, t.grad_scores, &t.dlogits};
  const char* names[] = {"grad of weights", "grad of scores", "grad of logits"};
  for (int i = 0; i < 3; ++i) {
    if (grads[i] == nullptr) continue;
    CheckRows(op, names[i], *grads[i], t.source, i == 0 ? options.k : experts);
    JUMAR_CHECK(op, IsFloating(grads[i]->dtype) && (grads[i]->dtype == DType::kF64) == f64, names[i], " of ",
                Name(grads[i]->dtype), " does not go with ", Name(t.source.dtype));
  }
  ScratchFrame frame;
  RouteGradBatch batch;
  batch.options = options;
  batch.source = InputRows(t.source, 1, frame);
  batch.from_scores = t.from_scores;
  batch.indices = InputRows(t.indices, 1, frame);
  const int64_t rows = batch.source.rows;
  if (rows == 0 || experts == 0) return;
  CheckIndices(op, batch.indices, experts, !t.from_scores);
  RowMap grad_weights;
  if (t.grad_weights != nullptr) {
    grad_weights = InputRows(*t.grad_weights, 1, frame);
    batch.grad_weights = &grad_weights;
  }
  RowMap grad_scores;
  if (t.grad_scores != nullptr) {
    grad_scores = InputRows(*t.grad_scores, 1, frame);
    batch.grad_scores = &grad_scores;
  }
  batch.dlogits = ContiguousRows(t.dlogits);
  ParallelFor(rows, 1 + kGrain / experts, [&](int64_t begin, int64_t end) { RouteGradRows(batch, begin, end); });
}

}  // namespace jumar
