#include "kernels/optimizer/grad_norm.h"

#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/overlap.h"
#include "kernels/optimizer/adamw.h"
#include "kernels/optimizer/optimizer_simd.h"
#include "kernels/optimizer/tasks.h"

namespace jumar {
namespace {

void CheckFloating(const char* op, const std::vector<TensorView>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    JUMAR_CHECK(op, IsFloating(tensors[i].dtype), "grad[", i, "] must be float32, bfloat16, float16 or float64, got ",
                Name(tensors[i].dtype));
  }
}

Power PowerOf(double p) {
  if (std::isinf(p)) return Power::kMax;
  return p == 1 ? Power::kOne : p == 2 ? Power::kTwo : Power::kOther;
}

}  // namespace

std::vector<double> GradPowerSums(const char* op, const std::vector<TensorView>& tensors,
                                  const std::vector<int64_t>& groups, int64_t group_count, double p) {
  CheckFloating(op, tensors);
  JUMAR_CHECK(op, p > 0, "norm_type must be positive or infinity, got ", p);
  JUMAR_CHECK(op, groups.size() == tensors.size(), "a group for each of ", tensors.size(), " gradients, got ",
              groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    JUMAR_CHECK(op, groups[i] >= 0 && groups[i] < group_count, "group ", groups[i], " of grad[", i, "] is not in [0, ",
                group_count, ")");
  }
  const Power power = PowerOf(p);
  std::vector<BlockPlan> plans;
  std::vector<std::vector<double>> parts;
  plans.reserve(tensors.size());
  for (const TensorView& tensor : tensors) {
    plans.emplace_back(std::vector<TensorView>{tensor}, 1);
    parts.emplace_back(static_cast<size_t>(plans.back().count()));
  }
  ForEachTask(plans, [&](size_t i, int64_t first, int64_t end) {
    plans[i].Run(first, end, [&](int64_t b, void* const* pointers, int64_t n) {
      parts[i][static_cast<size_t>(b)] = PowerSumBlock(tensors[i].dtype, power, p, pointers[0], n);
    });
  });
  std::vector<double> sums(static_cast<size_t>(group_count), 0.0);
  for (size_t i = 0; i < tensors.size(); ++i) {
    double& sum = sums[static_cast<size_t>(groups[i])];
    double mine = 0;
    for (const double part : parts[i]) {
      if (power != Power::kMax) {
        mine += part;
      } else if (mine < part || std::isnan(part)) {
        mine = part;
      }
    }
    if (power != Power::kMax) {
      sum += mine;
    } else if (sum < mine || std::isnan(mine)) {
      sum = mine;
    }
  }
  return sums;
}

void ScaleAll(const char* op, const std::vector<TensorView>& tensors, double factor) {
  CheckFloating(op, tensors);
  std::vector<NamedView> named;
  for (size_t i = 0; i < tensors.size(); ++i) named.push_back({"grad[" + std::to_string(i) + "]", tensors[i], true});
  CheckNoOverlap(op, named);
  std::vector<BlockPlan> plans;
  plans.reserve(tensors.size());
  for (const TensorView& tensor : tensors) plans.emplace_back(std::vector<TensorView>{tensor, tensor}, 1);
  ForEachTask(plans, [&](size_t i, int64_t first, int64_t end) {
    plans[i].Run(first, end, [&](int64_t, void* const* pointers, int64_t n) {
      ScaleBlock(tensors[i].dtype, factor, pointers[0], pointers[1], n);
    });
  });
}

}  // namespace jumar
