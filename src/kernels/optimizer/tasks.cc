#include "kernels/optimizer/tasks.h"

#include "base/parallel.h"

namespace jumar {

void ForEachTask(const std::vector<BlockPlan>& plans,
                 const std::function<void(size_t tensor, int64_t first, int64_t end)>& body) {
  struct Piece {
    size_t tensor;
    int64_t first, end;
  };
  std::vector<Piece> pieces;
  std::vector<size_t> task_begin = {0};
  int64_t elements = 0;
  for (size_t t = 0; t < plans.size(); ++t) {
    int64_t first = 0;
    for (int64_t b = 0; b < plans[t].count(); ++b) {
      elements += plans[t].ElementsOf(b);
      if (elements >= kTaskElements) {
        pieces.push_back({t, first, b + 1});
        task_begin.push_back(pieces.size());
        first = b + 1;
        elements = 0;
      }
    }
    if (first < plans[t].count()) pieces.push_back({t, first, plans[t].count()});
  }
  if (task_begin.back() < pieces.size()) task_begin.push_back(pieces.size());
  ParallelChunks(static_cast<int64_t>(task_begin.size()) - 1, [&](int64_t task) {
    const auto at = static_cast<size_t>(task);
    for (size_t i = task_begin[at]; i < task_begin[at + 1]; ++i) {
      body(pieces[i].tensor, pieces[i].first, pieces[i].end);
    }
  });
}

}  // namespace jumar
