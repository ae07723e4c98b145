#include "replay/replay.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

#include "replay/gpu.hpp"
#include "replay/memory.hpp"
#include "replay/token_pool_stack.hpp"
#include "replay/yardstick.hpp"

namespace folio::replay {
namespace {

constexpr size_t kYardstickBytes = size_t{256}
                                   << 20;  // beyond the caches of most machines, read in a fraction of a second

/// Every page of the pool that some step wrote, up to kYardstickBytes, in a fixed random order. Unwritten pages are
/// left alone: reading them would measure the system's zero page.
std::vector<const std::byte*> used_pages(const AttentionStack& stack, int32_t pages_used, const WindowUse& window) {
  std::vector<const std::byte*> pages;
  for (int32_t layer = 0; layer < stack.config().num_layers; ++layer) {
    const KvCacheView& cache = stack.cache(layer);
    const int64_t stride = cache.k_strides.page * size_of(cache.dtype);
    const bool own_pool = window.pages > 0 && stack.config().has_window(layer);
    // Page 0 is the dummy page.
    for (int32_t page = own_pool ? 1 : 0; page < (own_pool ? window.held + 1 : pages_used); ++page)
      pages.push_back(static_cast<const std::byte*>(cache.k) + page * stride);
  }
  std::shuffle(pages.begin(), pages.end(), std::mt19937_64(1));
  pages.resize(std::min(pages.size(), kYardstickBytes / stack.k_page_bytes()));
  return pages;
}

void measure_limits(const Context& context, const AttentionStack& stack, int32_t pages_used, ReplayResult& result) {
  constexpr size_t kGranule = 256;
  constexpr size_t kLeastBytes = size_t{4} << 20;  // less says nothing
  if (stack.k_page_bytes() % kGranule == 0) {
    const std::vector<const std::byte*> pages = used_pages(stack, pages_used, result.window);
    if (pages.size() * stack.k_page_bytes() >= kLeastBytes) {
      result.read_limit = best_read_rate(context, {pages, stack.k_page_bytes()});
    }
  }
  result.multiply_limit = product_rate(context, result.kernel);
}

ReplayProgress progress_of(const Workload& workload, const Scheduler& scheduler) {
  ReplayProgress progress;
  progress.requests = static_cast<int64_t>(workload.requests.size());
  progress.finished = scheduler.counters().finished;
  progress.running = scheduler.running();
  progress.waiting = scheduler.waiting();
  progress.computed_tokens = scheduler.counters().computed_tokens;
  progress.hit_tokens = scheduler.counters().hit_tokens;
  progress.preemptions = scheduler.counters().preemptions;
  return progress;
}

void check_drafts(const ReplayOptions& options) {
  const DraftOptions& drafts = options.scheduler.drafts;
  if (drafts.tokens == 0 && drafts.topk == 1) return;
  if (options.stack.backend != ServingBackend::kTokenPool) {
    throw Error(ErrorCode::kUnsupported, "--draft-tokens and --draft-topk are for --backend token_pool");
  }
  if (drafts.tokens < 2 || drafts.topk < 1 || drafts.topk != options.stack.draft_topk) {
    throw Error(ErrorCode::kInvalidArgument,
                "a draft has 2 tokens or more, the last generated one included, and each "
                "has 1 child or more: --draft-tokens, --draft-topk");
  }
  if (drafts.topk > 1 && options.scheduler.page_size > 1) {
    throw Error(ErrorCode::kUnsupported,
                "accepted tokens of a tree would have to move within pages; --draft-topk above "
                "1 is for --page-size 1");
  }
  if (drafts.tokens > options.scheduler.token_budget) {
    throw Error(ErrorCode::kInvalidArgument, "--draft-tokens is more than --token-budget: nothing would be drafted");
  }
}

void check_window_pages(const StackConfig& stack) {
  if (stack.window_pages == 0) return;
  if (stack.window_pages < 0 || stack.window_pages > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "--window-pages is not a number that page ids can have");
  }
  if (stack.backend != ServingBackend::kTokenPool || stack.window_left < 0) {
    throw Error(ErrorCode::kUnsupported,
                "--window-pages is for --backend token_pool and models with a sliding window: elsewhere all layers "
                "have pages of one number");
  }
}

/// Who keeps the KV's memory, and the layers over it.
struct Serving {
  std::optional<PageManager> pages;
  std::unique_ptr<KvKeeper> keeper;
  std::unique_ptr<AttentionStack> stack;
};

std::unique_ptr<Serving> make_serving(const Context& context, const Workload& workload, const ReplayOptions& options) {
  auto serving = std::make_unique<Serving>();
  const auto num_pages = static_cast<int32_t>(options.stack.num_pages);
  const int32_t page_size = options.scheduler.page_size;
  check_drafts(options);
  check_window_pages(options.stack);
  if (options.stack.backend == ServingBackend::kTokenPool) {
    TokenKeeperOptions sizes;
    sizes.num_pages = num_pages;
    sizes.page_size = page_size;
    sizes.max_running = options.scheduler.max_running;
    sizes.draft_tokens = options.scheduler.drafts.tokens;
    sizes.reuse = options.prefix_reuse;
    sizes.window_left = options.stack.window_left;
    sizes.num_window_pages =
        options.stack.window_pages > 0 ? static_cast<int32_t>(options.stack.window_pages) : num_pages;
    sizes.token_budget = options.scheduler.token_budget;
    auto keeper = std::make_unique<TokenKeeper>(workload, sizes);
    serving->stack = make_token_pool_stack(context, options.stack, *keeper);
    serving->keeper = std::move(keeper);
    return serving;
  }
  serving->pages.emplace(num_pages, options.prefix_reuse);
  serving->keeper = std::make_unique<PageKeeper>(*serving->pages, workload.requests.size(), page_size);
  serving->stack = make_stack(context, options.stack, options.processes);
  return serving;
}

/// Drafts are verified by a batch of their own.
void split_drafts(std::vector<StepItem>& items, std::vector<StepItem>& drafted) {
  const auto middle =
      std::stable_partition(items.begin(), items.end(), [](const StepItem& item) { return !item.drafted; });
  drafted.assign(middle, items.end());
  items.erase(middle, items.end());
}

void check_clock(const ClockOptions& clock) {
  if (!(clock.step_ms > 0.0 && std::isfinite(clock.step_ms)) ||
      !(clock.time_scale > 0.0 && std::isfinite(clock.time_scale))) {
    throw Error(ErrorCode::kInvalidArgument, "the step's length and the time scale must be above 0");
  }
}

}  // namespace

