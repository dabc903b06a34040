// Working memory of kernels: a per-thread arena that keeps its pages between calls.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jumar {

// Memory handed out by a frame lives until the frame ends; frames of one thread nest. Addresses are 64-byte aligned and
// contents are uninitialised.
class ScratchFrame {
 public:
  ScratchFrame();
  ~ScratchFrame();
  ScratchFrame(const ScratchFrame&) = delete;
  ScratchFrame& operator=(const ScratchFrame&) = delete;

  template <typename T>
  T* Alloc(int64_t count) {
    return static_cast<T*>(AllocBytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void* AllocBytes(size_t bytes);

 private:
  size_t block_;
  size_t used_;
};

}  // namespace jumar
