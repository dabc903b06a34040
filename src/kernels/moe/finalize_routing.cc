#include "kernels/moe/finalize_routing.h"

#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "base/indices.h"
#include "base/widen.h"
#include "kernels/moe/moe_operands.h"
#include "kernels/moe/moe_rows.h"

namespace jumar {
namespace {

int64_t TopK(const FinalizeOperands& o) { return o.scales != nullptr ? o.scales->size[1] : o.top_k; }

int64_t RowCount(const TensorView& rows) {
  return rows.size[rows.rank - 1] == 0 ? 0 : rows.numel() / rows.size[rows.rank - 1];
}

void CheckLikeRows(const char* op, const char* name, const TensorView& view, const TensorView& rows) {
  CheckDims(op, name, view, 2);
  CheckDType(op, name, view, rows.dtype);
  JUMAR_CHECK(op, view.size[1] == rows.size[rows.rank - 1], name, " ", ShapeString(view),
              " does not go with expanded_permuted_rows ", ShapeString(rows));
}

// Token by token.
std::vector<int32_t> RowsByToken(const char* op, const FinalizeOperands& o, int64_t tokens) {
  const std::vector<int64_t> index = ReadIndices(op, "expanded_src_to_dst_row", o.row_idx, -1, RowCount(o.rows));
  const int64_t top_k = TopK(o);
  std::vector<int32_t> rows(index.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      rows[static_cast<size_t>(t * top_k + k)] =
          static_cast<int32_t>(index[static_cast<size_t>(o.by_row ? t * top_k + k : k * tokens + t)]);
    }
  }
  return rows;
}

std::vector<int32_t> Experts(const char* op, const FinalizeOperands& o) {
  if (o.bias == nullptr) return {};
  return ReadRowsBelow(op, "export_for_source_row", *o.experts, o.bias->size[0]);
}

// sums[i] += more[i], in the compute type.
void AddInPlace(const TensorView& sums, const void* more) {
  const int64_t n = sums.numel();
  if (sums.dtype == DType::kF64) {
    for (int64_t i = 0; i < n; ++i) sums.ptr<double>()[i] += static_cast<const double*>(more)[i];
  } else {
    for (int64_t i = 0; i < n; ++i) sums.ptr<float>()[i] += static_cast<const float*>(more)[i];
  }
}

}  // namespace

int64_t CheckFinalizeRouting(const char* op, const FinalizeOperands& o, const TensorView* skip1,
                             const TensorView* skip2) {
  JUMAR_CHECK(op, o.rows.rank >= 2, "expanded_permuted_rows must have at least 2 dimensions, got ",
              ShapeString(o.rows));
  CheckFloating(op, "expanded_permuted_rows", o.rows);
  CheckDims(op, "expanded_src_to_dst_row", o.row_idx, 1);
  const int64_t slots = o.row_idx.size[0];
  CheckSlots(op, slots);
  if (o.scales != nullptr) {
    CheckDims(op, "scales", *o.scales, 2);
    CheckFloating(op, "scales", *o.scales);
  }
  const int64_t top_k = TopK(o);
  JUMAR_CHECK(op, top_k > 0, "k must be positive, got ", top_k);
  JUMAR_CHECK(op, o.scales == nullptr ? slots % top_k == 0 : o.scales->numel() == slots, slots,
              " elements of expanded_src_to_dst_row do not go with k ", top_k,
              o.scales == nullptr ? "" : " and scales " + ShapeString(*o.scales));
  const int64_t tokens = slots / top_k;
  JUMAR_CHECK(op, skip2 == nullptr || skip1 != nullptr, "skip2 needs skip1");
  for (const auto& [name, skip] : {std::pair("skip1", skip1), std::pair("skip2", skip2)}) {
    if (skip == nullptr) continue;
    CheckLikeRows(op, name, *skip, o.rows);
    JUMAR_CHECK(op, skip->size[0] == tokens, name, " ", ShapeString(*skip), " does not go with ", tokens, " tokens");
  }
  if (o.bias != nullptr) {
    CheckLikeRows(op, "bias", *o.bias, o.rows);
    JUMAR_CHECK(op, o.experts != nullptr, "bias ", ShapeString(*o.bias), " needs export_for_source_row");
    JUMAR_CHECK(op, o.experts->rank == 2 && o.experts->size[0] == tokens && o.experts->size[1] == top_k,
                "export_for_source_row must be [", tokens, ", ", top_k, "], got ", ShapeString(*o.experts));
  }
  return tokens;
}

