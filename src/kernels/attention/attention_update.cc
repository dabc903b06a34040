#include "kernels/attention/attention_update.h"

#include "base/check.h"
#include "base/parallel.h"
#include "base/rows.h"
#include "base/widen.h"
#include "kernels/attention/attention_blocks.h"
#include "kernels/attention/attention_update_simd.h"
#include "kernels/attention/fusion_attention.h"

namespace jumar {
namespace {

constexpr int64_t kRows = 16;   // of the sequence, all heads of them: a task of the ring update
constexpr int64_t kBlock = 64;  // rows of a task of the update by lse

// [B, N, S, ..] of out in layout SBH or TND; columns adjacent, in a copy if need be.
TensorView ByHead(const TensorView& x, int64_t heads, bool packed, ScratchFrame& frame) {
  const RowMap rows = InputRows(x, 1, frame);
  TensorView v = x;
  if (rows.data != x.data) v = Contiguous(rows.data, x.dtype, {x.size[0], x.size[1], x.size[2]});
  v.rank = 4;
  const int64_t outer = v.stride[0];
  const int64_t inner = v.stride[1];
  v.size[0] = packed ? 1 : x.size[1];
  v.size[1] = heads;
  v.size[2] = x.size[0];
  v.size[3] = packed ? x.size[2] : x.size[2] / heads;
  v.stride[0] = packed ? 0 : inner;
  v.stride[1] = packed ? inner : v.size[3];
  v.stride[2] = outer;
  v.stride[3] = 1;
  return v;
}

template <typename C>
void Update(const AttentionPart& p, const AttentionPart& c, const AttentionPart& r) {
  const int64_t heads = r.out.size[1];
  const int64_t blocks = CeilDiv(r.out.size[2], kRows);
  constexpr bool kF64 = sizeof(C) == 8;
  ParallelFor(r.out.size[0] * blocks, 1, [&](int64_t begin, int64_t end) {
    ScratchFrame frame;
    const int64_t most = heads * kRows;
    C* numbers[4];  // max, sum of the one; those of the other, then weights
    for (C*& x : numbers) x = frame.Alloc<C>(most);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / blocks;
      const int64_t row = task % blocks * kRows;
      const int64_t rows = std::min(kRows, r.out.size[2] - row);
      const auto walk = [&](const auto& body) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t h = 0; h < heads; ++h) body(h, row + i, i * heads + h);
        }
      };
      const TensorView* from[4] = {&p.max, &p.sum, &c.max, &c.sum};
      for (int x = 0; x < 4; ++x) {
        walk([&](int64_t h, int64_t i, int64_t at) {
          numbers[x][at] = *reinterpret_cast<const C*>(Element(*from[x], b, h, i));
        });
      }
      RingWeights(kF64, numbers[0], numbers[1], numbers[2], numbers[3], rows * heads);
      walk([&](int64_t h, int64_t i, int64_t at) {
        const void* parts[2] = {Element(p.out, b, h, i), Element(c.out, b, h, i)};
        const C weights[2] = {numbers[2][at], numbers[3][at]};
        WeightedRow(r.out.dtype, parts, weights, 1, 2, Element(r.out, b, h, i), r.out.size[3]);
        std::fill_n(reinterpret_cast<C*>(Element(r.max, b, h, i)), 8, numbers[0][at]);
        std::fill_n(reinterpret_cast<C*>(Element(r.sum, b, h, i)), 8, numbers[1][at]);
      });
    }
  });
}

template <typename C>
void UpdateByLse(const std::vector<TensorView>& lse, const std::vector<RowMap>& parts, const TensorView& out,
                 const TensorView* lse_out) {
  const auto count = static_cast<int64_t>(parts.size());
  ParallelFor(CeilDiv(out.size[0], kBlock), 1, [&](int64_t begin, int64_t end) {
    ScratchFrame frame;
    C* weights = frame.Alloc<C>(count * kBlock);
    C* total = frame.Alloc<C>(kBlock);
    std::vector<const void*> rows(parts.size());
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * kBlock;
      const int64_t n = std::min(kBlock, out.size[0] - row);
      for (int64_t i = 0; i < count; ++i) {
        const TensorView& x = lse[static_cast<size_t>(i)];
        for (int64_t r = 0; r < n; ++r) weights[i * n + r] = x.ptr<C>()[(row + r) * x.stride[0]];
      }
      LseWeights(sizeof(C) == 8, weights, count, n, total);
      for (int64_t r = 0; r < n; ++r) {
        for (size_t i = 0; i < parts.size(); ++i) {
          rows[i] = At(parts[i].data, parts[i].Offset(row + r), SizeOf(out.dtype));
        }
        WeightedRow(out.dtype, rows.data(), weights + r, n, count,
                    At(out.data, (row + r) * out.stride[0], SizeOf(out.dtype)), out.size[1]);
      }
      if (lse_out != nullptr) std::copy_n(total, n, lse_out->ptr<C>() + row);
    }
  });
}

}  // namespace

