// The k largest of a row that arrives in blocks of ascending positions: the larger first, of equal ones the lower
// position.
//
// Candidates that beat the k-th best so far are collected in order of position; where they fill their room, the k best
// of them stay. A later element that equals the k-th best never enters, so that nothing depends on the blocks.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/scratch.h"
#include "kernels/lightning_indexer/lightning_indexer_simd.h"

namespace jumar {

template <typename C>
class RunningTopK {
 public:
  using Id = std::conditional_t<sizeof(C) == 8, int64_t, int32_t>;
  using Key = std::make_unsigned_t<Id>;
  struct Choice {
    Key key;
    Id id;
    C score() const { return ScoreOf(key); }
  };

  // k > 0 of at most `n` elements that come in blocks of at most `block`.
  struct Limits {
    Limits(int64_t k_of_call, int64_t n, int64_t block)
        : k(std::min(k_of_call, n)), room(k + std::min(n, std::max(k, 4 * block))) {}
    int64_t k;
    int64_t room;
  };
  // Working memory that rows share.
  struct Scratch {
    Scratch(ScratchFrame& frame, const Limits& limits)
        : choices(frame.Alloc<Choice>(2 * limits.k)),
          keys(frame.Alloc<Key>(2 * limits.room + 1)),
          counts(frame.Alloc<int32_t>(kBins)) {}
    Choice* choices;
    Key* keys;
    int32_t* counts;
  };

  RunningTopK(const IndexerKernel& kernel, ScratchFrame& frame, const Limits& limits)
      : kernel_(kernel),
        k_(limits.k),
        room_(limits.room),
        scores_(frame.Alloc<C>(room_ + kSlack)),
        ids_(frame.Alloc<Id>(room_ + kSlack)) {}

  // x[0..n) are the elements of positions first, first + 1, ..
  void Add(const C* x, int64_t n, int64_t first, const Scratch& scratch) {
    if (count_ + n > room_) Prune(scratch);
    count_ += kernel_.append(x, n, first, static_cast<double>(threshold_), !full_, scores_ + count_, ids_ + count_);
  }

  // The choices in order; they live in `scratch`. Returns how many.
  int64_t Finish(const Scratch& scratch, const Choice** sorted) {
    if (count_ > k_) Prune(scratch);
    Choice* at = scratch.choices;
    for (int64_t i = 0; i < count_; ++i) at[i] = {KeyOf(scores_[i]), ids_[i]};
    *sorted = count_ < 256 ? SortFew(at) : SortMany(at, scratch.counts);
    return count_;
  }

 private:
  static constexpr int kDigit = 11;
  static constexpr int kBins = 1 << kDigit;
  static constexpr int kBits = static_cast<int>(sizeof(C)) * 8;
  static constexpr int64_t kSlack = 64;  // whole vectors are stored
  static constexpr Key kSign = Key{1} << (kBits - 1);

  // Ordered as the numbers are: both zeros alike, NaN above all.
  static Key KeyOf(C x) {
    const Key bits = std::bit_cast<Key>(x + C(0));
    const Key key = bits ^ (static_cast<Key>(static_cast<Id>(bits) >> (kBits - 1)) | kSign);
    return std::isnan(x) ? ~Key{0} : key;
  }
  static C ScoreOf(Key key) {
    if (key == ~Key{0}) return std::numeric_limits<C>::quiet_NaN();
    return std::bit_cast<C>((key & kSign) != 0 ? static_cast<Key>(key ^ kSign) : static_cast<Key>(~key));
  }

  // Keeps the k best, in order of position.
  void Prune(const Scratch& scratch) {
    int32_t* counts = scratch.counts;
    Key* keys = scratch.keys;
    std::fill_n(counts, kBins, 0);
    for (int64_t i = 0; i < count_; ++i) keys[i] = KeyOf(scores_[i]);
    for (int64_t i = 0; i < count_; ++i) ++counts[keys[i] >> (kBits - kDigit)];
    // The bin that holds the k-th best, and how many of it are wanted.
    int64_t wanted = k_;
    int64_t bin = kBins - 1;
    for (; counts[bin] < wanted; --bin) wanted -= counts[bin];
    Key* in_bin = keys + room_;
    int64_t n = 0;
    for (int64_t i = 0; i < count_; ++i) {
      in_bin[n] = keys[i];
      n += static_cast<int64_t>(keys[i] >> (kBits - kDigit)) == bin ? 1 : 0;
    }
    std::nth_element(in_bin, in_bin + wanted - 1, in_bin + n, std::greater<Key>());
    const Key floor = in_bin[wanted - 1];
    // Of those that equal the k-th best the first ones stay.
    int64_t equal = wanted - std::count_if(in_bin, in_bin + wanted, [&](Key key) { return key > floor; });
    int64_t kept = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const bool tie = keys[i] == floor && equal > 0;
      equal -= tie ? 1 : 0;
      scores_[kept] = scores_[i];
      ids_[kept] = ids_[i];
      kept += keys[i] > floor || tie ? 1 : 0;
    }
    count_ = kept;
    threshold_ = ScoreOf(floor);
    full_ = true;
  }

  const Choice* SortFew(Choice* at) const {
    std::sort(at, at + count_,
              [](const Choice& a, const Choice& b) { return a.key != b.key ? a.key > b.key : a.id < b.id; });
    return at;
  }

  // Positions ascend already, so that a stable sort by key is enough: by digits, the lowest first.
  const Choice* SortMany(Choice* from, int32_t* counts) const {
    Choice* to = from + k_;
    for (int shift = 0; shift < kBits; shift += kDigit) {
      const auto digit = [&](const Choice& c) { return static_cast<size_t>(~c.key >> shift & Key{kBins - 1}); };
      std::fill_n(counts, kBins, 0);
      for (int64_t i = 0; i < count_; ++i) ++counts[digit(from[i])];
      if (counts[digit(from[0])] == count_) continue;
      int32_t begin = 0;
      for (int64_t b = 0; b < kBins; ++b) begin += std::exchange(counts[b], begin);
      for (int64_t i = 0; i < count_; ++i) to[counts[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
    return from;
  }

  const IndexerKernel& kernel_;
  int64_t k_;
  int64_t room_;
  C* scores_;
  Id* ids_;
  int64_t count_ = 0;
  C threshold_ = 0;
  bool full_ = false;
};

}  // namespace jumar
