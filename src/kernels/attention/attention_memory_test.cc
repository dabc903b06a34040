// Where operands and results lie changes the time alone.
#include <cmath>

#include "kernels/attention/attention.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

// Rows of large results that begin on a cache line go past the caches: the same bits as those that do not, and nothing
// beside them.
TEST(AttentionMemory, LargeResults) {
  constexpr int64_t kHeads = 128, kRows = 64;
  ForEachSimdTarget([&](const std::string& target) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      if (SmallTests() && dtype == DType::kF32) continue;
      const int64_t cols = dtype == DType::kF32 ? 64 : 128;
      const int64_t elements = kHeads * kRows * cols;
      std::vector<std::vector<double>> results[2];
      for (const bool lines : {false, true}) {
        const auto size = static_cast<int64_t>(SizeOf(dtype));
        std::vector<Buffer> memory;
        // [S, heads, D], as attention sees it.
        const auto rows = [&] {
          Buffer& all = memory.emplace_back(dtype, std::vector<int64_t>{elements + 128});
          const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(all.view().data) % 64);
          void* data = static_cast<char*>(all.view().data) + (64 - past) + (lines ? 0 : size);
          TensorView x = Contiguous(data, dtype, {1, kHeads, kRows, cols});
          x.stride[1] = cols;
          x.stride[2] = kHeads * cols;
          return x;
        };
        AttentionInputs in;
        TensorView dy;
        uint64_t seed = 1;
        for (TensorView* x : {&in.q, &in.k, &in.v, &dy}) {
          *x = rows();
          Random random(seed++);
          for (int64_t i = 0; i < elements; ++i) StoreFromDouble(x->data, dtype, i, random.Uniform());
        }
        in.sequences.push_back({0, 0, 0, kRows, 0, kRows, -kUnboundedBand, 0, 0});
        Buffer max(DType::kF32, {1, kHeads, kRows, 8});
        Buffer sum(DType::kF32, {1, kHeads, kRows, 8});
        const TensorView out = rows(), dq = rows(), dk = rows(), dv = rows();
        Attention("op", in, out, max.view(), sum.view());
        AttentionBackward("op", in, dy, out, max.view(), sum.view(), {dq, dk, dv, {}, {}, {}, {}});
        for (const TensorView* x : {&out, &dq, &dk, &dv}) {
          std::vector<double>& all = results[lines].emplace_back();
          for (int64_t i = 0; i < elements; ++i) all.push_back(LoadAsDouble(x->data, dtype, i));
          EXPECT_TRUE(std::isnan(LoadAsDouble(x->data, dtype, elements))) << target;
        }
      }
      EXPECT_TRUE(results[0] == results[1]) << target;
    }
  });
}

}  // namespace
}  // namespace jumar::testing
