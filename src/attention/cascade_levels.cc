#include "attention/cascade_levels.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr int32_t kMaxDepth = 16;
/// What may have been taken last around a candidate, counted from outside: nothing, or one of the candidates around it;
/// one more stands for the candidate itself, for those inside it.
constexpr int32_t kPlaces = kMaxDepth + 1;

constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

[[noreturn]] void refuse_overflow() {
  core::fail(
      ErrorCode::kInvalidArgument,
      "the bytes that a cascade reads or saves do not fit in 64 bits: the costs of a token or row, or the batch, "
      "are too large");
}

int64_t product(int64_t a, int64_t b) {
  int64_t value = 0;
  if (__builtin_mul_overflow(a, b, &value)) refuse_overflow();
  return value;
}

int64_t sum(int64_t a, int64_t b) {
  int64_t value = 0;
  if (__builtin_add_overflow(a, b, &value)) refuse_overflow();
  return value;
}

}  // namespace

size_t CascadeLevels::cell(int32_t candidate, int32_t around, int32_t levels) const {
  return static_cast<size_t>((int64_t{candidate} * kPlaces + around) * (max_levels_ + 1) + levels);
}

void CascadeLevels::count_rows() {
  const auto num_requests = static_cast<size_t>(batch_->num_requests);
  rows_before_.resize(num_requests + 1);
  reads_before_.resize(num_requests + 1);
  rows_before_[0] = reads_before_[0] = 0;
  for (size_t r = 0; r < num_requests; ++r) {
    const int64_t rows = int64_t{batch_->cu_q[r + 1] - batch_->cu_q[r]} * costs_->group_size;
    rows_before_[r + 1] = rows_before_[r] + rows;
    reads_before_[r + 1] = reads_before_[r] + ceil_div(rows, costs_->tile_rows);
  }
}

/// Tokens from `first_page` on to the end of the prefix that its requests read, each on its own. Under a window what
/// is still visible to the last query: the least of what is read.
int64_t CascadeLevels::own_tokens(const SharedPrefix& prefix, int32_t first_page) const {
  const int64_t begin = int64_t{first_page} * costs_->page_size;
  const int64_t end = int64_t{prefix.pages} * costs_->page_size;
  const auto first = static_cast<size_t>(prefix.begin);
  const auto last = static_cast<size_t>(prefix.end);
  if (costs_->window_left < 0) return product(reads_before_[last] - reads_before_[first], end - begin);
  int64_t tokens = 0;
  for (size_t r = first; r < last; ++r) {
    const int64_t seen_from = std::max(begin, int64_t{batch_->kv_len[r]} - 1 - costs_->window_left);
    const int64_t reads = reads_before_[r + 1] - reads_before_[r];
    tokens = sum(tokens, product(reads, std::max<int64_t>(0, end - seen_from)));
  }
  return tokens;
}

/// The same tokens read by the group, in whole tiles. Under a window from the first that is visible to any query: the
/// most.
int64_t CascadeLevels::group_tokens(const SharedPrefix& prefix, int32_t first_page) const {
  const int64_t begin = int64_t{first_page} * costs_->page_size;
  const int64_t end = int64_t{prefix.pages} * costs_->page_size;
  int64_t seen_from = begin;
  if (costs_->window_left >= 0) {
    seen_from = end;
    for (auto r = static_cast<size_t>(prefix.begin); r < static_cast<size_t>(prefix.end); ++r) {
      const int32_t q_len = batch_->cu_q[r + 1] - batch_->cu_q[r];
      if (q_len > 0) seen_from = std::min(seen_from, int64_t{batch_->kv_len[r]} - q_len - costs_->window_left);
    }
    seen_from = std::max(begin, seen_from);
  }
  return product(group_reads(prefix), ceil_div(end - seen_from, costs_->tile_tokens) * costs_->tile_tokens);
}

int64_t CascadeLevels::group_reads(const SharedPrefix& prefix) const {
  const int64_t rows = rows_before_[static_cast<size_t>(prefix.end)] - rows_before_[static_cast<size_t>(prefix.begin)];
  return ceil_div(rows, costs_->tile_rows);
}

/// What the rows pay for one more partial result, and the outermost time for their own becoming one.
int64_t CascadeLevels::row_cost(const SharedPrefix& prefix, bool outermost) const {
  const int64_t rows = rows_before_[static_cast<size_t>(prefix.end)] - rows_before_[static_cast<size_t>(prefix.begin)];
  return product(rows, sum(costs_->q_row_bytes, product(outermost ? 4 : 2, costs_->partial_row_bytes)));
}

int64_t CascadeLevels::saving(const SharedPrefix& prefix, int32_t first_page, bool outermost) const {
  const int64_t tokens = own_tokens(prefix, first_page) - group_tokens(prefix, first_page);
  return sum(product(tokens, costs_->kv_token_bytes), -row_cost(prefix, outermost));
}

