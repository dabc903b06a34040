#include "base/blocks.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/parallel.h"
#include "base/scratch.h"

namespace jumar {
namespace {

// Inner rows at least this long are cut into blocks themselves; shorter ones share blocks.
constexpr int64_t kLongRow = 512;
constexpr int64_t kMinBlocksPerThread = 8;

// The common index space after dropping, sorting and merging dimensions.
struct Space {
  int rank = 0;
  int64_t size[kMaxRank];
  std::vector<std::vector<int64_t>> stride;  // [view][dimension]

  int64_t inner() const { return size[rank - 1]; }
};

Space MakeSpace(const std::vector<TensorView>& views, int leader) {
  const TensorView& lead = views[static_cast<size_t>(leader)];
  std::vector<int> order;
  for (int i = 0; i < lead.rank; ++i) {
    if (lead.size[i] != 1) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return lead.stride[a] > lead.stride[b]; });
  Space space;
  space.stride.resize(views.size());
  for (const int dim : order) {
    bool merge = space.rank > 0;
    for (size_t v = 0; v < views.size() && merge; ++v) {
      merge = space.stride[v].back() == views[v].stride[dim] * lead.size[dim];
    }
    if (merge) {
      space.size[space.rank - 1] *= lead.size[dim];
    } else {
      space.size[space.rank++] = lead.size[dim];
    }
    for (size_t v = 0; v < views.size(); ++v) {
      if (merge) {
        space.stride[v].back() = views[v].stride[dim];
      } else {
        space.stride[v].push_back(views[v].stride[dim]);
      }
    }
  }
  if (space.rank == 0) {  // one element
    space.size[space.rank++] = 1;
    for (auto& strides : space.stride) strides.push_back(1);
  }
  return space;
}

// Copies elements [begin, begin + n) of the space between a strided view and a dense buffer.
template <typename T>
void Move(const Space& space, size_t view, T* base, int64_t begin, int64_t n, T* dense, bool gather) {
  const std::vector<int64_t>& stride = space.stride[view];
  const int last = space.rank - 1;
  int64_t index[kMaxRank];
  int64_t rest = begin;
  int64_t offset = 0;
  for (int i = last; i >= 0; --i) {
    index[i] = rest % space.size[i];
    rest /= space.size[i];
    offset += index[i] * stride[static_cast<size_t>(i)];
  }
  const int64_t step = stride[static_cast<size_t>(last)];
  while (n > 0) {
    const int64_t run = std::min(n, space.size[last] - index[last]);
    T* p = base + offset;
    if (step == 1) {
      std::memcpy(gather ? dense : p, gather ? p : dense, static_cast<size_t>(run) * sizeof(T));
    } else if (gather) {
      for (int64_t i = 0; i < run; ++i) dense[i] = p[i * step];
    } else {
      for (int64_t i = 0; i < run; ++i) p[i * step] = dense[i];
    }
    dense += run;
    n -= run;
    offset -= index[last] * step;
    index[last] = 0;
    for (int i = last - 1; i >= 0; --i) {
      offset += stride[static_cast<size_t>(i)];
      if (++index[i] < space.size[i]) break;
      offset -= space.size[i] * stride[static_cast<size_t>(i)];
      index[i] = 0;
    }
  }
}

void MoveAny(const Space& space, size_t view, const TensorView& of, int64_t begin, int64_t n, void* dense,
             bool gather) {
  switch (SizeOf(of.dtype)) {
    case 2:
      return Move(space, view, of.ptr<uint16_t>(), begin, n, static_cast<uint16_t*>(dense), gather);
    case 4:
      return Move(space, view, of.ptr<uint32_t>(), begin, n, static_cast<uint32_t*>(dense), gather);
    default:
      return Move(space, view, of.ptr<uint64_t>(), begin, n, static_cast<uint64_t*>(dense), gather);
  }
}

int64_t OffsetOf(const Space& space, size_t view, int64_t element) {
  int64_t offset = 0;
  for (int i = space.rank - 1; i >= 0; --i) {
    offset += element % space.size[i] * space.stride[view][static_cast<size_t>(i)];
    element /= space.size[i];
  }
  return offset;
}

}  // namespace

void ForEachBlock(const std::vector<TensorView>& views, int inputs,
                  const std::function<void(void* const* pointers, int64_t n)>& body,
                  const std::function<void()>& done) {
  const int64_t total = views[0].numel();
  if (total == 0) return;
  const Space space = MakeSpace(views, inputs);
  const int64_t inner = space.inner();
  // Blocks lie within rows of `row` elements: true rows when they are long, else everything as one.
  const int64_t row = inner >= kLongRow ? inner : total;
  const int64_t per_row = (row + kBlockElements - 1) / kBlockElements;

  // Direct: each block is adjacent memory.
  std::vector<char> direct(views.size());
  for (size_t v = 0; v < views.size(); ++v) {
    int64_t step = 1;
    bool dense = true;
    for (int i = space.rank - 1; i >= 0; --i) {
      dense = dense && space.stride[v][static_cast<size_t>(i)] == step;
      step *= space.size[i];
    }
    direct[v] = dense || (row == inner && space.stride[v].back() == 1);
  }

  ParallelFor(total / row * per_row, kMinBlocksPerThread, [&](int64_t first, int64_t end) {
    ScratchFrame frame;
    std::vector<void*> pointers(views.size());
    std::vector<void*> buffers(views.size(), nullptr);
    for (size_t v = 0; v < views.size(); ++v) {
      if (!direct[v]) {
        buffers[v] = frame.AllocBytes(std::min(kBlockElements, row) * SizeOf(views[v].dtype));
      }
    }
    for (int64_t block = first; block < end; ++block) {
      const int64_t within = block % per_row * kBlockElements;
      const int64_t begin = block / per_row * row + within;
      const int64_t n = std::min(kBlockElements, row - within);
      for (size_t v = 0; v < views.size(); ++v) {
        if (direct[v]) {
          pointers[v] = static_cast<char*>(views[v].data) +
                        OffsetOf(space, v, begin) * static_cast<int64_t>(SizeOf(views[v].dtype));
        } else {
          pointers[v] = buffers[v];
          if (static_cast<int>(v) < inputs) MoveAny(space, v, views[v], begin, n, buffers[v], true);
        }
      }
      body(pointers.data(), n);
      for (size_t v = static_cast<size_t>(inputs); v < views.size(); ++v) {
        if (!direct[v]) MoveAny(space, v, views[v], begin, n, buffers[v], false);
      }
    }
    if (done) done();
  });
}

}  // namespace jumar
