#include "replay/replay.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "replay/gpu.hpp"
#include "replay/memory.hpp"
#include "replay/token_pool_stack.hpp"
#include "replay/yardstick.hpp"

namespace folio::replay {
namespace {

constexpr size_t kYardstickBytes = size_t{256}
                                   << 20;  // beyond the caches of most machines, read in a fraction of a second
constexpr double kLongestNap = 0.05;       // seconds between looks at `stop` while idle

/// Simulated time: either so much a step, or wall time times a factor.
class SimulatedClock {
 public:
  explicit SimulatedClock(const ClockOptions& options) : options_(options) {}

  double now_ms() const { return options_.time_scale > 0.0 ? watch_.elapsed() * 1e3 * options_.time_scale : now_ms_; }

  void step_done() { now_ms_ += options_.step_ms; }

  /// Nothing can be done before `arrival_ms`.
  void idle_until(double arrival_ms) {
    now_ms_ = std::max(now_ms_, arrival_ms);
    if (options_.time_scale <= 0.0) return;
    const double seconds = (arrival_ms - now_ms()) / (1e3 * options_.time_scale);
    if (seconds > 0.0) std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, kLongestNap)));
  }

 private:
  ClockOptions options_;
  double now_ms_ = 0.0;
  Stopwatch watch_;
};

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
      !(clock.time_scale >= 0.0 && std::isfinite(clock.time_scale))) {
    throw Error(ErrorCode::kInvalidArgument, "the step's length must be above 0 and the time scale 0 or more");
  }
}

}  // namespace

Percentiles percentiles(std::vector<float>& values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto rank = [&](double share) {
    const auto n = static_cast<double>(values.size());
    return static_cast<double>(values[static_cast<size_t>(std::max(0.0, std::ceil(share * n) - 1.0))]);
  };
  return {rank(0.5), rank(0.9), rank(0.99), static_cast<double>(values.back())};
}

bool ReplayResult::failed() const {
  const bool unequal = attention.determinism == Determinism::kScheduleInvariant && checks.recomputed_unequal > 0;
  return checks.failures > 0 || leaked_pages != 0 || unequal;
}

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
  std::vector<StepItem> ordered, drafted;
  PrefixOrder prefix_order;
  std::vector<float> step_seconds;
  Stopwatch wall;
  int32_t highest_page = -1;
  const auto observe = [&](const StepBatch& rows, const LayerOutput& output) {
    checker.observe(rows, output, scheduler);
  };
  while (!scheduler.done() && !stack->stops(stop.load(std::memory_order_relaxed))) {
    const double serving_before = phases.times().serving();
    phases.begin();
    const auto items = scheduler.next_step(clock.now_ms());
    if (items.empty()) {
      clock.idle_until(scheduler.next_arrival_ms().value_or(clock.now_ms()));
      continue;
    }
    ordered.assign(items.begin(), items.end());
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
    result.peak_pages_held = std::max(result.peak_pages_held, keeper.held());
    result.window.held = std::max(result.window.held, keeper.window_use().held);
    phases.begin();
    scheduler.finish_step();
    phases.end(Phase::kSchedule);
    clock.step_done();
    step_seconds.push_back(static_cast<float>(phases.times().serving() - serving_before));
    if (timeline != nullptr)
      timeline->counters(scheduler.running(), scheduler.waiting(), keeper.held(), keeper.cached());
    result.progress = progress_of(workload, scheduler);
    result.progress.steps = static_cast<int64_t>(step_seconds.size());
    result.progress.simulated_ms = clock.now_ms();
    result.progress.wall_seconds = wall.elapsed();
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
