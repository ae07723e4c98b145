#include "replay/replay.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "replay/memory.hpp"
#include "replay/prefix_count.hpp"
#include "replay/report.hpp"
#include "replay/scene_test_util.hpp"

namespace folio::replay {
namespace {

using ::testing::HasSubstr;

int64_t tokens_owed(const Workload& workload) {
  int64_t tokens = 0;
  for (const Request& request : workload.requests) tokens += request.computed_length();
  return tokens;
}

TEST(Replay, ComputesChecksAndAccountsForEverything) {
  const Scene scene = small_scene();
  const ReplayResult result = replay(scene);
  EXPECT_EQ(result.progress.finished, 11);
  EXPECT_FALSE(result.interrupted);
  EXPECT_EQ(result.scheduler.computed_tokens + result.scheduler.hit_tokens, tokens_owed(scene.workload));
  EXPECT_EQ(result.checks.digested_rows, scene.workload.output_tokens() * scene.options.stack.num_layers);
  EXPECT_GT(result.checks.rows, 0);
  EXPECT_GT(result.scheduler.hit_tokens, 0);
  EXPECT_GT(result.work.flops, 0.0);
  EXPECT_GT(result.work.kv_bytes_read, 0);
  const int64_t token_bytes = 2 * (16 + 24) * 2;
  EXPECT_EQ(result.work.kv_bytes_written, result.scheduler.computed_tokens * token_bytes * 2);
  EXPECT_EQ(result.pool_bytes, static_cast<size_t>(scene.options.stack.num_pages * 8 * token_bytes * 2));
}

/// The promise of schedule invariance: the same bits with prefixes computed anew, in other chunks, one request at a
/// time, with other arrivals, and after preemptions.
TEST(Replay, EveryScheduleGivesTheSameBits) {
  const Scene scene = small_scene();
  const uint64_t digest = replay(scene).digest;

  Scene anew = scene;
  anew.options.prefix_reuse = false;
  const ReplayResult without_reuse = replay(anew);
  EXPECT_EQ(without_reuse.scheduler.hit_tokens, 0);
  EXPECT_EQ(without_reuse.digest, digest);

  Scene chunked = scene;
  chunked.options.scheduler.token_budget = 17;
  EXPECT_EQ(replay(chunked).digest, digest);

  Scene serial = scene;
  serial.options.scheduler.max_running = 1;
  EXPECT_EQ(replay(serial).digest, digest);

  Scene hurried = scene;
  hurried.options.clock.step_ms = 1e9;
  EXPECT_EQ(replay(hurried).digest, digest);

  Scene cramped = scene;
  cramped.options.clock.step_ms = 1e9;  // all at once
  cramped.options.stack.num_pages = (scene.workload.longest() + 7) / 8 + 2;
  const ReplayResult preempted = replay(cramped);
  EXPECT_GT(preempted.scheduler.preemptions, 0);
  EXPECT_GT(preempted.evictions, 0);
  EXPECT_EQ(preempted.digest, digest);

  cramped.options.prefix_reuse = false;  // a preempted request then finds none of its own pages again
  const ReplayResult recomputed = replay(cramped);
  EXPECT_GT(recomputed.checks.recomputed_rows, 0);
  EXPECT_EQ(recomputed.checks.recomputed_unequal, 0);
  EXPECT_EQ(recomputed.digest, digest);
}

TEST(Replay, SeedsAndModelsChangeTheBits) {
  const Scene scene = small_scene(4);
  const uint64_t digest = replay(scene).digest;
  Scene other = scene;
  other.options.stack.seed = 2;
  EXPECT_NE(replay(other).digest, digest);
  other = scene;
  other.options.stack.window_left = 20;
  EXPECT_NE(replay(other).digest, digest);
}

TEST(Replay, SerialHitsAreThoseOfTheIndependentCount) {
  Scene scene = small_scene(11);
  scene.options.stack.num_layers = 1;
  scene.options.stack.num_q_heads = scene.options.stack.num_kv_heads = 1;
  scene.options.scheduler.max_running = 1;
  const ReplayResult result = replay(scene);
  EXPECT_EQ(result.scheduler.hit_tokens, count_prefix_hits(scene.workload, 8).hit_tokens);
}

struct Variant {
  const char* name;
  DType q, kv;
  KvLayout layout;
  int32_t window_left, full_every;
  float soft_cap;
};
class ReplayVariants : public ::testing::TestWithParam<Variant> {};

TEST_P(ReplayVariants, AgreesWithTheOracle) {
  const Variant& variant = GetParam();
  Scene scene = small_scene(4);
  StackConfig& stack = scene.options.stack;
  stack.q = variant.q;
  stack.kv = variant.kv;
  stack.layout = variant.layout;
  stack.window_left = variant.window_left;
  stack.full_every = variant.full_every;
  stack.logits_soft_cap = variant.soft_cap;
  stack.determinism = Determinism::kRunToRun;
  stack.page_size = scene.options.scheduler.page_size = 16;
  scene.options.checks.rate = 0.2;
  EXPECT_GT(replay(scene).checks.rows, 100);
}

INSTANTIATE_TEST_SUITE_P(
    Replay, ReplayVariants,
    ::testing::Values(
        Variant{"float32", DType::kFloat32, DType::kFloat32, KvLayout::kStridedNhd, -1, 0, 0.0f},
        Variant{"float16_hnd", DType::kFloat16, DType::kFloat16, KvLayout::kStridedHnd, -1, 0, 0.0f},
        Variant{"bfloat16_packed", DType::kBFloat16, DType::kBFloat16, KvLayout::kCpuPacked, -1, 0, 0.0f},
        Variant{"e4m3_cache", DType::kBFloat16, DType::kFloat8E4M3, KvLayout::kStridedNhd, -1, 0, 0.0f},
        Variant{"e5m2_packed", DType::kBFloat16, DType::kFloat8E5M2, KvLayout::kCpuPacked, -1, 0, 0.0f},
        Variant{"int8_cache", DType::kBFloat16, DType::kInt8, KvLayout::kStridedHnd, 17, 3, 0.0f},
        Variant{"int8_packed", DType::kFloat32, DType::kInt8, KvLayout::kCpuPacked, -1, 0, 0.0f},
        Variant{"e4m3_queries", DType::kFloat8E4M3, DType::kFloat8E4M3, KvLayout::kRecommended, -1, 0, 0.0f},
        Variant{"window", DType::kBFloat16, DType::kBFloat16, KvLayout::kRecommended, 9, 0, 0.0f},
        Variant{"window_and_full_layers", DType::kBFloat16, DType::kBFloat16, KvLayout::kRecommended, 9, 2, 5.0f}),
    [](const auto& variant) { return variant.param.name; });

TEST(Replay, StopsWhenAskedAndLeavesNothingBehind) {
  const Scene scene = small_scene();
  std::atomic<bool> stop{false};
  const ReplayResult result =
      run_replay(context(), scene.workload, scene.options, stop, [&](const ReplayProgress& progress) {
        if (progress.steps == 3) stop = true;
      });
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.progress.steps, 3);
  EXPECT_LT(result.progress.finished, 11);
  EXPECT_EQ(result.leaked_pages, 0);
  EXPECT_THAT(summary_text(result), HasSubstr("interrupted"));
}

TEST(Replay, TimelineAndSamplesAreWritten) {
  Scene scene = small_scene(3);
  scene.options.checks.keep_samples = true;
  scene.options.checks.rate = 1.0;
  const std::string base = ::testing::TempDir() + "folio_replay_test";
  const std::string timeline_path = base + ".timeline", samples_path = base + ".samples";
  OutputFile timeline_file(timeline_path), samples_file(samples_path);
  scene.options.timeline = &timeline_file;
  scene.options.samples = &samples_file;
  const ReplayResult result = replay(scene);
  timeline_file.close();
  samples_file.close();

  std::ifstream timeline(timeline_path);
  const nlohmann::json events = nlohmann::json::parse(timeline);
  int64_t runs = 0;
  for (const nlohmann::json& event : events) runs += event["name"] == "run 0" ? 1 : 0;
  EXPECT_EQ(runs, result.progress.steps);

  std::ifstream samples(samples_path);
  int64_t lines = 0;
  for (std::string line; std::getline(samples, line); ++lines) {
    std::istringstream fields(line);
    int32_t request = -1, position = -1, layer = -1;
    std::string bits;
    ASSERT_TRUE(fields >> request >> position >> layer >> bits);
    EXPECT_EQ(bits.size(), 2u * 4u * 24u * 2u);  // hexadecimal digits of 4 heads of 24 bfloat16
  }
  EXPECT_EQ(lines, result.checks.digested_rows);
  std::remove(timeline_path.c_str());
  std::remove(samples_path.c_str());
}

TEST(Replay, JsonHoldsTheSummary) {
  const ReplayResult result = replay(small_scene(3));
  const nlohmann::ordered_json json = summary_json(result);
  EXPECT_EQ(json["requests"]["finished"], 3);
  EXPECT_EQ(json["pages"]["leaked"], 0);
  EXPECT_EQ(json["checks"]["rows"], result.checks.rows);
  EXPECT_EQ(json["attention"]["determinism"], "schedule-invariant");
  EXPECT_FALSE(json["failed"]);
}

TEST(Replay, BadOptionsAreRefused) {
  Scene scene = small_scene(3);
  scene.options.clock.step_ms = 0.0;
  EXPECT_THROW(replay(scene), Error);
  scene = small_scene(3);
  scene.options.checks.rate = 1.5;
  EXPECT_THROW(replay(scene), Error);
  scene = small_scene(3);
  scene.options.stack.num_pages = 2;
  EXPECT_THROW(replay(scene), Error);
}

TEST(MappedMemory, CountsWhatWasTouched) {
  const MappedMemory memory(1 << 20);
  EXPECT_EQ(memory.resident_bytes(), 0u);
  memory.data()[0] = std::byte{1};
  memory.data()[1 << 19] = std::byte{1};
  EXPECT_GE(memory.resident_bytes(), 2u * 4096u);
  EXPECT_LT(memory.resident_bytes(), memory.bytes());
}

TEST(MappedMemory, OfCachesIsInterleaved) {
  const auto policy_at = [](const std::byte* data) {
    int policy = -1;
    return syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, data, MPOL_F_ADDR) == 0 ? policy : -1;
  };
  const MappedMemory plain(1 << 20);
  if (policy_at(plain.data()) != MPOL_DEFAULT) GTEST_SKIP() << "a memory policy of the process, or none is allowed";
  if (!interleave_over_nodes(plain.data(), 4096)) GTEST_SKIP() << "the system allows no memory policies";
  EXPECT_EQ(policy_at(plain.data()), MPOL_INTERLEAVE);
  EXPECT_EQ(policy_at(plain.data() + 4096), MPOL_DEFAULT);
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  const MappedMemory cache = MappedMemory::of_cache_on(context, 1 << 20);
  EXPECT_EQ(policy_at(cache.data()), MPOL_INTERLEAVE);
  EXPECT_EQ(policy_at(cache.data() + (1 << 20) - 1), MPOL_INTERLEAVE);
  EXPECT_EQ(cache.resident_bytes(), 0u);
  EXPECT_EQ(policy_at(MappedMemory::on(context, 1 << 20).data()), MPOL_DEFAULT);
}

TEST(Percentiles, NearestRank) {
  std::vector<float> values;
  for (int i = 100; i >= 1; --i) values.push_back(static_cast<float>(i));
  const Percentiles p = percentiles(values);
  EXPECT_EQ(p.p50, 50.0);
  EXPECT_EQ(p.p90, 90.0);
  EXPECT_EQ(p.p99, 99.0);
  EXPECT_EQ(p.max, 100.0);
  std::vector<float> one = {3.0f};
  EXPECT_EQ(percentiles(one).p99, 3.0);
}

}  // namespace
}  // namespace folio::replay
