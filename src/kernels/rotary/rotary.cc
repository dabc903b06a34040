#include "kernels/rotary/rotary.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/widen.h"
#include "kernels/rotary/rotary_rows.h"

namespace jumar {
namespace {

constexpr int kMinRank = 2;
constexpr int kMaxRotaryRank = 8;

// Table elements that one block prepares (they stay in the first-level cache) and elements of x that it rotates.
constexpr int64_t kTableElements = 4096;
constexpr int64_t kBlockElements = 65536;
constexpr int64_t kThreadElements = 32768;

// An output of this size will have left the caches before it is read, so it need not pass through them.
constexpr int64_t kStreamBytes = int64_t{16} << 20;
constexpr int64_t kLineBytes = 64;

// Partial sums of dcos and dsin: about this many blocks, for at least so many rows each.
constexpr int64_t kSumBlocks = 64;
constexpr int64_t kMinSumRows = 16;

// A set of row dimensions with the strides of up to four operands.
struct Axes {
  int rank = 0;
  int64_t size[kMaxRank];
  int64_t stride[kMaxRank][4];
  int64_t count = 1;

  void Add(int64_t n) {
    size[rank++] = n;
    count *= n;
  }
  // Offsets of rows [begin, begin + n) in row-major order, of one operand.
  void Offsets(int64_t begin, int64_t n, int operand, int64_t* out) const {
    if (n == 0) return;  // a size may be 0
    int64_t index[kMaxRank];
    int64_t offset = 0;
    for (int i = rank - 1; i >= 0; --i) {
      index[i] = begin % size[i];
      begin /= size[i];
      offset += index[i] * stride[i][operand];
    }
    for (int64_t k = 0; k < n; ++k) {
      out[k] = offset;
      for (int i = rank - 1; i >= 0; --i) {
        offset += stride[i][operand];
        if (++index[i] < size[i]) break;
        offset -= size[i] * stride[i][operand];
        index[i] = 0;
      }
    }
  }
  int64_t SmallestStride(int operand) const {
    int64_t smallest = INT64_MAX;
    for (int i = 0; i < rank; ++i) smallest = std::min(smallest, stride[i][operand]);
    return smallest;
  }
};

struct Plan {
  Axes kept;     // dimensions that the tables have: strides of x, out, cos, sin
  Axes reduced;  // dimensions that they are broadcast over: strides of x, out
};

// `views`: x, out, cos, sin, or in the sums: grad, x, dcos, dsin. `table` gives the shape of the tables. Dimensions are
// walked in the memory order of views[0], except reduced ones when `logical_order`.
Plan MakePlan(const TensorView* const (&views)[4], const TensorView& table, bool logical_order) {
  const TensorView& x = *views[0];
  std::vector<int> order;
  for (int i = 0; i < x.rank - 1; ++i) {
    if (x.size[i] != 1) order.push_back(i);
  }
  std::vector<int> sorted = order;
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return x.stride[a] > x.stride[b]; });
  Plan plan;
  for (const bool kept : {true, false}) {
    Axes& axes = kept ? plan.kept : plan.reduced;
    for (const int dim : kept || !logical_order ? sorted : order) {
      if ((table.size[dim] == x.size[dim]) != kept) continue;
      for (int v = 0; v < 4; ++v) axes.stride[axes.rank][v] = views[v] == nullptr ? 0 : views[v]->stride[dim];
      axes.Add(x.size[dim]);
    }
  }
  return plan;
}

RowOperand Operand(const TensorView& view) {
  RowOperand operand;
  operand.data = view.data;
  operand.dtype = view.dtype;
  operand.step = view.size[view.rank - 1] == 1 ? 1 : view.stride[view.rank - 1];
  return operand;
}

