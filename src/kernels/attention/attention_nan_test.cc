// NaN among what is seen comes out where it is seen, and nowhere else.
#include <cmath>

#include "kernels/attention/attention.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

// Maxima pass NaN over on every target; only its exponential brings it back. One head, causal.
TEST(AttentionNaN, ComesOutInTheRowsThatSeeIt) {
  constexpr int64_t kRows = 20, kQuery = 7, kKey = 12;
  ForEachSimdTarget([&](const std::string& target) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int64_t d : {8, 64}) {
        for (const bool in_query : {true, false}) {
          const std::vector<int64_t> size{1, 1, kRows, d};
          const DType compute = dtype == DType::kF64 ? dtype : DType::kF32;
          Buffer q(dtype, size), k(dtype, size), v(dtype, size), dy(dtype, size), out(dtype, size);
          Buffer dq(dtype, size), dk(dtype, size), dv(dtype, size);
          Buffer max(compute, {1, 1, kRows, 8}), sum(compute, {1, 1, kRows, 8});
          uint64_t seed = 1;
          for (Buffer* x : {&q, &k, &v, &dy}) x->FillRandom(seed++);
          if (in_query) {
            q.Set(kQuery * d + 3, std::nan(""));
          } else {
            k.Set(kKey * d + 3, std::nan(""));
          }
          AttentionInputs in;
          in.q = q.view();
          in.k = k.view();
          in.v = v.view();
          in.scale = 0.4;
          in.sequences.push_back({0, 0, 0, kRows, 0, kRows, -kUnboundedBand, 0, 0});
          Attention("op", in, out.view(), max.view(), sum.view());
          AttentionBackward("op", in, dy.view(), out.view(), max.view(), sum.view(),
                            {dq.view(), dk.view(), dv.view(), {}, {}, {}, {}});
          for (int64_t i = 0; i < kRows * d; ++i) {
            const int64_t row = i / d;
            const bool seen = in_query ? row == kQuery : row >= kKey;
            ASSERT_EQ(std::isnan(out.Get(i)), seen) << target << " out " << row;
            ASSERT_EQ(std::isnan(dq.Get(i)), seen) << target << " dq " << row;
            // A key before the NaN is seen by a query whose probabilities are NaN.
            const bool sees = !in_query || row <= kQuery;
            ASSERT_EQ(std::isnan(dk.Get(i)), sees) << target << " dk " << row;
            ASSERT_EQ(std::isnan(dv.Get(i)), sees) << target << " dv " << row;
          }
          for (int64_t i = 0; i < kRows * 8; ++i) {
            ASSERT_EQ(std::isnan(sum.Get(i)), in_query ? i / 8 == kQuery : i / 8 >= kKey) << target << " sum " << i / 8;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace jumar::testing
