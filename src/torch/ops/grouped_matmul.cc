#include "kernels/grouped_matmul/grouped_matmul.h"

#include "base/check.h"
#include "base/overlap.h"
#include "base/widen.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

using Views = std::vector<TensorView>;

// No silent mixing of dtypes.
void CheckSameDType(const char* op, const char* a_name, const TensorView& a, const char* b_name, const TensorView& b) {
  JUMAR_CHECK(op, a.dtype == b.dtype, a_name, " and ", b_name, " should have one dtype, got ", Describe(a), " and ",
              Describe(b));
}

void CheckBias(const char* op, const TensorView& x, const TensorView& bias) {
  const DType wide = ComputeType(x.dtype);
  JUMAR_CHECK(op, bias.dtype == x.dtype || bias.dtype == wide, "bias should be ", Name(x.dtype),
              wide == x.dtype ? "" : std::string(" or ") + Name(wide), ", got ", Describe(bias));
}

TensorView Stack(const char* op, const char* name, const Tensor& tensor) {
  const TensorView view = View(op, tensor);
  JUMAR_CHECK(op, view.rank == 3, name, " must be [groups, rows, columns], got ", ShapeString(view));
  return view;
}

TensorView Matrix(const char* op, const char* name, const Tensor& tensor) {
  const TensorView view = View(op, tensor);
  JUMAR_CHECK(op, view.rank == 2, name, " must be a matrix, got ", ShapeString(view));
  return view;
}

Tensor Forward(const char* op, const Tensor& x, const Views& weights, const Views& biases, int64_t columns,
               const Tensor& group_list, int64_t type) {
  const TensorView xv = Matrix(op, "x", x);
  for (const TensorView& w : weights) CheckSameDType(op, "x", xv, "weight", w);
  for (const TensorView& b : biases) CheckBias(op, xv, b);
  const RowGroups groups = ParseGroups(op, View(op, group_list), type, xv.size[0]);
  Tensor y = Empty(x, {xv.size[0], columns}, xv.dtype);
  GroupedMatmul(op, xv, weights, biases, groups, View(op, y));
  return y;
}

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& group_list,
                      const std::optional<Tensor>& bias, int64_t group_list_type) {
  constexpr const char* kOp = "grouped_matmul";
  JUMAR_COUNT_CALL("grouped_matmul");
  const TensorView w = Stack(kOp, "weight", weight);
  Views biases;
  if (bias.has_value()) {
    const TensorView b = Matrix(kOp, "bias", *bias);
    JUMAR_CHECK(kOp, b.size[0] == w.size[0], "bias ", ShapeString(b), " does not go with weight ", ShapeString(w));
    biases = Unstack(b);
  }
  return Forward(kOp, x, Unstack(w), biases, w.size[2], group_list, group_list_type);
}

// The product of the heads of an attention: counted apart from those of experts.
Tensor head_matmul(const Tensor& x, const Tensor& weight, const Tensor& rows) {
  constexpr const char* kOp = "head_matmul";
  JUMAR_COUNT_CALL("head_matmul");
  const TensorView w = Stack(kOp, "weight", weight);
  return Forward(kOp, x, Unstack(w), {}, w.size[2], rows, 1);
}

Tensor grouped_matmul_list(const Tensor& x, const Tensors& weight, const Tensor& group_list, const Tensors& bias,
                           int64_t group_list_type) {
  constexpr const char* kOp = "grouped_matmul";
  JUMAR_COUNT_CALL("grouped_matmul_list");
  JUMAR_CHECK(kOp, !weight.empty(), "neither x nor weight could be empty");
  return Forward(kOp, x, ViewAll(kOp, weight), ViewAll(kOp, bias), Matrix(kOp, "weight", weight[0]).size[1], group_list,
                 group_list_type);
}

Tensor Dgrad(const char* op, const Tensor& grad, const Views& weights, int64_t columns, const Tensor& group_list,
             int64_t type) {
  const TensorView dy = Matrix(op, "grad_output", grad);
  for (const TensorView& w : weights) CheckSameDType(op, "grad_output", dy, "weight", w);
  const RowGroups groups = ParseGroups(op, View(op, group_list), type, dy.size[0]);
  Tensor dx = Empty(grad, {dy.size[0], columns}, dy.dtype);
  GroupedMatmulDgrad(op, dy, weights, groups, View(op, dx));
  return dx;
}

Tensor grouped_matmul_dgrad(const Tensor& grad_output, const Tensor& weight, const Tensor& group_list,
                            int64_t group_list_type) {
  constexpr const char* kOp = "grouped_matmul_dgrad";
  JUMAR_COUNT_CALL("grouped_matmul_dgrad");
  const TensorView w = Stack(kOp, "weight", weight);
  return Dgrad(kOp, grad_output, Unstack(w), w.size[1], group_list, group_list_type);
}

