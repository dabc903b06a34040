#include "kernels/lightning_indexer/indexer_gradient.h"

#include <cstring>

#include "base/parallel.h"

namespace jumar {
namespace {

constexpr int64_t kChunks = 32;  // of a sequence
constexpr int64_t kChunkRows = 64;
constexpr int64_t kSumKeys = 32;  // of a task that adds up chunks

}  // namespace

template <typename C>
void HeadProducts(const IndexerPlan& plan, const PackedHeads& of, const C* packed, const void* const* rows,
                  const TurnedTile& r, bool accumulate) {
  const int64_t width = plan.kernel.width;
  for (int64_t h = 0; h < of.heads; h += width, packed += of.panel) {
    plan.products.dots(
        {rows, r.n, of.d, packed, std::min(width, of.heads - h), static_cast<C*>(r.r) + h, accumulate, r.ld});
  }
}

template <typename C>
QueryGradient<C>::QueryGradient(const IndexerPlan& plan, ScratchFrame& frame)
    : plan_(plan),
      form_{plan.heads, plan.d, plan.gemm.PanelStride(plan.gemm.nr, plan.d)},
      across_panel_(plan.gemm.PanelStride(plan.gemm.nr, plan.heads)),
      query_(frame.Alloc<C>(form_.Size(plan.kernel.width))),
      across_(frame.Alloc<C>(plan.ld_d / plan.gemm.nr * across_panel_)),
      dq_(frame.Alloc<C>(plan.heads * plan.ld_d)),
      dw_(frame.Alloc<C>(plan.panels * plan.kernel.width)),
      weights_(frame.Alloc<C>(plan.panels * plan.kernel.width)) {}

template <typename C>
void QueryGradient<C>::Load(const SequencePair& s, int64_t row) {
  const GemmOperand q = plan_.Query(s, row);
  const GemmOperand across{q.data, q.dtype, q.k, q.rows, q.k_stride, q.row_stride};
  plan_.gemm.pack_b({&q, 0, plan_.heads, 0, plan_.d, form_.panel, query_});
  plan_.gemm.pack_b({&across, 0, plan_.d, 0, plan_.heads, across_panel_, across_});
  const int64_t padded = plan_.panels * plan_.kernel.width;
  std::fill_n(dq_, plan_.heads * plan_.ld_d, C(0));
  std::fill_n(dw_, padded, C(0));
  std::fill(std::copy_n(plan_.Weights<C>(s, row), plan_.heads, weights_), weights_ + padded, C(0));
  row_ = s.batch * plan_.in.query.size[1] + s.q_begin + row;
}

template <typename C>
void QueryGradient<C>::Scores(const void* const* keys, int64_t n, C* r, C* scores) const {
  const TurnedTile tile = Tile(r, n);
  HeadProducts(plan_, form_, query_, keys, tile, false);
  plan_.kernel.turned_scores(tile, weights_, scores);
}

template <typename C>
void QueryGradient<C>::Add(const void* const* keys, int64_t n, C* r, const C* di, void* const* dk) {
  const TurnedTile tile = Tile(r, n);
  plan_.kernel.score_gradient(tile, weights_, di, dw_);
  plan_.products.sums({keys, n, plan_.d, r, plan_.heads, dq_, plan_.ld_d, true, tile.ld});
  plan_.products.updates({dk, n, plan_.ld_d, r, plan_.heads, across_, across_panel_, plan_.gemm.nr, tile.ld});
}

template <typename C>
void QueryGradient<C>::Store(const TensorView& dq, const TensorView& dw) const {
  const auto place = [&](const TensorView& x, int64_t elements) {
    return static_cast<char*>(x.data) + row_ * elements * static_cast<int64_t>(SizeOf(x.dtype));
  };
  StoreRows(plan_, dq_, plan_.ld_d, plan_.heads, plan_.d, dq.dtype, place(dq, plan_.heads * plan_.d));
  StoreRows(plan_, dw_, plan_.heads, 1, plan_.heads, dw.dtype, place(dw, plan_.heads));
}

template <typename C>
double SumOverChunks(const IndexerPlan& plan, bool all_keys, const TensorView& dk,
                     const std::function<void(const RowChunk&)>& body) {
  int64_t rows = 0;
  for (const SequencePair& s : plan.in.sequences) rows += s.q_len;
  std::vector<double> losses(static_cast<size_t>(rows), 0.0);
  std::vector<RowChunk> chunks;
  std::vector<std::pair<size_t, size_t>> of_sequence;
  rows = 0;
  for (const SequencePair& s : plan.in.sequences) {
    const size_t first = chunks.size();
    const int64_t count = s.q_len == 0 ? 0 : std::clamp<int64_t>(s.q_len / kChunkRows, 1, kChunks);
    for (int64_t c = 0; c < count; ++c) {
      const int64_t begin = ChunkBegin(s.q_len, count, c);
      const int64_t n = ChunkBegin(s.q_len, count, c + 1) - begin;
      const int64_t keys = all_keys ? s.k_len : plan.Limit(s, begin + n - 1);
      chunks.push_back({&s, begin, n, keys, nullptr, losses.data() + rows});
      rows += n;
    }
    of_sequence.emplace_back(first, chunks.size());
  }
  std::vector<HeapBuffer> memory(chunks.size());
  const auto count = static_cast<int64_t>(chunks.size());
  ParallelChunks(count, [&](int64_t task) {
    // Later rows of causal attention have more keys: they go first.
    const auto at = static_cast<size_t>(count - 1 - task);
    RowChunk& chunk = chunks[at];
    const int64_t bytes = chunk.keys * plan.ld_d * static_cast<int64_t>(sizeof(C));
    memory[at] = HeapBuffer(bytes);
    chunk.dk = memory[at].data();
    std::memset(chunk.dk, 0, static_cast<size_t>(bytes));
    body(chunk);
  });
  ZeroResult(dk);
  for (size_t i = 0; i < of_sequence.size(); ++i) {
    const SequencePair& s = plan.in.sequences[i];
    const auto [first, last] = of_sequence[i];
    ParallelChunks(CeilDiv(s.k_len, kSumKeys), [&](int64_t block) {
      const int64_t key = block * kSumKeys;
      ScratchFrame frame;
      C* sum = frame.Alloc<C>(kSumKeys * plan.ld_d);
      const int64_t n = std::min(kSumKeys, s.k_len - key);
      std::fill_n(sum, n * plan.ld_d, C(0));
      for (size_t c = first; c < last; ++c) {
        const int64_t have = std::min(n, chunks[c].keys - key);
        if (have > 0) plan.kernel.add(sum, static_cast<const C*>(chunks[c].dk) + key * plan.ld_d, have * plan.ld_d);
      }
      StoreRows(plan, sum, plan.ld_d, n, plan.d, dk.dtype, Element(dk, s.batch, s.k_begin + key));
    });
  }
  double loss = 0;
  for (const double x : losses) loss += x;
  return loss;
}

template void HeadProducts(const IndexerPlan&, const PackedHeads&, const float*, const void* const*, const TurnedTile&,
                           bool);
template void HeadProducts(const IndexerPlan&, const PackedHeads&, const double*, const void* const*, const TurnedTile&,
                           bool);
template class QueryGradient<float>;
template class QueryGradient<double>;
template double SumOverChunks<float>(const IndexerPlan&, bool, const TensorView&,
                                     const std::function<void(const RowChunk&)>&);
template double SumOverChunks<double>(const IndexerPlan&, bool, const TensorView&,
                                      const std::function<void(const RowChunk&)>&);

}  // namespace jumar
