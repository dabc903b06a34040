#include "kernels/swiglu/swiglu.h"

#include "base/blocks.h"
#include "base/check.h"
#include "kernels/swiglu/swiglu_simd.h"

namespace jumar {
namespace {

// An output of this size will have left the caches before its consumer reads its start, so it need not pass through
// them; that saves the read of every line that an ordinary store starts with.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

bool Streams(const TensorView& out) {
  return out.numel() * static_cast<int64_t>(SizeOf(out.dtype)) >= kStreamBytes && IsContiguous(out);
}

void CheckSame(const char* op, const char* name, const TensorView& view, const char* gate_name,
               const TensorView& gate) {
  JUMAR_CHECK(op, view.dtype == gate.dtype, name, " and ", gate_name, " must have one dtype, got ", Name(view.dtype),
              " and ", Name(gate.dtype));
  JUMAR_CHECK(op, SameShape(view, gate), name, " and ", gate_name, " must have one shape, got ", ShapeString(view),
              " and ", ShapeString(gate));
}

void CheckFloating(const char* op, const char* name, const TensorView& view) {
  JUMAR_CHECK(op, IsFloating(view.dtype), name, " must be float32, bfloat16, float16 or float64, got ",
              Name(view.dtype));
}

void Run(const TensorView& gate, const TensorView& up, const TensorView& out, bool stream) {
  ForEachBlock(
      {gate, up, out}, 2, [&](void* const* p, int64_t n) { SwigluBlock(gate.dtype, p[0], p[1], p[2], n, stream); },
      stream ? StreamFence : nullptr);
}

void RunBackward(const TensorView& grad, const TensorView& gate, const TensorView& up, const TensorView& dgate,
                 const TensorView& dup, bool stream) {
  ForEachBlock(
      {grad, gate, up, dgate, dup}, 3,
      [&](void* const* p, int64_t n) { SwigluBackwardBlock(gate.dtype, p[0], p[1], p[2], p[3], p[4], n, stream); },
      stream ? StreamFence : nullptr);
}

// The shape and dtype that the packed form's output must have.
TensorView HalfOf(const TensorView& input, int dim) { return Narrow(input, dim, 0, input.size[dim] / 2); }

}  // namespace

void Swiglu(const char* op, const TensorView& gate, const TensorView& up, const TensorView& out) {
  CheckFloating(op, "gate", gate);
  CheckSame(op, "up", up, "gate", gate);
  CheckSame(op, "the output", out, "gate", gate);
  Run(gate, up, out, Streams(out));
}

void SwigluBackward(const char* op, const TensorView& grad, const TensorView& gate, const TensorView& up,
                    const TensorView& dgate, const TensorView& dup) {
  CheckFloating(op, "gate", gate);
  CheckSame(op, "up", up, "gate", gate);
  CheckSame(op, "grad_output", grad, "gate", gate);
  CheckSame(op, "the gradient of gate", dgate, "gate", gate);
  CheckSame(op, "the gradient of up", dup, "gate", gate);
  RunBackward(grad, gate, up, dgate, dup, Streams(dgate) && IsContiguous(dup));
}

int CheckSwigluPacked(const char* op, const TensorView& input, int64_t dim) {
  CheckFloating(op, "input", input);
  JUMAR_CHECK(op, input.rank >= 1, "input must have at least one dimension, got a 0-d tensor");
  JUMAR_CHECK(op, dim >= -input.rank && dim < input.rank, "dim out of range: ", dim, " for input of shape ",
              ShapeString(input));
  const int d = static_cast<int>(dim < 0 ? dim + input.rank : dim);
  JUMAR_CHECK(op, input.size[d] % 2 == 0, "the size of input along dim ", dim, " must be even, got ", input.size[d],
              " in ", ShapeString(input));
  return d;
}

void SwigluPacked(const TensorView& input, int64_t dim, const TensorView& out) {
  const char* op = "npu_swiglu";
  const int d = CheckSwigluPacked(op, input, dim);
  const int64_t half = input.size[d] / 2;
  CheckSame(op, "the output", out, "a half of input", HalfOf(input, d));
  Run(Narrow(input, d, 0, half), Narrow(input, d, half, half), out, Streams(out));
}

void SwigluPackedBackward(const TensorView& grad, const TensorView& input, int64_t dim, const TensorView& dinput) {
  const char* op = "npu_swiglu_backward";
  const int d = CheckSwigluPacked(op, input, dim);
  const int64_t half = input.size[d] / 2;
  CheckSame(op, "grad_output", grad, "a half of input", HalfOf(input, d));
  CheckSame(op, "the gradient of input", dinput, "input", input);
  RunBackward(grad, Narrow(input, d, 0, half), Narrow(input, d, half, half), Narrow(dinput, d, 0, half),
              Narrow(dinput, d, half, half), Streams(dinput));
}

}  // namespace jumar
