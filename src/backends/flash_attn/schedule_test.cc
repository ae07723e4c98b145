#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "scheduler/plan_image.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::FlashAttnFixture;
using testing::LayerSetup;
using testing::message_of;

constexpr size_t kHeaderInts = 64;  ///< in front of a schedule's image

/// The work that a schedule holds.
const scheduler::PlanView& work_of(std::span<const int32_t> schedule) {
  return reinterpret_cast<const scheduler::PlanImageHeader*>(schedule.data() + kHeaderInts)->view;
}

void capture(FlashAttnFixture& fixture) {
  fixture.config.compilation = {DecodeGraphMode::kFull, 16};
  fixture.config.scheduler = {64, 512};
  fixture.config.model.max_model_len = 4096;
}

TEST(FlashAttnSchedule, IsMadeAheadOfTimeAndRuns) {
  for (const bool aot : {false, true}) {
    FlashAttnFixture fixture;
    fixture.options.aot_schedule = aot;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    EXPECT_EQ(builder.aot_schedule(), aot);
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    EXPECT_EQ(metadata.scheduler_metadata.empty(), !aot);
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

// What the kernel executes is the schedule: with work cut short, and nothing to notice it, the output would differ. It
// is noticed.
TEST(FlashAttnSchedule, IsRefusedCorruptedOrTruncated) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  const auto* item = work_of(metadata.scheduler_metadata).work_tiles;
  const auto* begin = reinterpret_cast<const scheduler::WorkTile*>(metadata.scheduler_metadata.data());
  const auto* end = begin + metadata.scheduler_metadata.size_bytes() / sizeof(scheduler::WorkTile);
  ASSERT_TRUE(item >= begin && item < end) << "the work lies in the schedule's memory";

  const std::vector<std::byte> cache = fixture.cache_memory;
  const auto forward = [&](const FlashAttentionMetadata& given) {
    impl.forward(fixture.scales(), fixture.query, {}, {}, fixture.kv, &given, fixture.output);
  };
  auto* writable = const_cast<scheduler::WorkTile*>(item);
  ++writable->kv_begin;
  EXPECT_NE(message_of([&] { forward(metadata); }).find("checksum"), std::string::npos);
  --writable->kv_begin;
  FlashAttentionMetadata truncated = metadata;
  truncated.scheduler_metadata = metadata.scheduler_metadata.first(metadata.scheduler_metadata.size() - 4);
  EXPECT_NE(message_of([&] { forward(truncated); }).find("truncated"), std::string::npos);
  truncated.scheduler_metadata = {};
  EXPECT_NE(message_of([&] { forward(truncated); }).find("truncated"), std::string::npos);
  FlashAttentionMetadata foreign = metadata;
  foreign.scheduler_metadata = builder.build(0, fixture.batch).scheduler_metadata;
  EXPECT_NE(message_of([&] { forward(foreign); }).find("not the one"), std::string::npos);
  EXPECT_EQ(fixture.cache_memory, cache);
  EXPECT_TRUE(std::ranges::all_of(fixture.out_memory, [](std::byte byte) { return byte == testing::kUnwritten; }));
  EXPECT_NO_THROW(forward(metadata));
}

TEST(FlashAttnSchedule, IsNotMadeByFastBuildsOrInBatchInvariantMode) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  EXPECT_TRUE(builder.build(0, fixture.batch, /*fast_build=*/true).scheduler_metadata.empty());
  EXPECT_TRUE(builder.build_for_drafting(fixture.batch).scheduler_metadata.empty());
  EXPECT_FALSE(builder.build_for_cudagraph_capture(fixture.batch).scheduler_metadata.empty());

  fixture.config.determinism = Determinism::kBatchInvariant;
  FlashAttentionMetadataBuilder invariant = fixture.make_builder({&impl});
  EXPECT_FALSE(invariant.aot_schedule());
  const FlashAttentionMetadata metadata = invariant.build(0, fixture.batch);
  EXPECT_TRUE(metadata.scheduler_metadata.empty());
  EXPECT_EQ(metadata.max_num_splits, 1);
}