bool ReplayResult::failed() const {
  const bool unequal = attention.determinism == Determinism::kScheduleInvariant && checks.recomputed_unequal > 0;
  return checks.failures > 0 || leaked_pages != 0 || unequal;
}

namespace {

/// What a step's items say of it. The phases' times come when it has ended.
StepPoint point_of(const Workload& workload, std::span<const StepItem> items, const Scheduler& scheduler) {
  StepPoint point;
  for (const StepItem& item : items) {
    const bool generates = item.first >= workload.requests[static_cast<size_t>(item.request)].input_length;
    (generates ? point.decoding : point.prefilling) += 1.0;
    point.query_tokens += item.count;
    point.kv_tokens += item.first + item.count;
  }
  point.waiting = static_cast<double>(scheduler.waiting());
  return point;
}

/// Of the workload's tokens, those that were computed or found. What preempted requests compute again may count twice.
double share_done(const Scheduler& scheduler, int64_t tokens, const ClockOptions& clock, double now_ms,
                  double last_arrival_ms) {
  const auto done = static_cast<double>(scheduler.counters().computed_tokens + scheduler.counters().hit_tokens);
  const double share = std::min(1.0, done / static_cast<double>(std::max<int64_t>(1, tokens)));
  return clock.kind == ClockKind::kWall && last_arrival_ms > now_ms ? std::min(share, now_ms / last_arrival_ms) : share;
}

int64_t all_hits(const Scheduler& scheduler) {
  return scheduler.counters().hit_tokens + scheduler.counters().resumed_hit_tokens;
}

PhaseTimes since(const PhaseTimes& now, const PhaseTimes& before) {
  PhaseTimes times = now;
  for (size_t phase = 0; phase < kPhaseNames.size(); ++phase) times.seconds[phase] -= before.seconds[phase];
  return times;
}

}  // namespace

