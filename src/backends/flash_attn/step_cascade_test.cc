#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "backends/flashinfer/shared_steps_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::GoldenCase;
using testing::FlashAttnFixture;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;
using testing::SharedStep;

struct DiscoveringFixture : FlashAttnFixture {
  explicit DiscoveringFixture(const LayerSetup& given, const testing::BatchLengths& lengths,
                              CascadeMode mode = CascadeMode::kAuto)
      : FlashAttnFixture(given, lengths) {
    options.cascade = mode;
  }
};

int64_t tokens_read(const FlashAttentionMetadata& metadata) {
  return summary(metadata.plans.front()->plan).kv_tokens_read;
}

class FlashAttnSharedSteps : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashAttnSharedSteps, AreFoundInTheBlockTable) {
  const SharedStep step(GetParam());
  for (const bool aot : {false, true}) {
    DiscoveringFixture fixture(step.setup, step.lengths);
    fixture.options.aot_schedule = aot;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
    EXPECT_EQ(metadata.use_cascade, !step.levels.empty());
    EXPECT_EQ(metadata.common_prefix_len, 0);
    EXPECT_EQ(!metadata.scheduler_metadata.empty(), aot);
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashAttnSharedSteps, ::testing::ValuesIn(testing::shared_steps()), golden_case_name);

TEST(FlashAttnStepCascade, GivesTheOraclesOutputWithAndWithout) {
  const SharedStep step = testing::deep_step();
  for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    int32_t number = 0;
    for (const std::string& feature : testing::shared_features()) {
      if (folio::testing::kInstrumented && number++ % 2 == (layout == KvCacheLayout::kNhd ? 0 : 1)) continue;
      SCOPED_TRACE(feature + ", " + std::string(to_string(layout)));
      LayerSetup setup = testing::with_feature(step.setup, feature);
      setup.layout = layout;
      int64_t read_alone = 0;
      for (const CascadeMode mode : {CascadeMode::kOff, CascadeMode::kAuto}) {
        DiscoveringFixture fixture(setup, step.lengths, mode);
        fixture.options.aot_schedule = false;
        const FlashAttentionImpl impl = fixture.make_impl();
        FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
        const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
        const bool shares = mode == CascadeMode::kAuto && feature != "narrow window";
        EXPECT_EQ(metadata.use_cascade, shares);
        if (mode == CascadeMode::kOff) read_alone = tokens_read(metadata);
        if (shares) {
          EXPECT_LT(tokens_read(metadata), read_alone);
        }
        fixture.forward(impl, metadata);
        EXPECT_EQ(fixture.wrong_output(), "") << to_string(mode);
        EXPECT_EQ(fixture.wrong_cache(), "");
      }
    }
  }
}

TEST(FlashAttnStepCascade, QueriesThatSeeAllKeysShareToo) {
  const SharedStep step = testing::deep_step();
  LayerSetup setup = step.setup;
  setup.mask = MaskKind::kNone;
  DiscoveringFixture fixture(setup, step.lengths);
  fixture.batch.causal = false;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnStepCascade, WithoutAnythingSharedThePlanIsThePlainOne) {
  const SharedStep step(testing::shared_steps().back());
  DiscoveringFixture fixture(step.setup, step.lengths);
  DiscoveringFixture plain(step.setup, step.lengths, CascadeMode::kOff);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  FlashAttentionMetadataBuilder plain_builder = plain.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  const FlashAttentionMetadata alone = plain_builder.build(0, plain.batch);
  EXPECT_FALSE(metadata.use_cascade);
  EXPECT_EQ(metadata.scheduler_metadata.size(), alone.scheduler_metadata.size());
  fixture.forward(impl, metadata);
  plain.forward(impl, alone);
  EXPECT_EQ(fixture.out_memory, plain.out_memory);
}

