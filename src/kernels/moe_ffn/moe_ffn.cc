#include "kernels/moe_ffn/moe_ffn.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "base/heap_buffer.h"
#include "base/indices.h"
#include "base/parallel.h"
#include "base/slot_sort.h"
#include "base/widen.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_tiles.h"
#include "kernels/moe_ffn/moe_ffn_simd.h"

namespace jumar {
namespace {

constexpr int64_t kSlabBytes = 64 << 20;  // of fp32 sums that wait for their token's other experts
constexpr int64_t kSlabUnit = 256;        // columns
constexpr int64_t kGrid = 128;            // columns of a partial sum of dprobs

int64_t Bytes(DType dtype) { return static_cast<int64_t>(SizeOf(dtype)); }

// The slots in the order of their experts; those of no expert come last and are left out.
struct Routing {
  int64_t tokens = 0;
  int64_t top_k = 0;
  int64_t used = 0;                  // rows: slots that have an expert
  std::vector<int64_t> begin;        // [E + 1]
  std::vector<int32_t> slot_of_row;  // [T * K]
  std::vector<int32_t> row_of_slot;
  std::vector<int32_t> token_of_row;
  HeapBuffer probs;         // in the order of slots, in the compute type
  HeapBuffer probs_of_row;  // in the order of rows
};

struct Shape {
  int64_t tokens, top_k, experts, hidden, inner;
  DType dtype;    // of hidden, weights and results
  DType compute;  // of sums
};

void CheckSameShape(const char* op, const char* name, const TensorView& x, int64_t rows, int64_t cols) {
  JUMAR_CHECK(op, x.rank == 2 && x.size[0] == rows && x.size[1] == cols, name, " must be [", rows, ", ", cols,
              "], got ", ShapeString(x));
}

void CheckDType(const char* op, const char* name, const TensorView& x, const Shape& s) {
  JUMAR_CHECK(op, x.dtype == s.dtype, name, " and hidden should have one dtype, got ", Name(x.dtype), " and ",
              Name(s.dtype));
}

void CheckWeights(const char* op, const char* what, const ExpertWeights& w, const Shape& s, bool partial) {
  const auto list = [&](const char* name, const std::vector<TensorView>& matrices, int64_t rows, int64_t cols) {
    if (partial && matrices.empty()) return;
    JUMAR_CHECK(op, static_cast<int64_t>(matrices.size()) == s.experts, what, name, " has ", matrices.size(),
                " experts, expected ", s.experts);
    for (const TensorView& m : matrices) {
      CheckSameShape(op, name, m, rows, cols);
      CheckDType(op, name, m, s);
    }
  };
  list("gate", w.gate, s.hidden, w.up.empty() ? 2 * s.inner : s.inner);
  if (!w.up.empty()) list("up", w.up, s.hidden, s.inner);
  list("down", w.down, s.inner, s.hidden);
}

Shape CheckInputs(const char* op, const TensorView& hidden, const TensorView& ids, const TensorView& probs,
                  const ExpertWeights& w) {
  JUMAR_CHECK(op, hidden.rank == 2 && IsFloating(hidden.dtype), "hidden must be a floating [tokens, features], got ",
              Describe(hidden));
  JUMAR_CHECK(op, ids.rank == 2 && ids.size[0] == hidden.size[0], "ids must be [", hidden.size[0], ", top_k], got ",
              ShapeString(ids));
  JUMAR_CHECK(op, SameShape(ids, probs) && IsFloating(probs.dtype), "probs must be floating and like ids ",
              ShapeString(ids), ", got ", Describe(probs));
  JUMAR_CHECK(op, ids.numel() <= std::numeric_limits<int32_t>::max(), "at most 2^31 - 1 slots, got ", ids.numel());
  Shape s{hidden.size[0],           ids.size[1], static_cast<int64_t>(w.down.size()), hidden.size[1], 0, hidden.dtype,
          ComputeType(hidden.dtype)};
  JUMAR_CHECK(op, s.experts > 0, "there are no experts");
  JUMAR_CHECK(op, w.down[0].rank == 2, "down must be [experts, inner, features], got matrices ",
              ShapeString(w.down[0]));
  s.inner = w.down[0].size[0];
  CheckWeights(op, "", w, s, false);
  return s;
}

Routing Route(const char* op, const TensorView& ids, const TensorView& probs, const Shape& s) {
  Routing r;
  r.tokens = s.tokens;
  r.top_k = s.top_k;
  const std::vector<int64_t> id = ReadIndices(op, "ids", ids, 0, s.experts + 1);
  const auto slots = static_cast<int64_t>(id.size());
  r.slot_of_row.resize(id.size());
  r.row_of_slot.resize(id.size());
  SortSlots(id.data(), slots, r.slot_of_row.data(), r.row_of_slot.data());
  r.begin.push_back(0);
  for (const int64_t n : CountIds(id.data(), slots, s.experts)) r.begin.push_back(r.begin.back() + n);
  r.used = r.begin.back();
  r.token_of_row.resize(static_cast<size_t>(r.used));
  r.probs = HeapBuffer(slots * Bytes(s.compute));
  r.probs_of_row = HeapBuffer(slots * Bytes(s.compute));
  ConvertAll(probs, Contiguous(r.probs.data(), s.compute, {s.tokens, s.top_k}));
  for (int64_t row = 0; row < r.used; ++row) {
    const int32_t slot = r.slot_of_row[static_cast<size_t>(row)];
    r.token_of_row[static_cast<size_t>(row)] = static_cast<int32_t>(slot / s.top_k);
    std::memcpy(static_cast<char*>(r.probs_of_row.data()) + row * Bytes(s.compute),
                static_cast<const char*>(r.probs.data()) + slot * Bytes(s.compute), SizeOf(s.compute));
  }
  return r;
}

// The rows of expert e, picked from a matrix of tokens; as a left operand, tokens along rows or along k.
TileOperand TokenRows(const TensorView& x, const Routing& r, int64_t e) {
  TileOperand picked{LeftOperand(x)};
  picked.matrix.rows = r.begin[static_cast<size_t>(e) + 1] - r.begin[static_cast<size_t>(e)];
  picked.row_at = r.token_of_row.data() + r.begin[static_cast<size_t>(e)];
  return picked;
}
TileOperand TokensAlongK(const TensorView& x, const Routing& r, int64_t e) {
  TileOperand picked{RightOperand(x)};  // rows: features; the same for either side of a product
  picked.matrix.k = r.begin[static_cast<size_t>(e) + 1] - r.begin[static_cast<size_t>(e)];
  picked.k_at = r.token_of_row.data() + r.begin[static_cast<size_t>(e)];
  return picked;
}

TensorView RowsOf(const TensorView& x, const Routing& r, int64_t e) {
  return Narrow(x, 0, r.begin[static_cast<size_t>(e)],
                r.begin[static_cast<size_t>(e) + 1] - r.begin[static_cast<size_t>(e)]);
}

void* At(const TensorView& x, int64_t row, int64_t col) {
  return static_cast<char*>(x.data) + (row * x.stride[0] + col * x.stride[1]) * Bytes(x.dtype);
}

// out[t] = sum over k of weights[t, k] * x[row of (t, k)] * matrices[e], where the matrices of expert e are those of
// each term: slab by slab of columns, so that the fp32 sums of all slots need not be there at once.
struct CombineTerm {
  TensorView x;                      // [used, K]
  std::vector<TensorView> matrices;  // [K, N] an expert
};

void MultiplyAndCombine(const GemmKernel& kernel, const Routing& r, const std::vector<CombineTerm>& terms,
                        const void* weights, const Shape& s, const TensorView& out) {
  const int64_t n = out.size[1];
  if (out.numel() == 0) return;
  const int64_t fits = kSlabBytes / std::max<int64_t>(1, r.used * Bytes(s.compute)) / kSlabUnit * kSlabUnit;
  const int64_t width = std::min(n, std::max(kSlabUnit, fits));
  const HeapBuffer sums(r.used * width * Bytes(s.compute));
  const TensorView slab = Contiguous(sums.data(), s.compute, {r.used, width});
  for (int64_t col = 0; col < n; col += width) {
    const int64_t cols = std::min(width, n - col);
    std::vector<TileProduct> products;
    for (int64_t e = 0; e < s.experts; ++e) {
      TileProduct p;
      p.n = cols;
      p.term_count = static_cast<int>(terms.size());
      for (size_t t = 0; t < terms.size(); ++t) {
        const TensorView rows = RowsOf(terms[t].x, r, e);
        p.m = rows.size[0];
        p.terms[t] = {{LeftOperand(rows)},
                      {RightOperand(Narrow(terms[t].matrices[static_cast<size_t>(e)], 1, col, cols))}};
      }
      p.sums = At(slab, r.begin[static_cast<size_t>(e)], 0);
      p.ld_sums = width;
      if (p.m > 0) products.push_back(p);
    }
    RunTiles(kernel, products, [](const SumTile&) {});
    ParallelFor(s.tokens, std::max<int64_t>(1, 16384 / (cols * std::max<int64_t>(1, r.top_k))),
                [&](int64_t first, int64_t last) {
                  ScratchFrame frame;
                  void* row =
                      out.stride[1] == 1 ? nullptr : frame.AllocBytes(static_cast<size_t>(cols * Bytes(s.dtype)));
                  for (int64_t t = first; t < last; ++t) {
                    CombineRow c{s.dtype, cols,   slab.data, width, r.row_of_slot.data() + t * r.top_k,
                                 r.top_k, r.used, nullptr,   row};
                    if (weights != nullptr) {
                      c.weights = static_cast<const char*>(weights) + t * r.top_k * Bytes(s.compute);
                    }
                    if (row == nullptr) c.out = At(out, t, col);
                    RunCombineRow(c);
                    for (int64_t j = 0; row != nullptr && j < cols; ++j) {
                      std::memcpy(At(out, t, col + j), static_cast<char*>(row) + j * Bytes(s.dtype), SizeOf(s.dtype));
                    }
                  }
                });
  }
}

// The rows of tokens of each expert times matrices [.., inner], which `set_b(e, product)` gives.
template <typename F>
std::vector<TileProduct> InnerProducts(const TensorView& x, const Routing& r, const Shape& s, const F& set_b) {
  std::vector<TileProduct> products(static_cast<size_t>(s.experts));
  for (int64_t e = 0; e < s.experts; ++e) {
    TileProduct& p = products[static_cast<size_t>(e)];
    p.n = s.inner;
    p.terms[0].a = TokenRows(x, r, e);
    p.m = p.terms[0].a.matrix.rows;
    set_b(static_cast<size_t>(e), &p);
  }
  return products;
}

TensorView Half(const TensorView& matrix, const Shape& s, int which) {
  return Narrow(matrix, 1, which * s.inner, s.inner);
}

bool Joined(const ExpertWeights& w) { return w.up.empty(); }

}  // namespace

void MoeFfn(const char* op, const TensorView& hidden, const TensorView& ids, const TensorView& probs,
            const ExpertWeights& w, const TensorView& y, const TensorView* saved) {
  const Shape s = CheckInputs(op, hidden, ids, probs, w);
  CheckSameShape(op, "y", y, s.tokens, s.hidden);
  CheckDType(op, "y", y, s);
  const int64_t slots = s.tokens * s.top_k;
  if (saved != nullptr) {
    CheckSameShape(op, "saved", *saved, slots, 2 * s.inner);
    CheckDType(op, "saved", *saved, s);
    JUMAR_CHECK(op, saved->numel() == 0 || IsContiguous(*saved), "saved must be contiguous");
  }
  const Routing r = Route(op, ids, probs, s);
  const GemmKernel& kernel = ChooseGemmKernel(s.dtype, s.dtype);
  const HeapBuffer inner(r.used * s.inner * Bytes(s.dtype));
  const TensorView h = Contiguous(inner.data(), s.dtype, {r.used, s.inner});
  const std::vector<TileProduct> products = InnerProducts(hidden, r, s, [&](size_t e, TileProduct* p) {
    p->separate = true;
    p->term_count = 2;
    p->terms[0].b = {RightOperand(Joined(w) ? Half(w.gate[e], s, 0) : w.gate[e])};
    p->terms[1].b = {RightOperand(Joined(w) ? Half(w.gate[e], s, 1) : w.up[e])};
  });
  RunTiles(kernel, products, [&](const SumTile& tile) {
    const int64_t row = r.begin[static_cast<size_t>(tile.product)] + tile.row;
    SwigluTile t{};
    t.dtype = s.dtype;
    t.rows = tile.rows;
    t.cols = tile.cols;
    t.gate_sums = tile.sums[0];
    t.up_sums = tile.sums[1];
    t.ld_sums = tile.ld;
    t.out = At(h, row, tile.col);
    t.out_stride = s.inner;
    if (saved != nullptr) {
      t.saved_gate = At(*saved, row, tile.col);
      t.saved_up = At(*saved, row, s.inner + tile.col);
      t.saved_stride = 2 * s.inner;
    }
    RunSwigluTile(t);
  });
  if (saved != nullptr && r.used < slots && s.inner > 0) {
    std::memset(At(*saved, r.used, 0), 0, static_cast<size_t>((slots - r.used) * 2 * s.inner * Bytes(s.dtype)));
  }
  MultiplyAndCombine(kernel, r, {{h, w.down}}, r.probs.data(), s, y);
}

void MoeFfnBackward(const char* op, const TensorView& dy, const TensorView& hidden, const TensorView& ids,
                    const TensorView& probs, const ExpertWeights& w, const TensorView& saved, const TensorView* dhidden,
                    const TensorView* dprobs, const ExpertWeights& grads) {
  const Shape s = CheckInputs(op, hidden, ids, probs, w);
  const int64_t slots = s.tokens * s.top_k;
  CheckSameShape(op, "grad", dy, s.tokens, s.hidden);
  CheckDType(op, "grad", dy, s);
  CheckSameShape(op, "saved", saved, slots, 2 * s.inner);
  CheckDType(op, "saved", saved, s);
  JUMAR_CHECK(op, saved.numel() == 0 || IsContiguous(saved), "saved must be contiguous");
  CheckWeights(op, "grad of ", grads, s, true);
  JUMAR_CHECK(op, grads.gate.empty() || grads.up.empty() == w.up.empty(),
              "gradients of gate and up must be joined as the weights are");
  if (dhidden != nullptr) {
    CheckSameShape(op, "grad of hidden", *dhidden, s.tokens, s.hidden);
    CheckDType(op, "grad of hidden", *dhidden, s);
  }
  if (dprobs != nullptr) {
    JUMAR_CHECK(op, SameShape(*dprobs, ids) && IsFloating(dprobs->dtype), "grad of probs must be like ids ",
                ShapeString(ids), ", got ", Describe(*dprobs));
  }
  const Routing r = Route(op, ids, probs, s);
  const GemmKernel& kernel = ChooseGemmKernel(s.dtype, s.dtype);
  const HeapBuffer dgu_memory(r.used * 2 * s.inner * Bytes(s.dtype));
  HeapBuffer ph_memory(r.used * s.inner * Bytes(s.dtype));
  const TensorView dgu = Contiguous(dgu_memory.data(), s.dtype, {r.used, 2 * s.inner});
  const TensorView ph = Contiguous(ph_memory.data(), s.dtype, {r.used, s.inner});
  const int64_t cells = CeilDiv(s.inner, kGrid);
  const HeapBuffer dots(cells * r.used * Bytes(s.compute));
  {
    const std::vector<TileProduct> products = InnerProducts(
        dy, r, s, [&](size_t e, TileProduct* p) { p->terms[0].b = {RightOperand(Transposed(w.down[e]))}; });
    RunTiles(
        kernel, products,
        [&](const SumTile& tile) {
          const int64_t row = r.begin[static_cast<size_t>(tile.product)] + tile.row;
          SwigluGradTile t{};
          t.dtype = s.dtype;
          t.rows = tile.rows;
          t.cols = tile.cols;
          t.sums = tile.sums[0];
          t.ld_sums = tile.ld;
          t.probs = static_cast<const char*>(r.probs_of_row.data()) + row * Bytes(s.compute);
          t.gate = At(saved, row, tile.col);
          t.up = At(saved, row, s.inner + tile.col);
          t.saved_stride = 2 * s.inner;
          t.dgate = At(dgu, row, tile.col);
          t.dup = At(dgu, row, s.inner + tile.col);
          t.grad_stride = 2 * s.inner;
          t.weighted = At(ph, row, tile.col);
          t.weighted_stride = s.inner;
          t.dots = static_cast<char*>(dots.data()) + (tile.col / kGrid * r.used + row) * Bytes(s.compute);
          RunSwigluGradTile(t);
        },
        kGrid);
  }
  if (dprobs != nullptr) {
    const HeapBuffer sums(slots * Bytes(s.compute));
    const auto add = [&](auto* out, const auto* partial) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t row = r.row_of_slot[static_cast<size_t>(slot)];
        out[slot] = 0;
        for (int64_t c = 0; row < r.used && c < cells; ++c) out[slot] += partial[c * r.used + row];
      }
    };
    if (s.compute == DType::kF64) {
      add(static_cast<double*>(sums.data()), static_cast<const double*>(dots.data()));
    } else {
      add(static_cast<float*>(sums.data()), static_cast<const float*>(dots.data()));
    }
    ConvertAll(Contiguous(sums.data(), s.compute, {s.tokens, s.top_k}), *dprobs);
  }
  if (!grads.down.empty()) {
    std::vector<MatrixProduct> items;
    for (int64_t e = 0; e < s.experts; ++e) {
      items.push_back({{RightOperand(RowsOf(ph, r, e))}, TokensAlongK(dy, r, e), grads.down[static_cast<size_t>(e)]});
    }
    RunProducts(kernel, std::move(items));
  }
  ph_memory = HeapBuffer();
  if (!grads.gate.empty()) {
    std::vector<MatrixProduct> items;
    for (int64_t e = 0; e < s.experts; ++e) {
      const auto i = static_cast<size_t>(e);
      const TensorView rows = RowsOf(dgu, r, e);
      items.push_back({TokensAlongK(hidden, r, e), {RightOperand(Joined(w) ? rows : Half(rows, s, 0))}, grads.gate[i]});
      if (!Joined(w)) items.push_back({TokensAlongK(hidden, r, e), {RightOperand(Half(rows, s, 1))}, grads.up[i]});
    }
    RunProducts(kernel, std::move(items));
  }
  if (dhidden != nullptr) {
    const auto turned = [](const std::vector<TensorView>& matrices) {
      std::vector<TensorView> all;
      for (const TensorView& m : matrices) all.push_back(Transposed(m));
      return all;
    };
    std::vector<CombineTerm> terms;
    if (Joined(w)) {
      terms.push_back({dgu, turned(w.gate)});
    } else {
      terms.push_back({Half(dgu, s, 0), turned(w.gate)});
      terms.push_back({Half(dgu, s, 1), turned(w.up)});
    }
    MultiplyAndCombine(kernel, r, terms, nullptr, s, *dhidden);
  }
}

}  // namespace jumar
