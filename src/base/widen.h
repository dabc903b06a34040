// Small operands (a weight vector) in the compute type, once per call.
#pragma once

#include "base/scratch.h"
#include "jumar/tensor.h"

namespace jumar {

// The elements of `view` in row-major order plus `offset`, as double when `wide` is kF64 and as float otherwise.
// fp32 + offset is rounded in fp32, as the operators are specified.
void* WidenAll(const TensorView& view, DType wide, double offset, ScratchFrame& frame);

// The compute type of a stored dtype: fp64 for fp64, fp32 for the rest.
inline DType ComputeType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

}  // namespace jumar
