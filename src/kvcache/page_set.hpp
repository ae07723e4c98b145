#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace folio::inline v0::kvcache {

/// A set of page ids in [1, num_pages]: one bit each. The lowest member is found by a scan that starts at or before it,
/// so that taking members in ascending order reads every word once.
class PageSet {
 public:
  explicit PageSet(int32_t num_pages) : words_(static_cast<std::size_t>(num_pages) / 64 + 1), low_(words_.size()) {}

  int32_t count() const noexcept { return count_; }
  bool contains(int32_t page) const noexcept { return (words_[word_of(page)] >> (page % 64) & 1) != 0; }
  void add(int32_t page) noexcept;         ///< not a member before
  int32_t take_lowest() noexcept;          ///< count() > 0
  void take_all(PageSet& other) noexcept;  ///< adds other's members, which leave it; the sets are disjoint
  void fill(int32_t num_pages) noexcept;   ///< members are 1 to num_pages
  void clear() noexcept;

 private:
  static std::size_t word_of(int32_t page) noexcept { return static_cast<std::size_t>(page) / 64; }

  std::vector<uint64_t> words_;
  std::size_t low_;       ///< no word before this one has members
  std::size_t high_ = 0;  ///< no word from this one on has members
  int32_t count_ = 0;
};

}  // namespace folio::inline v0::kvcache
