// The operator table: one line per family, each defined in ops/<family>.cc.
#pragma once

#include <vector>

#include "torch/binding.h"

namespace jumar::binding {

std::vector<OpEntry> AttentionOps();
std::vector<OpEntry> AttentionUpdateOps();
std::vector<OpEntry> GroupedMatmulOps();
std::vector<OpEntry> LightningIndexerOps();
std::vector<OpEntry> LinearOps();
std::vector<OpEntry> LossOps();
std::vector<OpEntry> MaskedSoftmaxOps();
std::vector<OpEntry> MoeFfnOps();
std::vector<OpEntry> MoeOps();
std::vector<OpEntry> MoeRoutingMapOps();
std::vector<OpEntry> MoeRoutingOps();
std::vector<OpEntry> OptimizerOps();
std::vector<OpEntry> RmsNormOps();
std::vector<OpEntry> RotaryOps();
std::vector<OpEntry> RouterOps();
std::vector<OpEntry> SparseAttentionOps();
std::vector<OpEntry> SwigluOps();
std::vector<OpEntry> UlpErrorOps();

inline std::vector<std::vector<OpEntry>> Families() {
  return {
      AttentionOps(),        AttentionUpdateOps(), GroupedMatmulOps(),
      LightningIndexerOps(), LinearOps(),          LossOps(),
      MaskedSoftmaxOps(),    MoeFfnOps(),          MoeOps(),
      MoeRoutingMapOps(),    MoeRoutingOps(),      OptimizerOps(),
      RmsNormOps(),          RotaryOps(),          RouterOps(),
      SparseAttentionOps(),  SwigluOps(),          UlpErrorOps(),
  };
}

}  // namespace jumar::binding