void CheckArguments(const char* op, const TensorView& x, const TensorView& cos, const TensorView& sin) {
  JUMAR_CHECK(op, IsFloating(x.dtype), "input must be float32, bfloat16, float16 or float64, got ", Name(x.dtype));
  JUMAR_CHECK(op, x.rank >= kMinRank && x.rank <= kMaxRotaryRank, "input must have 2 to 8 dimensions, got ", x.rank);
  for (const TensorView* table : {&cos, &sin}) {
    const char* name = table == &cos ? "r1 (cos)" : "r2 (sin)";
    JUMAR_CHECK(op, IsFloating(table->dtype) && (table->dtype == DType::kF64) == (x.dtype == DType::kF64), name, " of ",
                Name(table->dtype), " does not go with input of ", Name(x.dtype));
  }
  JUMAR_CHECK(op, SameShape(cos, sin), "r1 and r2 must have one shape, got ", ShapeString(cos), " and ",
              ShapeString(sin));
  JUMAR_CHECK(op, cos.rank == x.rank, "r1 and r2 must have the rank of input, got ", ShapeString(cos), " for input ",
              ShapeString(x));
  const int last = x.rank - 1;
  for (int i = 0; i < last; ++i) {
    JUMAR_CHECK(op, cos.size[i] == 1 || cos.size[i] == x.size[i], "dimension ", i,
                " of r1 and r2 must be 1 or that of input, got ", ShapeString(cos), " for input ", ShapeString(x));
  }
  JUMAR_CHECK(op, x.size[last] % 2 == 0, "the last dimension of input must be even, got ", x.size[last]);
  JUMAR_CHECK(op, cos.size[last] % 2 == 0, "the last dimension of r1 and r2 must be even, got ", cos.size[last]);
  JUMAR_CHECK(op, cos.size[last] <= x.size[last], "the last dimension of r1 and r2 must not exceed that of input, got ",
              cos.size[last], " and ", x.size[last]);
}

void CheckLike(const char* op, const char* name, const TensorView& view, const char* like_name,
               const TensorView& like) {
  JUMAR_CHECK(op, view.dtype == like.dtype, name, " and ", like_name, " must have one dtype, got ", Name(view.dtype),
              " and ", Name(like.dtype));
  JUMAR_CHECK(op, SameShape(view, like), name, " and ", like_name, " must have one shape, got ", ShapeString(view),
              " and ", ShapeString(like));
}

// Calls rotate(block, x, cos, sin, out) on blocks that cover all rows.
using RotateFunction =
    std::function<void(const RotaryBlock&, const RowOperand&, const RowOperand&, const RowOperand&, const RowOperand&)>;
void ForEachBlock(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& out,
                  const RotateFunction& rotate) {
  if (x.numel() == 0) return;
  const Plan plan = MakePlan({&x, &out, &cos, &sin}, cos, /*logical_order=*/false);
  const int64_t dim = x.size[x.rank - 1];
  const int64_t width = cos.size[x.rank - 1];
  const int64_t tile = std::min(plan.kept.count, std::max<int64_t>(1, kTableElements / std::max<int64_t>(width, 1)));
  const int64_t chunk = std::min(plan.reduced.count, std::max<int64_t>(1, kBlockElements / (tile * dim)));
  const int64_t tiles = (plan.kept.count + tile - 1) / tile;
  const int64_t chunks = (plan.reduced.count + chunk - 1) / chunk;
  const bool kept_inside = plan.kept.SmallestStride(0) <= plan.reduced.SmallestStride(0);
  const int64_t grain = std::max<int64_t>(1, kThreadElements / (tile * chunk * dim));
  const auto bytes = static_cast<int64_t>(SizeOf(x.dtype));
  const bool stream = x.numel() * bytes >= kStreamBytes && width == dim && dim * bytes % kLineBytes == 0;

  ParallelFor(tiles * chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      ScratchFrame frame;
      const int64_t k = item / chunks * tile;
      const int64_t r = item % chunks * chunk;
      RotaryBlock block;
      block.kept = std::min(tile, plan.kept.count - k);
      block.reduced = std::min(chunk, plan.reduced.count - r);
      block.kept_inside = kept_inside;
      block.dim = dim;
      block.width = width;
      block.stream = stream;
      RowOperand operands[4] = {Operand(x), Operand(out), Operand(cos), Operand(sin)};
      for (int v = 0; v < 4; ++v) {
        auto* kept = frame.Alloc<int64_t>(block.kept);
        plan.kept.Offsets(k, block.kept, v, kept);
        operands[v].kept_offset = kept;
        if (v >= 2) continue;
        auto* reduced = frame.Alloc<int64_t>(block.reduced);
        plan.reduced.Offsets(r, block.reduced, v, reduced);
        operands[v].reduced_offset = reduced;
      }
      rotate(block, operands[0], operands[2], operands[3], operands[1]);
    }
  });
}

