// Packers, block product and store for every Highway target.
#include <algorithm>
#include <cstring>

#include "base/simd_dispatch.h"
#include "kernels/gemm/gemm_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/gemm_simd.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "kernels/gemm/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace jumar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows of C that one kernel call computes, with two vectors of columns: 2 * rows accumulators, two B vectors and one
// broadcast fit the register file.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define JUMAR_GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
constexpr int kMR = 14;
#elif HWY_ARCH_ARM_A64
#define JUMAR_GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
constexpr int kMR = 12;
#else
#define JUMAR_GEMM_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
constexpr int kMR = 6;
#endif
// Elements of A and of B that are fetched ahead: far enough for the last-level cache, and across the gaps that a
// hardware prefetcher leaves at page borders.
constexpr int kAhead = 512;
constexpr size_t kLine = 64;
constexpr int64_t kFetchSteps = 8;

// c[kRows x 2 vectors] (+)= sum over k of a[k][0..kRows) x b[k][..]. One accumulator per element, k ascending.
// kFetch: operands come from memory. Meanwhile lines from `ahead` on, `ahead_step` bytes apart, are asked for, one
// every kFetchSteps of k.
template <int kRows, bool kFetch, typename T>
HWY_NOINLINE void MicroKernel(int64_t kc, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, T* HWY_RESTRICT c,
                              int64_t ldc, bool accumulate, const char* ahead, int64_t ahead_step) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
#define JUMAR_X(i)                           \
  [[maybe_unused]] auto lo##i = hn::Zero(d); \
  [[maybe_unused]] auto hi##i = hn::Zero(d);
  JUMAR_GEMM_ROWS(JUMAR_X)
#undef JUMAR_X
  // C is needed at the end only.
#define JUMAR_X(i)                      \
  if constexpr (kFetch && i < kRows) {  \
    hwy::Prefetch(c + i * ldc);         \
    hwy::Prefetch(c + i * ldc + lanes); \
  }
  JUMAR_GEMM_ROWS(JUMAR_X)
