// Which queries meet which keys: sequences of a padded batch, or packed one after another.
#pragma once

#include <cstdint>
#include <vector>

namespace jumar {

// Queries [q_begin, q_begin + q_len) and keys [k_begin, k_begin + k_len) of batch entry `batch`.
struct SequencePair {
  int64_t batch = 0;
  int64_t q_begin = 0;
  int64_t q_len = 0;
  int64_t k_begin = 0;
  int64_t k_len = 0;
};

// The two lists of one call and their names in errors.
struct SequenceLists {
  const char* q_name;
  const char* k_name;
  std::vector<int64_t> q;
  std::vector<int64_t> k;
};

// Tokens [T, ..], packed: the lists are ends, cumulative, without a leading 0. A repeated end is an empty sequence,
// trailing zeros are ignored, the last ends must be `queries` and `keys`. Throws Error, `op` first.
std::vector<SequencePair> PackedSequences(const char* op, const SequenceLists& ends, int64_t queries, int64_t keys);

// Tokens [B, S, ..], padded: the lists are lengths, one per batch entry, at most S. An empty list: all have S.
std::vector<SequencePair> PaddedSequences(const char* op, const SequenceLists& lengths, int64_t batch, int64_t queries,
                                          int64_t keys);

}  // namespace jumar
