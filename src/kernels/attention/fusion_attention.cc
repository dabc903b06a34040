#include "kernels/attention/fusion_attention.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "base/sequences.h"

namespace jumar {
namespace {

constexpr int64_t kCompressed = 2048;
constexpr int64_t kPrefixRows = 1024;  // below the triangle of a mask with prefix; of a compressed pse

std::string Upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// Rows [0, 2048): ones above the diagonal; rows below: zeros left, ones right.
bool IsCompressed(const TensorView& mask) {
  const int64_t rows = mask.size[mask.rank - 2];
  const int64_t row_stride = mask.stride[mask.rank - 2];
  const int64_t stride = mask.stride[mask.rank - 1];
  static const std::vector<uint8_t> kZeros(kCompressed, 0);
  static const std::vector<uint8_t> kOnes(kCompressed, 1);
  std::atomic<bool> same{true};
  ParallelFor(rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end && same; ++r) {
      const uint8_t* p = static_cast<const uint8_t*>(mask.data) + r * row_stride;
      const auto zeros = static_cast<size_t>(r < kCompressed ? r + 1 : kCompressed / 2);
      const size_t ones = kCompressed - zeros;
      if (stride == 1 && std::memcmp(p, kZeros.data(), zeros) == 0 && std::memcmp(p + zeros, kOnes.data(), ones) == 0) {
        continue;
      }
      // Any number but 0 hides.
      for (int64_t j = 0; j < kCompressed; ++j) {
        if ((p[j * stride] != 0) != (j >= static_cast<int64_t>(zeros))) same = false;
      }
    }
  });
  return same;
}

}  // namespace

TensorView PackedStatistics(const char* op, const char* name, const TensorView& x, bool heads_first) {
  TensorView v = x;
  v.rank = 4;
  v.size[0] = 1;
  v.size[1] = x.size[1];
  v.size[2] = x.size[0];
  v.size[3] = 8;
  v.stride[0] = 0;
  v.stride[1] = x.stride[1];
  v.stride[2] = x.stride[0];
  v.stride[3] = x.stride[2];
  if (heads_first) {
    JUMAR_CHECK(op, IsContiguous(x), name, " must be contiguous with softmax_layout ''");
    v.stride[1] = 8 * x.size[0];
    v.stride[2] = 8;
  }
  return v;
}

FusionAttention::FusionAttention(const char* op, const FusionAttentionTensors& t, const FusionAttentionOptions& o)
    : op_(op), layout_(Upper(o.layout)), softmax_layout_(o.softmax_layout), heads_(o.head_num), query_(t.query) {
  JUMAR_CHECK(op, layout_ == "BSH" || layout_ == "SBH" || layout_ == "BNSD" || layout_ == "BSND" || layout_ == "TND",
              "input_layout must be BSH, SBH, BNSD, BSND or TND, got '", o.layout, "'");
  JUMAR_CHECK(op, heads_ > 0, "head_num must be positive, got ", heads_);
  JUMAR_CHECK(op, softmax_layout_.empty() || (softmax_layout_ == "TND" && layout_ == "TND"),
              "softmax_layout must be '', or 'TND' with input_layout TND, got '", o.softmax_layout, "'");
  const int rank = layout_ == "BNSD" || layout_ == "BSND" ? 4 : 3;
  for (const TensorView* x : {&t.query, &t.key, &t.value}) {
    JUMAR_CHECK(op, x->rank == rank, "query, key and value of layout ", layout_, " have ", rank, " dimensions, got ",
                ShapeString(*x));
  }
  int64_t kv_heads = layout_ == "BNSD" ? t.key.size[1] : t.key.size[rank - 2];
  if (layout_ == "BSH" || layout_ == "SBH") {
    JUMAR_CHECK(op, t.query.size[2] % heads_ == 0, "query's last size ", t.query.size[2],
                " is not a multiple of head_num ", heads_);
    const int64_t d = t.query.size[2] / heads_;
    JUMAR_CHECK(op, d > 0 && t.key.size[2] % d == 0, "key's last size ", t.key.size[2],
                " is not a multiple of the head size ", d);
    kv_heads = t.key.size[2] / d;
    JUMAR_CHECK(op, kv_heads > 0 && t.value.size[2] % kv_heads == 0, "value's last size ", t.value.size[2],
                " is not a multiple of the number of key heads ", kv_heads);
  }
  inputs_.q = Heads("query", t.query, heads_);
  inputs_.k = Heads("key", t.key, kv_heads);
  inputs_.v = Heads("value", t.value, kv_heads);
  value_cols_ = inputs_.v.size[3];
  JUMAR_CHECK(op, (t.query_rope.rank == 0) == (t.key_rope.rank == 0), "query_rope and key_rope go together");
  if (t.query_rope.rank != 0) {
    inputs_.q_rope = QueryHeads("query_rope", t.query_rope);
    inputs_.k_rope = KeyHeads("key_rope", t.key_rope);
  }
  inputs_.scale = o.scale;
  inputs_.dropout = o.dropout;
  inputs_.sink = t.sink;
  SetSequences(o);
  const int64_t mode = o.sparse_mode;
  JUMAR_CHECK(op_, mode >= 0 && mode <= 8 && (layout_ == "TND" ? mode != 5 : mode <= 6), "sparse_mode ", mode,
              " does not exist for input_layout ", layout_);
  if (t.atten_mask.rank != 0) SetRules(t.atten_mask, o);
  if (t.pse.rank != 0) SetPse(t.pse);
}