void Rotate(const TensorView& x, const TensorView& cos, const TensorView& sin, RotaryMode mode, bool transpose,
            const TensorView& out) {
  ForEachBlock(
      x, cos, sin, out,
      [&](RotaryBlock block, const RowOperand& from, const RowOperand& c, const RowOperand& s, const RowOperand& to) {
        block.mode = mode;
        RotaryRows(block, transpose, from, c, s, to);
      });
}

// One row of a table's gradient as a 1-d view.
TensorView RowOf(const TensorView& view, int64_t offset) {
  TensorView row = view;
  row.data = static_cast<char*>(view.data) + offset * static_cast<int64_t>(SizeOf(view.dtype));
  row.rank = 1;
  row.size[0] = view.size[view.rank - 1];
  row.stride[0] = view.stride[view.rank - 1];
  return row;
}

void SumTables(const TensorView& grad, const TensorView& x, RotaryMode mode, const TensorView* dcos,
               const TensorView* dsin) {
  const TensorView& table = dcos != nullptr ? *dcos : *dsin;
  if (table.numel() == 0) return;
  const Plan plan = MakePlan({&grad, &x, dcos, dsin}, table, /*logical_order=*/true);
  const DType compute = ComputeType(x.dtype);
  const int64_t width = table.size[table.rank - 1];
  const int64_t tile = std::min(plan.kept.count, std::max<int64_t>(1, kTableElements / width));
  const int64_t tiles = (plan.kept.count + tile - 1) / tile;
  const int64_t chunks =
      std::clamp<int64_t>(kSumBlocks / tiles, 1, std::max<int64_t>(1, plan.reduced.count / kMinSumRows));
  const bool kept_inside = plan.kept.SmallestStride(0) <= plan.reduced.SmallestStride(0);

  // sums[chunk][kept row][...]
  ScratchFrame outer;
  const int64_t row_stride = RotarySumsStride(x.dtype, width);
  const int64_t chunk_stride = row_stride * plan.kept.count;
  const auto bytes = static_cast<int64_t>(SizeOf(compute));
  char* sums = outer.Alloc<char>(chunks * chunk_stride * bytes);

  ParallelChunks(tiles * chunks, [&](int64_t item) {
    ScratchFrame frame;
    const int64_t k = item / chunks * tile;
    const int64_t c = item % chunks;
    const int64_t r = ChunkBegin(plan.reduced.count, chunks, c);
    RotaryBlock block;
    block.kept = std::min(tile, plan.kept.count - k);
    block.reduced = ChunkBegin(plan.reduced.count, chunks, c + 1) - r;
    block.kept_inside = kept_inside;
    block.dim = x.size[x.rank - 1];
    block.width = width;
    block.mode = mode;
    RowOperand operands[2] = {Operand(grad), Operand(x)};
    for (int v = 0; v < 2; ++v) {
      auto* kept = frame.Alloc<int64_t>(block.kept);
      auto* reduced = frame.Alloc<int64_t>(block.reduced);
      plan.kept.Offsets(k, block.kept, v, kept);
      plan.reduced.Offsets(r, block.reduced, v, reduced);
      operands[v].kept_offset = kept;
      operands[v].reduced_offset = reduced;
    }
    RotarySumRows(block, operands[0], operands[1], sums + (c * chunk_stride + k * row_stride) * bytes);
  });

  ParallelFor(plan.kept.count, std::max<int64_t>(1, kThreadElements / (width * chunks)),
              [&](int64_t begin, int64_t end) {
                for (int64_t k = begin; k < end; ++k) {
                  TensorView rows[2];
                  for (int v = 0; v < 2; ++v) {
                    const TensorView* view = v == 0 ? dcos : dsin;
                    int64_t offset;
                    plan.kept.Offsets(k, 1, v + 2, &offset);
                    if (view != nullptr) rows[v] = RowOf(*view, offset);
                  }
                  RotaryStoreSums(compute, mode, width, sums + k * row_stride * bytes, chunks, chunk_stride,
                                  dcos != nullptr ? &rows[0] : nullptr, dsin != nullptr ? &rows[1] : nullptr);
                }
              });
}

}  // namespace

