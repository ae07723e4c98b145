#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "replay/drafts.hpp"
#include "replay/kv_keeper.hpp"
#include "replay/workload.hpp"

namespace folio::replay {

struct SchedulerOptions {
  int32_t token_budget = 512;  ///< most tokens a step computes
  int32_t max_running = 64;    ///< most requests a step serves
  int32_t page_size = 16;
  DraftOptions drafts{};  ///< of requests that generate; the keeper must serve them
};

/// Tokens [first, first + count) of a request, to be computed in this step. The request's KV then has first + count
/// tokens. With drafts, `first` is the root's position, and count is how many tokens of the tree are true.
struct StepItem {
  int32_t request = 0;
  int32_t first = 0;
  int32_t count = 0;
  bool drafted = false;
};

struct SchedulerCounters {
  int64_t finished = 0;
  int64_t computed_tokens = 0;     ///< recomputation after preemption included
  int64_t hit_tokens = 0;          ///< tokens found in the cache when a request was first admitted
  int64_t resumed_hit_tokens = 0;  ///< ... when it was resumed after a preemption
  int64_t preemptions = 0;
  int64_t first_admissions = 0;
  int64_t verified_trees = 0;   ///< drafts of one request in one step
  int64_t accepted_drafts = 0;  ///< their tokens that were kept, the roots not counted
};

/// Continuous batching with chunked prefill: each step serves the running requests in order of admission, then admits
/// waiting ones, within a token budget. Where pages run out the request admitted last is preempted: its pages are
/// released and it starts again later, from the tokens it has by then (recomputation), ahead of those still waiting.
///
/// Deterministic: the steps depend on the workload, the options, the pool and the times given, and on nothing else.
/// A request's full pages are published when the step that fills them is made: within a step every write precedes every
/// read, and the pages of a request that is in the step are not preempted away in it.
class Scheduler {
 public:
  /// Borrows both. Throws kInvalidArgument if a request cannot fit the pool alone, naming its line.
  Scheduler(const Workload& workload, KvKeeper& keeper, const SchedulerOptions& options);
  /// The same with a page manager's pages.
  Scheduler(const Workload& workload, PageManager& pages, const SchedulerOptions& options);

  bool done() const;
  int64_t waiting() const { return static_cast<int64_t>(queue_.size()); }
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  /// When the next request arrives that has not yet; nullopt when all have.
  std::optional<double> next_arrival_ms() const;

  /// Makes the next step from what has arrived by `now_ms`. Empty if nothing can be computed now. The items are valid
  /// until finish_step, which must be called before the next step is made.
  std::span<const StepItem> next_step(double now_ms);

  /// The step's tokens are computed: requests that are complete leave and release their pages.
  void finish_step();

  /// Gives back everything that requests still hold (an interrupted run).
  void abandon();

  /// The pages of a request in the step, in order; enough for first + count tokens.
  std::span<const int32_t> pages_of(int32_t request) const { return keeper_.pages_of(request); }
  /// The token chain of a request that is running.
  std::span<const uint64_t> chain_of(int32_t request) const { return state(request).chain; }
  const SchedulerOptions& options() const { return options_; }
  const SchedulerCounters& counters() const { return counters_; }

 private:
  void check_options();
  struct State {
    int32_t known = 0;     ///< tokens that exist by now: the prompt and what has been generated
    int32_t computed = 0;  ///< of which have their KV in the pages
    bool admitted_before = false;
    std::vector<uint64_t> chain;
  };
  State& state(int32_t request) { return states_[static_cast<size_t>(request)]; }
  const State& state(int32_t request) const { return states_[static_cast<size_t>(request)]; }
  bool reserve_preempting(size_t position, int32_t tokens);
  void preempt_last();
  void schedule_running(int32_t& budget, bool& preempted);
  void admit_waiting(int32_t& budget);
  bool drafts(int32_t request, int32_t budget) const;
  void add_drafts(int32_t request);
  void add_item(int32_t request, int32_t count);
  void release(int32_t request);
  std::span<const uint64_t> chain_of(int32_t request, int32_t tokens) const {
    return chain_of(request).first(static_cast<size_t>(tokens));
  }

  const Workload& workload_;
  std::unique_ptr<KvKeeper> owned_;
  KvKeeper& keeper_;
  SchedulerOptions options_;
  std::vector<State> states_;
  std::vector<int32_t> running_;  ///< in order of admission
  std::deque<int32_t> queue_;     ///< arrived and not running
  std::vector<StepItem> items_;
  std::vector<int32_t> nodes_;
  size_t arrived_ = 0;
  SchedulerCounters counters_;
};

}  // namespace folio::replay
