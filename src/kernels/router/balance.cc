#include "kernels/router/balance.h"

#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "base/widen.h"
#include "kernels/router/router_checks.h"
#include "kernels/router/router_rows.h"

namespace jumar {
namespace {

constexpr int64_t kGrain = 8192;
constexpr int64_t kMinRows = 64;

double ValueAt(const TensorView& view) {
  return view.dtype == DType::kF64 ? *view.ptr<double>() : static_cast<double>(*view.ptr<float>());
}

void SetValue(const TensorView& view, int64_t i, double value) {
  if (view.dtype == DType::kF64) {
    view.ptr<double>()[i] = value;
  } else {
    view.ptr<float>()[i] = static_cast<float>(value);
  }
}

void CheckResult(const char* op, const char* name, const TensorView& view, DType logits, int64_t elements) {
  JUMAR_CHECK(op, view.dtype == ComputeType(logits) && view.numel() == elements, name, " is ", Describe(view),
              ", expected ", elements, " of ", Name(ComputeType(logits)));
}

// The mask as one column, and the sum that everything is divided by.
struct Mask {
  Mask(const char* op, const TensorView* view, const std::vector<TensorView>& layers, ScratchFrame& frame) {
    if (view == nullptr) return;
    for (size_t i = 0; i < layers.size(); ++i) {
      JUMAR_CHECK(op, layers[i].size[0] == view->numel(), "attention_mask ", ShapeString(*view), " has ", view->numel(),
                  " elements, layer ", i, " has ", layers[i].size[0], " rows");
    }
    column = InputRows(*view, 0, frame);
    used = &column;
  }
  RowMap column;
  const RowMap* used = nullptr;
};

void CheckLayers(const char* op, const std::vector<TensorView>& layers, int64_t experts) {
  JUMAR_CHECK(op, !layers.empty(), "gate_logits must hold the logits of at least one layer");
  for (size_t i = 0; i < layers.size(); ++i) {
    JUMAR_CHECK(op, layers[i].rank == 2 && layers[i].size[1] == experts, "gate_logits[", i, "] must be [rows, ",
                experts, "], got ", ShapeString(layers[i]));
    CheckLogits(op, "gate_logits", layers[i]);
    JUMAR_CHECK(op, layers[i].dtype == layers[0].dtype, "gate_logits must have one dtype, got ", Name(layers[0].dtype),
                " and ", Name(layers[i].dtype));
  }
}

// Chunks of rows whose partial sums are added in order.
template <typename F>
std::vector<double> SumOfChunks(int64_t rows, size_t width, const F& chunk_sums) {
  const int64_t chunks = FixedChunks(rows, kMinRows);
  std::vector<double> parts(static_cast<size_t>(chunks) * width, 0.0);
  ParallelChunks(chunks, [&](int64_t c) {
    chunk_sums(ChunkBegin(rows, chunks, c), ChunkBegin(rows, chunks, c + 1), &parts[static_cast<size_t>(c) * width]);
  });
  std::vector<double> sums(width, 0.0);
  for (size_t i = 0; i < parts.size(); ++i) sums[i % width] += parts[i];
  return sums;
}

// Sum of the mask over the rows of all layers.
double MaskSum(const std::vector<TensorView>& layers, const Mask& mask) {
  if (mask.used == nullptr) {
    double rows = 0;
    for (const TensorView& layer : layers) rows += static_cast<double>(layer.size[0]);
    return rows;
  }
  return static_cast<double>(layers.size()) * MaskColumnSum(mask.column);
}

}  // namespace

void LoadBalanceLoss(const char* op, const std::vector<TensorView>& layers, int64_t experts, int64_t top_k,
                     const TensorView* mask_view, const TensorView& loss, const TensorView& tokens) {
  CheckLayers(op, layers, experts);
  JUMAR_CHECK(op, top_k >= 1 && top_k <= experts, "top_k must be in [1, ", experts, "], the number of experts, got ",
              top_k);
  CheckResult(op, "loss", loss, layers[0].dtype, 1);
  CheckResult(op, "tokens_per_expert", tokens, layers[0].dtype, experts);
  ScratchFrame frame;
  const Mask mask(op, mask_view, layers, frame);
  const size_t width = static_cast<size_t>(experts);
  std::vector<double> sums(2 * width, 0.0);
  for (const TensorView& layer : layers) {
    ScratchFrame own;
    const RowMap rows = InputRows(layer, 1, own);
    const std::vector<double> part = SumOfChunks(rows.rows, 2 * width, [&](int64_t begin, int64_t end, double* into) {
      BalanceRows(rows, mask.used, top_k, begin, end, into, into + width);
    });
    for (size_t i = 0; i < part.size(); ++i) sums[i] += part[i];
  }
  const double total = MaskSum(layers, mask);
  double sum = 0;
  for (size_t e = 0; e < width; ++e) {
    SetValue(tokens, static_cast<int64_t>(e), sums[e] / total);
    sum += sums[e] / total * (sums[width + e] / total);
  }
  SetValue(loss, 0, static_cast<double>(experts) * sum);
}

void LoadBalanceLossBackward(const char* op, const TensorView& grad, const std::vector<TensorView>& layers,
                             const TensorView* mask_view, const TensorView& tokens,
                             const std::vector<TensorView>& dlayers) {
  const int64_t experts = tokens.numel();
  CheckLayers(op, layers, experts);
  CheckResult(op, "grad", grad, layers[0].dtype, 1);
  CheckResult(op, "tokens_per_expert", tokens, layers[0].dtype, experts);
  JUMAR_CHECK(op, dlayers.size() == layers.size(), dlayers.size(), " gradients for ", layers.size(), " layers");
  for (size_t i = 0; i < layers.size(); ++i) CheckRows(op, "grad of gate_logits", dlayers[i], layers[i], experts);
  ScratchFrame frame;
  const Mask mask(op, mask_view, layers, frame);
  const DType compute = ComputeType(layers[0].dtype);
  const double factor = ValueAt(grad) * static_cast<double>(experts) / MaskSum(layers, mask);
  const RowMap fractions = InputRows(tokens, 1, frame);
  TensorView v = Contiguous(frame.AllocBytes(static_cast<size_t>(experts) * SizeOf(compute)), compute, {experts});
  for (int64_t e = 0; e < experts; ++e) {
    SetValue(v, e,
             factor * (compute == DType::kF64 ? fractions.Row<double>(0)[e]
                                              : static_cast<double>(fractions.Row<float>(0)[e])));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    ScratchFrame own;
    const RowMap rows = InputRows(layers[i], 1, own);
    const RowMap out = ContiguousRows(dlayers[i]);
    ParallelFor(rows.rows, 1 + kGrain / experts,
                [&](int64_t begin, int64_t end) { BalanceGradRows(rows, mask.used, v.data, out, begin, end); });
  }
}

void RouterZLoss(const char* op, const TensorView& logits, const TensorView& loss) {
  CheckLogits(op, "logits", logits);
  CheckResult(op, "loss", loss, logits.dtype, 1);
  ScratchFrame frame;
  const RowMap rows = InputRows(logits, 1, frame);
  JUMAR_CHECK(op, rows.cols > 0, "logits ", ShapeString(logits), " have no experts");
  const double sum = SumOfChunks(
      rows.rows, 1, [&](int64_t begin, int64_t end, double* into) { *into = ZLossRows(rows, begin, end); })[0];
  SetValue(loss, 0, sum / static_cast<double>(rows.rows));
}

void RouterZLossBackward(const char* op, const TensorView& grad, const TensorView& logits, const TensorView& dlogits) {
  CheckLogits(op, "logits", logits);
  CheckResult(op, "grad", grad, logits.dtype, 1);
  CheckRows(op, "grad of logits", dlogits, logits, logits.size[logits.rank - 1]);
  ScratchFrame frame;
  const RowMap rows = InputRows(logits, 1, frame);
  if (rows.rows == 0 || rows.cols == 0) return;
  const RowMap out = ContiguousRows(dlogits);
  const double scale = 2 * ValueAt(grad) / static_cast<double>(rows.rows);
  ParallelFor(rows.rows, 1 + kGrain / rows.cols,
              [&](int64_t begin, int64_t end) { ZLossGradRows(rows, scale, out, begin, end); });
}

void ExpertBiasUpdate(const char* op, const TensorView& bias, const TensorView& tokens, double rate, bool center,
                      const TensorView& out) {
  CheckLogits(op, "bias", bias);
  JUMAR_CHECK(op, SameShape(bias, tokens) && tokens.dtype != DType::kBool, "tokens_per_expert ", Describe(tokens),
              " does not match bias ", Describe(bias));
  JUMAR_CHECK(op, SameShape(bias, out) && out.dtype == bias.dtype && IsContiguous(out), "the new bias is ",
              Describe(out), ", expected ", Describe(bias));
  ScratchFrame frame;
  const RowMap from = InputRows(bias, 1, frame);
  const RowMap counts = InputRows(tokens, 1, frame);
  if (from.rows == 0 || from.cols == 0) return;
  const RowMap to = ContiguousRows(out);
  for (int64_t row = 0; row < from.rows; ++row) BiasRow(from, counts, rate, center, to, row);
}

}  // namespace jumar