RotaryMode ParseRotaryMode(const char* op, const std::string& name) {
  if (name == "half") return RotaryMode::kHalf;
  JUMAR_CHECK(op, name == "interleave", "The rotary_mode of npu_rotary_mul should be half or interleave, but got ",
              name);
  return RotaryMode::kInterleave;
}

void RotaryMul(const TensorView& x, const TensorView& cos, const TensorView& sin, RotaryMode mode,
               const TensorView& out) {
  const char* op = "npu_rotary_mul";
  CheckArguments(op, x, cos, sin);
  CheckLike(op, "the output", out, "input", x);
  Rotate(x, cos, sin, mode, /*transpose=*/false, out);
}

void RotaryMulMatrix(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& matrix,
                     const TensorView& out) {
  const char* op = "npu_rotary_mul";
  CheckArguments(op, x, cos, sin);
  CheckLike(op, "the output", out, "input", x);
  const int64_t dim = x.size[x.rank - 1];
  JUMAR_CHECK(op, matrix.rank == 2 && matrix.size[0] == dim && matrix.size[1] == dim, "rotate must be [", dim, ", ",
              dim, "], got ", ShapeString(matrix));
  JUMAR_CHECK(op, IsFloating(matrix.dtype) && (matrix.dtype == DType::kF64) == (x.dtype == DType::kF64), "rotate of ",
              Name(matrix.dtype), " does not go with input of ", Name(x.dtype));
  JUMAR_CHECK(op, cos.size[x.rank - 1] == dim,
              "with rotate, the last dimension of r1 and r2 must be that of input, got ", cos.size[x.rank - 1], " and ",
              dim);
  ScratchFrame frame;
  const void* wide = WidenAll(matrix, ComputeType(x.dtype), 0.0, frame);
  ForEachBlock(x, cos, sin, out,
               [&](const RotaryBlock& block, const RowOperand& from, const RowOperand& c, const RowOperand& s,
                   const RowOperand& to) { RotaryMatrixRows(block, from, c, s, wide, to); });
}

void RotaryMulBackward(const TensorView& grad, const TensorView& x, const TensorView& cos, const TensorView& sin,
                       RotaryMode mode, const TensorView& dx, const TensorView* dcos, const TensorView* dsin) {
  const char* op = "npu_rotary_mul_backward";
  CheckArguments(op, x, cos, sin);
  CheckLike(op, "grad", grad, "input", x);
  CheckLike(op, "the gradient of input", dx, "input", x);
  for (const TensorView* table : {dcos, dsin}) {
    if (table == nullptr) continue;
    JUMAR_CHECK(op, SameShape(*table, cos), "a gradient of r1 or r2 must have the shape of r1, ", ShapeString(cos),
                ", got ", ShapeString(*table));
    JUMAR_CHECK(op, IsFloating(table->dtype) && (table->dtype == DType::kF64) == (x.dtype == DType::kF64),
                "a gradient of r1 or r2 of ", Name(table->dtype), " does not go with input of ", Name(x.dtype));
  }
  Rotate(grad, cos, sin, mode, /*transpose=*/true, dx);
  if (dcos != nullptr || dsin != nullptr) SumTables(grad, x, mode, dcos, dsin);
}

}  // namespace jumar
