#include "kernels/sparse_attention/sparse_flash_attention.h"

#include <algorithm>

#include "base/check.h"
#include "base/indices.h"

namespace jumar {
namespace {

std::vector<int64_t> Lengths(const char* op, const char* name, const TensorView* x) {
  if (x == nullptr) return {};
  JUMAR_CHECK(op, x->rank == 1 && (x->dtype == DType::kI32 || x->dtype == DType::kI64), name,
              " must be a list of int32 or int64, got ", Describe(*x));
  return ReadIntegers(*x);
}

}  // namespace

SparseFlashAttention::SparseFlashAttention(const char* op, const SparseFlashTensors& t, const SparseFlashOptions& o)
    : op_(op), packed_(o.layout == "TND") {
  JUMAR_CHECK(op, packed_ || o.layout == "BSND", "the layout must be BSND or TND, got '", o.layout, "'");
  JUMAR_CHECK(op, o.sparse_mode == 0 || o.sparse_mode == 3, "sparse_mode must be 0 or 3, got ", o.sparse_mode);
  inputs_.q = Tokens("query", t.query);
  inputs_.k = Tokens("key", t.key);
  inputs_.v = Tokens("value", t.value);
  inputs_.q_rope = Tokens("query_rope", t.query_rope);
  inputs_.k_rope = Tokens("key_rope", t.key_rope);
  inputs_.indices = Tokens("sparse_indices", t.indices);
  inputs_.sinks = t.sinks;
  inputs_.scale = o.scale;
  inputs_.block_size = o.block_size;
  inputs_.causal = o.sparse_mode == 3;
  const SequenceLists lists{o.q_name, o.k_name, Lengths(op, o.q_name, t.q_lengths), Lengths(op, o.k_name, t.k_lengths)};
  const int64_t queries = inputs_.q.size[1];
  const int64_t keys = inputs_.k.size[1];
  inputs_.sequences = packed_ ? PackedSequences(op, lists, queries, keys)
                              : PaddedSequences(op, lists, inputs_.q.size[0], queries, keys);
}

TensorView SparseFlashAttention::WithBatch(const char* name, const TensorView& x) const {
  const int rank = packed_ ? 3 : 4;
  JUMAR_CHECK(op_, x.rank == rank, name, " of layout ", packed_ ? "TND" : "BSND", " has ", rank, " dimensions, got ",
              ShapeString(x));
  if (!packed_) return x;
  TensorView y = x;
  y.rank = 4;
  y.size[0] = 1;
  y.stride[0] = 0;
  std::copy_n(x.size, 3, y.size + 1);
  std::copy_n(x.stride, 3, y.stride + 1);
  return y;
}

TensorView SparseFlashAttention::Tokens(const char* name, const TensorView& x) const {
  return x.rank == 0 ? x : WithBatch(name, x);
}

TensorView SparseFlashAttention::Statistics(const char* name, const TensorView& x) const { return WithBatch(name, x); }

std::vector<int64_t> SparseFlashAttention::OutSizes() const {
  const TensorView& q = inputs_.q;
  std::vector<int64_t> sizes{q.size[1], q.size[2], inputs_.v.size[3]};
  if (!packed_) sizes.insert(sizes.begin(), q.size[0]);
  return sizes;
}

std::vector<int64_t> SparseFlashAttention::StatisticsSizes() const {
  const TensorView& q = inputs_.q;
  const int64_t kv_heads = inputs_.k.size[2];
  std::vector<int64_t> sizes{kv_heads, q.size[1], kv_heads == 0 ? 0 : q.size[2] / kv_heads};
  if (!packed_) sizes.insert(sizes.begin(), q.size[0]);
  return sizes;
}

}  // namespace jumar
