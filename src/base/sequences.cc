#include "base/sequences.h"

#include <algorithm>

#include "base/check.h"

namespace jumar {
namespace {

int64_t LengthOf(const char* op, const char* name, const std::vector<int64_t>& lengths, int64_t batch, int64_t b,
                 int64_t all) {
  if (lengths.empty()) return all;
  JUMAR_CHECK(op, static_cast<int64_t>(lengths.size()) == batch, name, " must have one length per batch entry (", batch,
              "), got ", lengths.size());
  const int64_t length = lengths[static_cast<size_t>(b)];
  JUMAR_CHECK(op, length >= 0 && length <= all, name, " is ", length, " at position ", b, ", not within [0, ", all,
              "]");
  return length;
}

}  // namespace

std::vector<SequencePair> PackedSequences(const char* op, const SequenceLists& ends, int64_t queries, int64_t keys) {
  JUMAR_CHECK(op, !ends.q.empty() && ends.q.size() == ends.k.size(), "input_layout TND needs ", ends.q_name, " and ",
              ends.k_name, " of one length, got ", ends.q.size(), " and ", ends.k.size(), " ends");
  const auto live = [](const std::vector<int64_t>& list) {
    size_t n = list.size();
    while (n > 0 && list[n - 1] == 0) --n;
    return n;
  };
  const size_t count = std::max(live(ends.q), live(ends.k));
  std::vector<SequencePair> sequences;
  int64_t q_end = 0;
  int64_t k_end = 0;
  for (size_t i = 0; i < count; ++i) {
    const SequencePair s{0, q_end, ends.q[i] - q_end, k_end, ends.k[i] - k_end};
    JUMAR_CHECK(op, s.q_len >= 0 && s.k_len >= 0, ends.q_name, " and ", ends.k_name, " are cumulative; sequence ", i,
                " ends at ", ends.q[i], " and ", ends.k[i], ", before its begin ", q_end, " and ", k_end);
    q_end = ends.q[i];
    k_end = ends.k[i];
    sequences.push_back(s);
  }
  JUMAR_CHECK(op, q_end == queries && k_end == keys, ends.q_name, " and ", ends.k_name, " end at ", q_end, " and ",
              k_end, ", but query and key have ", queries, " and ", keys, " tokens (the lists are cumulative)");
  return sequences;
}

std::vector<SequencePair> PaddedSequences(const char* op, const SequenceLists& lengths, int64_t batch, int64_t queries,
                                          int64_t keys) {
  std::vector<SequencePair> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    sequences.push_back({b, 0, LengthOf(op, lengths.q_name, lengths.q, batch, b, queries), 0,
                         LengthOf(op, lengths.k_name, lengths.k, batch, b, keys)});
  }
  return sequences;
}

}  // namespace jumar