void RingAttentionUpdate(const char* op, const AttentionPart& previous, const AttentionPart& current,
                         const std::string& layout, const std::string& softmax_layout, const AttentionPart& result) {
  const bool packed = layout == "TND";
  JUMAR_CHECK(op, packed || layout == "SBH", "input_layout must be SBH or TND, got '", layout, "'");
  JUMAR_CHECK(op, softmax_layout.empty() || softmax_layout == layout,
              "input_softmax_layout must be '' or the input_layout ", layout, ", got '", softmax_layout, "'");
  const TensorView& x = previous.out;
  JUMAR_CHECK(op, IsFloating(x.dtype) && x.rank == 3, "prev_attn_out must be floating point with 3 dimensions, got ",
              Describe(x));
  const int64_t heads = previous.max.rank >= 2 ? previous.max.size[1] : 0;
  TensorView statistics = Contiguous(nullptr, ComputeType(x.dtype), {x.size[0], heads, 8});
  if (!packed) statistics = Contiguous(nullptr, ComputeType(x.dtype), {x.size[1], heads, x.size[0], 8});
  const auto like = [&](const char* name, const TensorView& given, const TensorView& model) {
    JUMAR_CHECK(op, SameShape(given, model) && given.dtype == model.dtype, name, " must be ", Describe(model),
                " beside prev_attn_out ", Describe(x), ", got ", Describe(given));
  };
  like("prev_softmax_max", previous.max, statistics);
  like("prev_softmax_sum", previous.sum, statistics);
  like("cur_attn_out", current.out, x);
  like("cur_softmax_max", current.max, statistics);
  like("cur_softmax_sum", current.sum, statistics);
  JUMAR_CHECK(op, packed ? heads == x.size[1] : heads > 0 && x.size[2] % heads == 0, "softmax_max has ", heads,
              " heads, which does not go with prev_attn_out ", ShapeString(x));
  ScratchFrame frame;
  const auto by_head = [&](const AttentionPart& part) {
    AttentionPart views{ByHead(part.out, heads, packed, frame), part.max, part.sum};
    if (packed) {
      views.max = PackedStatistics(op, "softmax_max", part.max, softmax_layout.empty());
      views.sum = PackedStatistics(op, "softmax_sum", part.sum, softmax_layout.empty());
    }
    return views;
  };
  const AttentionPart p = by_head(previous);
  const AttentionPart c = by_head(current);
  const AttentionPart r = by_head(result);
  x.dtype == DType::kF64 ? Update<double>(p, c, r) : Update<float>(p, c, r);
}

void AttentionUpdate(const char* op, const std::vector<TensorView>& lse, const std::vector<TensorView>& parts,
                     const TensorView& out, const TensorView* lse_out) {
  JUMAR_CHECK(op, !lse.empty() && lse.size() == parts.size(),
              "lse and local_out must have one length of at least 1, got ", lse.size(), " and ", parts.size());
  JUMAR_CHECK(op, IsFloating(out.dtype) && out.rank == 2, "local_out must be floating point with 2 dimensions, got ",
              Describe(out));
  const TensorView model = Contiguous(nullptr, ComputeType(out.dtype), {out.size[0]});
  ScratchFrame frame;
  std::vector<RowMap> rows;
  for (size_t i = 0; i < lse.size(); ++i) {
    JUMAR_CHECK(op, SameShape(parts[i], out) && parts[i].dtype == out.dtype, "local_out[", i, "] must be ",
                Describe(out), ", got ", Describe(parts[i]));
    JUMAR_CHECK(op, SameShape(lse[i], model) && lse[i].dtype == model.dtype, "lse[", i, "] must be ", Describe(model),
                ", got ", Describe(lse[i]));
    rows.push_back(InputRows(parts[i], 1, frame));
  }
  out.dtype == DType::kF64 ? UpdateByLse<double>(lse, rows, out, lse_out) : UpdateByLse<float>(lse, rows, out, lse_out);
}

}  // namespace jumar
