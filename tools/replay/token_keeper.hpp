#pragma once

#include <cstdint>
#include <vector>

#include "folio/pools.hpp"
#include "replay/kv_keeper.hpp"
#include "replay/token_slots.hpp"
#include "replay/workload.hpp"

namespace folio::replay {

struct TokenKeeperOptions {
  int32_t num_pages = 0;     ///< without the dummy page
  int32_t page_size = 1;     ///< 1 or more
  int32_t max_running = 0;   ///< requests at once
  int32_t draft_tokens = 0;  ///< that a request has at most behind its own
  bool reuse = true;         ///< false: nothing is kept for later requests
  /// Layers with this window have a pool of their own, of num_window_pages; -1: one pool for all layers.
  int32_t window_left = -1;
  int32_t num_window_pages = 0;  ///< without the dummy page
  int32_t token_budget = 0;      ///< with a window: most tokens that a step computes
};

/// Slots as an engine with a token pool keeps them: an allocator, a row of slots for every running request, and a radix
/// tree over what was served. Pages are those of the KvPool: page 0 is the dummy page.
///
/// With a window, slots have copies in the windowed layers' pool (WindowTokenAllocator) for as long as a query's window
/// reaches them: a request gives back those of its own tokens, the tree loses those of others to whoever needs room
/// (tombstones). What requests compute is shown to others when the step is done, since an eviction within the step must
/// not take what its queries still read.
///
/// The tree is told tokens of 31 bits of each link: two sequences could share one token too many with a probability of
/// 2^-31 where they part.
class TokenKeeper final : public KvKeeper {
 public:
  /// Borrows the workload. Throws kInvalidArgument for numbers that pools do not take.
  TokenKeeper(const Workload& workload, const TokenKeeperOptions& options);

  int32_t num_pages() const override { return options_.num_pages; }
  int32_t held() const override;
  int32_t cached() const override;
  int64_t evictions() const override { return evicted_slots_ / options_.page_size; }
  int32_t begin(int32_t request, std::span<const uint64_t> chain) override;
  bool reserve(int32_t request, int32_t tokens) override;
  void publish(int32_t request, std::span<const uint64_t> chain) override;
  void accept(int32_t request, int32_t computed, std::span<const int32_t> nodes) override;
  void computed(int32_t request, std::span<const uint64_t> chain) override;
  void release(int32_t request, std::span<const uint64_t> chain) override;
  std::span<const int32_t> pages_of(int32_t request) const override { return state(request).pages; }
  void drop_cache() override;
  int32_t held_rows() const override { return rows_.size() - rows_.available(); }
  WindowUse window_use() const override;

  const ReqToTokenPool& rows() const { return rows_; }
  int32_t row_of(int32_t request) const { return state(request).row; }

  /// Tokens before this one lie in slots of the tree that another request of this step, or of one before, writes: the
  /// request computes them too, and does not store them.
  int32_t stored_from(int32_t request) const { return state(request).stored_from; }

  bool windowed() const { return options_.window_left >= 0; }
  /// The request table in slots of the windowed layers' pool; empty with one pool.
  PageTableView window_rows() const;
  /// Two pools: where copies of slots lie.
  void to_window(std::span<const int32_t> slots, std::span<int32_t> window) const { slots_.to_window(slots, window); }

 private:
  struct State {
    int32_t row = 0;
    int32_t published = 0;  ///< tokens that the tree was told of
    int32_t stored_from = 0;
    int32_t window_begin = 0;  ///< tokens of its own before this one have no window copies
    PrefixLock lock;
    std::vector<int32_t> slots;
    std::vector<int32_t> pages;
  };
  State& state(int32_t request) { return states_[static_cast<size_t>(request)]; }
  const State& state(int32_t request) const { return states_[static_cast<size_t>(request)]; }
  bool make_room(int64_t slots);
  void show(State& state, int32_t request, std::span<const uint64_t> chain);
  std::span<const int32_t> tokens(std::span<const uint64_t> chain);
  void rewrite(State& state, int32_t first);

  const Workload& workload_;
  TokenKeeperOptions options_;
  TokenSlots slots_;
  ReqToTokenPool rows_;
  std::vector<int32_t> window_rows_;  ///< as rows_, in window copies
  PrefixCache cache_;
  std::vector<State> states_;
  std::vector<int32_t> tokens_, before_;
  SlotChanges changes_;
  int64_t evicted_slots_ = 0;
  int64_t left_copies_ = 0, evicted_copies_ = 0;
};

}  // namespace folio::replay
