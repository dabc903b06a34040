#include "base/overlap.h"

#include <algorithm>
#include <cstdint>

#include "base/check.h"

namespace jumar {
namespace {

// Bytes from the first element to the end of the last one.
struct Extent {
  uintptr_t begin, end;
};

Extent ExtentOf(const TensorView& view) {
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  int64_t last = 0;
  for (int i = 0; i < view.rank; ++i) last += (view.size[i] - 1) * view.stride[i];
  return {begin, begin + (static_cast<uintptr_t>(last) + 1) * SizeOf(view.dtype)};
}

// Elements of a view without gaps and repeats fill their extent once.
bool Fills(const TensorView& view) {
  const Extent e = ExtentOf(view);
  if (e.end - e.begin != static_cast<uintptr_t>(view.numel()) * SizeOf(view.dtype)) return false;
  std::vector<int> dims;
  for (int i = 0; i < view.rank; ++i) {
    if (view.size[i] != 1) dims.push_back(i);
  }
  std::sort(dims.begin(), dims.end(), [&](int a, int b) { return view.stride[a] < view.stride[b]; });
  int64_t expected = 1;
  for (const int d : dims) {
    if (view.stride[d] != expected) return false;
    expected *= view.size[d];
  }
  return true;
}

// Calls f(address) for every element.
template <typename F>
void ForEachAddress(const TensorView& view, const F& f) {
  const int64_t n = view.numel();
  int64_t index[kMaxRank] = {};
  int64_t offset = 0;
  for (int64_t k = 0; k < n; ++k) {
    f(reinterpret_cast<uintptr_t>(view.data) + static_cast<uintptr_t>(offset) * SizeOf(view.dtype));
    for (int i = view.rank - 1; i >= 0; --i) {
      offset += view.stride[i];
      if (++index[i] < view.size[i]) break;
      offset -= view.size[i] * view.stride[i];
      index[i] = 0;
    }
  }
}

// Views whose extents form one connected stretch of memory.
void CheckCluster(const char* op, const std::vector<NamedView>& views, const std::vector<size_t>& cluster) {
  bool any_written = false;
  for (const size_t i : cluster) any_written |= views[i].written;
  if (!any_written || (cluster.size() == 1 && Fills(views[cluster[0]].view))) return;
  uintptr_t begin = ExtentOf(views[cluster[0]].view).begin;
  uintptr_t end = 0;
  for (const size_t i : cluster) end = std::max(end, ExtentOf(views[i].view).end);
  // Per byte: 0, or 1 + the view that has it, in cluster order; written ones first, so that reads meet them.
  std::vector<uint32_t> owner(end - begin, 0);
  const auto mark = [&](size_t at, bool claim) {
    const NamedView& named = views[cluster[at]];
    ForEachAddress(named.view, [&](uintptr_t address) {
      for (size_t k = 0; k < SizeOf(named.view.dtype); ++k) {
        uint32_t& o = owner[address - begin + k];
        if (o == at + 1) {
          JUMAR_CHECK(op, false, named.name, " overlaps itself in memory: ", Describe(named.view),
                      " has several elements in one place");
        }
        JUMAR_CHECK(op, o == 0, named.name, " and ", views[cluster[o - 1]].name, " overlap in memory");
        if (claim) o = static_cast<uint32_t>(at + 1);
      }
    });
  };
  for (size_t at = 0; at < cluster.size(); ++at) {
    if (views[cluster[at]].written) mark(at, true);
  }
  for (size_t at = 0; at < cluster.size(); ++at) {
    if (!views[cluster[at]].written) mark(at, false);
  }
}

}  // namespace

void CheckNoOverlap(const char* op, const std::vector<NamedView>& views) {
  std::vector<size_t> order;
  std::vector<Extent> extents(views.size());
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].view.numel() == 0) continue;
    extents[i] = ExtentOf(views[i].view);
    order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return extents[a].begin < extents[b].begin; });
  std::vector<size_t> cluster;
  uintptr_t end = 0;
  for (const size_t i : order) {
    if (!cluster.empty() && extents[i].begin >= end) {
      CheckCluster(op, views, cluster);
      cluster.clear();
    }
    cluster.push_back(i);
    end = std::max(cluster.size() == 1 ? 0 : end, extents[i].end);
  }
  if (!cluster.empty()) CheckCluster(op, views, cluster);
}

}  // namespace jumar