#undef JUMAR_X
  const auto step = [&]() HWY_ATTR {
    const auto b0 = hn::LoadU(d, b);
    const auto b1 = hn::LoadU(d, b + lanes);
    if constexpr (kFetch) {
      hwy::Prefetch(b + kAhead);
      // A second line of B where two vectors are longer than one.
      if constexpr (2 * hn::MaxLanes(d) * sizeof(T) > kLine) hwy::Prefetch(b + kAhead + lanes);
    }
#define JUMAR_X(i)                     \
  if constexpr (i < kRows) {           \
    const auto ai = hn::Set(d, a[i]);  \
    lo##i = hn::MulAdd(ai, b0, lo##i); \
    hi##i = hn::MulAdd(ai, b1, hi##i); \
  }
    JUMAR_GEMM_ROWS(JUMAR_X)
#undef JUMAR_X
    a += kMR;
    b += 2 * lanes;
  };
  // Steps of k whose elements of A fill about one cache line.
  constexpr int64_t kUnroll = kMR * sizeof(T) >= kLine ? 1 : 2;
  const auto steps = [&]() HWY_ATTR {
    if constexpr (kFetch) hwy::Prefetch(a + kAhead);
    for (int64_t u = 0; u < kUnroll; ++u) step();
  };
  int64_t k = 0;
  for (; k + kFetchSteps <= kc; k += kFetchSteps, ahead += ahead_step) {
    __builtin_prefetch(ahead, 0, 2);
    for (int64_t u = 0; u < kFetchSteps; u += kUnroll) steps();
  }
  for (; k + kUnroll <= kc; k += kUnroll) steps();
  for (; k < kc; ++k) step();
  if (accumulate) {
#define JUMAR_X(i)                                         \
  if constexpr (i < kRows) {                               \
    T* row = c + i * ldc;                                  \
    hn::StoreU(hn::Add(hn::LoadU(d, row), lo##i), d, row); \
    row += lanes;                                          \
    hn::StoreU(hn::Add(hn::LoadU(d, row), hi##i), d, row); \
  }
    JUMAR_GEMM_ROWS(JUMAR_X)
#undef JUMAR_X
  } else {
#define JUMAR_X(i)                             \
  if constexpr (i < kRows) {                   \
    hn::StoreU(lo##i, d, c + i * ldc);         \
    hn::StoreU(hi##i, d, c + i * ldc + lanes); \
  }
    JUMAR_GEMM_ROWS(JUMAR_X)
#undef JUMAR_X
  }
}

template <typename T>
using MicroKernelPtr = void (*)(int64_t, const T*, const T*, T*, int64_t, bool, const char*, int64_t);

template <bool kFetch, typename T>
MicroKernelPtr<T> KernelForRows(int64_t rows) {
#define JUMAR_X(i) &MicroKernel<i + 1, kFetch, T>,
  static constexpr MicroKernelPtr<T> kTable[] = {JUMAR_GEMM_ROWS(JUMAR_X)};
#undef JUMAR_X
  return kTable[rows - 1];
}

// Shares out the lines of memory that is wanted soon: down the runs, line by line.
class Fetcher {
 public:
  explicit Fetcher(const GemmAhead& memory) : memory_(memory) {}

  struct Lines {
    const char* first;
    int64_t step;
  };
  // At most `count` lines of one column of lines; those of `other` over and over when there are none left.
  Lines Next(int64_t count, const void* other) {
    if (offset_ >= memory_.bytes || memory_.runs == 0) return {static_cast<const char*>(other), 0};
    const Lines lines{memory_.data + run_ * memory_.stride + offset_, memory_.stride};
    run_ += count;
    if (run_ < memory_.runs) return lines;
    run_ = 0;
    offset_ += kLine;
    return lines;
  }

 private:
  const GemmAhead& memory_;
  int64_t run_ = 0;
  int64_t offset_ = 0;
};

template <bool kFetch, typename T>
void Multiply(const GemmBlock& block) {
  const hn::ScalableTag<T> d;
  const auto nr = static_cast<int64_t>(2 * hn::Lanes(d));
  const T* b = static_cast<const T*>(block.b);
  T* c_col = static_cast<T*>(block.c);
  HWY_ALIGN T edge[kMR * 2 * HWY_MAX_BYTES / sizeof(T)];
  // While a B panel is in use, the next one comes nearer, a few lines a call; not worth it where calls are few.
  const int64_t calls = (block.m + kMR - 1) / kMR;
  constexpr int64_t kPerLine = kLine / sizeof(T);
  const int64_t ahead = calls < 8 ? 0 : (block.kc * nr + kPerLine * calls - 1) / (kPerLine * calls) * kPerLine;
  const EvenPanels even = block.even ? EvenPanels(block.m, kMR) : EvenPanels();
  Fetcher fetcher(block.ahead);
  const int64_t lines = block.kc / kFetchSteps;
  for (int64_t j = 0; j < block.n; j += nr, b += block.b_panel, c_col += nr) {
    const int64_t cols = std::min(nr, block.n - j);
    const T* a = static_cast<const T*>(block.a);
    T* c = c_col;
    const T* next = b + block.b_panel;
    for (int64_t i = 0, panel = 0, rows = 0; i < block.m;
         i += rows, ++panel, a += block.a_panel, c += rows * block.ldc) {
      if constexpr (kFetch) {
        for (int64_t t = 0; t < ahead; t += kPerLine) __builtin_prefetch(next + t, 0, 2);
        next += ahead;
      }
      const Fetcher::Lines fetch = fetcher.Next(lines, a);
      rows = block.even ? even.rows + (panel < even.longer ? 1 : 0) : std::min<int64_t>(kMR, block.m - i);
      const MicroKernelPtr<T> kernel = KernelForRows<kFetch, T>(rows);
      if (cols == nr) {
        kernel(block.kc, a, b, c, block.ldc, block.accumulate, fetch.first, fetch.step);
        continue;
      }
      const size_t bytes = static_cast<size_t>(cols) * sizeof(T);
      if (block.accumulate) {
        for (int64_t r = 0; r < rows; ++r) std::memcpy(edge + r * nr, c + r * block.ldc, bytes);
      }
      kernel(block.kc, a, b, edge, nr, block.accumulate, fetch.first, fetch.step);
      for (int64_t r = 0; r < rows; ++r) std::memcpy(c + r * block.ldc, edge + r * nr, bytes);
    }
  }
}

// Vectors of adjacent accumulators -> adjacent outputs.
template <bool kStream, typename T, typename O>
void StoreRow(const T* acc, const T* bias, T row_bias, int64_t n, O* out) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto add = hn::Set(d, row_bias);
  ForEachTwo<kStream>(d, static_cast<size_t>(n),
                      [&](const auto& load, const auto& store, const auto& /*keep*/) HWY_ATTR {
                        V a;
                        V b;
                        load(acc, a, b);
                        a = hn::Add(a, add);
                        b = hn::Add(b, add);
                        if (bias != nullptr) {
                          V c;
                          V e;
                          load(bias, c, e);
                          a = hn::Add(a, c);
                          b = hn::Add(b, e);
                        }
                        store(a, b, out);
                      });
}

template <typename T, typename O>
void StoreAs(const GemmStore& s) {
  const T* acc = static_cast<const T*>(s.acc);
  const T* bias = static_cast<const T*>(s.bias);
  O* out = static_cast<O*>(s.out);
  constexpr int64_t kRun = 64;
  HWY_ALIGN T gathered[kRun];
  HWY_ALIGN O narrow[kRun];
  // -0 is the neutral element of an addition that keeps the sign of zero.
  const auto row_bias = [&](int64_t i) { return bias != nullptr && s.bias_per_row ? bias[i] : T(-0.0); };
  const T* col_bias = s.bias_per_row ? nullptr : bias;
  if (s.col_stride == 1 || s.n == 1) {
    const auto vector = static_cast<uintptr_t>(hn::Lanes(hn::ScalableTag<T>()) * sizeof(T));
    for (int64_t i = 0; i < s.m; ++i) {
      O* row = out + i * s.row_stride;
      if (s.stream && reinterpret_cast<uintptr_t>(row) % vector == 0) {
        StoreRow<true>(acc + i * s.ld_acc, col_bias, row_bias(i), s.n, row);
      } else {
        StoreRow<false>(acc + i * s.ld_acc, col_bias, row_bias(i), s.n, row);
      }
    }
    if (s.stream) hwy::FlushStream();
    return;
  }
  if (s.row_stride == 1) {
    for (int64_t j = 0; j < s.n; ++j) {
      for (int64_t i = 0; i < s.m; i += kRun) {
        const int64_t run = std::min(kRun, s.m - i);
        for (int64_t r = 0; r < run; ++r) gathered[r] = acc[(i + r) * s.ld_acc + j];
        const T* along = s.bias_per_row && bias != nullptr ? bias + i : nullptr;
        StoreRow<false>(gathered, along, col_bias == nullptr ? T(-0.0) : col_bias[j], run, out + j * s.col_stride + i);
      }
    }
    return;
  }
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; j += kRun) {
      const int64_t run = std::min(kRun, s.n - j);
      StoreRow<false>(acc + i * s.ld_acc + j, col_bias == nullptr ? nullptr : col_bias + j, row_bias(i), run, narrow);
      for (int64_t r = 0; r < run; ++r) out[i * s.row_stride + (j + r) * s.col_stride] = narrow[r];
    }
  }
}

template <typename T>
void Store(const GemmStore& s) {
  WithStored<T>(s.dtype, [&](auto type) HWY_ATTR { StoreAs<T, decltype(type)>(s); });
}

template <typename T>
void PackA(const GemmPack& p) {
  PackPanels<T>(p, kMR);
}
template <typename T>
void PackB(const GemmPack& p) {
  PackPanels<T>(p, 2 * static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>())));
}