TEST(FlashAttnStepCascade, EveryStepInFlightHasItsOwnLevels) {
  const SharedStep deep = testing::deep_step();
  const SharedStep apart(testing::shared_steps()[2]);
  DiscoveringFixture first(deep.setup, deep.lengths);
  DiscoveringFixture second(apart.setup, apart.lengths);
  const FlashAttentionImpl impl = first.make_impl();
  FlashAttentionMetadataBuilder builder = first.make_builder({&impl});
  const FlashAttentionMetadata first_step = builder.build(0, first.batch);
  const FlashAttentionMetadata second_step = builder.build(0, second.batch);
  first.forward(impl, first_step);
  second.forward(impl, second_step);
  EXPECT_EQ(first.wrong_output(), "");
  EXPECT_EQ(second.wrong_output(), "");
  EXPECT_TRUE(testing::found_as_expected(first_step.cascade, deep.levels));
  builder.build(0, first.batch);
  EXPECT_EQ(message_of([&] { first.forward(impl, first_step); }, ErrorCode::kStalePlan).empty(), false);
}

TEST(FlashAttnStepCascade, LeavesPaddingAlone) {
  const SharedStep step = testing::deep_step();
  LayerSetup setup = step.setup;
  setup.padding_tokens = 5;
  setup.padding_slots = 2;
  setup.padding_requests = 3;
  DiscoveringFixture fixture(setup, step.lengths);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
  EXPECT_EQ(fixture.wrong_cache(), "");
}

TEST(FlashAttnStepCascade, AllocatesNothingOnceWarm) {
  const TableChecks none(false);
  const SharedStep deep = testing::deep_step();
  const SharedStep flat(testing::shared_steps().back());
  DiscoveringFixture fixture(deep.setup, deep.lengths);
  DiscoveringFixture other(flat.setup, flat.lengths);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const auto round = [&] {
    for (int step = 0; step < fixture.options.steps_in_flight; ++step) {
      fixture.forward(impl, builder.build(0, fixture.batch));
    }
    builder.build(0, other.batch);
  };
  round();
  round();
  const int64_t warm = folio::testing::num_allocations();
  for (int i = 0; i < 3; ++i) round();
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

// Who shares depends on the other requests, and so would a request's bits.
TEST(FlashAttnStepCascade, InvariantLevelsKeepTheirBits) {
  const SharedStep step = testing::deep_step();
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    LayerSetup setup = step.setup;
    setup.determinism = level;
    DiscoveringFixture fixture(setup, step.lengths);
    DiscoveringFixture plain(setup, step.lengths, CascadeMode::kOff);
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    FlashAttentionMetadataBuilder plain_builder = plain.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    EXPECT_FALSE(metadata.use_cascade);
    fixture.forward(impl, metadata);
    plain.forward(impl, plain_builder.build(0, plain.batch));
    EXPECT_EQ(fixture.out_memory, plain.out_memory);
  }
}

TEST(FlashAttnStepCascade, CapturedShapesHaveRoomForTheLevels) {
  const SharedStep step = testing::deep_step();
  DiscoveringFixture fixture(step.setup, step.lengths);
  fixture.config.compilation.decode_graph_mode = DecodeGraphMode::kFull;
  fixture.config.compilation.max_capture_size = 16;
  fixture.config.scheduler.max_num_seqs = 16;
  fixture.config.scheduler.max_num_batched_tokens = 64;
  fixture.config.model.max_model_len = 512;
  if (folio::testing::on_gpu()) fixture.options.steps_in_flight = 1;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const auto expect_right = [&](const FlashAttentionMetadata& metadata, int32_t segments) {
    // A graph of a GPU's reads as many segments whatever is shared.
    EXPECT_EQ(metadata.cascade.num_segments, folio::testing::on_gpu() ? 5 : segments);
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
  };
  for (const bool capture : {true, false}) {
    const FlashAttentionMetadata metadata =
        capture ? builder.build_for_cudagraph_capture(fixture.batch) : builder.build_for_drafting(fixture.batch);
    EXPECT_FALSE(metadata.use_cascade);
    expect_right(metadata, 0);
  }
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
  expect_right(metadata, metadata.cascade.num_levels + 1);
}

