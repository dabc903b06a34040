#include "kernels/gemm/gemm.h"

#include <algorithm>

#include "base/check.h"
#include "base/widen.h"
#include "jumar/runtime.h"
#include "kernels/gemm/gemm_kernel.h"

namespace jumar {

const GemmKernel& BaseGemmKernel(bool f64);

namespace {

// VDPBF16PS does twice the multiply-adds of an fp32 instruction. Intel's cores issue it at a quarter of the rate of
// VFMADDPS (measured on Sapphire Rapids: half the fp32 peak in all), so that there widening to fp32 is faster.
bool Avx512Bf16IsFaster() {
#if defined(__x86_64__)
  static const bool faster = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") == 0;
  }();
  return faster;
#else
  return false;
#endif
}

}  // namespace

const GemmKernel& ChooseGemmKernel(DType a, DType b) {
  const GemmKernel& base = BaseGemmKernel(a == DType::kF64);
  if (a == DType::kBF16 && b == DType::kBF16) {
    if (SimdAllows("AVX3_SPR")) {
      if (const GemmKernel* kernel = GemmKernelAmx(base)) return *kernel;
    }
    if (SimdAllows("AVX3_ZEN4") && Avx512Bf16IsFaster()) {
      if (const GemmKernel* kernel = GemmKernelAvx512Bf16(base)) return *kernel;
    }
  }
  return base;
}

TensorView Transposed(const TensorView& matrix) {
  TensorView t = matrix;
  std::swap(t.size[0], t.size[1]);
  std::swap(t.stride[0], t.stride[1]);
  return t;
}

namespace {

void Product(const char* op, const TensorView& a, const TensorView& b, const TensorView* bias, const TensorView& c,
             bool add) {
  JUMAR_CHECK(op, a.rank == 2 && b.rank == 2 && c.rank == 2, "expected matrices, got ", Describe(a), ", ", Describe(b),
              " and ", Describe(c));
  JUMAR_CHECK(op, a.size[1] == b.size[0], "inner sizes differ: ", ShapeString(a), " times ", ShapeString(b));
  JUMAR_CHECK(op, c.size[0] == a.size[0] && c.size[1] == b.size[1], "result has shape ", ShapeString(c), ", expected [",
              a.size[0], ", ", b.size[1], "]");
  const bool f64 = a.dtype == DType::kF64;
  for (const TensorView* x : {&a, &b, bias, &c}) {
    if (x == nullptr) continue;
    JUMAR_CHECK(op, IsFloating(x->dtype) && (x->dtype == DType::kF64) == f64,
                "dtypes must all be float64, or each one of float32, bfloat16, float16; got ", Name(a.dtype), ", ",
                Name(b.dtype), bias == nullptr ? "" : ", bias ", bias == nullptr ? "" : Name(bias->dtype), ", result ",
                Name(c.dtype));
  }
  if (bias != nullptr) {
    JUMAR_CHECK(op, bias->rank == 1 && bias->size[0] == c.size[1], "bias has shape ", ShapeString(*bias),
                ", expected [", c.size[1], "]");
  }
  if (c.numel() == 0) return;

  ScratchFrame frame;
  GemmOperand left = LeftOperand(a);
  GemmOperand right = RightOperand(b);
  GemmStore store{};
  store.m = c.size[0];
  store.n = c.size[1];
  if (bias != nullptr) store.bias = WidenAll(*bias, ComputeType(a.dtype), 0.0, frame);
  store.out = c.data;
  store.dtype = c.dtype;
  store.row_stride = c.stride[0];
  store.col_stride = c.stride[1];
  store.add = add;

  const GemmKernel& kernel = ChooseGemmKernel(a.dtype, b.dtype);
  // Columns are padded to whole panels of nr, rows are not: a narrow result is computed as its transpose.
  const int64_t padded = RoundUp(store.n, kernel.nr);
  if (!add && store.n < store.m && store.n <= 2 * kernel.nr && padded * 10 > store.n * 13) {
    std::swap(left, right);
    std::swap(store.m, store.n);
    std::swap(store.row_stride, store.col_stride);
    store.bias_per_row = true;
  }
  GemmRun(kernel, left, right, store, c.size[1]);
}

}  // namespace

void Gemm(const char* op, const TensorView& a, const TensorView& b, const TensorView* bias, const TensorView& c) {
  Product(op, a, b, bias, c, false);
}

void GemmAdd(const char* op, const TensorView& a, const TensorView& b, const TensorView& c) {
  JUMAR_CHECK(op, c.rank == 2 && c.dtype == ComputeType(a.dtype) && c.stride[1] == 1, "sums must be in ",
              Name(ComputeType(a.dtype)), " with adjacent columns, got ", Describe(c));
  Product(op, a, b, nullptr, c, true);
}

}  // namespace jumar
