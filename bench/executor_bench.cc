#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "folio/folio.hpp"

/// What a region of Folio's own pool costs after a pause: threads spin for 50 us and sleep after that. Arguments:
/// threads, pause in microseconds. Counters are medians in microseconds.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header
using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double median(std::vector<double>& values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void pause_for(int64_t us) {
  if (us >= 100) {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    return;
  }
  const auto begin = Clock::now();
  while (us_since(begin) < static_cast<double>(us)) {
  }
}

Context pool_of(const benchmark::State& state) {
  ContextOptions options;
  options.num_threads = static_cast<int32_t>(state.range(0));
  return Context::cpu(options);
}

struct Region {
  Clock::time_point begin;
  std::thread::id caller = std::this_thread::get_id();
  double own_begins = -1.0;         ///< the caller's first body, microseconds after the region's begin
  std::atomic<int64_t> missing{0};  ///< threads that have not come yet
};

/// Times regions of as many bodies as threads.
void time_regions(benchmark::State& state, ParallelBody body) {
  const Context context = pool_of(state);
  std::vector<double> own, whole;
  for (auto _ : state) {
    pause_for(state.range(1));
    Region region;
    region.missing = state.range(0);
    region.begin = Clock::now();
    context.parallel_for(state.range(0), body, &region);
    whole.push_back(us_since(region.begin));
    state.SetIterationTime(whole.back() * 1e-6);
    if (region.own_begins >= 0.0) own.push_back(region.own_begins);
  }
  state.counters["caller_begins"] = median(own);
  state.counters["region"] = median(whole);
}

void note_caller(Region& region) {
  if (region.own_begins < 0.0 && std::this_thread::get_id() == region.caller)
    region.own_begins = us_since(region.begin);
}

void BM_EmptyBodies(benchmark::State& state) {
  time_regions(state, [](void* self, int64_t) noexcept { note_caller(*static_cast<Region*>(self)); });
}

/// Bodies that wait for each other: the region takes until the last thread has begun.
void BM_AllThreadsBegin(benchmark::State& state) {
  time_regions(state, [](void* self, int64_t) noexcept {
    auto& region = *static_cast<Region*>(self);
    note_caller(region);
    --region.missing;
    while (region.missing.load() != 0) {
    }
  });
}

void cases(benchmark::internal::Benchmark* bench, int64_t most_threads) {
  std::vector<int64_t> threads{2};
  for (int64_t n = 4; n <= most_threads; n *= 2) threads.push_back(n);
  bench->ArgsProduct({threads, {0, 20, 100, 1000}})
      ->ArgNames({"threads", "pause_us"})
      ->Iterations(2000)
      ->UseManualTime();
}

const auto kCpus = static_cast<int64_t>(std::thread::hardware_concurrency());

/// What the caller's wake-ups take is to be seen with more threads than CPUs, too.
void empty_cases(benchmark::internal::Benchmark* bench) {
  cases(bench, std::max<int64_t>(kCpus, 8));
}
void meeting_cases(benchmark::internal::Benchmark* bench) {
  cases(bench, kCpus);
}
BENCHMARK(BM_EmptyBodies)->Apply(empty_cases)->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_AllThreadsBegin)->Apply(meeting_cases)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
