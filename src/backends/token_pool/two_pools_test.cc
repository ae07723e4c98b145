#include <gtest/gtest.h>

#include <cstring>

#include "backends/token_pool/pool_test_util.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using Ints = std::vector<int32_t>;

/// A second, smaller pool for the layer with the window: it has the slots that a window can still reach, in the
/// opposite order; nothing is left of the others.
struct WindowPool {
  WindowPool(PoolFixture& fixture, const PoolSetup& setup) : table(fixture.table.size(), 0) {
    const KvCacheView& full = fixture.pool->view(0);
    const auto row_bytes = static_cast<size_t>(setup.num_kv_heads * setup.head_dim * size_of(fixture.setup.kv_dtype));
    int32_t needed = 0;
    for (size_t r = 0; r < fixture.num_requests(); ++r) needed += reach(fixture, r, *setup.window).second;
    KvPoolConfig config = fixture.pool->config();
    config.num_slots = needed;
    config.num_layers = 1;
    k_memory.resize(KvPool::k_bytes_per_layer(config));
    v_memory.resize(KvPool::v_bytes_per_layer(config));
    void* const k = k_memory.data();
    void* const v = v_memory.data();
    pool = std::make_unique<KvPool>(config, std::span(&k, 1), std::span(&v, 1));
    const KvCacheView& view = pool->view(0);
    std::memset(view.k, 0xff, KvPool::k_bytes_per_layer(config));
    std::memset(view.v, 0xff, KvPool::v_bytes_per_layer(config));
    int32_t next = needed;
    for (size_t r = 0; r < fixture.num_requests(); ++r) {
      const auto [first, count] = reach(fixture, r, *setup.window);
      for (int32_t p = first; p < first + count; ++p) {
        const bool fresh = p >= fixture.lengths.prefix[r];
        if (fixture.slot(r, p) < 0) {  // another rank's
          if (fresh) slots.push_back(-1);
          continue;
        }
        const auto entry = static_cast<size_t>(fixture.rows[r] * fixture.columns + fixture.column(r, p));
        table[entry] = next;
        const auto from = static_cast<size_t>(fixture.table[entry]) * row_bytes;
        const auto to = static_cast<size_t>(next) * row_bytes;
        std::memcpy(static_cast<std::byte*>(view.k) + to, static_cast<std::byte*>(full.k) + from, row_bytes);
        std::memcpy(static_cast<std::byte*>(view.v) + to, static_cast<std::byte*>(full.v) + from, row_bytes);
        if (fresh) slots.push_back(next);
        --next;
      }
    }
    // What the windowed layer had in the other pool is gone.
    std::memset(full.k, 0xff, KvPool::k_bytes_per_layer(fixture.pool->config()));
    std::memset(full.v, 0xff, KvPool::v_bytes_per_layer(fixture.pool->config()));
  }

  /// The first position in reach of the request's first query, and how many there are to its end.
  static std::pair<int32_t, int32_t> reach(const PoolFixture& fixture, size_t r, int32_t window) {
    const int32_t prefix = fixture.lengths.prefix[r];
    const int32_t first = std::max(0, prefix - window);
    return {first, prefix + fixture.lengths.fresh[r] - first};
  }

  Ints table;
  std::vector<std::byte> k_memory, v_memory;
  std::unique_ptr<KvPool> pool;
  std::vector<int64_t> slots;
};

struct TwoPoolsCase {
  PoolSetup setup;
  PoolLengths lengths;
};

std::vector<TwoPoolsCase> two_pools_cases() {
  std::vector<TwoPoolsCase> cases;
  for (const Determinism determinism : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
    for (const ExtendPath path : {ExtendPath::kPaged, ExtendPath::kRagged}) {
      if (determinism == Determinism::kScheduleInvariant && path == ExtendPath::kRagged) continue;
      PoolSetup setup;
      setup.window = 5;
      setup.determinism = determinism;
      setup.extend_path = path;
      cases.push_back({setup, {.mode = ForwardMode::kDecode, .prefix = {20, 2, 9}, .fresh = {1, 1, 1}}});
      cases.push_back({setup, {.mode = ForwardMode::kExtend, .prefix = {20, 0, 9}, .fresh = {3, 12, 1}}});
      cases.push_back({setup, {.mode = ForwardMode::kTargetVerify, .prefix = {20, 1, 9}, .fresh = {3, 3, 3}}});
      cases.push_back(
          {setup,
           {.mode = ForwardMode::kTargetVerify, .prefix = {90, 1, 9}, .fresh = {4, 4, 4}, .parents = {-1, 0, 0, 2}}});
    }
  }
  return cases;
}

/// A step of both layers, the one with the window over a pool of its own.
void expect_attention(const PoolSetup& setup, const PoolLengths& lengths) {
  PoolFixture fixture(setup, lengths);
  const WindowPool window(fixture, setup);
  TokenPoolConfig config = fixture.config();
  config.window_req_to_token = dense_table(window.table, fixture.table_rows, fixture.columns);
  fixture.batch.window_token_to_kv_pool = window.pool.get();
  fixture.batch.window_out_cache_loc = window.slots;
  TokenPoolBackend backend(fixture.context, config);
  backend.init_forward_metadata(fixture.batch);
  const bool ragged = is_extend(lengths.mode) && setup.extend_path == ExtendPath::kRagged;
  for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) {
    fixture.clear_output();
    fixture.forward(backend, layer);
    EXPECT_EQ(fixture.wrong_output(layer, ragged), "") << to_string(lengths.mode) << " " << lengths.parents.size();
  }
}

/// Also where lists begin with the sequence and name the dummy slot, which holds NaN, in place of what is gone.
TEST(TokenPoolTwoPools, WindowedLayersHaveSlotsOfTheirOwn) {
  for (const auto& [setup, lengths] : two_pools_cases()) expect_attention(setup, lengths);
}

/// Over ranks too, whose lists always begin so.
TEST(TokenPoolTwoPools, OverRanks_WindowedLayersHaveSlotsOfTheirOwn) {
  for (const auto& given : two_pools_cases()) {
    if (!given.lengths.parents.empty()) continue;  // trees are refused there
    testing::run_ranks(2, [&given = given](distributed::ProcessGroup& group) {
      PoolSetup setup = given.setup;
      setup.group = &group;
      expect_attention(setup, given.lengths);
    });
  }
}

TEST(TokenPoolTwoPools, AreBothNamedOrNeither) {
  PoolSetup setup;
  setup.window = 5;
  PoolFixture fixture(setup, {.mode = ForwardMode::kDecode, .prefix = {2}, .fresh = {1}});
  TokenPoolBackend one(fixture.context, fixture.config());
  fixture.batch.window_token_to_kv_pool = fixture.pool.get();
  EXPECT_THROW(one.init_forward_metadata(fixture.batch), Error);
  TokenPoolConfig config = fixture.config();
  config.window_req_to_token = config.req_to_token;
  config.sliding_window_size.reset();
  EXPECT_THROW(TokenPoolBackend(fixture.context, config), Error);
  config.sliding_window_size = 5;
  TokenPoolBackend two(fixture.context, config);
  fixture.batch.window_token_to_kv_pool = nullptr;
  two.init_forward_metadata(fixture.batch);
  EXPECT_THROW(fixture.forward(two, fixture.layer()), Error);
}

}  // namespace
}  // namespace folio::inline v0::backends
