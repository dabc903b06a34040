// What the SIMD row kernels get: rows [begin, end) of operands in row form. Unused operands are null.
#pragma once

#include "base/rows.h"

namespace jumar {

// gamma is already widened and has the offset added: N values of the compute type. rstd: one per row.
struct RmsForwardRows {
  const RowMap* x;
  const RowMap* add;   // second summand: x + add is rounded, stored to `sum` and normalised
  const RowMap* gate;  // y is multiplied by silu(gate)
  const void* gamma;
  double epsilon;
  const RowMap* y;
  const RowMap* sum;
  void* rstd;
};

struct RmsBackwardRows {
  const RowMap* dy;
  const RowMap* x;
  const RowMap* gate;
  const RowMap* add;  // added to dx before the rounding
  const void* gamma;
  const void* rstd;
  const RowMap* dx;
  const RowMap* dgate;
  double* dgamma;  // N partial sums of this call's rows; overwritten
};

void RmsForward(const RmsForwardRows& args, int64_t begin, int64_t end);
void RmsBackward(const RmsBackwardRows& args, int64_t begin, int64_t end);

}  // namespace jumar