TEST(FlashAttnStepCascade, AnotherGroupsTableMustShareTheSamePages) {
  const SharedStep step = testing::deep_step();
  DiscoveringFixture fixture(step.setup, step.lengths);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  // The other group's pages are the first one's in another order.
  DiscoveringFixture other(step.setup, step.lengths);
  std::vector<int32_t> old_table = other.block_table;
  BlockTableView view = other.batch.block_table;
  view.data = old_table.data();
  for (int32_t& page : old_table) page = page < 0x70000000 ? page + 1000 : page;
  CommonAttentionMetadata batch = other.batch;
  batch.block_table = batch.block_table_host = view;
  const FlashAttentionMetadata metadata = builder.build(0, batch);
  const FlashAttentionMetadata updated =
      builder.update_block_table(metadata, other.batch.block_table, other.slot_mapping, other.batch.block_table);
  other.forward(impl, updated);
  EXPECT_EQ(other.wrong_output(), "");

  std::vector<int32_t> forked = other.block_table;
  const int64_t stride = view.row_stride;
  forked[static_cast<size_t>(2 * stride + 21)] = 1;  // of the samples' level
  BlockTableView fork = other.batch.block_table;
  fork.data = forked.data();
  const auto update = [&] { builder.update_block_table(metadata, fork, other.slot_mapping, fork); };
  EXPECT_THAT(message_of(update), HasSubstr("request 2 has page 1 at column 21, request 1 page"));
  forked = other.block_table;
  forked[static_cast<size_t>(9 * stride)] = 1;  // it shares nothing
  fork.data = forked.data();
  update();
  fork.row_stride = stride + 1;
  fork.num_columns = other.batch.block_table.num_columns;
  EXPECT_THAT(message_of(update), HasSubstr("row stride"));
  builder.build(0, batch);
  builder.build(0, batch);
  fork.row_stride = stride;
  EXPECT_FALSE(message_of(update, ErrorCode::kStalePlan).empty());
}

TEST(FlashAttnStepCascade, VllmsProfileDoesNotShareUnderWindowsAndAlibi) {
  const SharedStep step = testing::deep_step();
  const auto shares = [&](LayerSetup setup) {
    DiscoveringFixture fixture(setup, step.lengths);
    fixture.options.facts = testing::vllm_on_hopper();
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
    return metadata.use_cascade;
  };
  LayerSetup alibi = step.setup;
  alibi.alibi = true;
  LayerSetup window = step.setup;
  window.sliding_window = 300;
  EXPECT_TRUE(shares(step.setup));
  EXPECT_FALSE(shares(alibi));
  EXPECT_FALSE(shares(window));
}

TEST(FlashAttnStepCascade, OnlyTheHeuristicLooksAtTheCommonPrefix) {
  LayerSetup setup;
  setup.shared_prefix = 16;
  for (const CascadeMode mode : {CascadeMode::kOff, CascadeMode::kHeuristic, CascadeMode::kAuto}) {
    DiscoveringFixture fixture(setup, {"pair", {40, 50}, {1, 1}}, mode);
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(16, fixture.batch);
    EXPECT_EQ(metadata.common_prefix_len, mode == CascadeMode::kHeuristic ? 16 : 0) << to_string(mode);
    EXPECT_EQ(metadata.use_cascade, mode == CascadeMode::kHeuristic) << "16 tokens are too few for kAuto";
    fixture.forward(impl, metadata);
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_THROW(builder.build(17, fixture.batch), Error);
  }
}

TEST(FlashAttnStepCascade, LevelsAreBounded) {
  const SharedStep step = testing::deep_step();
  DiscoveringFixture fixture(step.setup, step.lengths);
  const FlashAttentionImpl impl = fixture.make_impl();
  fixture.options.max_cascade_levels = 2;
  EXPECT_EQ(fixture.make_builder({&impl}).build(0, fixture.batch).cascade.num_levels, 2);
  fixture.options.max_cascade_levels = 0;
  EXPECT_THAT(message_of([&] { fixture.make_builder({&impl}); }), HasSubstr("1 to 8 are offered"));
}

}  // namespace
}  // namespace folio::inline v0::backends
