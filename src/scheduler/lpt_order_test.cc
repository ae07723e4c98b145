#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "folio/types/error.hpp"
#include "scheduler/plan_check_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// The makespan of prefill plans in LPT order, by a model of an H200: 132 workers of one speed, 1.6 us for 128 rows
/// by 128 keys (700 TFLOP/s), 2 us for a work tile, 0.7 us more for a partial result (64 KB that are written and read
/// again). The bound: all workers end at once, with no more work tiles than row tiles.
namespace folio::inline v0::scheduler {
namespace {

using testing::check_plan;
using testing::OwnedBatch;
using testing::paged_batch;

constexpr double kTile = 1.6;
constexpr double kItem = 2.0;
constexpr double kPartial = 0.7;

SchedulerConfig prefill_config() {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.page_size = 16;
  config.tile = {.rows = 128, .kv_tokens = 128, .schedule = Schedule::kDynamic, .order = TileOrder::kLpt};
  config.num_workers = 132;
  config.tile_cost = 128;
  config.row_cost = 0;
  config.start_cost = 160;
  config.min_split_tokens = 512;
  config.l2_swizzle_tokens = (40 << 20) / 512;
  return config;
}

int32_t kv_tiles(const WorkTile& work_tile) {
  return (work_tile.kv_end + 127) / 128 - work_tile.kv_begin / 128;
}

double microseconds(const WorkTile& work_tile) {
  return kv_tiles(work_tile) * kTile + kItem + (work_tile.partial >= 0 ? kPartial : 0.0);
}

struct Times {
  double bound = 0;
  double end = 0;
  int32_t cut = 0;  ///< dynamic tiles of row tiles that are split
};

Times times_of(const SchedulerConfig& config, const PlanView& plan) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  for (int32_t w = 0; w < config.num_workers; ++w) free.push(0.0);
  Times times;
  double tiles = 0;
  double whole = 0;
  for (int32_t i = 0; i < plan.num_dynamic_tiles; ++i) {
    const WorkTile& work_tile = plan.work_tiles[i];
    const double done = free.top() + microseconds(work_tile);
    free.pop();
    free.push(done);
    times.end = std::max(times.end, done);
    times.cut += work_tile.partial >= 0 ? 1 : 0;
    tiles += kv_tiles(work_tile);
    whole += work_tile.partial < 0 ? 1 : 0;
  }
  times.bound =
      (tiles * kTile + std::max(whole + plan.num_combine_tiles, 1.0 * config.num_workers) * kItem) / config.num_workers;
  return times;
}

Times times_of(OwnedBatch batch) {
  const SchedulerConfig config = prefill_config();
  PlanStorage storage;
  return times_of(config, make_plan(config, batch.view(), storage));
}

std::vector<int32_t> repeat(size_t requests, int32_t length) {
  return std::vector<int32_t>(requests, length);
}

OwnedBatch append(size_t requests, int32_t tokens, int32_t kv_len) {
  return paged_batch(repeat(requests, tokens), repeat(requests, kv_len));
}

/// Lengths around 1,000 that add up to 64 x 1024.
std::vector<int32_t> log_normal() {
  std::mt19937 random(7);
  std::vector<double> raw;
  for (int32_t r = 0; r < 64; ++r) {
    double normal = -6;
    for (int i = 0; i < 12; ++i) normal += static_cast<double>(random() % 10001) / 10000;
    raw.push_back(std::exp(normal));
  }
  const double sum = std::accumulate(raw.begin(), raw.end(), 0.0);
  std::vector<int32_t> lengths;
  for (const double length : raw) lengths.push_back(std::max(1, static_cast<int32_t>(length / sum * 65536)));
  return lengths;
}

OwnedBatch mixed(int32_t chunk, int32_t context, size_t decodes) {
  OwnedBatch batch = append(decodes, 1, 4096);
  batch.q_len.insert(batch.q_len.begin() + static_cast<std::ptrdiff_t>(decodes / 2), chunk);
  auto& kv_len = batch.segments[0].kv_len;
  kv_len.insert(kv_len.begin() + static_cast<std::ptrdiff_t>(decodes / 2), context);
  return batch;
}

TEST(LptOrder, Makespan_ServingBatches_ComesNearTheBound) {
  const std::vector<int32_t> lengths = log_normal();
  const struct {
    std::string name;
    OwnedBatch batch;
    double max;  ///< of the bound
    bool cut = false;
  } shapes[] = {{"8 x 4096", append(8, 4096, 4096), 1.005},
                {"1 x 16384", append(1, 16384, 16384), 1.005},
                {"1 x 131072", append(1, 131072, 131072), 1.005},
                {"8 x 512 on 8192", append(8, 512, 8704), 1.035},
                {"64 around 1000", paged_batch(lengths, lengths), 1.005},
                {"64 x 1024", append(64, 1024, 1024), 1.005},
                {"1 x 1024", append(1, 1024, 1024), 1.04},
                {"1 x 2048", append(1, 2048, 2048), 1.04},
                {"1 x 4096", append(1, 4096, 4096), 1.02},
                {"1 x 8192", append(1, 8192, 8192), 1.01},
                {"1 x 128 on 32768", append(1, 128, 32768), 1.05, true},
                {"1 x 512 on 32768", append(1, 512, 32768), 1.05},
                {"1 x 544 on 8192", append(1, 544, 8192), 1.12, true},
                {"1 x 768 on 32768", append(1, 768, 32768), 1.07, true},
                {"1 x 1024 on 32768", append(1, 1024, 32768), 1.04},
                {"2 x 200 on 16384", append(2, 200, 16384), 1.1, true},
                {"3 x 512 on 8192", append(3, 512, 8192), 1.05},
                {"5 x 512 on 8192", append(5, 512, 8192), 1.05},
                {"512 of 4096, 128 decodes", mixed(512, 4096, 128), 1.05},
                {"512 of 131072, 128 decodes", mixed(512, 131072, 128), 1.02}};
  for (const auto& shape : shapes) {
    const Times times = times_of(shape.batch);
    std::printf("%-28s bound %8.1f us, ends %8.1f (%.3f), %d dynamic tiles of units that are cut\n", shape.name.c_str(),
                times.bound, times.end, times.end / times.bound, times.cut);
    EXPECT_LE(times.end, times.bound * shape.max) << shape.name;
    EXPECT_EQ(times.cut > 0, shape.cut) << shape.name;
  }
}

TEST(LptOrder, Makespan_VariableLengths_KeepsTheRateOfUniformOnes) {
  const std::vector<int32_t> lengths = log_normal();
  const auto rate = [](const std::vector<int32_t>& of) {
    double pairs = 0;
    for (const int32_t length : of) pairs += 0.5 * length * (length + 1.0);
    return pairs / times_of(paged_batch(of, of)).end;
  };
  EXPECT_GE(rate(lengths), 0.85 * rate(repeat(64, 1024)));
}

TEST(LptOrder, Makespan_Appends_StaysNearTheBound) {
  std::mt19937 random(82);
  double worst = 0;
  for (int i = 0; i < folio::testing::random_cases(300); ++i) {
    OwnedBatch batch = append(1 + random() % 6, 1, 1);
    for (size_t r = 0; r < batch.q_len.size(); ++r) {
      batch.q_len[r] = 1 + static_cast<int32_t>(random() % 800);
      batch.segments[0].kv_len[r] = batch.q_len[r] + static_cast<int32_t>(random() % (4096u << random() % 5));
    }
    const Times times = times_of(batch);
    // A row tile of 8 KV tiles or so is not worth two work tiles.
    const double over = (times.end - 8 * kTile - kItem) / times.bound;
    worst = std::max(worst, over);
    ASSERT_LE(over, 1.25) << "case " << i;
  }
  std::printf("the worst of random appends: %.3f\n", worst);
}

/// KV tiles of head 0's dynamic tiles, in claim order.
std::vector<int32_t> costs_of_head_0(const PlanView& plan) {
  std::vector<int32_t> costs;
  for (int32_t i = 0; i < plan.num_dynamic_tiles; ++i) {
    if (plan.work_tiles[i].kv_head == 0) costs.push_back(kv_tiles(plan.work_tiles[i]));
  }
  return costs;
}

TEST(LptOrder, RowTiles_OfOneRequest_StandLastToFirst) {
  PlanStorage storage;
  OwnedBatch batch = append(1, 2048, 2048);
  const PlanView plan = make_plan(prefill_config(), batch.view(), storage);
  const std::vector<int32_t> costs = costs_of_head_0(plan);
  ASSERT_EQ(costs.size(), 64u);
  EXPECT_TRUE(std::is_sorted(costs.rbegin(), costs.rend()));
  EXPECT_EQ(costs.front(), 16);
  EXPECT_EQ(costs.back(), 1);
}

TEST(LptOrder, Requests_ByCost_LongestFirstAndStable) {
  PlanStorage storage;
  OwnedBatch batch = paged_batch({32, 32, 32, 32, 32}, {128, 8192, 8000, 1500, 8192});
  const PlanView plan = make_plan(prefill_config(), batch.view(), storage);
  std::vector<int32_t> requests;
  for (int32_t i = 0; i < plan.num_dynamic_tiles; ++i) {
    const WorkTile& work_tile = plan.work_tiles[i];
    if (work_tile.kv_head == 0 && work_tile.kv_begin == 0) requests.push_back(work_tile.request);
  }
  EXPECT_EQ(requests, (std::vector<int32_t>{1, 2, 4, 3, 0}));
}

TEST(LptOrder, HeadSwizzle_KeysBeyondTheL2_GroupsTheHeads) {
  PlanStorage storage;
  const struct {
    int32_t length;
    int32_t l2_swizzle_tokens;
    int32_t heads;
  } shapes[] = {{16384, 81920, 4}, {16384, 0, 8},      {8192, 81920, 8},
                {32768, 81920, 2}, {131072, 81920, 1}, {16384, 49152, 3}};
  for (const auto& shape : shapes) {
    SchedulerConfig config = prefill_config();
    config.l2_swizzle_tokens = shape.l2_swizzle_tokens;
    OwnedBatch batch = append(1, shape.length, shape.length);
    const PlanView plan = make_plan(config, batch.view(), storage);
    int32_t together = 0;
    while (plan.work_tiles[together].row_begin == plan.work_tiles[0].row_begin) ++together;
    EXPECT_EQ(together, shape.heads) << shape.length << " tokens";
    // Every swizzle group has all row tiles before the next begins.
    const int32_t a_head = plan.num_dynamic_tiles / 8;
    EXPECT_EQ(plan.work_tiles[a_head * together - 1].kv_head, together - 1);
    if (together < 8) {
      EXPECT_EQ(plan.work_tiles[a_head * together].kv_head, together);
      EXPECT_EQ(plan.work_tiles[a_head * together].row_begin, plan.work_tiles[0].row_begin);
    }
  }
}

TEST(LptOrder, HeadSwizzle_ShortGroups_IsNotUsed) {
  // Four row tiles of 1,024 KV tiles: eight times four dynamic tiles have to begin at once.
  PlanStorage storage;
  OwnedBatch batch = append(1, 128, 131072);
  const PlanView plan = make_plan(prefill_config(), batch.view(), storage);
  EXPECT_EQ(plan.work_tiles[7].kv_head, 7);
}

TEST(LptOrder, PartialRows_Bound_IsLowerThanInRequestOrder) {
  SchedulerConfig config = prefill_config();
  EXPECT_EQ(max_partial_rows(config), 6 * 132 * 128);
  config.tile.order = TileOrder::kRequestOrder;
  EXPECT_EQ(max_partial_rows(config), 16 * 132 * 128);
}

TEST(LptOrder, Config_StaticSchedule_IsRefused) {
  PlanStorage storage;
  SchedulerConfig config = prefill_config();
  config.tile.schedule = Schedule::kStatic;
  OwnedBatch batch = append(1, 1, 1);
  EXPECT_THROW(make_plan(config, batch.view(), storage), Error);
}

TEST(LptOrder, Coverage_ServingSizes_EveryVisiblePairOnce) {
  PlanStorage storage;
  OwnedBatch batch = paged_batch({1, 300, 70, 0, 1, 544, 33}, {3000, 900, 1200, 0, 64, 4000, 2500});
  for (const Determinism level : {Determinism::kRunToRun, Determinism::kScheduleInvariant}) {
    SchedulerConfig config = prefill_config();
    config.num_q_heads = 8;
    config.num_kv_heads = 2;
    config.fixed_split_tokens = 1024;
    config.l2_swizzle_tokens = 4000;
    config.determinism = level;
    EXPECT_EQ(check_plan(config, batch, make_plan(config, batch.view(), storage)), "");
  }
}

}  // namespace
}  // namespace folio::inline v0::scheduler
