// Backward. Queries that share a key head go in units of up to kBackwardUnitRows rows. A unit walks over the key blocks
// that its queries see: in each, all its panels of queries give their part to the block's dk and dv, and take their
// part of dq.
//
// Units run side by side. dk and dv of a block are the sums over its units, each unit's part taken together first, and
// units add theirs in order: one that comes too early waits for the one before it. Both start at the first key and walk
// on at the same pace, so that waits are short. What a unit is depends on shapes alone, and with it every bit.
#include "kernels/attention/attention_backward.h"

#include <atomic>
#include <memory>
#include <thread>

#include "base/parallel.h"

namespace jumar {
namespace {

constexpr int64_t kUnitRows = kBackwardUnitRows;
constexpr int64_t kWaveBytes = 64 << 20;

template <typename C>
class Backward {
 public:
  explicit Backward(const AttentionGradients& g)
      : g_(g), plan_(g.plan), ld_k_(BackwardUnit<C>::LdK(plan_)), ld_v_(BackwardUnit<C>::LdV(plan_)) {}

  // Key heads go in waves whose dk and dv fit some megabytes, the longest sequences first, so that all threads end
  // together.
  void Run() {
    std::vector<const AttentionSequence*> sequences;
    for (const AttentionSequence& s : plan_.in.sequences) sequences.push_back(&s);
    std::stable_sort(sequences.begin(), sequences.end(),
                     [](const auto* a, const auto* b) { return Work(*a) > Work(*b); });
    std::vector<Item> wave;
    int64_t bytes = 0;
    for (const AttentionSequence* s : sequences) {
      const std::vector<BackwardUnitShape> units = Units(*s);
      const int64_t size = units.size() < 2 ? 0 : s->k_len * (ld_k_ + ld_v_) * static_cast<int64_t>(sizeof(C));
      for (int64_t h = 0; h < plan_.shape.kv_heads; ++h) {
        if (bytes + size > kWaveBytes && bytes > 0) {
          Wave(wave);
          wave.clear();
          bytes = 0;
        }
        wave.push_back({s, h, units, nullptr, nullptr, nullptr});
        bytes += size;
      }
    }
    Wave(wave);
  }

 private:
  static double Work(const AttentionSequence& s) { return static_cast<double>(s.q_len) * static_cast<double>(s.k_len); }

  // One key head of a sequence.
  struct Item {
    const AttentionSequence* s;
    int64_t kv_head;
    std::vector<BackwardUnitShape> units;
    C* dk;  // sums so far, [k_len, ld]; null with one unit
    C* dv;
    std::unique_ptr<std::atomic<int64_t>[]> done;  // per key block: the last unit that has added its part
  };

  std::vector<BackwardUnitShape> Units(const AttentionSequence& s) const {
    std::vector<BackwardUnitShape> units;
    const int64_t group = plan_.shape.group;
    const int64_t together = s.q_len == 0 ? group : std::max<int64_t>(1, kUnitRows / s.q_len);
    for (int64_t h = 0; h < group; h += together) {
      for (int64_t r = 0; r < s.q_len; r += kUnitRows) {
        BackwardUnitShape u{h, std::min(together, group - h), r, std::min(kUnitRows, s.q_len - r), 0, 0};
        const int64_t low = plan_.Low(s, r);
        const int64_t high = plan_.High(s, r + u.rows - 1);
        if (low < high) {
          u.begin = low / plan_.key_block;
          u.end = CeilDiv(high, plan_.key_block);
        }
        units.push_back(u);
      }
    }
    return units;
  }

  void Wave(std::vector<Item>& wave) {
    ScratchFrame frame;
    std::vector<int64_t> first{0};
    for (Item& item : wave) {
      const auto count = static_cast<int64_t>(item.units.size());
      first.push_back(first.back() + count);
      if (count < 2) continue;
      item.dk = frame.Alloc<C>(item.s->k_len * ld_k_);
      item.dv = frame.Alloc<C>(item.s->k_len * ld_v_);
      const auto blocks = static_cast<size_t>(CeilDiv(item.s->k_len, plan_.key_block));
      item.done = std::make_unique<std::atomic<int64_t>[]>(blocks);
      for (size_t b = 0; b < blocks; ++b) item.done[b] = -1;
    }
    ParallelChunks(static_cast<int64_t>(wave.size()), [&](int64_t i) { ClearUnseen(wave[static_cast<size_t>(i)]); });
    failed_ = false;
    ParallelChunks(first.back(), [&](int64_t task) {
      const auto at = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
      try {
        RunUnit(wave[static_cast<size_t>(at)], task - first[static_cast<size_t>(at)]);
      } catch (...) {
        failed_ = true;  // nobody may wait for this unit
        throw;
      }
    });
  }