Tensor head_matmul_dgrad(const Tensor& grad_output, const Tensor& weight, const Tensor& rows) {
  constexpr const char* kOp = "head_matmul_dgrad";
  JUMAR_COUNT_CALL("head_matmul_dgrad");
  const TensorView w = Stack(kOp, "weight", weight);
  return Dgrad(kOp, grad_output, Unstack(w), w.size[1], rows, 1);
}

Tensor grouped_matmul_list_dgrad(const Tensor& grad_output, const Tensors& weight, const Tensor& group_list,
                                 int64_t group_list_type) {
  constexpr const char* kOp = "grouped_matmul_dgrad";
  JUMAR_COUNT_CALL("grouped_matmul_list_dgrad");
  JUMAR_CHECK(kOp, !weight.empty(), "neither x nor weight could be empty");
  return Dgrad(kOp, grad_output, ViewAll(kOp, weight), Matrix(kOp, "weight", weight[0]).size[0], group_list,
               group_list_type);
}

struct WgradInputs {
  TensorView x;
  TensorView dy;
  RowGroups groups;
};

WgradInputs WgradViews(const char* op, const Tensor& x, const Tensor& grad, const Tensor& group_list, int64_t type) {
  WgradInputs in{Matrix(op, "x", x), Matrix(op, "grad_output", grad), {}};
  CheckSameDType(op, "x", in.x, "grad_output", in.dy);
  in.groups = ParseGroups(op, View(op, group_list), type, in.x.size[0]);
  return in;
}

// The gradient of a transposed view has the layout of what it views.
Tensor Allocate(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype, bool transposed) {
  return transposed ? EmptyTransposed(like, sizes, dtype) : Empty(like, sizes, dtype);
}

Tensor Wgrad(const char* op, const Tensor& x, const Tensor& grad, const Tensor& group_list, int64_t type,
             bool transposed) {
  const WgradInputs in = WgradViews(op, x, grad, group_list, type);
  Tensor dw = Allocate(x, {in.groups.count(), in.x.size[1], in.dy.size[1]}, in.x.dtype, transposed);
  GroupedMatmulWgrad(op, in.x, in.dy, in.groups, Unstack(View(op, dw)), false);
  return dw;
}

Tensor grouped_matmul_wgrad(const Tensor& x, const Tensor& grad_output, const Tensor& group_list,
                            int64_t group_list_type, bool transposed) {
  JUMAR_COUNT_CALL("grouped_matmul_wgrad");
  return Wgrad("grouped_matmul_wgrad", x, grad_output, group_list, group_list_type, transposed);
}

Tensor head_matmul_wgrad(const Tensor& x, const Tensor& grad_output, const Tensor& rows, bool transposed) {
  JUMAR_COUNT_CALL("head_matmul_wgrad");
  return Wgrad("head_matmul_wgrad", x, grad_output, rows, 1, transposed);
}

Tensors grouped_matmul_list_wgrad(const Tensor& x, const Tensor& grad_output, const Tensor& group_list,
                                  int64_t group_list_type, bool transposed) {
  constexpr const char* kOp = "grouped_matmul_wgrad";
  JUMAR_COUNT_CALL("grouped_matmul_list_wgrad");
  const WgradInputs in = WgradViews(kOp, x, grad_output, group_list, group_list_type);
  Tensors dw;
  for (int64_t g = 0; g < in.groups.count(); ++g) {
    dw.push_back(Allocate(x, {in.x.size[1], in.dy.size[1]}, in.x.dtype, transposed));
  }
  GroupedMatmulWgrad(kOp, in.x, in.dy, in.groups, ViewAll(kOp, dw), false);
  return dw;
}

// `sums` [E, K, N], or [E * K, N] as the vendor's operator has it.
void grouped_matmul_add_(const Tensor& sums, const Tensor& x, const Tensor& grad_output, const Tensor& group_list,
                         int64_t group_list_type) {
  constexpr const char* kOp = "npu_grouped_matmul_add";
  JUMAR_COUNT_CALL("npu_grouped_matmul_add");
  const WgradInputs in = WgradViews(kOp, x, grad_output, group_list, group_list_type);
  TensorView s = View(kOp, sums);
  const int64_t groups = in.groups.count();
  const int64_t rows = in.x.size[1];
  const bool flat = s.rank == 2 && s.size[0] == groups * rows;
  const bool stacked = s.rank == 3 && s.size[0] == groups && s.size[1] == rows;
  JUMAR_CHECK(kOp, s.dtype == in.x.dtype || s.dtype == ComputeType(in.x.dtype), "input must be ",
              Name(ComputeType(in.x.dtype)), " or of x's dtype, got ", Describe(s), " with ", Describe(in.x));
  JUMAR_CHECK(kOp, (flat || stacked) && s.size[s.rank - 1] == in.dy.size[1], "input has shape ", ShapeString(s),
              ", expected [", groups, ", ", rows, ", ", in.dy.size[1], "] or [", groups * rows, ", ", in.dy.size[1],
              "]");
  CheckNoOverlap(kOp, {{"input", s, true}, {"x", in.x, false}, {"weight", in.dy, false}});
  if (flat) {
    s.rank = 3;
    s.size[2] = s.size[1];
    s.stride[2] = s.stride[1];
    s.size[1] = rows;
    s.stride[1] = s.stride[0];
    s.size[0] = groups;
    s.stride[0] *= rows;
  }
  GroupedMatmulWgrad(kOp, in.x, in.dy, in.groups, Unstack(s), true);
}