// The original resolves the window at the first build, and forgets it for good where that one was fast.
TEST(FlashAttnSchedule, IsForTheLayersWindowWhateverTheFirstBuild) {
  LayerSetup setup;
  setup.sliding_window = 24;
  FlashAttnFixture fixture(setup, backend_batch("medium_decode"));
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  EXPECT_EQ(builder.aot_sliding_window(), (SlidingWindow{23, 0}));
  builder.build(0, fixture.batch, /*fast_build=*/true);
  EXPECT_EQ(builder.aot_sliding_window(), (SlidingWindow{23, 0}));
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  const scheduler::PlanView& work = work_of(metadata.scheduler_metadata);
  for (int32_t i = 0; i < work.num_work_tiles; ++i)
    EXPECT_LE(work.work_tiles[i].kv_end - work.work_tiles[i].kv_begin, 24);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnSchedule, IsNotMadeForLayersOfSeveralWindows) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl full = fixture.make_impl();
  fixture.layer.sliding_window = 24;
  const FlashAttentionImpl windowed = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&full, &windowed});
  EXPECT_FALSE(builder.aot_schedule());
  EXPECT_EQ(builder.aot_sliding_window(), (SlidingWindow{-1, -1}));
  EXPECT_TRUE(builder.build(0, fixture.batch).scheduler_metadata.empty());
}

// Captured graphs keep the address. Beyond a schedule there are zeros, not an earlier step's work.
TEST(FlashAttnSchedule, HasAPersistentMemoryWithAZeroedTail) {
  LayerSetup setup;
  setup.head_size = 16;
  FlashAttnFixture large(setup, backend_batch("mixed_medium"));
  FlashAttnFixture small(setup, {"one", {5}, {1}});
  capture(large);
  large.options.steps_in_flight = 1;
  const FlashAttentionImpl impl = large.make_impl();
  FlashAttentionMetadataBuilder builder = large.make_builder({&impl});
  const int64_t capacity = builder.scheduler_metadata_capacity();
  const std::span<const int32_t> first = builder.build(0, large.batch).scheduler_metadata;
  const std::span<const int32_t> second = builder.build(0, small.batch).scheduler_metadata;
  EXPECT_EQ(first.data(), second.data());
  ASSERT_LT(second.size(), first.size());
  ASSERT_LE(first.size(), static_cast<size_t>(capacity));
  for (auto i = second.size(); i < static_cast<size_t>(capacity); ++i) ASSERT_EQ(second.data()[i], 0) << i;
  // Any batch within the configuration's bounds fits.
  FlashAttnFixture widest(setup, {"wide", std::vector<int32_t>(64, 200), std::vector<int32_t>(64, 8)});
  EXPECT_LE(builder.build(0, widest.batch).scheduler_metadata.size(), static_cast<size_t>(capacity));
}