  // Blocks that no unit sees.
  void ClearUnseen(const Item& item) {
    ScratchFrame frame;
    C* zeros = nullptr;
    for (int64_t key = 0; key < item.s->k_len; key += plan_.key_block) {
      if (Other(item, -1, 1, key / plan_.key_block) >= 0) continue;
      if (zeros == nullptr) {
        zeros = frame.Alloc<C>(plan_.key_block * std::max(ld_k_, ld_v_));
        std::fill(zeros, zeros + plan_.key_block * std::max(ld_k_, ld_v_), C(0));
      }
      StoreKeys(item, key, std::min(plan_.key_block, item.s->k_len - key), zeros, zeros);
    }
  }

  // The next unit after `u` in direction `step` that touches the block; -1: none.
  static int64_t Other(const Item& item, int64_t u, int64_t step, int64_t block) {
    const auto count = static_cast<int64_t>(item.units.size());
    for (u += step; u >= 0 && u < count; u += step) {
      if (item.units[static_cast<size_t>(u)].Touches(block)) return u;
    }
    return -1;
  }

  void RunUnit(const Item& item, int64_t index) {
    const BackwardUnitShape& shape = item.units[static_cast<size_t>(index)];
    ScratchFrame frame;
    BackwardUnit<C> unit(g_, *item.s, item.kv_head, shape, frame);
    for (int64_t block = shape.begin; block < shape.end; ++block) {
      const bool any = unit.Keys(block);
      Add(item, index, unit, block, any);
    }
    unit.StoreQueries();
  }

  // Adds the unit's part of a block (`any`: it has one) in its turn; the last unit stores the sums.
  void Add(const Item& item, int64_t index, BackwardUnit<C>& unit, int64_t block, bool any) {
    const int64_t key = block * plan_.key_block;
    const int64_t n = std::min(plan_.key_block, item.s->k_len - key);
    C* dk = unit.dk();
    C* dv = unit.dv();
    const int64_t before = Other(item, index, -1, block);
    const bool alone = before < 0 && Other(item, index, 1, block) < 0;
    if (!alone) {
      for (int tries = 0; item.done[static_cast<size_t>(block)].load(std::memory_order_acquire) != before; ++tries) {
        if (failed_) return;
        if (tries > 100) std::this_thread::yield();
      }
      dk = item.dk + key * ld_k_;
      dv = item.dv + key * ld_v_;
    }
    if (before < 0 && !any) {
      std::fill(dk, dk + n * ld_k_, C(0));
      std::fill(dv, dv + n * ld_v_, C(0));
    } else if (before < 0 && !alone) {
      std::copy(unit.dk(), unit.dk() + n * ld_k_, dk);
      std::copy(unit.dv(), unit.dv() + n * ld_v_, dv);
    } else if (before >= 0 && any) {
      plan_.panel.add(dk, n * ld_k_, unit.dk());
      plan_.panel.add(dv, n * ld_v_, unit.dv());
    }
    if (g_.shares_pse() && any) {
      for (int64_t i = 0; i < item.units[static_cast<size_t>(index)].heads; ++i) {
        C* row = reinterpret_cast<C*>(Element(*g_.dpse, item.s->index, unit.HeadAt(i), 0)) + key;
        for (int64_t k = 0; k < n; ++k) row[k] += unit.dpse(i)[k];
      }
    }
    if (Other(item, index, 1, block) < 0) {
      plan_.panel.scale(dk, n * ld_k_, plan_.in.scale);
      StoreKeys(item, key, n, dk, dv);
    }
    if (!alone) item.done[static_cast<size_t>(block)].store(index, std::memory_order_release);
  }

  void StoreKeys(const Item& item, int64_t key, int64_t n, const C* dk, const C* dv) {
    const AttentionSequence& s = *item.s;
    plan_.Store(dk, ld_k_, n, g_.grads.dk, s.batch, item.kv_head, s.k_begin + key);
    plan_.Store(dv, ld_v_, n, g_.grads.dv, s.batch, item.kv_head, s.k_begin + key);
    if (plan_.shape.rope == 0) return;
    plan_.Store(dk + plan_.shape.d, ld_k_, n, g_.grads.dk_rope, s.batch, item.kv_head, s.k_begin + key);
  }

  const AttentionGradients& g_;
  const AttentionPlan& plan_;
  int64_t ld_k_, ld_v_;
  std::atomic<bool> failed_{false};
};

}  // namespace

void AttentionBackwardTasks(const AttentionGradients& g) {
  if (g.plan.shape.compute == DType::kF64) {
    Backward<double>(g).Run();
  } else {
    Backward<float>(g).Run();
  }
}

}  // namespace jumar
