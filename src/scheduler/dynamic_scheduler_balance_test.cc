#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/instrumented_test_util.hpp"
#include "scheduler/plan_test_util.hpp"

/// The makespan of dynamic schedules, by a model of decode on an H200: 132 workers that read at speeds up to 15% off
/// their mean. (One launch shows that there: some SMs end after 170 us of equal work, some after 245.)
///
/// A key of one KV head (128 components of K and V in 16 bits, 512 bytes) takes a worker 1/65 us: 4.4 TB/s together.
/// A work tile takes 1 us to begin and end. A partial result of four rows takes 0.13 us more, for bytes that are
/// written and read again. What all plans have in common is left out. The bound: all workers end at once, with no
/// more work tiles than output tiles, or one per worker.
namespace folio::inline v0::scheduler {
namespace {

constexpr double kKeysPerMicrosecond = 65.0;
constexpr double kItem = 1.0;
constexpr double kPartial = 0.13;
constexpr int32_t kHeads = 8;
constexpr int32_t kWorkers = 132;

SchedulerConfig decode_config(Schedule schedule) {
  SchedulerConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = kHeads;
  config.page_size = 16;
  config.tile = {.rows = 16, .kv_tokens = 16, .schedule = schedule};
  config.num_workers = kWorkers;
  config.tile_cost = 12;
  config.row_cost = 1;
  config.start_cost = 65;
  return config;
}

double microseconds(const WorkTile& work_tile) {
  return (work_tile.kv_end - work_tile.kv_begin) / kKeysPerMicrosecond + kItem +
         (work_tile.partial >= 0 ? kPartial : 0.0);
}

std::vector<double> speeds(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<double> all;
  double sum = 0;
  for (int32_t w = 0; w < kWorkers; ++w) {
    all.push_back(0.85 + 0.3 * static_cast<double>(random() % 10001) / 10000);
    sum += all.back();
  }
  for (double& speed : all) speed *= kWorkers / sum;
  return all;
}

/// When the last worker ends: a free worker claims the next work tile.
double makespan_of(const PlanView& plan, const std::vector<double>& speed) {
  using Free = std::pair<double, size_t>;
  std::priority_queue<Free, std::vector<Free>, std::greater<>> workers;
  for (size_t w = 0; w < speed.size(); ++w) workers.emplace(0.0, w);
  double end = 0;
  for (int32_t dynamic_tile = 0; dynamic_tile < plan.num_dynamic_tiles; ++dynamic_tile) {
    const auto [time, worker] = workers.top();
    workers.pop();
    const double done = time + microseconds(plan.work_tiles[dynamic_tile]) / speed[worker];
    end = std::max(end, done);
    workers.emplace(done, worker);
  }
  return end;
}

double lists_end(const PlanView& plan, const std::vector<double>& speed) {
  double end = 0;
  for (int32_t w = 0; w < plan.num_workers; ++w) {
    double time = 0;
    for (int32_t i = plan.worker_indptr[w]; i < plan.worker_indptr[w + 1]; ++i)
      time += microseconds(plan.work_tiles[i]);
    end = std::max(end, time / speed[static_cast<size_t>(w)]);
  }
  return end;
}

struct Times {
  double bound = 0;
  double dynamic = 0;
  double lists = 0;
};

Times times_of(const std::vector<int32_t>& kv_len) {
  testing::OwnedBatch batch = testing::paged_batch(std::vector<int32_t>(kv_len.size(), 1), kv_len);
  PlanStorage dynamic_tiles;
  PlanStorage lists;
  const PlanView dynamic = make_plan(decode_config(Schedule::kDynamic), batch.view(), dynamic_tiles);
  const PlanView listed = make_plan(decode_config(Schedule::kStatic), batch.view(), lists);
  Times times;
  double keys = 0;
  for (const int32_t length : kv_len) keys += length;
  const double work_tiles = std::max(static_cast<double>(kv_len.size()) * kHeads, static_cast<double>(kWorkers));
  times.bound = (keys * kHeads / kKeysPerMicrosecond + work_tiles * kItem) / kWorkers;
  constexpr uint32_t kCards = 20;
  for (uint32_t card = 0; card < kCards; ++card) {
    times.dynamic += makespan_of(dynamic, speeds(card)) / kCards;
    times.lists += lists_end(listed, speeds(card)) / kCards;
  }
  return times;
}

std::vector<int32_t> with_long(size_t requests, int32_t usual, size_t place, int32_t length) {
  std::vector<int32_t> kv_len(requests, usual);
  kv_len[place] = length;
  return kv_len;
}

/// Around 2,000 keys, up to 65,536.
std::vector<int32_t> log_normal(size_t requests) {
  std::mt19937 random(7);
  std::vector<int32_t> kv_len;
  for (size_t r = 0; r < requests; ++r) {
    double normal = -6;  // of twelve uniform numbers: the same everywhere, unlike std::normal_distribution
    for (int i = 0; i < 12; ++i) normal += static_cast<double>(random() % 10001) / 10000;
    kv_len.push_back(static_cast<int32_t>(std::clamp(2000 * std::exp(normal), 16.0, 65536.0)));
  }
  return kv_len;
}

TEST(DynamicSchedulerBalance, Makespan_UnequalWorkers_ComesNearTheBound) {
  const struct {
    std::string name;
    std::vector<int32_t> kv_len;
    double max;  ///< of the bound
  } shapes[] = {{"64 x 4096", std::vector<int32_t>(64, 4096), 1.04},
                {"8 x 32768", std::vector<int32_t>(8, 32768), 1.05},
                {"1 x 131072", {131072}, 1.075},
                {"1 x 131072, 63 x 1024", with_long(64, 1024, 0, 131072), 1.05},
                {"40 x 1024, 1 x 131072, 23 x 1024", with_long(64, 1024, 40, 131072), 1.05},
                {"63 x 1024, 1 x 131072", with_long(64, 1024, 63, 131072), 1.055},
                {"199 x 300, 1 x 100000", with_long(200, 300, 199, 100000), 1.06},
                {"256 around 2000", log_normal(256), 1.03},
                {"256 x 1024", std::vector<int32_t>(256, 1024), 1.03},
                {"64 x 131072", std::vector<int32_t>(64, 131072), 1.01},
                {"16 x 4096", std::vector<int32_t>(16, 4096), 1.13},
                {"8 x 1024", std::vector<int32_t>(8, 1024), 1.25},
                {"1 x 8192", {8192}, 1.25},
                {"1 x 4096", {4096}, 1.25}};
  for (const auto& shape : shapes) {
    const Times times = times_of(shape.kv_len);
    std::printf("%-34s bound %7.1f us, dynamic %7.1f (%.3f), lists %7.1f (%.3f)\n", shape.name.c_str(), times.bound,
                times.dynamic, times.dynamic / times.bound, times.lists, times.lists / times.bound);
    EXPECT_LE(times.dynamic, times.bound * shape.max) << shape.name;
    EXPECT_LE(times.dynamic, times.lists * 1.005) << shape.name;
  }
}

TEST(DynamicSchedulerBalance, Makespan_EveryBatch_StaysNearTheBound) {
  std::mt19937 random(9);
  for (int i = 0; i < folio::testing::random_cases(150); ++i) {
    std::vector<int32_t> kv_len;
    const uint32_t longest = 64u << random() % 11;
    for (auto left = 1 + random() % 300; left > 0; --left) {
      kv_len.push_back(1 + static_cast<int32_t>(random() % (random() % 8 == 0 ? longest : longest / 16)));
    }
    const Times times = times_of(kv_len);
    // At worst the slowest worker takes a second split, plus a tenth.
    EXPECT_LE(times.dynamic, times.bound * 1.1 + 2 * (256 / kKeysPerMicrosecond + kItem)) << "case " << i;
  }
}

}  // namespace
}  // namespace folio::inline v0::scheduler