// Cascades are never captured, but engines with graphs have them in between.
TEST(FlashAttnSchedule, OfACascadeFitsTheCapturedBatchesMemory) {
  LayerSetup setup;
  setup.shared_prefix = 32;
  FlashAttnFixture fixture(setup, {"decodes", std::vector<int32_t>(64, 90), std::vector<int32_t>(64, 1)});
  capture(fixture);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(32, fixture.batch);
  ASSERT_TRUE(metadata.use_cascade);
  EXPECT_EQ(metadata.prefix_scheduler_metadata.data(), metadata.scheduler_metadata.data());
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnSchedule, IsMadeForEncodersToo) {
  LayerSetup setup;
  setup.mask = MaskKind::kNone;
  FlashAttnFixture fixture(setup, {"encoder", {40, 7}, {40, 7}});
  capture(fixture);
  fixture.layer.attn_type = AttentionType::kEncoder;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_FALSE(metadata.scheduler_metadata.empty());
  impl.forward({}, fixture.query, fixture.key, fixture.value, {}, &metadata, fixture.output);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnSchedule, CutsNoQuerysKeysIntoMoreThanTheMostSplits) {
  LayerSetup setup;
  setup.head_size = 16;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  FlashAttnFixture fixture(setup, {"long", {4000, 3000, 100}, {1, 1, 1}});
  fixture.context = Context::cpu({.executor = {}, .num_threads = 8, .force_kernel = {}});
  capture(fixture);
  for (const int32_t most : {1, 3, 32}) {
    fixture.options.max_num_splits_for_graphs = most;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    EXPECT_EQ(metadata.max_num_splits, most);
    const scheduler::PlanView& work = work_of(metadata.scheduler_metadata);
    int32_t most_sources = 1;
    for (int32_t i = 0; i < work.num_combine_tiles; ++i) {
      most_sources = std::max(most_sources, work.combine_tiles[i].source_end - work.combine_tiles[i].source_begin);
    }
    EXPECT_LE(most_sources, most);
    if (most == 32) {
      EXPECT_GT(most_sources, 3) << "without the limit it is cut more often";
    }
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

TEST(FlashAttnSchedule, MostSplits_OfManyDecodes_LeaveNoWorkerWithoutWork) {
  LayerSetup setup;
  setup.head_size = 16;
  FlashAttnFixture fixture(setup, {"decodes", std::vector<int32_t>(32, 200), std::vector<int32_t>(32, 1)});
  fixture.context = Context::cpu({.executor = {}, .num_threads = 8, .force_kernel = {}});
  capture(fixture);
  for (const int32_t most : {1, 2, 32}) {
    fixture.options.max_num_splits_for_graphs = most;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    const scheduler::PlanView& work = work_of(metadata.scheduler_metadata);
    ASSERT_EQ(work.num_workers, 8);
    EXPECT_GE(work.num_dynamic_tiles, work.num_workers);
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

TEST(FlashAttnSchedule, MostSplits_LeftOut_AreVllmsInItsProfileAlone) {
  FlashAttnFixture fixture({}, backend_batch("mixed_small"));
  capture(fixture);
  const FlashAttentionImpl native = fixture.make_impl();
  EXPECT_EQ(fixture.make_builder({&native}).build(0, fixture.batch).max_num_splits, 0);
  fixture.options.facts = testing::vllm_on_hopper();
  const FlashAttentionImpl vllm = fixture.make_impl();
  EXPECT_EQ(fixture.make_builder({&vllm}).build(0, fixture.batch).max_num_splits, 32);
}

TEST(FlashAttnSchedule, ReportsSplitsForCapturedSizesOnly) {
  FlashAttnFixture fixture({}, backend_batch("mixed_small"));  // 12 tokens
  fixture.options.max_num_splits_for_graphs = 32;
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_EQ(fixture.make_builder({&impl}).build(0, fixture.batch).max_num_splits, 0) << "no graphs";
  capture(fixture);
  EXPECT_EQ(fixture.make_builder({&impl}).build(0, fixture.batch).max_num_splits, 32);
  fixture.config.compilation.max_capture_size = 11;
  EXPECT_EQ(fixture.make_builder({&impl}).build(0, fixture.batch).max_num_splits, 0) << "not captured";
  fixture.config.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(fixture.make_builder({&impl}).build(0, fixture.batch).max_num_splits, 1);
}

TEST(FlashAttnSchedule, NeedsBoundsForGraphs) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  capture(fixture);
  fixture.config.model.max_model_len = 0;
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }),
            "decode_graph_mode is kFull; max_num_seqs, max_num_batched_tokens and max_model_len must be given");
  capture(fixture);
  fixture.config.scheduler.max_num_seqs = 3;
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  EXPECT_EQ(message_of([&] { builder.build(0, fixture.batch); }), "num_reqs is 4; max_num_seqs is 3");
}

TEST(FlashAttnSchedule, FollowsTheVersionInVllmsProfile) {
  FlashAttnFixture fixture;
  for (const auto& [facts, version3] :
       {std::pair{testing::vllm_on_hopper(), true}, {testing::vllm_on_ampere(), false}}) {
    fixture.options.facts = facts;
    const FlashAttentionImpl impl = fixture.make_impl();
    const FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    EXPECT_EQ(builder.aot_schedule(), version3);
    EXPECT_EQ(builder.get_cudagraph_support(), version3 ? GraphSupport::kAlways : GraphSupport::kUniformBatch);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