/// At least what the prefix saves under any other that is taken around it.
int64_t CascadeLevels::most_saving(const SharedPrefix& prefix) const {
  int64_t tokens = own_tokens(prefix, 0);
  if (costs_->window_left < 0) tokens -= product(group_reads(prefix), int64_t{prefix.pages} * costs_->page_size);
  return sum(product(tokens, costs_->kv_token_bytes), -row_cost(prefix, false));
}

void CascadeLevels::collect(std::span<const SharedPrefix> prefixes) {
  candidates_.clear();
  numbers_.assign(prefixes.size(), -1);
  // From outside inwards, so that what stands around a prefix is known.
  for (size_t i = prefixes.size(); i-- > 0;) {
    SharedPrefix prefix = prefixes[i];
    const int32_t around = prefix.parent < 0 ? -1 : numbers_[static_cast<size_t>(prefix.parent)];
    const int32_t depth = around < 0 ? 0 : candidates_[static_cast<size_t>(around)].depth + 1;
    numbers_[i] = around;
    if (depth >= kMaxDepth || most_saving(prefix) <= 0) continue;
    prefix.parent = around;
    numbers_[i] = static_cast<int32_t>(candidates_.size());
    candidates_.push_back({prefix, depth});
  }
}

/// Pages that the prefix taken at place `around` of a candidate covers.
int32_t CascadeLevels::page_taken_before(int32_t candidate, int32_t around) const {
  if (around == 0) return 0;
  const Candidate* at = &candidates_[static_cast<size_t>(candidate)];
  while (at->depth >= around) at = &candidates_[static_cast<size_t>(at->prefix.parent)];
  return at->prefix.pages;
}

void CascadeLevels::weigh() {
  const size_t cells = cell(static_cast<int32_t>(candidates_.size()), 0, 0);
  best_.assign(cells, Best{0, false});
  inside_.assign(cells, 0);
  // Candidates stand from outside inwards: backwards, all that is inside one comes before it.
  for (auto c = static_cast<int32_t>(candidates_.size()) - 1; c >= 0; --c) {
    const Candidate& candidate = candidates_[static_cast<size_t>(c)];
    for (int32_t around = 0; around <= candidate.depth; ++around) {
      const int64_t own = saving(candidate.prefix, page_taken_before(c, around), around == 0);
      for (int32_t levels = 0; levels <= max_levels_; ++levels) {
        Best best{inside_[cell(c, around, levels)], false};
        if (levels > 0) {
          const int64_t taken = sum(own, inside_[cell(c, candidate.depth + 1, levels - 1)]);
          if (taken > best.saved) best = {taken, true};
        }
        best_[cell(c, around, levels)] = best;
        const int32_t parent = candidate.prefix.parent;
        if (parent < 0) continue;
        int64_t& inside = inside_[cell(parent, around, levels)];
        inside = sum(inside, best.saved);
      }
    }
  }
}

void CascadeLevels::take() {
  decisions_.resize(2 * candidates_.size());  // of each candidate: what is around those inside it, levels left
  saved_ = 0;
  for (size_t c = 0; c < candidates_.size(); ++c) {
    const Candidate& candidate = candidates_[c];
    const bool outermost = candidate.prefix.parent < 0;
    const auto parent = outermost ? size_t{0} : static_cast<size_t>(candidate.prefix.parent);
    int32_t around = outermost ? 0 : decisions_[2 * parent];
    int32_t levels = outermost ? max_levels_ : decisions_[2 * parent + 1];
    const Best& best = best_[cell(static_cast<int32_t>(c), around, levels)];
    if (outermost) saved_ = sum(saved_, best.saved);
    if (best.taken) {
      groups_.push_back({.level = max_levels_ - levels,
                         .begin = candidate.prefix.begin,
                         .end = candidate.prefix.end,
                         .first_page = page_taken_before(static_cast<int32_t>(c), around),
                         .end_page = candidate.prefix.pages});
      around = candidate.depth + 1;
      --levels;
    }
    decisions_[2 * c] = around;
    decisions_[2 * c + 1] = levels;
  }
  std::sort(groups_.begin(), groups_.end(), [](const CascadeGroup& a, const CascadeGroup& b) {
    return a.level != b.level ? a.level < b.level : a.begin < b.begin;
  });
}

std::span<const CascadeGroup> CascadeLevels::choose(const CascadeCosts& costs, int32_t max_levels,
                                                    const CascadeBatch& batch, std::span<const SharedPrefix> prefixes) {
  costs_ = &costs;
  batch_ = &batch;
  max_levels_ = max_levels;
  saved_ = 0;
  groups_.clear();
  if (prefixes.empty() || max_levels == 0) return groups_;
  count_rows();
  collect(prefixes);
  weigh();
  take();
  return groups_;
}

}  // namespace folio::inline v0::attention
