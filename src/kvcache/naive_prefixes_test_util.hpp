#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "folio/kvcache/slot_changes.hpp"

namespace folio::testing {

/// What PrefixCache keeps, in the plainest form: one node a page, every rule by its definition. Broken expectations
/// throw std::logic_error.
class NaivePrefixes {
 public:
  struct Page {
    std::vector<int32_t> slots;
    std::map<std::vector<int32_t>, std::unique_ptr<Page>> children;
    Page* parent = nullptr;
    std::vector<int32_t> tokens;
    int32_t locks = 0;
    bool copies = true;  ///< its slots have window copies
  };

  /// `window` 0: none.
  NaivePrefixes(int32_t page_size, int32_t window) : page_size_(page_size), window_(window) {}

  /// Tokens of the longest prefix that may be used, and its slots.
  int64_t find(const std::string& extra_key, std::span<const int32_t> tokens, std::vector<int32_t>* slots = nullptr);

  /// Counts a lock on the first `length` tokens, or takes it back (by = -1). They are there.
  void lock(const std::string& extra_key, std::span<const int32_t> tokens, int64_t length, int32_t by);

  /// What a request hands over that has the first `from` tokens from here. Changes `slots` where others were first, if
  /// `write_back`. Appends what is to be done to `changes`; returns the tokens that are there afterwards.
  int64_t hand_over(const std::string& extra_key, std::span<const int32_t> tokens, std::span<int32_t> slots,
                    int64_t from, int64_t window_begin, bool write_back, SlotChanges& changes);

  /// Takes out what an eviction gave back, after checking that it may go.
  void evicted(const SlotChanges& changes);

  /// Throws unless the first `length` tokens are there, with the window copies that the request's next token reads.
  void check_locked_window(const std::string& extra_key, std::span<const int32_t> tokens, int64_t length);

  int64_t size() const { return static_cast<int64_t>(by_slot_.size()); }
  int64_t locked() const;
  int64_t copies() const;

 private:
  std::vector<Page*> walk(const std::string& extra_key, std::span<const int32_t> tokens);
  bool usable(const std::vector<Page*>& path, size_t pages) const;

  int32_t page_size_;
  int32_t window_;
  std::map<std::string, Page> roots_;
  std::unordered_map<int32_t, Page*> by_slot_;
};

}  // namespace folio::testing
