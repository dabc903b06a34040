#include "kernels/lightning_indexer/lightning_indexer.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "base/check.h"
#include "base/indices.h"
#include "base/widen.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using OptionalInt = std::optional<int64_t>;
using OptionalInts = std::optional<std::vector<int64_t>>;
using OptionalString = std::optional<std::string>;

std::vector<int64_t> Lengths(const char* op, const OptionalTensor& x) {
  if (!x.has_value()) return {};
  const TensorView view = View(op, *x);
  JUMAR_CHECK(op, view.dtype == DType::kI32 || view.dtype == DType::kI64, "actual_seq_lengths must be integers, got ",
              Describe(view));
  return ReadIntegers(view);
}

// The dimensions `dims` of x in this order; -1: one of size 1.
TensorView Picked(const TensorView& x, std::initializer_list<int> dims) {
  TensorView out = x;
  out.rank = 0;
  for (const int d : dims) {
    out.size[out.rank] = d < 0 ? 1 : x.size[d];
    out.stride[out.rank++] = d < 0 ? 0 : x.stride[d];
  }
  return out;
}

// How the tensors of one call lie: BSND, or TND, of which kernels see one batch entry.
class Layout {
 public:
  Layout(const char* op, const std::string& name) : op_(op), packed_(name == "TND") {
    JUMAR_CHECK(op, packed_ || name == "BSND", "layout must be BSND or TND, got '", name, "'");
  }

  bool packed() const { return packed_; }
  // [B, S, N, D] of BSND or [T, N, D]; with `rank` 3, [B, S, N] or [T, N].
  TensorView Rows(const char* name, const TensorView& x, int rank = 4) const {
    JUMAR_CHECK(op_, x.rank == rank - (packed_ ? 1 : 0), name, " must have ", rank - (packed_ ? 1 : 0),
                " dimensions in layout ", packed_ ? "TND" : "BSND", ", got ", ShapeString(x));
    if (!packed_) return x;
    return rank == 4 ? Picked(x, {-1, 0, 1, 2}) : Picked(x, {-1, 0, 1});
  }
  TensorView Rows(const char* name, const OptionalTensor& x) const {
    return x.has_value() ? Rows(name, View(op_, *x)) : TensorView{};
  }
  // [B, 1, S, N] or [1, T, N].
  TensorView ByQuery(const char* name, const TensorView& x) const {
    JUMAR_CHECK(op_, x.rank == (packed_ ? 3 : 4) && x.size[packed_ ? 0 : 1] == 1, name, " must be ",
                packed_ ? "[1, T, N]" : "[B, 1, S, N]", ", got ", ShapeString(x));
    return packed_ ? x : Picked(x, {0, 2, 3});
  }
  // [B, N, S, 1] or [N, T, 1].
  TensorView ByHead(const char* name, const TensorView& x) const {
    JUMAR_CHECK(op_, x.rank == (packed_ ? 3 : 4) && x.size[x.rank - 1] == 1, name, " must be ",
                packed_ ? "[N, T, 1]" : "[B, N, S, 1]", ", got ", ShapeString(x));
    return packed_ ? Picked(x, {-1, 1, 0}) : Picked(x, {0, 2, 1});
  }
  // [B, 1, S] or [1, T].
  TensorView OfRow(const char* name, const TensorView& x) const {
    JUMAR_CHECK(op_, x.rank == (packed_ ? 2 : 3) && x.size[packed_ ? 0 : 1] == 1, name, " must be ",
                packed_ ? "[1, T]" : "[B, 1, S]", ", got ", ShapeString(x));
    return packed_ ? x : Picked(x, {0, 2});
  }

 private:
  const char* op_;
  bool packed_;
};

IndexerInputs Inputs(const char* op, const Layout& layout, const Tensor& query, const Tensor& key,
                     const Tensor& weights, const SequenceLists& lists, int64_t sparse_mode, bool dense_mode = true) {
  IndexerInputs in;
  in.query = layout.Rows("query", View(op, query));
  in.key = layout.Rows("key", View(op, key));
  in.weights = layout.Rows("weights", View(op, weights), 3);
  const TensorView& q = in.query;
  const TensorView& k = in.key;
  JUMAR_CHECK(op, sparse_mode == 3 || (sparse_mode == 0 && dense_mode), "sparse_mode must be ",
              dense_mode ? "0 or 3" : "3", ", got ", sparse_mode);
  in.causal = sparse_mode == 3;
  if (layout.packed()) {
    in.sequences = PackedSequences(op, lists, q.size[1], k.size[1]);
  } else {
    in.sequences = PaddedSequences(op, lists, q.size[0], q.size[1], k.size[1]);
  }
  return in;
}

