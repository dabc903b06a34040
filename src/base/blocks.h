// Elementwise kernels over any strides: equal-shaped views, cut into blocks of adjacent elements.
#pragma once

#include <functional>
#include <vector>

#include "jumar/tensor.h"

namespace jumar {

// The most elements that one block holds.
inline constexpr int64_t kBlockElements = 4096;

// Calls body(pointers, n) for blocks that together cover every element once; pointers[i] has n adjacent elements of
// views[i]. Dimensions are walked in the memory order of views[inputs], the first output. Where a view's elements are
// adjacent in that order the pointer is the view's own memory, elsewhere a per-thread copy of the block: inputs
// (the first `inputs` views) are gathered before the call, outputs are scattered after it. Nothing is allocated per
// tensor. Multithreaded; elements must not depend on each other. Each thread calls done(), if given, after its last
// block.
void ForEachBlock(const std::vector<TensorView>& views, int inputs,
                  const std::function<void(void* const* pointers, int64_t n)>& body,
                  const std::function<void()>& done = nullptr);

// The blocks of ForEachBlock as something to hold, for callers that spread the blocks of many tensors over threads
// themselves. Blocks depend on shapes and strides alone. A view that is read and written is given twice, as an input
// and as an output. With no outputs the order is that of the last view.
class BlockPlan {
 public:
  BlockPlan(const std::vector<TensorView>& views, int inputs);

  int64_t count() const { return count_; }
  // Elements of block b.
  int64_t ElementsOf(int64_t b) const;
  // Calls body(b, pointers, n) for the blocks of [first, end) on this thread.
  void Run(int64_t first, int64_t end,
           const std::function<void(int64_t b, void* const* pointers, int64_t n)>& body) const;

 private:
  // Sizes and, per view, strides after dropping, sorting and merging dimensions.
  struct Space {
    int rank = 0;
    int64_t size[kMaxRank];
    std::vector<int64_t> strides;  // [view][dimension], kMaxRank a view
    const int64_t* of(size_t view) const { return &strides[view * kMaxRank]; }
    int64_t* of(size_t view) { return &strides[view * kMaxRank]; }
  };
  static Space MakeSpace(const std::vector<TensorView>& views, size_t leader);
  template <typename T>
  void Move(size_t view, T* base, int64_t begin, int64_t n, T* dense, bool gather) const;
  void MoveAny(size_t view, int64_t begin, int64_t n, void* dense, bool gather) const;
  int64_t OffsetOf(size_t view, int64_t element) const;

  std::vector<TensorView> views_;
  int inputs_;
  Space space_;
  std::vector<char> direct_;  // per view: each block is adjacent memory
  int64_t row_ = 0;           // blocks lie within rows of so many elements
  int64_t per_row_ = 0;
  int64_t count_ = 0;
};

}  // namespace jumar