TensorView FusionAttention::Heads(const char* name, const TensorView& x, int64_t heads) const {
  TensorView v;
  v.data = x.data;
  v.dtype = x.dtype;
  v.rank = 4;
  const auto set = [&](int to, int64_t size, int64_t stride) {
    v.size[to] = size;
    v.stride[to] = stride;
  };
  if (layout_ == "BSH" || layout_ == "SBH") {
    JUMAR_CHECK(op_, x.size[2] % heads == 0, name, " has shape ", ShapeString(x),
                ", its last size is not a multiple of its ", heads, " heads");
    const int b = layout_ == "BSH" ? 0 : 1;
    const int64_t d = x.size[2] / heads;
    set(0, x.size[b], x.stride[b]);
    set(1, heads, d * x.stride[2]);
    set(2, x.size[1 - b], x.stride[1 - b]);
    set(3, d, x.stride[2]);
  } else if (layout_ == "TND") {
    set(0, 1, 0);
    set(1, x.size[1], x.stride[1]);
    set(2, x.size[0], x.stride[0]);
    set(3, x.size[2], x.stride[2]);
  } else {
    const int n = layout_ == "BNSD" ? 1 : 2;
    set(0, x.size[0], x.stride[0]);
    set(1, x.size[n], x.stride[n]);
    set(2, x.size[3 - n], x.stride[3 - n]);
    set(3, x.size[3], x.stride[3]);
  }
  JUMAR_CHECK(op_, v.size[1] == heads, name, " has ", v.size[1], " heads, expected ", heads, ": ", ShapeString(x));
  return v;
}

TensorView FusionAttention::QueryHeads(const char* name, const TensorView& x) const {
  JUMAR_CHECK(op_, x.rank == query_.rank, name, " must have ", query_.rank, " dimensions, got ", ShapeString(x));
  return Heads(name, x, heads_);
}

TensorView FusionAttention::KeyHeads(const char* name, const TensorView& x) const {
  JUMAR_CHECK(op_, x.rank == query_.rank, name, " must have ", query_.rank, " dimensions, got ", ShapeString(x));
  return Heads(name, x, inputs_.k.size[1]);
}

std::vector<int64_t> FusionAttention::OutSizes() const {
  std::vector<int64_t> sizes(query_.size, query_.size + query_.rank);
  sizes.back() = layout_ == "BSH" || layout_ == "SBH" ? heads_ * value_cols_ : value_cols_;
  return sizes;
}

std::vector<int64_t> FusionAttention::StatisticsSizes() const {
  const TensorView& q = inputs_.q;
  if (layout_ == "TND") return {q.size[2], heads_, 8};
  return {q.size[0], heads_, q.size[2], 8};
}

TensorView FusionAttention::Statistics(const char* name, const TensorView& x) const {
  const std::vector<int64_t> sizes = StatisticsSizes();
  JUMAR_CHECK(op_, x.rank == static_cast<int>(sizes.size()) && std::equal(sizes.begin(), sizes.end(), x.size), name,
              " has shape ", ShapeString(x));
  if (layout_ != "TND") return x;
  return PackedStatistics(op_, name, x, softmax_layout_.empty());
}