SequenceLists Lists(const char* op, const Layout& layout, const OptionalInts& q, const OptionalInts& k) {
  SequenceLists lists{"actual_seq_qlen", "actual_seq_klen", {}, {}};
  if (q.has_value()) lists.q = *q;
  if (k.has_value()) lists.k = *k;
  JUMAR_CHECK(op, layout.packed() || (lists.q.empty() && lists.k.empty()),
              "actual_seq_qlen and actual_seq_klen go with layout TND, not BSND");
  return lists;
}

// A band of tokens is not supported: without effect where it hides nothing, or where the mode has none.
void CheckTokens(const char* op, const IndexerInputs& in, int64_t pre, int64_t next) {
  const int64_t all = std::max(in.query.size[1], in.key.size[1]);
  JUMAR_CHECK(op, in.causal || (pre >= all && next >= all), "pre_tokens and next_tokens must not hide keys, got ", pre,
              " and ", next);
}

std::tuple<Tensor, Tensor> lightning_indexer(const Tensor& query, const Tensor& key, const Tensor& weights,
                                             const OptionalTensor& lengths_query, const OptionalTensor& lengths_key,
                                             const OptionalTensor& block_table, std::string layout_query,
                                             std::string layout_key, int64_t sparse_count, int64_t sparse_mode,
                                             int64_t pre_tokens, int64_t next_tokens, bool return_value) {
  constexpr const char* kOp = "npu_lightning_indexer";
  JUMAR_COUNT_CALL("npu_lightning_indexer");
  JUMAR_CHECK(kOp, layout_key.substr(0, 2) != "PA" && !block_table.has_value(), "paged keys (layout_key ", layout_key,
              block_table.has_value() ? ", with block_table" : "", ") are not supported");
  JUMAR_CHECK(kOp, layout_query == layout_key, "layout_query and layout_key must be the same, got '", layout_query,
              "' and '", layout_key, "'");
  JUMAR_CHECK(kOp, sparse_count > 0, "sparse_count must be positive, got ", sparse_count);
  const Layout layout(kOp, layout_query);
  const SequenceLists lists{"actual_seq_lengths_query", "actual_seq_lengths_key", Lengths(kOp, lengths_query),
                            Lengths(kOp, lengths_key)};
  const IndexerInputs in = Inputs(kOp, layout, query, key, weights, lists, sparse_mode);
  CheckTokens(kOp, in, pre_tokens, next_tokens);
  const TensorView& q = in.query;
  std::vector<int64_t> sizes = {q.size[1], 1, sparse_count};
  if (!layout.packed()) sizes.insert(sizes.begin(), q.size[0]);
  Tensor indices = Empty(query, sizes, DType::kI32);
  Tensor values = Empty(query, return_value ? sizes : std::vector<int64_t>{0}, q.dtype);
  const TensorView chosen = layout.Rows("indices", View(kOp, indices));
  if (return_value) {
    const TensorView scores = layout.Rows("values", View(kOp, values));
    LightningIndexer(kOp, in, chosen, &scores);
  } else {
    LightningIndexer(kOp, in, chosen, nullptr);
  }
  return {indices, values};
}

struct Gradients {
  Gradients(const char* op, const Layout& layout, const Tensor& query, const Tensor& key, const Tensor& weights)
      : dq(Empty(query, View(op, query), View(op, query).dtype)),
        dk(Empty(key, View(op, key), View(op, key).dtype)),
        dw(Empty(weights, View(op, weights), View(op, weights).dtype)),
        views{layout.Rows("d_query", View(op, dq)), layout.Rows("d_key", View(op, dk)),
              layout.Rows("d_weights", View(op, dw), 3)} {}
  Tensor dq, dk, dw;
  IndexerGradients views;
};

