// Checks, then blocks of adjacent memory for the SIMD code, on all threads.
#include "squared_relu_glu.h"

#include "base/blocks.h"
#include "base/check.h"
#include "squared_relu_glu_simd.h"

namespace jumar::example {
namespace {

void CheckInput(const char* op, const TensorView& input) {
  JUMAR_CHECK(op, IsFloating(input.dtype), "input must be float32, bfloat16, float16 or float64, got ",
              Name(input.dtype));
}

void CheckLikeInput(const char* op, const char* name, const TensorView& view, const TensorView& input) {
  JUMAR_CHECK(op, SameShape(view, input) && view.dtype == input.dtype, name, " must be like input, ", Describe(input),
              ", but is ", Describe(view));
}

}  // namespace

void SquaredReluGlu(const char* op, const TensorView& input, const TensorView& gate, const TensorView& y) {
  CheckInput(op, input);
  CheckLikeInput(op, "gate", gate, input);
  CheckLikeInput(op, "y", y, input);
  ForEachBlock({input, gate, y}, 2, [&](void* const* p, int64_t n) { ForwardBlock(input.dtype, p[0], p[1], p[2], n); });
}

void SquaredReluGluBackward(const char* op, const TensorView& dy, const TensorView& input, const TensorView& gate,
                            const TensorView& dinput, const TensorView& dgate) {
  CheckInput(op, input);
  CheckLikeInput(op, "gate", gate, input);
  CheckLikeInput(op, "dy", dy, input);
  CheckLikeInput(op, "dinput", dinput, input);
  CheckLikeInput(op, "dgate", dgate, input);
  ForEachBlock({dy, input, gate, dinput, dgate}, 3,
               [&](void* const* p, int64_t n) { BackwardBlock(input.dtype, p[0], p[1], p[2], p[3], p[4], n); });
}

}  // namespace jumar::example
