#include "kernels/optimizer/adamw.h"

#include <array>
#include <cmath>

#include "base/check.h"
#include "base/overlap.h"
#include "base/scratch.h"
#include "kernels/optimizer/optimizer_simd.h"
#include "kernels/optimizer/tasks.h"

namespace jumar {
namespace {

std::string At(const char* name, size_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

AdamWConstants ConstantsOf(const AdamWNumbers& n) {
  const double root = std::sqrt(n.correction2);
  return {n.maximize ? -1.0 : 1.0,     1 - n.beta1, n.beta2, 1 - n.beta2, 1 - n.lr * n.weight_decay,
          n.lr / n.correction1 * root, n.eps * root};
}

// How the views of an entry are laid out in its plan: inputs, then outputs.
enum Slot { kGrad, kParam, kExpAvg, kExpAvgSq, kExtra };

struct Entry {
  std::vector<TensorView> inputs;  // grad, param, exp_avg, exp_avg_sq, and the maximum or the master copy
  std::vector<TensorView> outputs;
  AdamWConstants constants;
  bool master = false;
  bool maximum = false;
  bool uniform = true;  // one dtype
};

void Check(const char* op, const std::vector<AdamWTensors>& tensors) {
  std::vector<NamedView> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const AdamWTensors& t = tensors[i];
    const auto add = [&](const char* name, const TensorView& view, bool written) {
      JUMAR_CHECK(op, IsFloating(view.dtype), At(name, i), " must be float32, bfloat16, float16 or float64, got ",
                  Name(view.dtype));
      JUMAR_CHECK(op, SameShape(view, t.param), At(name, i), " must have the shape ", ShapeString(t.param),
                  " of its param, got ", ShapeString(view));
      all.push_back({At(name, i), view, written});
    };
    add("param", t.param, true);
    add("grad", t.grad, false);
    add("exp_avg", t.exp_avg, true);
    add("exp_avg_sq", t.exp_avg_sq, true);
    if (t.max_exp_avg_sq) add("max_exp_avg_sq", *t.max_exp_avg_sq, false);
    if (t.master) {
      add("master", *t.master, true);
      JUMAR_CHECK(op, SizeOf(t.param.dtype) == 2, At("param", i), " must be bfloat16 or float16 to have a master, got ",
                  Name(t.param.dtype));
      for (const TensorView* view : {&*t.master, &t.exp_avg, &t.exp_avg_sq}) {
        JUMAR_CHECK(op, view->dtype == DType::kF32, "the master and both moments of ", At("param", i),
                    " must be float32, got ", Name(view->dtype));
      }
      JUMAR_CHECK(op, t.grad.dtype == DType::kF32 || t.grad.dtype == t.param.dtype, At("grad", i),
                  " must be float32 or ", Name(t.param.dtype), " where there is a master, got ", Name(t.grad.dtype));
      JUMAR_CHECK(op, !t.max_exp_avg_sq, At("param", i), " has both a master and a maximum");
    }
  }
  CheckNoOverlap(op, all);
}

Entry EntryOf(const AdamWTensors& t) {
  Entry entry;
  entry.constants = ConstantsOf(t.numbers);
  entry.master = t.master.has_value();
  entry.maximum = t.max_exp_avg_sq.has_value();
  entry.inputs = {t.grad, t.param, t.exp_avg, t.exp_avg_sq};
  entry.outputs = {t.param, t.exp_avg, t.exp_avg_sq};
  if (entry.master) {
    entry.inputs.push_back(*t.master);
    entry.outputs.push_back(*t.master);
  }
  if (entry.maximum) entry.inputs.push_back(*t.max_exp_avg_sq);
  for (const TensorView& view : entry.inputs) entry.uniform &= view.dtype == t.param.dtype;
  return entry;
}

AdamWBlockPointers PointersOf(const Entry& entry, void* const* p) {
  void* const* out = p + entry.inputs.size();
  return {p[kGrad],
          p[kParam],
          p[kExpAvg],
          p[kExpAvgSq],
          entry.maximum ? p[kExtra] : nullptr,
          entry.master ? p[kExtra] : nullptr,
          out[0],
          out[1],
          out[2],
          entry.master ? out[3] : nullptr};
}

// Dtypes that differ: everything through fp64 copies of the block.
void MixedBlock(const Entry& entry, void* const* p, int64_t n) {
  ScratchFrame frame;
  std::array<double*, kExtra + 1> wide{};
  for (size_t i = 0; i < entry.inputs.size(); ++i) {
    wide[i] = frame.Alloc<double>(n);
    WidenToF64(entry.inputs[i].dtype, p[i], wide[i], n);
  }
  AdamWBlock(DType::kF64, entry.constants,
             {wide[kGrad], wide[kParam], wide[kExpAvg], wide[kExpAvgSq], wide[kExtra], nullptr, wide[kParam],
              wide[kExpAvg], wide[kExpAvgSq], nullptr},
             n);
  for (size_t i = 0; i < entry.outputs.size(); ++i) {
    NarrowFromF64(entry.outputs[i].dtype, wide[kParam + i], p[entry.inputs.size() + i], n);
  }
}

}  // namespace

void AdamW(const char* op, const std::vector<AdamWTensors>& tensors) {
  Check(op, tensors);
  std::vector<Entry> entries;
  std::vector<BlockPlan> plans;
  entries.reserve(tensors.size());
  plans.reserve(tensors.size());
  for (const AdamWTensors& t : tensors) {
    Entry& entry = entries.emplace_back(EntryOf(t));
    std::vector<TensorView> views = entry.inputs;
    views.insert(views.end(), entry.outputs.begin(), entry.outputs.end());
    plans.emplace_back(views, static_cast<int>(entry.inputs.size()));
  }
  ForEachTask(plans, [&](size_t i, int64_t first, int64_t end) {
    const Entry& entry = entries[i];
    const DType param = entry.inputs[kParam].dtype;
    plans[i].Run(first, end, [&](int64_t, void* const* p, int64_t n) {
      if (entry.master) {
        AdamWMasterBlock(param, entry.inputs[kGrad].dtype, entry.constants, PointersOf(entry, p), n);
      } else if (entry.uniform) {
        AdamWBlock(param, entry.constants, PointersOf(entry, p), n);
      } else {
        MixedBlock(entry, p, n);
      }
    });
  });
}

}  // namespace jumar