std::tuple<Tensor, Tensor, Tensor> npu_lightning_indexer_grad(
    const Tensor& query, const Tensor& key, const Tensor& dy, const Tensor& sparse_indices, const Tensor& weights,
    const OptionalTensor& lengths_query, const OptionalTensor& lengths_key, const OptionalString& layout_name,
    const OptionalInt& /*sparse_mode*/, const OptionalInt& /*pre_tokens*/, const OptionalInt& /*next_tokens*/) {
  constexpr const char* kOp = "npu_lightning_indexer_grad";
  JUMAR_COUNT_CALL("npu_lightning_indexer_grad");
  const Layout layout(kOp, layout_name.value_or("BSND"));
  const SequenceLists lists{"actual_seq_lengths_query", "actual_seq_lengths_key", Lengths(kOp, lengths_query),
                            Lengths(kOp, lengths_key)};
  // Slots are taken as they stand.
  const IndexerInputs in = Inputs(kOp, layout, query, key, weights, lists, 0);
  // [.., N2, K], or [.., K].
  const auto slots = [&](const char* name, const TensorView& x) {
    if (x.rank == (layout.packed() ? 2 : 3)) return layout.Rows(name, x, 3);
    const TensorView rows = layout.Rows(name, x);
    JUMAR_CHECK(kOp, rows.size[2] == 1, name, " must have one head, got ", ShapeString(x));
    return Picked(rows, {0, 1, 3});
  };
  const Gradients g(kOp, layout, query, key, weights);
  LightningIndexerGrad(kOp, in, slots("dy", View(kOp, dy)), slots("sparse_indices", View(kOp, sparse_indices)),
                       g.views.dq, g.views.dk, g.views.dw);
  return {g.dq, g.dk, g.dw};
}

std::tuple<Tensor, Tensor> npu_dense_lightning_indexer_softmax_lse(
    const Tensor& query_index, const Tensor& key_index, const Tensor& weights, const OptionalInts& q_ends,
    const OptionalInts& k_ends, const OptionalString& layout_name, const OptionalInt& sparse_mode,
    const OptionalInt& /*pre_tokens*/, const OptionalInt& /*next_tokens*/) {
  constexpr const char* kOp = "npu_dense_lightning_indexer_softmax_lse";
  JUMAR_COUNT_CALL("npu_dense_lightning_indexer_softmax_lse");
  const Layout layout(kOp, layout_name.value_or("BSND"));
  const IndexerInputs in = Inputs(kOp, layout, query_index, key_index, weights, Lists(kOp, layout, q_ends, k_ends),
                                  sparse_mode.value_or(3), false);
  const TensorView& q = in.query;
  const std::vector<int64_t> sizes =
      layout.packed() ? std::vector<int64_t>{1, q.size[1]} : std::vector<int64_t>{q.size[0], 1, q.size[1]};
  const DType compute = ComputeType(q.dtype);
  Tensor max = Empty(query_index, sizes, compute);
  Tensor sum = Empty(query_index, sizes, compute);
  IndexerSoftmax(kOp, in, layout.OfRow("softmax_max", View(kOp, max)), layout.OfRow("softmax_sum", View(kOp, sum)));
  return {max, sum};
}

using Loss = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Loss Results(const char* op, const Gradients& g, double loss) {
  Tensor out = Empty(g.dq, std::vector<int64_t>{1}, ComputeType(g.views.dq.dtype));
  const TensorView view = View(op, out);
  if (view.dtype == DType::kF64) {
    *view.ptr<double>() = loss;
  } else {
    *view.ptr<float>() = static_cast<float>(loss);
  }
  return {g.dq, g.dk, g.dw, out};
}

IndexerTeacher Teacher(const char* op, const Layout& layout, const Tensor& query, const Tensor& key, double scale,
                       const OptionalTensor& query_rope, const OptionalTensor& key_rope) {
  IndexerTeacher teacher;
  teacher.query = layout.Rows("query", View(op, query));
  teacher.key = layout.Rows("key", View(op, key));
  teacher.query_rope = layout.Rows("query_rope", query_rope);
  teacher.key_rope = layout.Rows("key_rope", key_rope);
  teacher.scale = scale;
  return teacher;
}

