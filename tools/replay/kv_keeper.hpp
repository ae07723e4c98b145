#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replay/page_manager.hpp"

namespace folio::replay {

/// The pool of the layers with a sliding window, where they have one of their own.
struct WindowUse {
  int32_t pages = 0;  ///< 0: there is none
  int32_t held = 0;   ///< pages that requests hold
  int64_t left = 0;   ///< tokens that gave their place up because no window reached them any more, before their request
                      ///< ended
  int64_t evicted = 0;  ///< tokens that lost their place there to others, cached for requests to come
};

/// Where the KV of requests lies: what a scheduler asks of whoever hands out the memory. Tokens are links of their
/// request's chain. A page holds as many tokens as the scheduler's page_size. Requests are numbers of the workload.
class KvKeeper {
 public:
  virtual ~KvKeeper() = default;
  KvKeeper(const KvKeeper&) = delete;
  KvKeeper& operator=(const KvKeeper&) = delete;

  virtual int32_t num_pages() const = 0;
  virtual int32_t held() const = 0;       ///< pages that requests hold, and whatever else does not come back
  virtual int32_t cached() const = 0;     ///< pages kept for requests to come
  virtual int64_t evictions() const = 0;  ///< of pages

  /// The request begins: takes what is cached of `chain`, in whole pages. Returns its tokens.
  virtual int32_t begin(int32_t request, std::span<const uint64_t> chain) = 0;

  /// Sees to it that the request has memory for so many tokens. All or nothing: false if there is too little.
  virtual bool reserve(int32_t request, int32_t tokens) = 0;

  /// The tokens of `chain` will have been computed when this step is: its whole pages may be found by others, in this
  /// very step too.
  virtual void publish(int32_t request, std::span<const uint64_t> chain) = 0;

  /// Of the memory behind the request's first `computed` tokens, that of the tokens computed + nodes[0], computed +
  /// nodes[1], ... (ascending) becomes that of the next tokens; the rest is given back. Throws kInternal where drafts
  /// are not served.
  virtual void accept(int32_t request, int32_t computed, std::span<const int32_t> nodes);

  /// The tokens of `chain` are computed and the request goes on, with queries from there.
  virtual void computed(int32_t request, std::span<const uint64_t> chain);

  /// The request ends or is preempted, `chain` of it having been computed.
  virtual void release(int32_t request, std::span<const uint64_t> chain) = 0;

  /// The pages of a request, in order.
  virtual std::span<const int32_t> pages_of(int32_t request) const = 0;

  /// Forgets what is cached.
  virtual void drop_cache() = 0;

  /// Rows of a request table that are held; 0 where there is none.
  virtual int32_t held_rows() const { return 0; }

  virtual WindowUse window_use() const { return {}; }

 protected:
  KvKeeper() = default;
};

/// A page manager's pages.
class PageKeeper final : public KvKeeper {
 public:
  /// Borrows the manager.
  PageKeeper(PageManager& pages, size_t num_requests, int32_t page_size)
      : pages_(pages), page_size_(page_size), states_(num_requests) {}

  int32_t num_pages() const override { return pages_.num_pages(); }
  int32_t held() const override { return pages_.held(); }
  int32_t cached() const override { return pages_.cached(); }
  int64_t evictions() const override { return pages_.evictions(); }
  int32_t begin(int32_t request, std::span<const uint64_t> chain) override;
  bool reserve(int32_t request, int32_t tokens) override;
  void publish(int32_t request, std::span<const uint64_t> chain) override;
  void release(int32_t request, std::span<const uint64_t> chain) override;
  std::span<const int32_t> pages_of(int32_t request) const override {
    return states_[static_cast<size_t>(request)].pages;
  }
  void drop_cache() override { pages_.drop_cache(); }

 private:
  struct State {
    std::vector<int32_t> pages;
    int32_t published = 0;  ///< leading pages that were published or taken from the cache
  };

  PageManager& pages_;
  int32_t page_size_;
  std::vector<State> states_;
  std::vector<uint64_t> keys_;
};

}  // namespace folio::replay
