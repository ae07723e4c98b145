#include "replay/replay.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "replay/memory.hpp"
#include "replay/model_shape.hpp"
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

/// MLA: one KV head whose values are the first components of its keys.
TEST(Replay, ValuesInsideKeys) {
  Scene scene = small_scene(4);
  StackConfig& stack = scene.options.stack;
  stack.num_kv_heads = 1;
  stack.head_dim_qk = 72;
  stack.head_dim_v = 64;
  stack.latent = true;
  scene.options.checks.rate = 0.2;
  const ReplayResult result = replay(scene);
  EXPECT_GT(result.checks.rows, 0);
  EXPECT_EQ(result.pool_bytes, static_cast<size_t>(stack.num_pages * 8 * 72 * 2 * 2)) << "keys of two layers alone";
  EXPECT_EQ(result.work.kv_bytes_written, result.scheduler.computed_tokens * 72 * 2 * 2);
  stack.layout = KvLayout::kCpuPacked;
  stack.page_size = scene.options.scheduler.page_size = 16;
  EXPECT_THROW(replay(scene), Error);
  stack.layout = KvLayout::kStridedNhd;
  for (const ServingBackend backend : {ServingBackend::kFlashInfer, ServingBackend::kTokenPool}) {
    stack.backend = backend;
    EXPECT_THROW(replay(scene), Error);
  }
}

TEST(ModelShapes, AreWhole) {
  std::vector<std::string_view> names;
  for (const ModelShape& shape : model_shapes()) {
    SCOPED_TRACE(shape.name);
    names.push_back(shape.name);
    EXPECT_EQ(shape.num_q_heads % shape.num_kv_heads, 0);
    EXPECT_GT(shape.num_layers, 0);
    EXPECT_EQ(shape.head_dim_qk % 8, 0);
    EXPECT_LE(shape.head_dim_v, shape.head_dim_qk);
    EXPECT_FALSE(shape.note.empty());
    EXPECT_EQ(shape.source.empty(), shape.name == "tiny");
    EXPECT_TRUE(!shape.latent || shape.num_kv_heads == 1);
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << "a name that two models have";
}

TEST(Replay, LatenciesGoByTheClock) {
  Scene scene = small_scene(4);
  scene.options.clock.step_ms = 10.0;
  const ReplayResult fixed = replay(scene);
  EXPECT_EQ(fixed.latencies.ttft.count, 4);
  EXPECT_EQ(fixed.latencies.e2e.count, 4);
  EXPECT_EQ(fixed.latencies.tbt.count, scene.workload.output_tokens() - 4);
  EXPECT_FLOAT_EQ(static_cast<float>(fixed.latencies.tbt.percentiles.p50), 0.01f);

  scene.options.clock.kind = ClockKind::kMeasured;
  set_request_rate(scene.workload, std::numeric_limits<double>::infinity());
  const ReplayResult measured = replay(scene);
  EXPECT_EQ(measured.digest, fixed.digest);
  EXPECT_GT(measured.latencies.ttft.percentiles.p50, 0.0);
  // All arrive at 0 and nothing idles: the clock stands at what the steps took.
  EXPECT_NEAR(measured.progress.simulated_ms, measured.times.serving() * 1e3, 1e-6 * measured.progress.simulated_ms);
  EXPECT_NEAR(measured.latencies.e2e.percentiles.max, measured.times.serving(), 1e-5 * measured.times.serving());
}

TEST(Replay, TheSeriesHasEveryStep) {
  const Scene scene = small_scene();
  const ReplayResult result = replay(scene);
  int64_t steps = 0, query_tokens = 0, hits = 0;
  int32_t pages = 0;
  double requests = 0.0;
  PhaseTimes times;
  for (const StepPoint& point : result.series.points()) {
    steps += point.steps;
    query_tokens += point.query_tokens;
    hits += point.prefix_hits;
    pages = std::max(pages, point.pages_held);
    requests = std::max(requests, point.decoding + point.prefilling);
    for (size_t phase = 0; phase < kPhaseNames.size(); ++phase) times.seconds[phase] += point.times.seconds[phase];
    EXPECT_LT(point.start_ms, point.end_ms);
    EXPECT_GE(point.kv_tokens, point.query_tokens);
  }
  EXPECT_EQ(steps, result.progress.steps);
  EXPECT_EQ(query_tokens, result.scheduler.computed_tokens);
  EXPECT_EQ(hits, result.scheduler.hit_tokens + result.scheduler.resumed_hit_tokens);
  EXPECT_EQ(pages, result.peak_pages_held);
  EXPECT_GT(requests, 1.0);
  EXPECT_LE(requests, 8.0) << "max_running";
  EXPECT_NEAR(times[Phase::kRun], result.times[Phase::kRun], 1e-9);
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

}  // namespace
}  // namespace folio::replay
