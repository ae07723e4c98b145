#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "folio/kvcache/prefix_cache.hpp"
#include "folio/kvcache/token_allocator.hpp"

/// Time of the prefix cache and the allocator for one request. The promise (docs/archive/2026-11-21-prefix-cache.md):
/// match and insert of a prompt of 32k tokens under 50 microseconds per 1,000 tokens; allocation without a sort.
namespace {

using namespace folio;  // NOLINT(google-build-using-namespace): a program, not a header

std::vector<int32_t> random_tokens(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
  return tokens;
}

/// A cache in use: `requests` prompts of 2,048 tokens that share their first 512 by eights, in an allocator's slots.
struct Serving {
  Serving(int32_t page_size, int32_t requests) : cache({.page_size = page_size}), allocator(1 << 21, page_size) {
    for (int32_t r = 0; r < requests; ++r) {
      std::vector<int32_t> tokens = random_tokens(512, static_cast<uint32_t>(r / 8));
      const std::vector<int32_t> own = random_tokens(1536, static_cast<uint32_t>(r) + 1000);
      tokens.insert(tokens.end(), own.begin(), own.end());
      serve(tokens);
    }
  }

  /// One request from match to finish; returns the tokens that were there.
  int64_t serve(const std::vector<int32_t>& tokens) {
    slots.clear();
    PrefixLock lock = cache.acquire({std::span(tokens).first(tokens.size() - 1)}, slots);
    const int64_t hit = lock.length();
    slots.resize(tokens.size());
    const std::span<int32_t> fresh = std::span(slots).subspan(static_cast<size_t>(hit));
    if (!allocator.alloc(fresh)) {
      cache.evict({.slots = static_cast<int64_t>(fresh.size())}, changes);
      allocator.free(changes.freed);
      changes.clear();
      if (!allocator.alloc(fresh)) return -1;
    }
    cache.finish(std::move(lock), {tokens}, slots, changes);
    allocator.free(changes.freed);
    changes.clear();
    return hit;
  }

  PrefixCache cache;
  TokenAllocator allocator;
  SlotChanges changes;
  std::vector<int32_t> slots;
};

void per_thousand(benchmark::State& state, int64_t tokens) {
  state.counters["s_per_1k_tokens"] =
      benchmark::Counter(static_cast<double>(tokens) / 1000.0,
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

/// Prompts that nobody has sent before, in a pool that is full: match nothing, evict, allocate, insert all.
void new_prompt(benchmark::State& state) {
  Serving serving(static_cast<int32_t>(state.range(0)), 1000);
  std::vector<int32_t> tokens;
  uint32_t seed = 1 << 20;
  for (auto _ : state) {
    state.PauseTiming();
    tokens = random_tokens(static_cast<size_t>(state.range(1)), ++seed);
    state.ResumeTiming();
    benchmark::DoNotOptimize(serving.serve(tokens));
  }
  state.counters["nodes"] = static_cast<double>(serving.cache.num_nodes());
  per_thousand(state, state.range(1));
}

/// A prompt that is there: match all but the last page, hand over the rest.
void known_prompt(benchmark::State& state) {
  const auto page_size = static_cast<int32_t>(state.range(0));
  Serving serving(page_size, 256);
  const std::vector<int32_t> tokens = random_tokens(static_cast<size_t>(state.range(1)), 77);
  serving.serve(tokens);
  for (auto _ : state) {
    benchmark::DoNotOptimize(serving.serve(tokens));
  }
  per_thousand(state, state.range(1));
}

/// A conversation: every turn adds 64 tokens to the last one's, so that the path has many nodes.
void conversation(benchmark::State& state) {
  const auto page_size = static_cast<int32_t>(state.range(0));
  Serving serving(page_size, 256);
  const std::vector<int32_t> tokens = random_tokens(static_cast<size_t>(state.range(1)), 77);
  for (size_t length = 64; length <= tokens.size(); length += 64) {
    serving.serve({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(length)});
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(serving.serve(tokens));
  }
  state.counters["nodes"] = static_cast<double>(serving.cache.num_nodes());
  per_thousand(state, state.range(1));
}

/// 256 requests that take a slot each, and one of 2,048 slots that ends, in a pool of 2M slots that is nearly full and
/// whose free slots lie all over it.
void allocate(benchmark::State& state) {
  const auto page_size = static_cast<int32_t>(state.range(0));
  TokenAllocator allocator(1 << 21, page_size);
  std::vector<std::vector<int32_t>> requests(1000, std::vector<int32_t>(2048));
  for (auto& slots : requests) {
    if (!allocator.alloc(slots)) state.SkipWithError("no slots");
  }
  std::mt19937 random(3);
  size_t next = 0;
  for (auto _ : state) {
    std::vector<int32_t>& slots = requests[next];
    next = random() % requests.size();
    allocator.free(slots);
    for (size_t i = 0; i < slots.size(); i += 256) {
      if (!allocator.alloc(std::span(slots).subspan(i, 256))) state.SkipWithError("no slots");
    }
  }
  state.counters["s_per_slot"] =
      benchmark::Counter(2048, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

BENCHMARK(new_prompt)->Args({1, 32768})->Args({16, 32768})->Args({1, 2048});
BENCHMARK(known_prompt)->Args({1, 32768})->Args({16, 32768})->Args({1, 2048});
BENCHMARK(conversation)->Args({1, 32768})->Args({16, 32768});
BENCHMARK(allocate)->Arg(1)->Arg(16)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
