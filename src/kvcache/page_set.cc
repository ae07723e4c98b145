#include "kvcache/page_set.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace folio::inline v0::kvcache {

void PageSet::add(int32_t page) noexcept {
  const size_t word = word_of(page);
  words_[word] |= uint64_t{1} << (page % 64);
  low_ = std::min(low_, word);
  high_ = std::max(high_, word + 1);
  ++count_;
}

int32_t PageSet::take_lowest() noexcept {
  while (words_[low_] == 0) ++low_;
  const int32_t page = static_cast<int32_t>(low_ * 64) + std::countr_zero(words_[low_]);
  words_[low_] &= words_[low_] - 1;
  --count_;
  return page;
}

void PageSet::take_all(PageSet& other) noexcept {
  for (size_t word = other.low_; word < other.high_; ++word) words_[word] |= std::exchange(other.words_[word], 0);
  low_ = std::min(low_, other.low_);
  high_ = std::max(high_, other.high_);
  count_ += std::exchange(other.count_, 0);
  other.low_ = other.words_.size();
  other.high_ = 0;
}

void PageSet::fill(int32_t num_pages) noexcept {
  clear();
  for (int32_t page = 1; page <= num_pages; ++page) add(page);
}

void PageSet::clear() noexcept {
  std::fill(words_.begin(), words_.end(), 0);
  count_ = 0;
  low_ = words_.size();
  high_ = 0;
}

}  // namespace folio::inline v0::kvcache
