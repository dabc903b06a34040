#include "kernels/grouped_matmul/grouped_matmul.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/widen.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_tiles.h"

namespace jumar {
namespace {

using Views = std::vector<TensorView>;

// One product of a list. `bias` may be null.
struct Item {
  TensorView a;
  TensorView b;
  const TensorView* bias;
  TensorView out;
};

void CheckFloating(const char* op, std::initializer_list<const TensorView*> views) {
  const DType first = (*views.begin())->dtype;
  for (const TensorView* x : views) {
    JUMAR_CHECK(op, IsFloating(x->dtype), "unsupported dtype ", Name(x->dtype),
                "; expected float32, bfloat16, float16 or float64");
    JUMAR_CHECK(op, (x->dtype == DType::kF64) == (first == DType::kF64), "float64 does not mix with other dtypes, got ",
                Name(first), " and ", Name(x->dtype));
  }
}

void CheckMatrix(const char* op, const char* name, const TensorView& x) {
  JUMAR_CHECK(op, x.rank == 2, name, " must be a matrix, got ", ShapeString(x));
}

void CheckSize(const char* op, const char* name, const TensorView& x, int64_t rows, int64_t cols) {
  CheckMatrix(op, name, x);
  JUMAR_CHECK(op, x.size[0] == rows && x.size[1] == cols, name, " has shape ", ShapeString(x), ", expected [", rows,
              ", ", cols, "]");
}

void CheckCount(const char* op, const char* name, const Views& list, const RowGroups& groups) {
  JUMAR_CHECK(op, static_cast<int64_t>(list.size()) == groups.count(), "group_list has ", groups.count(),
              " groups, but there are ", list.size(), " of ", name);
}

void Run(const std::vector<Item>& items, bool add) {
  if (items.empty()) return;
  ScratchFrame frame;
  const GemmKernel& kernel = ChooseGemmKernel(items[0].a.dtype, items[0].b.dtype);
  std::vector<MatrixProduct> products;
  for (const Item& item : items) {
    products.push_back({{LeftOperand(item.a)}, {RightOperand(item.b)}, item.out});
    if (item.bias != nullptr) products.back().bias = WidenAll(*item.bias, kernel.acc, -0.0, frame);
  }
  RunProducts(kernel, std::move(products), add);
}

// Rows [begin, end) of a matrix become zero: all bits, in every dtype.
void ZeroRows(const TensorView& x, int64_t begin, int64_t end) {
  if (begin >= end || x.size[1] == 0) return;
  const auto bytes = static_cast<int64_t>(SizeOf(x.dtype));
  ParallelFor(end - begin, std::max<int64_t>(1, 4096 / x.size[1]), [&](int64_t first, int64_t last) {
    for (int64_t i = begin + first; i < begin + last; ++i) {
      char* row = static_cast<char*>(x.data) + i * x.stride[0] * bytes;
      if (x.stride[1] == 1) {
        std::memset(row, 0, static_cast<size_t>(x.size[1] * bytes));
      } else {
        for (int64_t j = 0; j < x.size[1]; ++j)
          std::memset(row + j * x.stride[1] * bytes, 0, static_cast<size_t>(bytes));
      }
    }
  });
}

TensorView RowsOf(const TensorView& x, const RowGroups::Range& range) {
  return Narrow(x, 0, range.begin, range.end - range.begin);
}

void CheckRows(const char* op, const char* name, const TensorView& x, const RowGroups& groups) {
  CheckMatrix(op, name, x);
  JUMAR_CHECK(op, groups.used <= x.size[0], "groups of ", groups.used, " rows do not fit ", name, " ", ShapeString(x));
}

// y = x * weights[g], or x times its transpose, row group by row group.
void ByRows(const TensorView& x, const Views& weights, bool transposed, const Views& biases, const RowGroups& groups,
            const TensorView& y) {
  std::vector<Item> items;
  for (size_t g = 0; g < weights.size(); ++g) {
    const RowGroups::Range& range = groups.ranges[g];
    if (range.begin == range.end) continue;
    items.push_back({RowsOf(x, range), transposed ? Transposed(weights[g]) : weights[g],
                     biases.empty() ? nullptr : &biases[g], RowsOf(y, range)});
  }
  ZeroRows(y, groups.used, y.size[0]);
  Run(items, false);
}

}  // namespace

std::vector<TensorView> Unstack(const TensorView& stacked) {
  std::vector<TensorView> matrices;
  for (int64_t e = 0; e < stacked.size[0]; ++e) {
    TensorView m = Narrow(stacked, 0, e, 1);
    --m.rank;
    for (int i = 0; i < m.rank; ++i) {
      m.size[i] = m.size[i + 1];
      m.stride[i] = m.stride[i + 1];
    }
    matrices.push_back(m);
  }
  return matrices;
}

void GroupedMatmul(const char* op, const TensorView& x, const Views& weights, const Views& biases,
                   const RowGroups& groups, const TensorView& y) {
  CheckRows(op, "x", x, groups);
  CheckCount(op, "weight", weights, groups);
  CheckFloating(op, {&x, &y});
  CheckSize(op, "y", y, x.size[0], y.rank == 2 ? y.size[1] : -1);
  if (!biases.empty()) CheckCount(op, "bias", biases, groups);
  for (size_t g = 0; g < weights.size(); ++g) {
    const TensorView& w = weights[g];
    JUMAR_CHECK(op, w.rank == 2 && w.size[0] == x.size[1] && w.size[1] == y.size[1], "weight of group ", g, " ",
                ShapeString(w), " does not go with x ", ShapeString(x), ", expected [", x.size[1], ", ", y.size[1],
                "]");
    CheckFloating(op, {&x, &w});
    JUMAR_CHECK(op, w.dtype == weights[0].dtype, "weights must have one dtype, got ", Name(weights[0].dtype), " and ",
                Name(w.dtype));
    if (biases.empty()) continue;
    const TensorView& b = biases[g];
    JUMAR_CHECK(op, b.rank == 1 && b.size[0] == y.size[1], "bias of group ", g, " ", ShapeString(b),
                " does not go with weight ", ShapeString(w), ", expected [", y.size[1], "]");
    CheckFloating(op, {&x, &b});
  }
  ByRows(x, weights, false, biases, groups, y);
}

void GroupedMatmulDgrad(const char* op, const TensorView& dy, const Views& weights, const RowGroups& groups,
                        const TensorView& dx) {
  CheckRows(op, "grad", dy, groups);
  CheckCount(op, "weight", weights, groups);
  CheckFloating(op, {&dy, &dx});
  CheckSize(op, "grad of x", dx, dy.size[0], dx.rank == 2 ? dx.size[1] : -1);
  for (size_t g = 0; g < weights.size(); ++g) {
    const TensorView& w = weights[g];
    JUMAR_CHECK(op, w.rank == 2 && w.size[1] == dy.size[1] && w.size[0] == dx.size[1], "weight of group ", g, " ",
                ShapeString(w), " does not go with grad ", ShapeString(dy), ", expected [", dx.size[1], ", ",
                dy.size[1], "]");
    CheckFloating(op, {&dy, &w});
    JUMAR_CHECK(op, w.dtype == weights[0].dtype, "weights must have one dtype, got ", Name(weights[0].dtype), " and ",
                Name(w.dtype));
  }
  ByRows(dy, weights, true, {}, groups, dx);
}

void GroupedMatmulWgrad(const char* op, const TensorView& x, const TensorView& dy, const RowGroups& groups,
                        const Views& dw, bool add) {
  CheckRows(op, "x", x, groups);
  CheckRows(op, "grad", dy, groups);
  JUMAR_CHECK(op, x.size[0] == dy.size[0], "x ", ShapeString(x), " and grad ", ShapeString(dy),
              " must have the same rows");
  CheckCount(op, "grad of weight", dw, groups);
  CheckFloating(op, {&x, &dy});
  std::vector<Item> items;
  for (size_t g = 0; g < dw.size(); ++g) {
    CheckSize(op, "grad of weight", dw[g], x.size[1], dy.size[1]);
    CheckFloating(op, {&x, &dw[g]});
    items.push_back({Transposed(RowsOf(x, groups.ranges[g])), RowsOf(dy, groups.ranges[g]), nullptr, dw[g]});
  }
  Run(items, add);
}

// A row of ones times dy.
void GroupedMatmulBiasGrad(const char* op, const TensorView& dy, const RowGroups& groups, const Views& db) {
  CheckRows(op, "grad", dy, groups);
  CheckCount(op, "grad of bias", db, groups);
  static const double kOneF64 = 1.0;
  static const uint16_t kOneBF16 = 0x3F80;  // exact, and keeps bf16 x bf16 together
  static const float kOneF32 = 1.0f;
  const auto* one = dy.dtype == DType::kF64    ? static_cast<const void*>(&kOneF64)
                    : dy.dtype == DType::kBF16 ? static_cast<const void*>(&kOneBF16)
                                               : static_cast<const void*>(&kOneF32);
  TensorView ones = Contiguous(const_cast<void*>(one), dy.dtype == DType::kF16 ? DType::kF32 : dy.dtype, {1, 1});
  ones.stride[1] = 0;
  std::vector<Item> items;
  for (size_t g = 0; g < db.size(); ++g) {
    JUMAR_CHECK(op, db[g].rank == 1 && db[g].size[0] == dy.size[1], "grad of bias ", ShapeString(db[g]),
                " does not go with grad ", ShapeString(dy));
    CheckFloating(op, {&dy, &db[g]});
    ones.size[1] = groups.ranges[g].end - groups.ranges[g].begin;
    TensorView row = db[g];
    row.rank = 2;
    row.size[1] = row.size[0];
    row.stride[1] = row.stride[0];
    row.size[0] = 1;
    row.stride[0] = 0;
    items.push_back({ones, RowsOf(dy, groups.ranges[g]), nullptr, row});
  }
  Run(items, false);
}

void SeparateProducts(const char* op, const Views& x, const Views& weights, const Views& biases, const Views& y) {
  JUMAR_CHECK(op, x.size() == weights.size() && x.size() == y.size(),
              "the num of x tensors must equal the num of "
              "weight tensors, got ",
              x.size(), " and ", weights.size());
  JUMAR_CHECK(op, biases.empty() || biases.size() == x.size(), "a bias for each of ", x.size(), " products, got ",
              biases.size());
  std::vector<Item> items;
  for (size_t i = 0; i < x.size(); ++i) {
    CheckMatrix(op, "x", x[i]);
    CheckMatrix(op, "weight", weights[i]);
    JUMAR_CHECK(op, x[i].size[1] == weights[i].size[0], "x[", i, "] ", ShapeString(x[i]), " does not go with weight[",
                i, "] ", ShapeString(weights[i]));
    CheckSize(op, "y", y[i], x[i].size[0], weights[i].size[1]);
    CheckFloating(op, {&x[0], &x[i], &weights[i], &y[i]});
    JUMAR_CHECK(op, x[i].dtype == x[0].dtype && weights[i].dtype == weights[0].dtype,
                "all of x, and all of weight, must have one dtype, got ", Name(x[0].dtype), " and ", Name(x[i].dtype),
                ", ", Name(weights[0].dtype), " and ", Name(weights[i].dtype));
    if (!biases.empty()) {
      JUMAR_CHECK(op, biases[i].rank == 1 && biases[i].size[0] == y[i].size[1], "bias[", i, "] ",
                  ShapeString(biases[i]), " does not go with weight[", i, "] ", ShapeString(weights[i]));
      CheckFloating(op, {&x[0], &biases[i]});
    }
    items.push_back({x[i], weights[i], biases.empty() ? nullptr : &biases[i], y[i]});
  }
  Run(items, false);
}

}  // namespace jumar