void FinalizeRouting(const char* op, const FinalizeOperands& o, const TensorView* skip1, const TensorView* skip2,
                     const TensorView& out_view) {
  const int64_t tokens = out_view.size[0];
  const std::vector<int32_t> rows = RowsByToken(op, o, tokens);
  const std::vector<int32_t> experts = Experts(op, o);
  ScratchFrame frame;
  const void* weights = o.scales == nullptr ? nullptr : InComputeType(*o.scales, o.rows.dtype, frame);
  std::vector<int32_t> self(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) self[static_cast<size_t>(t)] = static_cast<int32_t>(t);
  std::vector<CombinePart> parts;
  for (const TensorView* skip : {skip1, skip2}) {
    if (skip != nullptr) parts.push_back({InputRows(*skip, 1, frame), {self.data(), tokens}});
  }
  parts.push_back({InputRows(o.rows, 1, frame), {rows.data(), RowCount(o.rows), TopK(o), weights}});
  if (o.bias != nullptr) {
    parts.push_back({InputRows(*o.bias, 1, frame), {experts.data(), o.bias->size[0], TopK(o), weights}});
  }
  const OutputRows out(out_view, 1, frame);
  CombineParts(parts, out.rows());
  out.Finish();
}

void FinalizeRoutingGrad(const char* op, const TensorView& grad, const FinalizeOperands& o, const TensorView& drows,
                         const TensorView* dscales, const TensorView* dbias) {
  const int64_t tokens = CheckFinalizeRouting(op, o, nullptr, nullptr);
  CheckLikeRows(op, "grad", grad, o.rows);
  JUMAR_CHECK(op, grad.size[0] == tokens, "grad ", ShapeString(grad), " does not go with ", tokens, " tokens");
  const std::vector<int32_t> rows = RowsByToken(op, o, tokens);
  const std::vector<int32_t> experts = Experts(op, o);
  const int64_t top_k = TopK(o);
  const int64_t slots = tokens * top_k;
  ScratchFrame frame;
  const void* weights = o.scales == nullptr ? nullptr : InComputeType(*o.scales, o.rows.dtype, frame);
  const RowMap g = InputRows(grad, 1, frame);
  const OutputRows out(drows, 1, frame);
  const SlotTable table{rows.data(), RowCount(o.rows), top_k, weights};
  if (o.scales == nullptr) {
    SpreadRows(g, table, tokens, &out.rows(), nullptr, nullptr);
  } else {
    const RowMap values = InputRows(o.rows, 1, frame);
    TensorView dots = Contiguous(nullptr, ComputeType(grad.dtype), {tokens, top_k});
    const size_t bytes = static_cast<size_t>(slots) * SizeOf(dots.dtype);
    dots.data = frame.AllocBytes(bytes);
    SpreadRows(g, table, tokens, &out.rows(), &values, dots.data);
    if (o.bias != nullptr) {
      void* more = frame.AllocBytes(bytes);
      const RowMap bias = InputRows(*o.bias, 1, frame);
      SpreadRows(g, {experts.data(), o.bias->size[0], top_k}, tokens, nullptr, &bias, more);
      AddInPlace(dots, more);
    }
    ConvertAll(dots, *dscales);
  }
  out.Finish();
  if (dbias == nullptr) return;
  const OutputRows bias_out(*dbias, 1, frame);
  SumByRow(g, {experts.data(), o.bias->size[0], top_k, weights}, tokens, bias_out.rows());
  bias_out.Finish();
}

}  // namespace jumar
