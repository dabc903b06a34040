// Operands that end at an unmapped page: no packer or store may touch what lies behind a matrix.
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/gemm/gemm.h"
#include "testing/test_util.h"

namespace jumar::testing {
namespace {

// Memory for `bytes` that end where a page without access begins.
class Guarded {
 public:
  explicit Guarded(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t body = (bytes + page - 1) / page * page;
    mapped_ = body + page;
    base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    EXPECT_EQ(mprotect(base_ + body, page, PROT_NONE), 0);
    data_ = base_ + body - bytes;
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  void* data() const { return data_; }

 private:
  char* base_;
  char* data_;
  size_t mapped_;
};

TEST(Gemm, NothingBehindTheOperands) {
  const std::vector<int64_t> sizes = {1, 7, 8, 9, 15, 17, 33, 65};
  for (const DType dtype : FloatDTypes()) {
    const auto element = SizeOf(dtype);
    for (const int64_t m : sizes) {
      for (const int64_t n : sizes) {
        for (const int64_t k : {int64_t{1}, int64_t{9}, int64_t{31}, int64_t{130}}) {
          const Guarded a(static_cast<size_t>(m * k) * element);
          const Guarded b(static_cast<size_t>(k * n) * element);
          const Guarded c(static_cast<size_t>(m * n) * element);
          for (int64_t i = 0; i < m * k; ++i) StoreFromDouble(a.data(), dtype, i, 1.0);
          for (int64_t i = 0; i < k * n; ++i) StoreFromDouble(b.data(), dtype, i, 1.0);
          const TensorView out = Contiguous(c.data(), dtype, {m, n});
          ForEachSimdTarget([&](const std::string& target) {
            for (int layout = 0; layout < 4; ++layout) {
              const TensorView left = (layout & 1) == 0 ? Contiguous(a.data(), dtype, {m, k})
                                                        : Transposed(Contiguous(a.data(), dtype, {k, m}));
              const TensorView right = (layout & 2) == 0 ? Contiguous(b.data(), dtype, {k, n})
                                                         : Transposed(Contiguous(b.data(), dtype, {n, k}));
              Gemm("gemm", left, right, nullptr, out);
              for (int64_t i = 0; i < m * n; ++i) {
                ASSERT_EQ(LoadAsDouble(c.data(), dtype, i), static_cast<double>(k))
                    << target << " " << Name(dtype) << " " << m << "x" << n << "x" << k << " layout " << layout;
              }
            }
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace jumar::testing
