#include "replay/scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

int32_t pages_for_tokens(int32_t tokens, int32_t page_size) {
  return (tokens + page_size - 1) / page_size;
}

}  // namespace

Scheduler::Scheduler(const Workload& workload, PageManager& pages, const SchedulerOptions& options)
    : workload_(workload),
      owned_(std::make_unique<PageKeeper>(pages, workload.requests.size(), options.page_size)),
      keeper_(*owned_),
      options_(options),
      states_(workload.requests.size()) {
  check_options();
}

Scheduler::Scheduler(const Workload& workload, KvKeeper& keeper, const SchedulerOptions& options)
    : workload_(workload), keeper_(keeper), options_(options), states_(workload.requests.size()) {
  check_options();
}

void Scheduler::check_options() {
  const SchedulerOptions& options = options_;
  if (options.token_budget < 1 || options.max_running < 1 || options.page_size < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("token budget {}, max running {}, page size {}: each must be 1 or more",
                            options.token_budget, options.max_running, options.page_size));
  }
  for (const Request& request : workload_.requests) {
    const int32_t needed = pages_for_tokens(request.computed_length() + options.drafts.tokens, options.page_size);
    if (needed > keeper_.num_pages()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the request of line {} needs {} pages for its {} tokens; the pool has {}: enlarge it "
                              "(--pool-pages, --pool-mb) or shorten the requests (--scale)",
                              request.line, needed, request.computed_length(), keeper_.num_pages()));
    }
  }
  running_.reserve(static_cast<size_t>(options.max_running));
  items_.reserve(static_cast<size_t>(options.max_running));
}

bool Scheduler::done() const {
  return counters_.finished == static_cast<int64_t>(workload_.requests.size());
}

std::optional<double> Scheduler::next_arrival_ms() const {
  if (arrived_ == workload_.requests.size()) return std::nullopt;
  return workload_.requests[arrived_].arrival_ms;
}

std::span<const StepItem> Scheduler::next_step(double now_ms) {
  while (arrived_ < workload_.requests.size() && workload_.requests[arrived_].arrival_ms <= now_ms) {
    queue_.push_back(static_cast<int32_t>(arrived_++));
  }
  items_.clear();
  int32_t budget = options_.token_budget;
  bool preempted = false;
  schedule_running(budget, preempted);
  if (!preempted) admit_waiting(budget);  // what was just taken from a request must not go to a later one
  return items_;
}

void Scheduler::schedule_running(int32_t& budget, bool& preempted) {
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    const int32_t request = running_[i];
    const bool drafted = drafts(request, budget);
    const int32_t count =
        drafted ? options_.drafts.tokens : std::min(budget, state(request).known - state(request).computed);
    const size_t before = running_.size();
    const bool reserved = reserve_preempting(i, state(request).computed + count);
    preempted = preempted || running_.size() != before;
    if (!reserved) break;  // it was the last and has preempted itself
    if (drafted) {
      add_drafts(request);
    } else {
      add_item(request, count);
    }
    budget -= count;
  }
}

/// A request that generates has a tree where the step has room for it; else it decodes one token.
bool Scheduler::drafts(int32_t request, int32_t budget) const {
  const State& running = state(request);
  const int32_t input = workload_.requests[static_cast<size_t>(request)].input_length;
  return options_.drafts.tokens > 0 && options_.drafts.tokens <= budget && running.computed >= input &&
         running.known - running.computed == 1;
}

void Scheduler::add_drafts(int32_t request) {
  State& running = state(request);
  const int32_t target = workload_.requests[static_cast<size_t>(request)].computed_length();
  true_path(options_.drafts, request, running.computed, target - running.computed, nodes_);
  const auto count = static_cast<int32_t>(nodes_.size());
  running.known += count - 1;
  ++counters_.verified_trees;
  counters_.accepted_drafts += count - 1;
  add_item(request, count);
  items_.back().drafted = true;
}

bool Scheduler::reserve_preempting(size_t position, int32_t tokens) {
  const int32_t request = running_[position];
  while (!keeper_.reserve(request, tokens)) {
    const bool itself = position + 1 == running_.size();
    preempt_last();
    if (itself) return false;
  }
  return true;
}

void Scheduler::release(int32_t request) {
  keeper_.release(request, chain_of(request, state(request).computed));
}

void Scheduler::preempt_last() {
  const int32_t request = running_.back();
  running_.pop_back();
  State& victim = state(request);
  release(request);
  victim.computed = 0;
  queue_.push_front(request);
  ++counters_.preemptions;
}

void Scheduler::admit_waiting(int32_t& budget) {
  while (!queue_.empty() && budget > 0 && running() < options_.max_running) {
    const int32_t index = queue_.front();
    State& request = state(index);
    if (request.chain.empty()) {
      request.chain = token_chain(workload_, index);
      request.known = workload_.requests[static_cast<size_t>(index)].input_length;
    }
    // The last known token is always computed: its output is what the request waits for.
    const int32_t hit = keeper_.begin(index, chain_of(index, request.known - 1));
    const int32_t count = std::min(budget, request.known - hit);
    if (!keeper_.reserve(index, hit + count)) {
      keeper_.release(index, chain_of(index, hit));
      return;
    }
    (request.admitted_before ? counters_.resumed_hit_tokens : counters_.hit_tokens) += hit;
    counters_.first_admissions += request.admitted_before ? 0 : 1;
    request.admitted_before = true;
    request.computed = hit;
    queue_.pop_front();
    running_.push_back(index);
    add_item(index, count);
    budget -= count;
  }
}

void Scheduler::add_item(int32_t request, int32_t count) {
  items_.push_back({request, state(request).computed, count});
  keeper_.publish(request, chain_of(request, state(request).computed + count));
}

void Scheduler::finish_step() {
  for (const StepItem& item : items_) {
    State& request = state(item.request);
    if (item.drafted) {
      true_path(options_.drafts, item.request, item.first, item.count, nodes_);
      keeper_.accept(item.request, item.first, nodes_);
    }
    request.computed += item.count;
    counters_.computed_tokens += item.count;
    const int32_t target = workload_.requests[static_cast<size_t>(item.request)].computed_length();
    if (request.computed < target) {
      if (request.computed == request.known) ++request.known;  // the row of the last token gave the next one
      keeper_.computed(item.request, chain_of(item.request, request.computed));
      continue;
    }
    release(item.request);
    request = State{};
    std::erase(running_, item.request);
    ++counters_.finished;
  }
  items_.clear();
}

void Scheduler::abandon() {
  for (const int32_t request : running_) {
    release(request);
    state(request) = State{};
  }
  running_.clear();
  queue_.clear();
  items_.clear();
}

}  // namespace folio::replay