int64_t FusionAttention::Elements() const {
  int64_t n = 0;
  for (const AttentionSequence& s : inputs_.sequences) n += heads_ * s.q_len * s.k_len;
  return n;
}

void FusionAttention::SetSequences(const FusionAttentionOptions& o) {
  const TensorView& q = inputs_.q;
  const TensorView& k = inputs_.k;
  if (layout_ != "TND") {
    JUMAR_CHECK(op_, o.q_ends.empty() && o.k_ends.empty(),
                "actual_seq_qlen and actual_seq_kvlen go with input_layout TND, not ", layout_);
    for (int64_t b = 0; b < q.size[0]; ++b) {
      AttentionSequence s;
      s.batch = s.index = b;
      s.q_len = q.size[2];
      s.k_len = k.size[2];
      inputs_.sequences.push_back(s);
    }
    return;
  }
  const SequenceLists ends{"actual_seq_qlen", "actual_seq_kvlen", o.q_ends, o.k_ends};
  for (const SequencePair& pair : PackedSequences(op_, ends, q.size[2], k.size[2])) {
    AttentionSequence s;
    s.index = static_cast<int64_t>(inputs_.sequences.size());
    s.q_begin = pair.q_begin;
    s.q_len = pair.q_len;
    s.k_begin = pair.k_begin;
    s.k_len = pair.k_len;
    inputs_.sequences.push_back(s);
  }
}

void FusionAttention::SetRules(const TensorView& mask, const FusionAttentionOptions& o) {
  const int64_t mode = o.sparse_mode;
  const int64_t pre = std::clamp<int64_t>(o.pre_tokens, -kUnboundedBand, kUnboundedBand);
  const int64_t next = std::clamp<int64_t>(o.next_tokens, -kUnboundedBand, kUnboundedBand);
  const bool band = mode == 0 || mode == 4 || mode == 7 || mode == 8;
  JUMAR_CHECK(op_, !band || pre + next >= 0, "pre_tokens ", o.pre_tokens, " and next_tokens ", o.next_tokens,
              " leave an empty band");
  SetMask(mask, mode >= 2 && mode != 5, mode == 6);
  // The ignored zeros behind the ends may have prefixes.
  const size_t sequences = inputs_.sequences.size();
  JUMAR_CHECK(op_, mode != 6 || o.prefix.size() == std::max(sequences, o.q_ends.size()) || o.prefix.size() == sequences,
              "sparse_mode 6 needs one prefix per sequence (", sequences, "), got ", o.prefix.size());
  const auto live = [](const AttentionSequence& s) { return s.q_len > 0; };
  const auto& all = inputs_.sequences;
  const auto first = std::find_if(all.begin(), all.end(), live) - all.begin();
  const auto last = all.rend() - std::find_if(all.rbegin(), all.rend(), live) - 1;
  for (size_t i = 0; i < all.size(); ++i) {
    AttentionSequence& s = inputs_.sequences[i];
    const int64_t d = s.k_len - s.q_len;
    const auto at = static_cast<int64_t>(i);
    if (mode == 0) {
      s.low = -pre;
      s.high = next;
    } else if (mode == 4 || (mode == 7 && at == last) || (mode == 8 && at == first)) {
      s.low = d - pre;
      s.high = d + next;
    } else if (mode == 2 || mode == 8) {
      s.high = 0;
    } else if (mode == 3 || mode == 7) {
      s.high = d;
    } else if (mode == 6) {
      s.high = d;
      s.prefix = o.prefix[i];
      JUMAR_CHECK(op_, s.prefix >= 0 && s.prefix <= s.k_len, "prefix[", i, "] must be in [0, ", s.k_len, "], got ",
                  s.prefix);
    }
  }
}