// K blocks: a B panel (nr x kc) stays in L1 while the panels of an A block pass by.
template <typename T>
GemmKernel MakeKernel() {
  GemmKernel kernel;
  kernel.mr = kMR;
  kernel.nr = static_cast<int>(2 * hn::Lanes(hn::ScalableTag<T>()));
  kernel.kc = 256;
  kernel.k_step = 1;
  kernel.acc = sizeof(T) == 4 ? DType::kF32 : DType::kF64;
  kernel.packed_bytes = sizeof(T);
  kernel.pack_a = &PackA<T>;
  kernel.pack_b = &PackB<T>;
  kernel.multiply = &Multiply<true, T>;
  kernel.multiply_near = &Multiply<false, T>;
  kernel.store = &Store<T>;
  return kernel;
}

const GemmKernel* BaseKernel(bool f64) {
  static const GemmKernel k32 = MakeKernel<float>();
  static const GemmKernel k64 = MakeKernel<double>();
  return f64 ? &k64 : &k32;
}

#undef JUMAR_GEMM_ROWS

}  // namespace HWY_NAMESPACE
}  // namespace jumar
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace jumar {
HWY_EXPORT(BaseKernel);

const GemmKernel& BaseGemmKernel(bool f64) { return *JUMAR_DISPATCH(BaseKernel)(f64); }

}  // namespace jumar
#endif  // HWY_ONCE
