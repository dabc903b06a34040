#include "base/check.h"
#include "kernels/moe/routing_map.h"
#include "torch/ops/families.h"

namespace jumar::binding {
namespace {

// int8 maps hold the bytes of bool ones.
TensorView MapView(const char* op, const Tensor& map) {
  return map.scalar_type() == ScalarType::Char ? ViewAs(op, map, DType::kBool) : View(op, map);
}

std::tuple<Tensor, Tensor, Tensor> moe_permute_map(const Tensor& tokens, const Tensor& routing_map,
                                                   const OptionalTensor& probs, std::optional<int64_t> num_out_tokens,
                                                   bool drop_and_pad) {
  constexpr const char* kOp = "npu_moe_token_permute_with_routing_map";
  JUMAR_COUNT_CALL("npu_moe_token_permute_with_routing_map");
  const TensorView x = View(kOp, tokens);
  const TensorView map = MapView(kOp, routing_map);
  const OptionalView p(kOp, probs);
  const int64_t rows = CheckPermuteWithRoutingMap(kOp, x, map, p.get(), num_out_tokens, drop_and_pad);
  Tensor permuted = Empty(tokens, {rows, x.size[1]}, x.dtype);
  Tensor permuted_probs;
  if (p.get() != nullptr) permuted_probs = Empty(tokens, std::vector<int64_t>{rows}, p.get()->dtype);
  Tensor sorted_indices = Empty(tokens, std::vector<int64_t>{rows}, DType::kI32);
  const OptionalView moved(kOp, permuted_probs);
  PermuteWithRoutingMap(kOp, x, map, p.get(), drop_and_pad, View(kOp, permuted), moved.get(),
                        View(kOp, sorted_indices));
  return {permuted, permuted_probs, sorted_indices};
}

std::tuple<Tensor, Tensor> npu_moe_token_permute_with_routing_map_grad(const Tensor& permuted_token_out_grad,
                                                                       const OptionalTensor& probs_grad,
                                                                       const Tensor& sorted_indices,
                                                                       const Tensor& routing_map, int64_t experts_num,
                                                                       int64_t tokens_num, bool drop_and_pad) {
  constexpr const char* kOp = "npu_moe_token_permute_with_routing_map_grad";
  JUMAR_COUNT_CALL("npu_moe_token_permute_with_routing_map_grad");
  const TensorView g = View(kOp, permuted_token_out_grad);
  const OptionalView pg(kOp, probs_grad);
  JUMAR_CHECK(kOp, experts_num >= 0 && tokens_num >= 0, "experts_num and tokens_num must not be negative, got ",
              experts_num, " and ", tokens_num);
  Tensor dtokens = Empty(permuted_token_out_grad, {tokens_num, g.rank == 2 ? g.size[1] : 0}, g.dtype);
  Tensor dprobs;
  if (pg.get() != nullptr) dprobs = Empty(permuted_token_out_grad, {tokens_num, experts_num}, pg.get()->dtype);
  const OptionalView dp(kOp, dprobs);
  PermuteWithRoutingMapGrad(kOp, g, pg.get(), View(kOp, sorted_indices), MapView(kOp, routing_map), drop_and_pad,
                            View(kOp, dtokens), dp.get());
  return {dtokens, dprobs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_unpermute_map(const Tensor& permuted_tokens,
                                                             const Tensor& sorted_indices,
                                                             const std::vector<int64_t>& restore_shape,
                                                             const OptionalTensor& probs,
                                                             const OptionalTensor& routing_map, bool drop_and_pad) {
  constexpr const char* kOp = "npu_moe_token_unpermute_with_routing_map";
  JUMAR_COUNT_CALL("npu_moe_token_unpermute_with_routing_map");
  const TensorView rows = View(kOp, permuted_tokens);
  const OptionalView p(kOp, probs);
  const OptionalView map(kOp, routing_map, &MapView);
  JUMAR_CHECK(kOp, restore_shape.size() == 2 && restore_shape[0] >= 0 && restore_shape[1] >= 0,
              "restore_shape must be [tokens, width], got ", restore_shape.size(), " numbers",
              restore_shape.empty() ? "" : ", the first of them " + std::to_string(restore_shape[0]));
  Tensor out = Empty(permuted_tokens, restore_shape, rows.dtype);
  const std::vector<int64_t> each = {rows.rank == 0 ? 0 : rows.size[0]};
  Tensor out_index = Empty(permuted_tokens, each, DType::kI32);
  Tensor token_ids = Empty(permuted_tokens, each, DType::kI32);
  Tensor permuted_probs;
  if (p.get() != nullptr) permuted_probs = Empty(permuted_tokens, each, p.get()->dtype);
  const OptionalView moved(kOp, permuted_probs);
  UnpermuteWithRoutingMap(kOp, rows, View(kOp, sorted_indices), p.get(), map.get(), drop_and_pad, View(kOp, out),
                          View(kOp, out_index), View(kOp, token_ids), moved.get());
  return {out, out_index, token_ids, permuted_probs};
}

std::tuple<Tensor, Tensor> npu_moe_token_unpermute_with_routing_map_grad(
    const Tensor& unpermuted_tokens_grad, const Tensor& out_index, const Tensor& permuted_token_id,
    const OptionalTensor& routing_map, const OptionalTensor& permuted_tokens, const OptionalTensor& probs,
    bool drop_and_pad, const std::vector<int64_t>& restore_shape) {
  constexpr const char* kOp = "npu_moe_token_unpermute_with_routing_map_grad";
  JUMAR_COUNT_CALL("npu_moe_token_unpermute_with_routing_map_grad");
  const TensorView g = View(kOp, unpermuted_tokens_grad);
  const TensorView index = View(kOp, out_index);
  const OptionalView p(kOp, probs);
  const OptionalView rows(kOp, permuted_tokens);
  const OptionalView map(kOp, routing_map, &MapView);
  JUMAR_CHECK(
      kOp, g.rank == 2 && restore_shape.size() == 2 && restore_shape[0] == g.size[0] && restore_shape[1] == g.size[1],
      "unpermuted_tokens_grad ", ShapeString(g), " is not of restore_shape");
  Tensor dpermuted = Empty(unpermuted_tokens_grad, {index.rank == 0 ? 0 : index.size[0], g.size[1]}, g.dtype);
  Tensor dprobs;
  if (p.get() != nullptr) dprobs = Empty(unpermuted_tokens_grad, *p.get(), g.dtype);
  const OptionalView dp(kOp, dprobs);
  UnpermuteWithRoutingMapGrad(kOp, g, index, View(kOp, permuted_token_id), map.get(), rows.get(), p.get(), drop_and_pad,
                              View(kOp, dpermuted), dp.get());
  return {dpermuted, dprobs};
}

}  // namespace

// Vendor operators with tensors behind the star are composites in Python: torch's registration of gradients for custom
// operators passes over keyword-only arguments.
std::vector<OpEntry> MoeRoutingMapOps() {
  return {
      {"moe_permute_map(Tensor tokens, Tensor routing_map, Tensor? probs, int? num_out_tokens, bool drop_and_pad)"
       " -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_permute_map), false},
      {"npu_moe_token_permute_with_routing_map_grad(Tensor permuted_token_out_grad, Tensor? probs_grad,"
       " Tensor sorted_indices, Tensor routing_map, SymInt experts_num, SymInt tokens_num, bool drop_and_pad)"
       " -> (Tensor, Tensor)",
       TORCH_BOX(&npu_moe_token_permute_with_routing_map_grad), true},
      {"moe_unpermute_map(Tensor permuted_tokens, Tensor sorted_indices, int[] restore_shape, Tensor? probs,"
       " Tensor? routing_map, bool drop_and_pad) -> (Tensor, Tensor, Tensor, Tensor)",
       TORCH_BOX(&moe_unpermute_map), false},
      {"npu_moe_token_unpermute_with_routing_map_grad(Tensor unpermuted_tokens_grad, Tensor out_index,"
       " Tensor permuted_token_id, Tensor? routing_map, Tensor? permuted_tokens, Tensor? probs, bool drop_and_pad,"
       " int[] restore_shape) -> (Tensor, Tensor)",
       TORCH_BOX(&npu_moe_token_unpermute_with_routing_map_grad), true},
  };
}

}  // namespace jumar::binding