void FusionAttention::SetMask(const TensorView& mask, bool compressed, bool with_prefix) {
  JUMAR_CHECK(op_, mask.rank == 2 || mask.rank == 4, "atten_mask must have 2 or 4 dimensions, got ", ShapeString(mask));
  if (compressed) {
    const int64_t rows = with_prefix ? kCompressed + kPrefixRows : kCompressed;
    bool fits = mask.size[mask.rank - 2] == rows && mask.size[mask.rank - 1] == kCompressed;
    for (int i = 0; i < mask.rank - 2; ++i) fits = fits && mask.size[i] == 1;
    JUMAR_CHECK(op_, fits, "this sparse_mode takes a compressed atten_mask [", rows, ", ", kCompressed, "], got ",
                ShapeString(mask));
    JUMAR_CHECK(op_, IsCompressed(mask),
                "the compressed atten_mask does not hold ones above the diagonal (and zeros elsewhere), as this "
                "sparse_mode says",
                with_prefix ? " with 1024 more rows of zeros left and ones right" : "");
    return;
  }
  AttentionMask& m = inputs_.mask;
  m.data = static_cast<const uint8_t*>(mask.data);
  const bool packed = layout_ == "TND";
  JUMAR_CHECK(op_, !packed || mask.rank == 2, "atten_mask of layout TND has 2 dimensions, got ", ShapeString(mask));
  int64_t expected[4] = {packed ? 1 : inputs_.q.size[0], packed ? 1 : heads_, inputs_.q.size[2], inputs_.k.size[2]};
  if (packed) {
    expected[2] = expected[3] = 0;
    for (const AttentionSequence& s : inputs_.sequences) {
      expected[2] = std::max(expected[2], s.q_len);
      expected[3] = std::max(expected[3], s.k_len);
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int at = i - (4 - mask.rank);
    m.size[i] = at < 0 ? 1 : mask.size[at];
    m.stride[i] = m.size[i] == 1 ? 0 : mask.stride[at];
    const bool longer = packed && i >= 2 && m.size[i] > expected[i];
    JUMAR_CHECK(op_, m.size[i] == expected[i] || m.size[i] == 1 || longer, "atten_mask has shape ", ShapeString(mask),
                ", which does not go with ", packed ? "sequences" : "scores", " of [", expected[0], ", ", expected[1],
                ", ", expected[2], ", ", expected[3], "]");
  }
  // An empty mask hides nothing of nothing, and a single 0 nothing at all.
  if (mask.numel() == 0 || (mask.numel() == 1 && *m.data == 0)) m.data = nullptr;
}

void FusionAttention::SetPse(const TensorView& pse) {
  JUMAR_CHECK(op_, pse.rank == 4, "pse must have 4 dimensions, got ", ShapeString(pse));
  const bool packed = layout_ == "TND";
  if (pse.size[2] == kPrefixRows && (packed || inputs_.q.size[2] > kPrefixRows)) {
    SetCompressedPse(pse);
    return;
  }
  JUMAR_CHECK(op_, !packed, "pse of input_layout TND must be the compressed form of 1024 rows, got ", ShapeString(pse));
  const int64_t expected[4] = {inputs_.q.size[0], heads_, inputs_.q.size[2], inputs_.k.size[2]};
  for (int i = 0; i < 4; ++i) {
    JUMAR_CHECK(op_, pse.size[i] == expected[i] || (i < 3 && pse.size[i] == 1), "pse has shape ", ShapeString(pse),
                ", which does not go with scores of [", expected[0], ", ", expected[1], ", ", expected[2], ", ",
                expected[3], "]");
  }
  inputs_.pse = pse;
  if (pse.size[2] == 1) inputs_.pse.stride[2] = 0;
}

void FusionAttention::SetCompressedPse(const TensorView& pse) {
  const auto batch = static_cast<int64_t>(inputs_.sequences.size());
  int64_t longest = 0;
  for (const AttentionSequence& s : inputs_.sequences) {
    JUMAR_CHECK(op_, s.q_len == s.k_len && s.high <= 0,
                "pse compressed to 1024 rows is for causal attention of as many queries as keys, got a sequence of ",
                s.q_len, " queries and ", s.k_len, " keys", s.high > 0 ? ", not causal by its sparse_mode" : "");
    longest = std::max(longest, s.k_len);
  }
  const int64_t keys = pse.size[3];
  JUMAR_CHECK(op_,
              (pse.size[0] == batch || pse.size[0] == 1) && (pse.size[1] == heads_ || pse.size[1] == 1) &&
                  (layout_ == "TND" ? keys >= longest : keys == longest),
              "pse compressed to 1024 rows has shape ", ShapeString(pse), ", expected [", batch, " or 1, ", heads_,
              ", 1024, ", longest, "]");
  inputs_.pse = pse;
  inputs_.pse_first = keys - kPrefixRows;
}

}  // namespace jumar