Loss npu_sparse_lightning_indexer_grad_kl_loss(
    const Tensor& query, const Tensor& key, const Tensor& query_index, const Tensor& key_index, const Tensor& weights,
    const Tensor& sparse_indices, const Tensor& softmax_max, const Tensor& softmax_sum, double scale_value,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, const OptionalInts& q_ends,
    const OptionalInts& k_ends, const OptionalString& layout_name, const OptionalInt& sparse_mode,
    const OptionalInt& /*pre_tokens*/, const OptionalInt& /*next_tokens*/, const OptionalTensor& sinks) {
  constexpr const char* kOp = "npu_sparse_lightning_indexer_grad_kl_loss";
  JUMAR_COUNT_CALL("npu_sparse_lightning_indexer_grad_kl_loss");
  JUMAR_CHECK(kOp, !sinks.has_value() || sinks->dim() == 1, "sinks must have 1 dimension, got ",
              sinks.has_value() ? sinks->dim() : 0);
  const Layout layout(kOp, layout_name.value_or("BSND"));
  const IndexerInputs in = Inputs(kOp, layout, query_index, key_index, weights, Lists(kOp, layout, q_ends, k_ends),
                                  sparse_mode.value_or(3), false);
  IndexerTeacher teacher = Teacher(kOp, layout, query, key, scale_value, query_rope, key_rope);
  teacher.max = layout.ByQuery("softmax_max", View(kOp, softmax_max));
  teacher.sum = layout.ByQuery("softmax_sum", View(kOp, softmax_sum));
  const TensorView rows = layout.Rows("sparse_indices", View(kOp, sparse_indices));
  JUMAR_CHECK(kOp, rows.size[2] == 1, "sparse_indices must have one head, got ", ShapeString(rows));
  const Gradients g(kOp, layout, query_index, key_index, weights);
  return Results(kOp, g, SparseIndexerLoss(kOp, in, teacher, Picked(rows, {0, 1, 3}), g.views));
}

Loss npu_dense_lightning_indexer_grad_kl_loss(const Tensor& query, const Tensor& key, const Tensor& query_index,
                                              const Tensor& key_index, const Tensor& weights, const Tensor& softmax_max,
                                              const Tensor& softmax_sum, const Tensor& softmax_max_index,
                                              const Tensor& softmax_sum_index, double scale_value,
                                              const OptionalTensor& query_rope, const OptionalTensor& key_rope,
                                              const OptionalInts& q_ends, const OptionalInts& k_ends,
                                              const OptionalString& layout_name, const OptionalInt& sparse_mode,
                                              const OptionalInt& /*pre_tokens*/, const OptionalInt& /*next_tokens*/) {
  constexpr const char* kOp = "npu_dense_lightning_indexer_grad_kl_loss";
  JUMAR_COUNT_CALL("npu_dense_lightning_indexer_grad_kl_loss");
  const Layout layout(kOp, layout_name.value_or("BSND"));
  const IndexerInputs in = Inputs(kOp, layout, query_index, key_index, weights, Lists(kOp, layout, q_ends, k_ends),
                                  sparse_mode.value_or(3), false);
  IndexerTeacher teacher = Teacher(kOp, layout, query, key, scale_value, query_rope, key_rope);
  teacher.max = layout.ByHead("softmax_max", View(kOp, softmax_max));
  teacher.sum = layout.ByHead("softmax_sum", View(kOp, softmax_sum));
  const Gradients g(kOp, layout, query_index, key_index, weights);
  return Results(kOp, g,
                 DenseIndexerLoss(kOp, in, teacher, layout.OfRow("softmax_max_index", View(kOp, softmax_max_index)),
                                  layout.OfRow("softmax_sum_index", View(kOp, softmax_sum_index)), g.views));
}

}  // namespace

std::vector<OpEntry> LightningIndexerOps() {
  return {
      {"lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor? actual_seq_lengths_query,"
       " Tensor? actual_seq_lengths_key, Tensor? block_table, str layout_query, str layout_key, int sparse_count,"
       " int sparse_mode, int pre_tokens, int next_tokens, bool return_value) -> (Tensor, Tensor)",
       TORCH_BOX(&lightning_indexer), false},
      {"npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, Tensor weights,"
       " Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, str? layout=\"BSND\","
       " int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807)"
       " -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_lightning_indexer_grad), true},
      {"npu_dense_lightning_indexer_softmax_lse(Tensor query_index, Tensor key_index, Tensor weights, *,"
       " SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout='BSND', int? sparse_mode=3,"
       " int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_dense_lightning_indexer_softmax_lse), true},
      {"npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, Tensor key_index,"
       " Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, float scale_value, *,"
       " Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None,"
       " SymInt[]? actual_seq_klen=None, str? layout='BSND', int? sparse_mode=3,"
       " int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, Tensor? sinks=None)"
       " -> (Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_sparse_lightning_indexer_grad_kl_loss), true},
      {"npu_dense_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, Tensor key_index,"
       " Tensor weights, Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, Tensor softmax_sum_index,"
       " float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None,"
       " SymInt[]? actual_seq_klen=None, str? layout='BSND', int? sparse_mode=3,"
       " int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807)"
       " -> (Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_dense_lightning_indexer_grad_kl_loss), true},
  };
}

}  // namespace jumar::binding
