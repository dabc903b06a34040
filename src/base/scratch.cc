#include "base/scratch.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "base/huge_pages.h"

namespace jumar {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kMinBlock = size_t{1} << 20;

struct Block {
  char* data;
  size_t bytes;
};

// Blocks never move while a frame is open; when the outermost frame ends, several blocks are merged into one so that
// the next call finds all it needs in one piece.
struct Arena {
  std::vector<Block> blocks;
  size_t current = 0;
  size_t used = 0;
  int depth = 0;

  ~Arena() { Release(); }

  void Release() {
    for (const Block& b : blocks) std::free(b.data);
    blocks.clear();
  }

  void AddBlock(size_t bytes) {
    // Large blocks ask for huge pages: packed panels are read in long streams that cross many small pages.
    const size_t align = bytes >= 2 * kHugePage ? kHugePage : kAlign;
    bytes = (bytes + align - 1) / align * align;
    char* data = static_cast<char*>(std::aligned_alloc(align, bytes));
    if (data == nullptr) throw std::bad_alloc();
    if (align == kHugePage) AdviseHugePages(data, bytes);
    blocks.push_back({data, bytes});
  }
};

Arena& LocalArena() {
  thread_local Arena arena;
  return arena;
}

}  // namespace

ScratchFrame::ScratchFrame() {
  Arena& arena = LocalArena();
  block_ = arena.current;
  used_ = arena.used;
  ++arena.depth;
}

ScratchFrame::~ScratchFrame() {
  Arena& arena = LocalArena();
  arena.current = block_;
  arena.used = used_;
  if (--arena.depth == 0 && arena.blocks.size() > 1) {
    size_t total = 0;
    for (const Block& b : arena.blocks) total += b.bytes;
    arena.Release();
    try {
      arena.AddBlock(total);
    } catch (const std::bad_alloc&) {
      // The next frame starts from nothing and asks again.
    }
  }
}

void* ScratchFrame::AllocBytes(size_t bytes) {
  Arena& arena = LocalArena();
  bytes = std::max<size_t>((bytes + kAlign - 1) / kAlign * kAlign, kAlign);
  while (arena.current < arena.blocks.size()) {
    const Block& block = arena.blocks[arena.current];
    if (arena.used + bytes <= block.bytes) {
      void* p = block.data + arena.used;
      arena.used += bytes;
      return p;
    }
    ++arena.current;
    arena.used = 0;
  }
  arena.AddBlock(std::max(bytes, kMinBlock));
  arena.used = bytes;
  return arena.blocks[arena.current].data;
}

}  // namespace jumar
