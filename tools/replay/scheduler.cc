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
    : workload_(workload), pages_(pages), options_(options), states_(workload.requests.size()) {
  if (options.token_budget < 1 || options.max_running < 1 || options.page_size < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("token budget {}, max running {}, page size {}: each must be 1 or more",
                            options.token_budget, options.max_running, options.page_size));
  }
  for (const Request& request : workload.requests) {
    const int32_t needed = pages_for_tokens(request.computed_length(), options.page_size);
    if (needed > pages.num_pages()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the request of line {} needs {} pages for its {} tokens; the pool has {}: enlarge it "
                              "(--pool-pages, --pool-mb) or shorten the requests (--scale)",
                              request.line, needed, request.computed_length(), pages.num_pages()));
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
    const int32_t count = std::min(budget, state(request).known - state(request).computed);
    const size_t before = running_.size();
    const bool reserved = reserve_preempting(i, state(request).computed + count);
    preempted = preempted || running_.size() != before;
    if (!reserved) break;  // it was the last and has preempted itself
    add_item(request, count);
    budget -= count;
  }
}

bool Scheduler::reserve_preempting(size_t position, int32_t tokens) {
  const int32_t request = running_[position];
  while (!reserve(state(request), tokens)) {
    const bool itself = position + 1 == running_.size();
    preempt_last();
    if (itself) return false;
  }
  return true;
}

bool Scheduler::reserve(State& request, int32_t tokens) {
  const int32_t missing = pages_for_tokens(tokens, options_.page_size) - static_cast<int32_t>(request.pages.size());
  return missing <= 0 || pages_.allocate(missing, request.pages);
}

void Scheduler::preempt_last() {
  const int32_t request = running_.back();
  running_.pop_back();
  State& victim = state(request);
  pages_.release(victim.pages);
  victim.pages.clear();
  victim.computed = victim.published = 0;
  queue_.push_front(request);
  ++counters_.preemptions;
}

void Scheduler::admit_waiting(int32_t& budget) {
  const int32_t page_size = options_.page_size;
  while (!queue_.empty() && budget > 0 && running() < options_.max_running) {
    const int32_t index = queue_.front();
    State& request = state(index);
    if (request.chain.empty()) {
      request.chain = token_chain(workload_, index);
      request.known = workload_.requests[static_cast<size_t>(index)].input_length;
    }
    // The last known token is always computed: its output is what the request waits for.
    keys_.clear();
    for (int32_t page = 0; page < (request.known - 1) / page_size; ++page) {
      keys_.push_back(request.chain[static_cast<size_t>((page + 1) * page_size - 1)]);
    }
    const int32_t found = pages_.acquire_prefix(keys_, request.pages);
    const int32_t hit = found * page_size;
    const int32_t count = std::min(budget, request.known - hit);
    if (!reserve(request, hit + count)) {
      pages_.release(request.pages);
      request.pages.clear();
      return;
    }
    (request.admitted_before ? counters_.resumed_hit_tokens : counters_.hit_tokens) += hit;
    counters_.first_admissions += request.admitted_before ? 0 : 1;
    request.admitted_before = true;
    request.computed = hit;
    request.published = found;
    queue_.pop_front();
    running_.push_back(index);
    add_item(index, count);
    budget -= count;
  }
}

void Scheduler::add_item(int32_t request, int32_t count) {
  items_.push_back({request, state(request).computed, count});
  publish_full_pages(state(request), state(request).computed + count);
}

void Scheduler::publish_full_pages(State& request, int32_t tokens) {
  for (; request.published < tokens / options_.page_size; ++request.published) {
    const auto last_token = static_cast<size_t>((request.published + 1) * options_.page_size - 1);
    pages_.publish(request.pages[static_cast<size_t>(request.published)], request.chain[last_token]);
  }
}

void Scheduler::finish_step() {
  for (const StepItem& item : items_) {
    State& request = state(item.request);
    request.computed += item.count;
    counters_.computed_tokens += item.count;
    if (request.computed < request.known) continue;
    const int32_t target = workload_.requests[static_cast<size_t>(item.request)].computed_length();
    if (request.computed < target) {
      ++request.known;  // the row of the last token gave the next one
      continue;
    }
    pages_.release(request.pages);
    request = State{};
    std::erase(running_, item.request);
    ++counters_.finished;
  }
  items_.clear();
}

void Scheduler::abandon() {
  for (const int32_t request : running_) {
    pages_.release(state(request).pages);
    state(request) = State{};
  }
  running_.clear();
  queue_.clear();
  items_.clear();
}

}  // namespace folio::replay
