#include <string>

#include "base/check.h"
#include "base/widen.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/loss/linear_cross_entropy.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

std::vector<int64_t> Sizes(const TensorView& view) { return {view.size, view.size + view.rank}; }

LinearCrossEntropyOptions Options(const char* op, int64_t ignore_index, const std::string& reduction,
                                  double label_smoothing, double z_loss) {
  LinearCrossEntropyOptions options;
  options.ignore_index = ignore_index;
  options.reduction = ParseReduction(op, reduction);
  options.label_smoothing = label_smoothing;
  options.z_loss = z_loss;
  return options;
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy(const Tensor& input, const Tensor& weight, const Tensor& target,
                                                        const OptionalTensor& bias, int64_t ignore_index,
                                                        std::string reduction, double label_smoothing, double z_loss) {
  constexpr const char* kOp = "linear_cross_entropy";
  JUMAR_COUNT_CALL("linear_cross_entropy");
  const LinearCrossEntropyOptions options = Options(kOp, ignore_index, reduction, label_smoothing, z_loss);
  const TensorView x = View(kOp, input);
  const TensorView w = View(kOp, weight);
  const TensorView t = View(kOp, target);
  const OptionalView b(kOp, bias);
  const DType compute = ComputeType(x.dtype);
  const int64_t tokens = t.numel();
  const int64_t classes = w.rank > 0 ? w.size[0] : 0;
  Tensor loss = Empty(input, options.reduction == Reduction::kNone ? Sizes(t) : std::vector<int64_t>{}, compute);
  Tensor lse = Empty(input, std::vector<int64_t>{tokens}, compute);
  const bool keep = tokens * classes <= kKeptLogits;
  Tensor logits =
      Empty(input, keep ? std::vector<int64_t>{tokens, classes} : std::vector<int64_t>{0, classes}, compute);
  const TensorView kept = View(kOp, logits);
  LinearCrossEntropy(kOp, x, w, b.get(), t, options, View(kOp, loss), View(kOp, lse), keep ? &kept : nullptr);
  return {loss, lse, logits};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target, const OptionalTensor& bias,
    const Tensor& lse, const Tensor& logits, int64_t ignore_index, std::string reduction, double label_smoothing,
    double z_loss, bool need_input, bool need_weight, bool need_bias) {
  constexpr const char* kOp = "linear_cross_entropy_backward";
  JUMAR_COUNT_CALL("linear_cross_entropy_backward");
  const LinearCrossEntropyOptions options = Options(kOp, ignore_index, reduction, label_smoothing, z_loss);
  const TensorView x = View(kOp, input);
  const TensorView w = View(kOp, weight);
  const TensorView t = View(kOp, target);
  const OptionalView b(kOp, bias);
  need_bias = need_bias && bias.has_value();
  Tensor dinput = EmptyIf(need_input, input, x, x.dtype);
  Tensor dweight = EmptyIf(need_weight, input, w, w.dtype);
  const TensorView& like_bias = bias.has_value() ? *b.get() : w;
  Tensor dbias = EmptyIf(need_bias, input, like_bias, like_bias.dtype);
  const TensorView dx = View(kOp, dinput);
  const TensorView dw = View(kOp, dweight);
  const TensorView db = View(kOp, dbias);
  const TensorView kept = View(kOp, logits);
  const bool has_logits = kept.rank == 2 && kept.size[0] == t.numel();
  LinearCrossEntropyBackward(kOp, View(kOp, grad), x, w, b.get(), t, View(kOp, lse), has_logits ? &kept : nullptr,
                             options, need_input ? &dx : nullptr, need_weight ? &dw : nullptr,
                             need_bias ? &db : nullptr);
  return {dinput, dweight, dbias};
}

CrossEntropyOptions VendorOptions(const char* op, const std::string& reduction, int64_t ignore_index,
                                  double label_smoothing, double z_scale, bool z_loss) {
  JUMAR_CHECK(op, z_scale == 0 && !z_loss,
              "the z-loss is not supported, here as in the vendor's operator; got lse_square_scale_for_zloss ", z_scale,
              ". linear_cross_entropy has one");
  CrossEntropyOptions options;
  options.reduction = ParseReduction(op, reduction);
  options.ignore_index = ignore_index;
  options.label_smoothing = label_smoothing;
  return options;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> npu_cross_entropy_loss(const Tensor& input, const Tensor& target,
                                                                  const OptionalTensor& weight, std::string reduction,
                                                                  int64_t ignore_index, double label_smoothing,
                                                                  double lse_square_scale_for_zloss,
                                                                  bool return_zloss) {
  constexpr const char* kOp = "npu_cross_entropy_loss";
  JUMAR_COUNT_CALL("npu_cross_entropy_loss");
  const CrossEntropyOptions options =
      VendorOptions(kOp, reduction, ignore_index, label_smoothing, lse_square_scale_for_zloss, return_zloss);
  const TensorView x = View(kOp, input);
  const OptionalView w(kOp, weight);
  const int64_t rows = x.rank > 0 ? x.size[0] : 0;
  Tensor loss = Empty(input, {options.reduction == Reduction::kNone ? rows : 1}, x.dtype);
  Tensor log_prob = Empty(input, x, x.dtype);
  CrossEntropy(kOp, x, View(kOp, target), w.get(), options, View(kOp, loss), View(kOp, log_prob));
  Tensor zloss = Empty(input, std::vector<int64_t>{0}, x.dtype);
  return {loss, log_prob, zloss, Empty(input, std::vector<int64_t>{0}, x.dtype)};
}

Tensor npu_cross_entropy_loss_backward(const Tensor& grad_loss, const Tensor& log_prob, const Tensor& target,
                                       const OptionalTensor& weight, const OptionalTensor& grad_zloss,
                                       const OptionalTensor& lse_for_zloss, std::string reduction, int64_t ignore_index,
                                       double label_smoothing, double lse_square_scale_for_zloss) {
  constexpr const char* kOp = "npu_cross_entropy_loss_backward";
  JUMAR_COUNT_CALL("npu_cross_entropy_loss_backward");
  const bool z_loss =
      (grad_zloss.has_value() && grad_zloss->numel() > 0) || (lse_for_zloss.has_value() && lse_for_zloss->numel() > 0);
  const CrossEntropyOptions options =
      VendorOptions(kOp, reduction, ignore_index, label_smoothing, lse_square_scale_for_zloss, z_loss);
  const TensorView g = View(kOp, grad_loss);
  const TensorView lp = View(kOp, log_prob);
  const OptionalView w(kOp, weight);
  Tensor dinput = Empty(log_prob, lp, g.dtype);
  CrossEntropyBackward(kOp, g, lp, View(kOp, target), w.get(), options, View(kOp, dinput));
  return dinput;
}

}  // namespace

std::vector<OpEntry> LossOps() {
  return {
      {"linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias=None, int ignore_index=-100,"
       " str reduction='mean', float label_smoothing=0.0, float z_loss=0.0) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&linear_cross_entropy), false},
      {"linear_cross_entropy_backward(Tensor grad, Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor "
       "lse,"
       " Tensor logits, int ignore_index, str reduction, float label_smoothing, float z_loss, bool need_input,"
       " bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&linear_cross_entropy_backward), false},
      {"npu_cross_entropy_loss(Tensor input, Tensor target, Tensor? weight=None, str reduction='mean',"
       " int ignore_index=-100, float label_smoothing=0.0, float lse_square_scale_for_zloss=0.0,"
       " bool return_zloss=False) -> (Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&npu_cross_entropy_loss), true},
      {"npu_cross_entropy_loss_backward(Tensor grad_loss, Tensor log_prob, Tensor target, Tensor? weight=None,"
       " Tensor? grad_zloss=None, Tensor? lse_for_zloss=None, str reduction='mean', int ignore_index=-100,"
       " float label_smoothing=0.0, float lse_square_scale_for_zloss=0.0) -> Tensor",
       TORCH_BOX(&npu_cross_entropy_loss_backward), true},
  };
}

}  // namespace jumar::binding