ReplayResult run_replay(const Context& context, const Workload& workload, const ReplayOptions& options,
                        const std::atomic<bool>& stop, const std::function<void(const ReplayProgress&)>& report) {
  check_clock(options.clock);
  const std::unique_ptr<Serving> serving = make_serving(context, workload, options);
  KvKeeper& keeper = *serving->keeper;
  Scheduler scheduler(workload, keeper, options.scheduler);
  RowChecker checker(workload, options.stack, options.checks);
  AttentionStack* const stack = serving->stack.get();
  std::unique_ptr<TimelineWriter> timeline;
  if (options.timeline != nullptr) timeline = std::make_unique<TimelineWriter>(*options.timeline);

  ReplayResult result;
  PhaseClock phases(timeline.get());
  SimulatedClock clock(options.clock);
  StepBatch batch;
  std::vector<StepItem> made, ordered, drafted;
  PrefixOrder prefix_order;
  std::vector<float> step_seconds;
  LatencyRecorder latencies(workload);
  const int64_t tokens = workload.computed_tokens();
  const double last_arrival_ms = workload.requests.empty() ? 0.0 : workload.requests.back().arrival_ms;
  Stopwatch wall;
  int32_t highest_page = -1;
  const auto observe = [&](const StepBatch& rows, const LayerOutput& output) {
    checker.observe(rows, output, scheduler);
  };
  while (!scheduler.done() && !stack->stops(stop.load(std::memory_order_relaxed))) {
    const PhaseTimes times_before = phases.times();
    const int64_t hits_before = all_hits(scheduler);
    const double start_ms = clock.now_ms();
    phases.begin();
    const auto items = scheduler.next_step(start_ms);
    if (items.empty()) {
      clock.idle_until(scheduler.next_arrival_ms().value_or(clock.now_ms()));
      continue;
    }
    StepPoint point = point_of(workload, items, scheduler);
    made.assign(items.begin(), items.end());
    ordered = made;
    split_drafts(ordered, drafted);
    // Sharers must be neighbours. A backend's own order comes last: it may part them again.
    if (options.stack.cascade == backends::CascadeMode::kAuto)
      prefix_order.apply(ordered, scheduler, options.stack.page_size);
    stack->order(ordered);
    batch.build(ordered, scheduler, options.stack.tokens_per_page_id());
    phases.end(Phase::kSchedule);
    const auto serve = [&] {
      if (batch.rows.empty()) return;
      stack->step(batch, phases, observe);
      highest_page = std::max(highest_page, *std::max_element(batch.indices.begin(), batch.indices.end()));
    };
    serve();
    if (!drafted.empty()) {
      batch.build_drafts(drafted, scheduler, options.stack.tokens_per_page_id());
      serve();
    }
    point.pages_held = keeper.held();
    point.pages_cached = keeper.cached();
    result.peak_pages_held = std::max(result.peak_pages_held, point.pages_held);
    result.window.held = std::max(result.window.held, keeper.window_use().held);
    phases.begin();
    scheduler.finish_step();
    phases.end(Phase::kSchedule);
    point.times = since(phases.times(), times_before);
    clock.step_done(point.times.serving());
    point.step = static_cast<int64_t>(step_seconds.size());
    point.start_ms = start_ms;
    point.end_ms = clock.now_ms();
    point.prefix_hits = all_hits(scheduler) - hits_before;
    result.series.add(point);
    latencies.step_done(made, point.end_ms);
    step_seconds.push_back(static_cast<float>(point.times.serving()));
    if (timeline != nullptr)
      timeline->counters(scheduler.running(), scheduler.waiting(), keeper.held(), keeper.cached());
    result.progress = progress_of(workload, scheduler);
    result.progress.steps = static_cast<int64_t>(step_seconds.size());
    result.progress.simulated_ms = clock.now_ms();
    result.progress.wall_seconds = wall.elapsed();
    result.progress.share = share_done(scheduler, tokens, options.clock, point.end_ms, last_arrival_ms);
    report(result.progress);
  }
  result.interrupted = !scheduler.done();
  scheduler.abandon();
  keeper.drop_cache();
  WindowUse window = keeper.window_use();
  result.leaked_pages = int64_t{keeper.held()} + window.held + keeper.held_rows();
  window.held = result.window.held;
  result.window = window;
  result.scheduler = scheduler.counters();
  result.times = phases.times();
  result.work = stack->work();
  result.checks = checker.counts();
  result.digest = checker.digest();
  result.step_seconds = percentiles(step_seconds);
  result.clock = options.clock.kind;
  result.step_ms = options.clock.step_ms;
  result.latencies = latencies.latencies();
  result.input_tokens = workload.input_tokens();
  result.output_tokens = workload.output_tokens();
  result.pages = keeper.num_pages();
  result.evictions = keeper.evictions();
  result.pool_bytes = stack->pool_bytes();
  result.workspace_bytes = stack->workspace_bytes();
  result.kernel = stack->kernel_name();
  result.attention = stack->attention();
  result.backend = options.stack.backend;
  result.ranks = options.stack.ranks;
  result.plan_only = options.stack.plan_only;
  result.cascade = options.stack.cascade;
  result.threads = context.concurrency();
  result.on_gpu = gpu::is_gpu(context);
  if (options.samples != nullptr) checker.write_samples(*options.samples);
  if (!options.stack.plan_only && !gpu::is_gpu(context)) measure_limits(context, *stack, highest_page + 1, result);
  result.touched_bytes = stack->resident_bytes();
  result.peak_resident_bytes = peak_resident_bytes();
  return result;
}

}  // namespace folio::replay
