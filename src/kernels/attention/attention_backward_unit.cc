#include <type_traits>

#include "kernels/attention/attention_backward.h"

namespace jumar {
namespace {

// Queries whose probabilities are kept at a time: a longer sum of fp32 products has a larger error, a short one of bf16
// loads and stores its results too often.
constexpr int64_t kQueryRows = 64;
constexpr int64_t kSplitQueryRows = 128;
constexpr TensorView kNone{};

}  // namespace

template <typename C>
BackwardUnit<C>::BackwardUnit(const AttentionGradients& g, const AttentionSequence& s, int64_t kv_head,
                              const BackwardUnitShape& shape, ScratchFrame& frame)
    : g_(g),
      plan_(g.plan),
      s_(s),
      unit_(shape),
      kv_head_(kv_head),
      first_head_(kv_head * g.plan.shape.group + shape.head),
      width_(g.plan.width) {
  query_rows_ = std::max(width_, (plan_.split == nullptr ? kQueryRows : kSplitQueryRows) / width_ * width_);
  panels_ = CeilDiv(unit_.rows, width_);
  ld_k_ = LdK(plan_);
  ld_v_ = LdV(plan_);
  tile_ = plan_.key_block * width_;
  query_panel_ = plan_.PanelOf(unit_.rows);
  q_stride_ = plan_.OverQueries(plan_.Columns(), unit_.rows);
  dy_stride_ = plan_.OverQueries(plan_.shape.dv, unit_.rows);
  qt_stride_ = plan_.DotQueries(plan_.Columns());
  dyt_stride_ = plan_.DotQueries(plan_.shape.dv);
  const int64_t heads = unit_.heads;
  const int64_t q_panels = query_rows_ / width_;
  for (C** x : {&max_, &inverse_, &delta_}) *x = frame.Alloc<C>(heads * panels_ * width_);
  dq_ = frame.Alloc<C>(heads * panels_ * width_ * ld_k_);
  q_ = frame.Alloc<C>(heads * q_stride_);
  dy_ = frame.Alloc<C>(heads * dy_stride_);
  qt_ = frame.Alloc<C>(heads * panels_ * qt_stride_);
  dyt_ = frame.Alloc<C>(heads * panels_ * dyt_stride_);
  finite_ = frame.Alloc<bool>(heads * CeilDiv(unit_.rows, query_rows_) * 2);
  k_ = frame.Alloc<C>(plan_.OverKeys(plan_.Columns()));
  dot_k_ = plan_.dots == nullptr ? k_ : frame.Alloc<C>(plan_.DotKeys(plan_.Columns()));
  dot_v_ = frame.Alloc<C>(plan_.DotKeys(plan_.shape.dv));
  for (C** x : {&p_, &ds_}) *x = frame.Alloc<C>(q_panels * tile_);
  for (C** x : {&p_terms_, &ds_terms_}) *x = frame.Alloc<C>(q_panels * plan_.TermElements());
  terms_ = frame.Alloc<C>(plan_.TermElements());
  keep_ = plan_.drops() ? frame.Alloc<C>(tile_) : nullptr;
  dk_ = frame.Alloc<C>(plan_.key_block * ld_k_);
  dv_ = frame.Alloc<C>(plan_.key_block * ld_v_);
  dpse_ = g.shares_pse() ? frame.Alloc<C>(heads * plan_.key_block) : nullptr;
  work_ = frame.AllocBytes(static_cast<size_t>(plan_.ScoreWorkBytes()) + static_cast<size_t>(tile_) * sizeof(C));
  std::fill(dq_, dq_ + heads * panels_ * width_ * ld_k_, C(0));
  for (int64_t i = 0; i < heads; ++i) {
    PackQueries(i);
    Statistics(i);
  }
}

template <typename C>
AttentionPlan::Rows BackwardUnit<C>::QueriesOf(int64_t head) const {
  return {plan_.in.q, plan_.in.q_rope, s_.batch, head, s_.q_begin};
}
template <typename C>
AttentionPlan::Rows BackwardUnit<C>::GradientsOf(int64_t head) const {
  return {g_.dy, kNone, s_.batch, head, s_.q_begin};
}
template <typename C>
AttentionPlan::Rows BackwardUnit<C>::KeysOf() const {
  return {plan_.in.k, plan_.in.k_rope, s_.batch, kv_head_, s_.k_begin};
}

template <typename C>
void BackwardUnit<C>::PackQueries(int64_t i) {
  const int64_t head = HeadAt(i);
  C* q = q_ + i * q_stride_;
  C* dy = dy_ + i * dy_stride_;
  const AttentionPlan::Rows q_rows = QueriesOf(head);
  const AttentionPlan::Rows dy_rows = GradientsOf(head);
  plan_.PackOverQueries(q_rows, unit_.row, unit_.rows, q);
  plan_.PackOverQueries(dy_rows, unit_.row, unit_.rows, dy);
  for (int64_t r = 0; r < unit_.rows; r += width_) {
    const int64_t rows = std::min(width_, unit_.rows - r);
    const int64_t at = PanelAt(i, r);
    plan_.PackDotQueries(q_rows, unit_.row + r, rows, q, query_panel_, r, qt_ + at * qt_stride_);
    plan_.PackDotQueries(dy_rows, unit_.row + r, rows, dy, query_panel_, r, dyt_ + at * dyt_stride_);
  }
  bool* finite = finite_ + i * CeilDiv(unit_.rows, query_rows_) * 2;
  for (int64_t r = 0; r < unit_.rows; r += query_rows_, finite += 2) {
    const int64_t rows = std::min(query_rows_, unit_.rows - r);
    finite[0] = plan_.FiniteOverQueries(q, plan_.Columns(), unit_.rows, r, rows);
    finite[1] = plan_.FiniteOverQueries(dy, plan_.shape.dv, unit_.rows, r, rows);
  }
}

// Lane by lane; lanes without a query repeat the last.
template <typename C>
void BackwardUnit<C>::Statistics(int64_t i) {
  const int64_t head = HeadAt(i);
  FillDelta(g_, s_.batch, head, s_.q_begin + unit_.row, unit_.rows);
  for (int64_t r = 0; r < panels_ * width_; ++r) {
    const int64_t row = s_.q_begin + unit_.row + std::min(r, unit_.rows - 1);
    const int64_t at = PanelAt(i, 0) * width_ + r;
    const C sum = *reinterpret_cast<const C*>(Element(g_.sum, s_.batch, head, row));
    max_[at] = *reinterpret_cast<const C*>(Element(g_.max, s_.batch, head, row));
    inverse_[at] = sum == 0 ? C(0) : C(1) / sum;
    delta_[at] = *reinterpret_cast<const C*>(Element(g_.delta, s_.batch, head, row));
  }
}

template <typename C>
bool BackwardUnit<C>::Keys(int64_t block) {
  const int64_t key = block * plan_.key_block;
  const int64_t n = std::min(plan_.key_block, s_.k_len - key);
  packed_ = false;
  for (int64_t i = 0; i < unit_.heads; ++i) {
    for (int64_t r = 0; r < unit_.rows; r += query_rows_) {
      Queries({i, r, std::min(query_rows_, unit_.rows - r)}, key, n);
    }
  }
  return packed_;
}

template <typename C>
void BackwardUnit<C>::PackKeys(int64_t key, int64_t n) {
  const AttentionPlan::Rows k = KeysOf();
  finite_keys_ = plan_.PackOverKeys(k, key, n, k_);
  if (plan_.dots != nullptr) plan_.PackDotKeys(k, key, n, dot_k_);
  plan_.PackDotKeys({plan_.in.v, kNone, s_.batch, kv_head_, s_.k_begin}, key, n, dot_v_);
  std::fill(dk_, dk_ + plan_.key_block * ld_k_, C(0));
  std::fill(dv_, dv_ + plan_.key_block * ld_v_, C(0));
  if (dpse_ != nullptr) std::fill(dpse_, dpse_ + unit_.heads * plan_.key_block, C(0));
  packed_ = true;
}

// One block of queries with one block of keys.
template <typename C>
bool BackwardUnit<C>::Queries(const Block& b, int64_t key, int64_t n) {
  const int64_t head = HeadAt(b.i);
  PanelKeys keys[kQueryRows];
  PanelKeys all{n, 0};
  bool masked = false;
  const int64_t panels = CeilDiv(b.rows, width_);
  const auto rows_of = [&](int64_t t) { return std::min(width_, b.rows - t * width_); };
  for (int64_t t = 0; t < panels; ++t) {
    keys[t] = plan_.Keys(s_, head, unit_.row + b.row + t * width_, rows_of(t), key, n);
    masked = masked || keys[t].by_mask || keys[t].by_position || !keys[t].any();
    if (!keys[t].any()) continue;
    all.begin = std::min(all.begin, keys[t].begin);
    all.end = std::max(all.end, keys[t].end);
  }
  if (!all.any()) return false;
  if (!packed_) PackKeys(key, n);
  const int64_t edge = plan_.products.tile_rows;
  for (int64_t t = 0; t < panels; ++t) {
    // A tile of keys reaches beyond those that all its panels of queries see by less than its rows. Where a mask hides
    // all keys of a panel, it may lie between others.
    PanelKeys& k = keys[t];
    if (k.any()) {
      Panel({b.i, b.row + t * width_, rows_of(t)}, t, key, k);
    } else {
      k = {all.begin, all.begin};
    }
    const int64_t from = k.any() ? std::max(all.begin, k.begin - edge) : all.begin;
    const int64_t to = k.any() || plan_.in.mask.data == nullptr ? std::min(all.end, k.end + edge) : all.end;
    for (C* x : {p_ + t * tile_, ds_ + t * tile_}) {
      std::fill(x + from * width_, x + k.begin * width_, C(0));
      std::fill(x + k.end * width_, x + to * width_, C(0));
    }
  }
  const bool* finite = finite_ + (b.i * CeilDiv(unit_.rows, query_rows_) + b.row / query_rows_) * 2;
  const auto add = [&](const C* panel, const C* terms, const C* packed, const AttentionPlan::Rows& from, bool clean,
                       C* sums) {
    plan_.AddOverQueries({s_, unit_.row + b.row, b.rows, key, all.begin, all.end, keys, panel, terms, packed,
                          unit_.rows, b.row, clean, from, sums});
  };
  const bool spared = plan_.split == nullptr && !masked;  // no product of a hidden key
  add(p_, p_terms_, dy_ + b.i * dy_stride_, GradientsOf(head), spared || finite[1], dv_);
  add(ds_, ds_terms_, q_ + b.i * q_stride_, QueriesOf(head), spared || finite[0], dk_);
  return true;
}

// p and ds of one panel, and its part of dq.
template <typename C>
void BackwardUnit<C>::Panel(const Block& b, int64_t t, int64_t key, const PanelKeys& keys) {
  C* p = p_ + t * tile_;
  C* ds = ds_ + t * tile_;
  const int64_t panel = PanelAt(b.i, b.row);
  const int64_t row = unit_.row + b.row;
  const int64_t from = keys.begin * width_;
  const int64_t n = keys.end - keys.begin;
  const bool scaled = plan_.Scores(s_, HeadAt(b.i), row, b.rows, key, keys, dot_k_, qt_ + panel * qt_stride_, p, work_);
  plan_.Dots(keys, b.rows, plan_.shape.dv, dot_v_, dyt_ + panel * dyt_stride_, ds);
  if (keep_ != nullptr) plan_.Keep(s_, HeadAt(b.i), row, b.rows, key + keys.begin, n, keep_);
  PanelGradient g{};
  g.scores = p + from;
  g.dp = ds + from;
  g.n = n;
  g.scale = scaled ? 1.0 : plan_.in.scale;
  g.max = max_ + panel * width_;
  g.inverse_sum = inverse_ + panel * width_;
  g.delta = delta_ + panel * width_;
  g.keep = keep_;
  g.masked = keys.by_mask || keys.by_position;
  plan_.panel.gradient(g);
  if (g_.dpse != nullptr) AddPse(b, key, keys, ds);
  plan_.Split(keys, p, p_terms_ + t * plan_.TermElements(), nullptr);
  plan_.Split(keys, ds, ds_terms_ + t * plan_.TermElements(), terms_);
  plan_.AddOverKeys({s_, row, b.rows, key, keys, ds, terms_, k_, finite_keys_, KeysOf(), dq_ + panel * width_ * ld_k_});
}

// dpse += scale * ds. Rows that do not serve all queries belong to this unit alone.
template <typename C>
void BackwardUnit<C>::AddPse(const Block& b, int64_t key, const PanelKeys& keys, const C* ds) {
  const C scale = static_cast<C>(plan_.in.scale);
  const int64_t first = plan_.in.pse_first;
  for (int64_t r = 0; r < b.rows; ++r) {
    const int64_t i = unit_.row + b.row + r;
    C* row = dpse(b.i);
    int64_t end = keys.end;
    if (row == nullptr) {
      const bool early = i < first;
      const int64_t at = early ? plan_.in.pse.size[2] + i / kBackwardUnitRows : i - first;
      const int64_t column = key + (early ? first - i : 0);
      row = reinterpret_cast<C*>(Element(*g_.dpse, s_.index, HeadAt(b.i), at)) + column;
      end = std::min(end, g_.dpse->size[3] - column);  // keys beyond are hidden
    }
    for (int64_t k = keys.begin; k < end; ++k) row[k] += scale * ds[k * width_ + r];
  }
}

template <typename C>
void BackwardUnit<C>::StoreQueries() {
  plan_.panel.scale(dq_, unit_.heads * panels_ * width_ * ld_k_, plan_.in.scale);
  const int64_t columns = plan_.Columns();
  for (int64_t i = 0; i < unit_.heads; ++i) {
    for (int64_t r = 0; r < unit_.rows; r += width_) {
      const C* dq = dq_ + PanelAt(i, r) * width_ * ld_k_;
      const int64_t rows = std::min(width_, unit_.rows - r);
      const int64_t row = s_.q_begin + unit_.row + r;
      plan_.StoreSums(dq, columns, 0, rows, g_.grads.dq, s_.batch, HeadAt(i), row);
      if (plan_.shape.rope == 0) continue;
      plan_.StoreSums(dq, columns, plan_.shape.d, rows, g_.grads.dq_rope, s_.batch, HeadAt(i), row);
    }
  }
}

template class BackwardUnit<float>;
template class BackwardUnit<double>;

}  // namespace jumar