Tensor grouped_matmul_bias_grad(const Tensor& grad_output, const Tensor& group_list, int64_t group_list_type) {
  constexpr const char* kOp = "grouped_matmul_bias_grad";
  JUMAR_COUNT_CALL("grouped_matmul_bias_grad");
  const TensorView dy = Matrix(kOp, "grad_output", grad_output);
  const RowGroups groups = ParseGroups(kOp, View(kOp, group_list), group_list_type, dy.size[0]);
  Tensor db = Empty(grad_output, {groups.count(), dy.size[1]}, ComputeType(dy.dtype));
  GroupedMatmulBiasGrad(kOp, dy, groups, Unstack(View(kOp, db)));
  return db;
}

Tensors separate_matmul(const Tensors& x, const Tensors& weight, const Tensors& bias) {
  constexpr const char* kOp = "separate_matmul";
  JUMAR_COUNT_CALL("separate_matmul");
  const Views xs = ViewAll(kOp, x);
  const Views weights = ViewAll(kOp, weight);
  const Views biases = ViewAll(kOp, bias);
  JUMAR_CHECK(kOp, xs.size() == weights.size(), "the num of x tensors must equal the num of weight tensors, got ",
              xs.size(), " and ", weights.size());
  JUMAR_CHECK(kOp, biases.empty() || biases.size() == xs.size(), "a bias for each of ", xs.size(), " products, got ",
              biases.size());
  Tensors y;
  for (size_t i = 0; i < xs.size(); ++i) {
    CheckSameDType(kOp, "x", xs[i], "weight", weights[i]);
    if (!biases.empty()) CheckBias(kOp, xs[i], biases[i]);
    y.push_back(Empty(x[i], {Matrix(kOp, "x", x[i]).size[0], Matrix(kOp, "weight", weight[i]).size[1]}, xs[i].dtype));
  }
  SeparateProducts(kOp, xs, weights, biases, ViewAll(kOp, y));
  return y;
}

}  // namespace

std::vector<OpEntry> GroupedMatmulOps() {
  return {
      {"grouped_matmul(Tensor x, Tensor weight, Tensor group_list, Tensor? bias=None, int group_list_type=0) -> Tensor",
       TORCH_BOX(&grouped_matmul), false},
      {"grouped_matmul_dgrad(Tensor grad_output, Tensor weight, Tensor group_list, int group_list_type=0) -> Tensor",
       TORCH_BOX(&grouped_matmul_dgrad), false},
      {"grouped_matmul_wgrad(Tensor x, Tensor grad_output, Tensor group_list, int group_list_type=0,"
       " bool transposed=False) -> Tensor",
       TORCH_BOX(&grouped_matmul_wgrad), false},
      {"grouped_matmul_bias_grad(Tensor grad_output, Tensor group_list, int group_list_type=0) -> Tensor",
       TORCH_BOX(&grouped_matmul_bias_grad), false},
      {"grouped_matmul_list(Tensor x, Tensor[] weight, Tensor group_list, Tensor[] bias, int group_list_type=0)"
       " -> Tensor",
       TORCH_BOX(&grouped_matmul_list), false},
      {"grouped_matmul_list_dgrad(Tensor grad_output, Tensor[] weight, Tensor group_list, int group_list_type=0)"
       " -> Tensor",
       TORCH_BOX(&grouped_matmul_list_dgrad), false},
      {"grouped_matmul_list_wgrad(Tensor x, Tensor grad_output, Tensor group_list, int group_list_type=0,"
       " bool transposed=False) -> Tensor[]",
       TORCH_BOX(&grouped_matmul_list_wgrad), false},
      {"grouped_matmul_add_(Tensor(a!) sums, Tensor x, Tensor grad_output, Tensor group_list, int group_list_type=0)"
       " -> ()",
       TORCH_BOX(&grouped_matmul_add_), false},
      {"head_matmul(Tensor x, Tensor weight, Tensor rows) -> Tensor", TORCH_BOX(&head_matmul), false},
      {"head_matmul_dgrad(Tensor grad_output, Tensor weight, Tensor rows) -> Tensor", TORCH_BOX(&head_matmul_dgrad),
       false},
      {"head_matmul_wgrad(Tensor x, Tensor grad_output, Tensor rows, bool transposed=False) -> Tensor",
       TORCH_BOX(&head_matmul_wgrad), false},
      {"separate_matmul(Tensor[] x, Tensor[] weight, Tensor[] bias) -> Tensor[]", TORCH_BOX(&separate_matmul), false},
  };
}

}  // namespace jumar::binding
