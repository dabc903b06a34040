// Working memory that goes back to the system when the call ends: for what grows with the number of tokens.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "base/huge_pages.h"

namespace jumar {

// Aligned to 64 bytes, uninitialised.
class HeapBuffer {
 public:
  HeapBuffer() = default;
  explicit HeapBuffer(int64_t bytes) {
    data_ = std::aligned_alloc(64, (static_cast<size_t>(bytes) + 63) / 64 * 64 + 64);
    if (data_ == nullptr) throw std::bad_alloc();
    if (static_cast<size_t>(bytes) >= kOwnMapping) AdviseHugePages(data_, static_cast<size_t>(bytes));
  }
  ~HeapBuffer() { std::free(data_); }
  HeapBuffer(const HeapBuffer&) = delete;
  HeapBuffer& operator=(const HeapBuffer&) = delete;
  HeapBuffer(HeapBuffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  HeapBuffer& operator=(HeapBuffer&& other) noexcept {
    void* data = data_;
    data_ = other.data_;
    other.data_ = data;
    return *this;
  }

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace jumar
