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

}  // namespace jumar
