#include "kernels/lightning_indexer/indexer_plan.h"

#include <cstring>

#include "base/parallel.h"

namespace jumar {
namespace {

constexpr int64_t kKeyBlock = 128;

}  // namespace

void CheckShape(const char* op, const char* name, const TensorView& x, const std::vector<int64_t>& sizes, DType dtype) {
  const bool same = x.rank == static_cast<int>(sizes.size()) && std::equal(sizes.begin(), sizes.end(), x.size);
  JUMAR_CHECK(op, same && x.dtype == dtype, name, " must be ", Describe(Contiguous(nullptr, dtype, sizes)), ", got ",
              Describe(x));
}

void CheckResult(const char* op, const char* name, const TensorView& x, const std::vector<int64_t>& sizes,
                 DType dtype) {
  CheckShape(op, name, x, sizes, dtype);
  JUMAR_CHECK(op, IsContiguous(x), name, " must be contiguous");
}

IndexerPlan::IndexerPlan(const char* name, const IndexerInputs& inputs, ScratchFrame& frame)
    : op(name),
      in(inputs),
      compute(ComputeType(inputs.query.dtype)),
      gemm(ChooseGemmKernel(compute, compute)),
      kernel(ChooseIndexerKernel(compute == DType::kF64)),
      products(ChooseRowProducts(compute == DType::kF64)) {
  const TensorView& q = in.query;
  const TensorView& k = in.key;
  JUMAR_CHECK(op, q.rank == 4 && k.rank == 4, "query and key must have 4 dimensions, got ", ShapeString(q), " and ",
              ShapeString(k));
  JUMAR_CHECK(op, IsFloating(q.dtype) && q.dtype == k.dtype, "query and key must be of one floating dtype, got ",
              Name(q.dtype), " and ", Name(k.dtype));
  JUMAR_CHECK(op, q.numel() > 0 && k.numel() > 0, "query and key must not be empty, got ", ShapeString(q), " and ",
              ShapeString(k));
  JUMAR_CHECK(op, k.size[0] == q.size[0] && k.size[2] == 1 && k.size[3] == q.size[3],
              "key must have query's batch and head size and one head, got ", ShapeString(k), " beside query ",
              ShapeString(q));
  JUMAR_CHECK(op, k.size[1] < (int64_t{1} << 31), "at most 2^31 - 1 keys, got ", k.size[1]);
  JUMAR_CHECK(op, in.weights.dtype == q.dtype || in.weights.dtype == compute, "weights must be ", Name(q.dtype),
              q.dtype == compute ? "" : " or float32", ", got ", Name(in.weights.dtype));
  CheckShape(op, "weights", in.weights, {q.size[0], q.size[1], q.size[2]}, in.weights.dtype);
  heads = q.size[2];
  panels = CeilDiv(heads, kernel.width);
  d = q.size[3];
  ld_d = RoundUp(d, gemm.nr);
  key_block = RoundUp(kKeyBlock, gemm.nr);
  key_panel = gemm.PanelStride(gemm.nr, d);
  key_size = key_block / gemm.nr * key_panel;
  weights_ = WidenAll(in.weights, compute, -0.0, frame);
}

GemmOperand IndexerPlan::Query(const SequencePair& s, int64_t i) const {
  const TensorView& x = in.query;
  return {Element(x, s.batch, s.q_begin + i), x.dtype, heads, d, x.stride[2], x.stride[3]};
}

GemmOperand IndexerPlan::Keys(const SequencePair& s, int64_t begin, int64_t n) const {
  const TensorView& x = in.key;
  return {Element(x, s.batch, s.k_begin + begin), x.dtype, n, d, x.stride[1], x.stride[3]};
}

void StoreRows(const IndexerPlan& plan, const void* acc, int64_t ld, int64_t rows, int64_t cols, DType dtype,
               void* out) {
  GemmStore store{};
  store.acc = acc;
  store.ld_acc = ld;
  store.m = rows;
  store.n = cols;
  store.out = out;
  store.dtype = dtype;
  store.row_stride = cols;
  store.col_stride = 1;
  plan.gemm.store(store);
}

void ZeroResult(const TensorView& x) {
  const auto bytes = static_cast<int64_t>(SizeOf(x.dtype)) * x.numel();
  ParallelFor(bytes, 1 << 20, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(x.data) + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace jumar
