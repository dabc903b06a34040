#include "kernels/moe_ffn/moe_ffn.h"

#include "base/check.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using Views = std::vector<TensorView>;

// One matrix an expert, of one stacked tensor [E, rows, columns] or of E matrices.
Views Matrices(const char* op, const char* name, const Tensors& tensors) {
  Views views;
  for (const Tensor& tensor : tensors) {
    const TensorView view = View(op, tensor);
    const bool stacked = tensors.size() == 1 && view.rank == 3;
    JUMAR_CHECK(op, stacked || view.rank == 2, name,
                " must be one tensor [experts, rows, columns] or a matrix for each ", "expert, got ",
                ShapeString(view));
    if (stacked) return Unstack(view);
    views.push_back(view);
  }
  return views;
}

ExpertWeights Weights(const char* op, const Tensors& gate_up, const Tensors& down, const Tensors& up) {
  return {Matrices(op, "gate_up", gate_up), Matrices(op, "up", up), Matrices(op, "down", down)};
}

// Like each of them, in memory too: column by column where they are.
Tensors EmptyLikeAll(const char* op, bool needed, const Tensors& tensors) {
  Tensors out;
  for (const Tensor& tensor : tensors) {
    const TensorView view = View(op, tensor);
    std::vector<int64_t> sizes(view.size, view.size + view.rank);
    const int last = view.rank - 1;
    if (!needed) {
      out.push_back(Empty(tensor, std::vector<int64_t>{0}, view.dtype));
    } else if (view.stride[last - 1] == 1 && view.stride[last] != 1) {
      out.push_back(EmptyTransposed(tensor, sizes, view.dtype));
    } else {
      out.push_back(Empty(tensor, sizes, view.dtype));
    }
  }
  return out;
}

int64_t InnerSize(const Views& down) { return down.empty() ? 0 : down[0].size[0]; }

std::tuple<Tensor, Tensor> moe_ffn(const Tensor& hidden, const Tensor& ids, const Tensor& probs, const Tensors& gate_up,
                                   const Tensors& down, const Tensors& up, bool save) {
  constexpr const char* kOp = "moe_ffn";
  JUMAR_COUNT_CALL("moe_ffn");
  const TensorView x = View(kOp, hidden);
  const TensorView i = View(kOp, ids);
  const ExpertWeights w = Weights(kOp, gate_up, down, up);
  Tensor y = Empty(hidden, x, x.dtype);
  Tensor saved = Empty(hidden, {save ? i.numel() : 0, 2 * InnerSize(w.down)}, x.dtype);
  const TensorView kept = View(kOp, saved);
  MoeFfn(kOp, x, i, View(kOp, probs), w, View(kOp, y), save ? &kept : nullptr);
  return {y, saved};
}

std::tuple<Tensor, Tensor, Tensors, Tensors, Tensors> moe_ffn_backward(const Tensor& grad, const Tensor& hidden,
                                                                       const Tensor& ids, const Tensor& probs,
                                                                       const Tensors& gate_up, const Tensors& down,
                                                                       const Tensors& up, const Tensor& saved,
                                                                       bool need_hidden, bool need_probs,
                                                                       bool need_gate_up, bool need_down) {
  constexpr const char* kOp = "moe_ffn_backward";
  JUMAR_COUNT_CALL("moe_ffn_backward");
  const TensorView x = View(kOp, hidden);
  const TensorView p = View(kOp, probs);
  const ExpertWeights w = Weights(kOp, gate_up, down, up);
  Tensor dhidden = EmptyIf(need_hidden, hidden, x, x.dtype);
  Tensor dprobs = EmptyIf(need_probs, probs, p, p.dtype);
  Tensors dgate_up = EmptyLikeAll(kOp, need_gate_up, gate_up);
  Tensors ddown = EmptyLikeAll(kOp, need_down, down);
  Tensors dup = EmptyLikeAll(kOp, need_gate_up, up);
  ExpertWeights grads;
  if (need_gate_up) {
    grads.gate = Matrices(kOp, "grad of gate_up", dgate_up);
    grads.up = Matrices(kOp, "grad of up", dup);
  }
  if (need_down) grads.down = Matrices(kOp, "grad of down", ddown);
  const TensorView dx = View(kOp, dhidden);
  const TensorView dp = View(kOp, dprobs);
  MoeFfnBackward(kOp, View(kOp, grad), x, View(kOp, ids), p, w, View(kOp, saved), need_hidden ? &dx : nullptr,
                 need_probs ? &dp : nullptr, grads);
  return {dhidden, dprobs, dgate_up, ddown, dup};
}

}  // namespace

std::vector<OpEntry> MoeFfnOps() {
  return {
      {"moe_ffn(Tensor hidden, Tensor ids, Tensor probs, Tensor[] gate_up, Tensor[] down, Tensor[] up, bool save)"
       " -> (Tensor, Tensor)",
       TORCH_BOX(&moe_ffn), false},
      {"moe_ffn_backward(Tensor grad, Tensor hidden, Tensor ids, Tensor probs, Tensor[] gate_up, Tensor[] down,"
       " Tensor[] up, Tensor saved, bool need_hidden, bool need_probs, bool need_gate_up, bool need_down)"
       " -> (Tensor, Tensor, Tensor[], Tensor[], Tensor[])",
       TORCH_BOX(&moe_ffn_backward), false},
  };
}

}  // namespace jumar::binding
