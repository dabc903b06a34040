#include "kernels/sparse_attention/pair_dots.h"

namespace jumar {

const PairDots* ChoosePairDots() {
  const GemmKernel* kernel = GemmKernelAvx512Bf16(ChooseGemmKernel(DType::kF32, DType::kF32));
  if (kernel == nullptr || &ChooseGemmKernel(DType::kBF16, DType::kBF16) != kernel) return nullptr;
  static const PairDots pairs = {*kernel, PairDotsAvx512Bf16()};
  return &pairs;
}

}  // namespace jumar
