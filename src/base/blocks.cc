#include "base/blocks.h"

#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "base/scratch.h"

namespace jumar {
namespace {

// Inner rows at least this long are cut into blocks themselves; shorter ones share blocks.
constexpr int64_t kLongRow = 512;
constexpr int64_t kMinBlocksPerThread = 8;

}  // namespace

BlockPlan::Space BlockPlan::MakeSpace(const std::vector<TensorView>& views, size_t leader) {
  const TensorView& lead = views[leader];
  std::vector<int> order;
  for (int i = 0; i < lead.rank; ++i) {
    if (lead.size[i] != 1) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return lead.stride[a] > lead.stride[b]; });
  Space space;
  space.strides.resize(views.size() * kMaxRank);
  for (const int dim : order) {
    const int last = space.rank - 1;
    bool merge = space.rank > 0;
    for (size_t v = 0; v < views.size() && merge; ++v) {
      merge = space.of(v)[last] == views[v].stride[dim] * lead.size[dim];
    }
    const int to = merge ? last : space.rank++;
    space.size[to] = merge ? space.size[to] * lead.size[dim] : lead.size[dim];
    for (size_t v = 0; v < views.size(); ++v) space.of(v)[to] = views[v].stride[dim];
  }
  if (space.rank == 0) {  // one element
    space.size[space.rank++] = 1;
    for (size_t v = 0; v < views.size(); ++v) space.of(v)[0] = 1;
  }
  return space;
}

// Copies elements [begin, begin + n) of the space between a strided view and a dense buffer.
template <typename T>
void BlockPlan::Move(size_t view, T* base, int64_t begin, int64_t n, T* dense, bool gather) const {
  const int64_t* stride = space_.of(view);
  const int last = space_.rank - 1;
  int64_t index[kMaxRank];
  int64_t rest = begin;
  int64_t offset = 0;
  for (int i = last; i >= 0; --i) {
    index[i] = rest % space_.size[i];
    rest /= space_.size[i];
    offset += index[i] * stride[i];
  }
  const int64_t step = stride[last];
  while (n > 0) {
    const int64_t run = std::min(n, space_.size[last] - index[last]);
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
      offset += stride[i];
      if (++index[i] < space_.size[i]) break;
      offset -= space_.size[i] * stride[i];
      index[i] = 0;
    }
  }
}

void BlockPlan::MoveAny(size_t view, int64_t begin, int64_t n, void* dense, bool gather) const {
  const TensorView& of = views_[view];
  switch (SizeOf(of.dtype)) {
    case 1:
      return Move(view, of.ptr<uint8_t>(), begin, n, static_cast<uint8_t*>(dense), gather);
    case 2:
      return Move(view, of.ptr<uint16_t>(), begin, n, static_cast<uint16_t*>(dense), gather);
    case 4:
      return Move(view, of.ptr<uint32_t>(), begin, n, static_cast<uint32_t*>(dense), gather);
    default:
      return Move(view, of.ptr<uint64_t>(), begin, n, static_cast<uint64_t*>(dense), gather);
  }
}

int64_t BlockPlan::OffsetOf(size_t view, int64_t element) const {
  int64_t offset = 0;
  for (int i = space_.rank - 1; i >= 0; --i) {
    offset += element % space_.size[i] * space_.of(view)[i];
    element /= space_.size[i];
  }
  return offset;
}

BlockPlan::BlockPlan(const std::vector<TensorView>& views, int inputs) : views_(views), inputs_(inputs) {
  const int64_t total = views[0].numel();
  if (total == 0) return;
  space_ = MakeSpace(views, std::min(static_cast<size_t>(inputs), views.size() - 1));
  const int64_t inner = space_.size[space_.rank - 1];
  // True rows when they are long, else everything as one.
  row_ = inner >= kLongRow ? inner : total;
  per_row_ = (row_ + kBlockElements - 1) / kBlockElements;
  count_ = total / row_ * per_row_;
  direct_.resize(views.size());
  for (size_t v = 0; v < views.size(); ++v) {
    int64_t step = 1;
    bool dense = true;
    for (int i = space_.rank - 1; i >= 0; --i) {
      dense = dense && space_.of(v)[i] == step;
      step *= space_.size[i];
    }
    direct_[v] = dense || (row_ == inner && space_.of(v)[space_.rank - 1] == 1);
  }
}

int64_t BlockPlan::ElementsOf(int64_t b) const {
  return std::min(kBlockElements, row_ - b % per_row_ * kBlockElements);
}

void BlockPlan::Run(int64_t first, int64_t end,
                    const std::function<void(int64_t b, void* const* pointers, int64_t n)>& body) const {
  ScratchFrame frame;
  std::vector<void*> pointers(views_.size());
  std::vector<void*> buffers(views_.size(), nullptr);
  for (size_t v = 0; v < views_.size(); ++v) {
    if (!direct_[v]) buffers[v] = frame.AllocBytes(std::min(kBlockElements, row_) * SizeOf(views_[v].dtype));
  }
  for (int64_t block = first; block < end; ++block) {
    const int64_t begin = block / per_row_ * row_ + block % per_row_ * kBlockElements;
    const int64_t n = ElementsOf(block);
    for (size_t v = 0; v < views_.size(); ++v) {
      if (direct_[v]) {
        pointers[v] =
            static_cast<char*>(views_[v].data) + OffsetOf(v, begin) * static_cast<int64_t>(SizeOf(views_[v].dtype));
      } else {
        pointers[v] = buffers[v];
        if (static_cast<int>(v) < inputs_) MoveAny(v, begin, n, buffers[v], true);
      }
    }
    body(block, pointers.data(), n);
    for (size_t v = static_cast<size_t>(inputs_); v < views_.size(); ++v) {
      if (!direct_[v]) MoveAny(v, begin, n, buffers[v], false);
    }
  }
}

void ForEachBlock(const std::vector<TensorView>& views, int inputs,
                  const std::function<void(void* const* pointers, int64_t n)>& body,
                  const std::function<void()>& done) {
  const BlockPlan plan(views, inputs);
  ParallelFor(plan.count(), kMinBlocksPerThread, [&](int64_t first, int64_t end) {
    plan.Run(first, end, [&](int64_t, void* const* pointers, int64_t n) { body(pointers, n); });
    if (done) done();
  });
}

}  // namespace jumar
