#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "backends/flashinfer/group_test_util.hpp"
#include "backends/flashinfer/shared_steps_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::GoldenCase;
using testing::BatchFixture;
using testing::Group;
using testing::LayerSetup;
using testing::message_of;
using testing::SharedLevels;
using testing::SharedStep;

struct DiscoveringGroup : Group {
  explicit DiscoveringGroup(const LayerSetup& setup, const testing::BatchLengths& lengths,
                            CascadeMode mode = CascadeMode::kAuto)
      : Group(setup, lengths) {
    options.cascade = mode;
  }
  void forward(const FlashInferMetadata& metadata, const OutputQuantization& quantization = {}) {
    impls.front().forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache, &metadata,
                          fixture.output, quantization);
  }
};

int64_t tokens_read(const FlashInferMetadata& metadata) {
  return summary(metadata.plans.front()->plan).kv_tokens_read;
}

class FlashInferSharedSteps : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(FlashInferSharedSteps, AreFoundInTheBlockTable) {
  const SharedStep step(GetParam());
  DiscoveringGroup group(step.setup, step.lengths);
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
  EXPECT_EQ(metadata.use_cascade, !step.levels.empty());
  EXPECT_EQ(metadata.cascade.bytes_saved > 0, !step.levels.empty());
  EXPECT_EQ(metadata.common_prefix_len, 0);
  group.forward(metadata);
  EXPECT_EQ(group.fixture.wrong_output(), "");
  EXPECT_EQ(group.fixture.wrong_cache(), "");
}

INSTANTIATE_TEST_SUITE_P(Golden, FlashInferSharedSteps, ::testing::ValuesIn(testing::shared_steps()), golden_case_name);

TEST(FlashInferStepCascade, GivesTheOraclesOutputWithAndWithout) {
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
        DiscoveringGroup group(setup, step.lengths, mode);
        FlashInferMetadataBuilder builder = group.make();
        const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
        const bool shares = mode == CascadeMode::kAuto && feature != "narrow window";
        EXPECT_EQ(metadata.use_cascade, shares);
        if (mode == CascadeMode::kOff) read_alone = tokens_read(metadata);
        if (shares) {
          EXPECT_LT(tokens_read(metadata), read_alone);
        }
        group.forward(metadata);
        EXPECT_EQ(group.fixture.wrong_output(), "") << to_string(mode);
        EXPECT_EQ(group.fixture.wrong_cache(), "");
      }
    }
  }
}

TEST(FlashInferStepCascade, WithoutAnythingSharedThePlanIsThePlainOne) {
  const SharedStep step(testing::shared_steps().back());
  DiscoveringGroup group(step.setup, step.lengths);
  DiscoveringGroup plain(step.setup, step.lengths, CascadeMode::kOff);
  FlashInferMetadataBuilder builder = group.make();
  FlashInferMetadataBuilder plain_builder = plain.make();
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_FALSE(metadata.use_cascade);
  EXPECT_EQ(metadata.cascade.num_levels, 0);
  const FlashInferMetadata alone = plain_builder.build(0, plain.fixture.batch);
  EXPECT_EQ(tokens_read(metadata), tokens_read(alone));
  EXPECT_EQ(metadata.workspace.bytes, alone.workspace.bytes);
  group.forward(metadata);
  plain.forward(alone);
  EXPECT_EQ(group.fixture.out_memory, plain.fixture.out_memory);
}

TEST(FlashInferStepCascade, LayersOfSeveralWindowsShareTheLevels) {
  const SharedStep step = testing::deep_step();
  LayerSetup setup = step.setup;
  setup.sliding_window = 20;
  DiscoveringGroup narrow(setup, step.lengths);
  narrow.add_layer();
  narrow.layer.sliding_window.reset();
  narrow.add_layer();
  FlashInferMetadataBuilder builder = narrow.make();
  const FlashInferMetadata metadata = builder.build(0, narrow.fixture.batch);
  EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
  narrow.forward(metadata);  // the layer with the window
  EXPECT_EQ(narrow.fixture.wrong_output(), "");
  DiscoveringGroup unbounded(step.setup, step.lengths);
  unbounded.fixture.cache_memory = narrow.fixture.cache_memory;
  narrow.impls.back().forward(narrow.fixture.scales(), unbounded.fixture.query, unbounded.fixture.key,
                              unbounded.fixture.value, unbounded.fixture.kv_cache, &metadata, unbounded.fixture.output);
  EXPECT_EQ(unbounded.fixture.wrong_output(), "");
}

TEST(FlashInferStepCascade, LeavesPaddingAlone) {
  const SharedStep step = testing::deep_step();
  LayerSetup setup = step.setup;
  setup.padding_requests = 3;
  setup.padding_tokens = 4;
  setup.padding_slots = 2;
  DiscoveringGroup group(setup, step.lengths);
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_TRUE(testing::found_as_expected(metadata.cascade, step.levels));
  group.forward(metadata);
  EXPECT_EQ(group.fixture.wrong_output(), "");
  EXPECT_EQ(group.fixture.wrong_cache(), "");
}

TEST(FlashInferStepCascade, AllocatesNothingOnceWarm) {
  const TableChecks none(false);
  const SharedStep deep = testing::deep_step();
  const SharedStep flat(testing::shared_steps().back());
  DiscoveringGroup group(deep.setup, deep.lengths);
  DiscoveringGroup other(flat.setup, flat.lengths);
  FlashInferMetadataBuilder builder = group.make();
  const auto round = [&] {
    group.forward(builder.build(0, group.fixture.batch));
    builder.build(0, other.fixture.batch);
  };
  round();
  const int64_t warm = folio::testing::num_allocations();
  for (int i = 0; i < 3; ++i) round();
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

// Who shares depends on the other requests, and so would a request's bits.
TEST(FlashInferStepCascade, InvariantLevelsKeepTheirBits) {
  const SharedStep step = testing::deep_step();
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    LayerSetup setup = step.setup;
    setup.determinism = level;
    DiscoveringGroup group(setup, step.lengths);
    DiscoveringGroup plain(setup, step.lengths, CascadeMode::kOff);
    FlashInferMetadataBuilder builder = group.make();
    FlashInferMetadataBuilder plain_builder = plain.make();
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    EXPECT_FALSE(metadata.use_cascade);
    group.forward(metadata);
    plain.forward(plain_builder.build(0, plain.fixture.batch));
    EXPECT_EQ(group.fixture.out_memory, plain.fixture.out_memory);
  }
}

TEST(FlashInferStepCascade, FixedShapesAndBlockTablesArePlannedWithout) {
  const SharedStep samples(testing::shared_steps()[1]);
  DiscoveringGroup padded(samples.setup, samples.lengths);
  padded.config.compilation.decode_graph_mode = DecodeGraphMode::kFull;
  padded.config.scheduler.max_num_seqs = 8;
  padded.config.model.max_model_len = 512;
  FlashInferMetadataBuilder graphs = padded.make();
  const FlashInferMetadata decodes = graphs.build(0, padded.fixture.batch);
  EXPECT_GT(decodes.num_padded_reqs, 0);
  EXPECT_FALSE(decodes.use_cascade);
  padded.forward(decodes);
  EXPECT_EQ(padded.fixture.wrong_output(), "");

  // A batch that no graph replays has its own shape.
  const SharedStep deep = testing::deep_step();
  DiscoveringGroup mixed(deep.setup, deep.lengths);
  mixed.config = padded.config;
  mixed.config.scheduler.max_num_seqs = 16;
  EXPECT_TRUE(mixed.make().build(0, mixed.fixture.batch).use_cascade);

  DiscoveringGroup tables(deep.setup, deep.lengths);
  tables.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder builder = tables.make();
  const FlashInferMetadata metadata = builder.build(0, tables.fixture.batch);
  EXPECT_TRUE(metadata.prefill_use_trtllm && metadata.decode_use_trtllm);
  EXPECT_FALSE(metadata.use_cascade);
  tables.forward(metadata);
  EXPECT_EQ(tables.fixture.wrong_output(), "");
}

// An engine under kAuto has no common_prefix_len to leave out, so a quantised output is computed without sharing.
TEST(FlashInferStepCascade, QuantisedOutputsAreComputedAlone) {
  const SharedStep step = testing::deep_step();
  const float scale = 0.5f;
  std::vector<std::vector<uint8_t>> outputs;
  for (const CascadeMode mode : {CascadeMode::kOff, CascadeMode::kAuto}) {
    DiscoveringGroup group(step.setup, step.lengths, mode);
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    EXPECT_EQ(metadata.use_cascade, mode == CascadeMode::kAuto);
    std::vector<uint8_t>& fp8 = outputs.emplace_back(static_cast<size_t>(group.fixture.padded_rows() * 4 * 32));
    group.fixture.output = TensorView(fp8.data(), DType::kFloat8E4M3, {group.fixture.padded_rows(), 4, 32});
    OutputQuantization quantization;
    quantization.scale = &scale;
    group.forward(metadata, quantization);
  }
  EXPECT_EQ(outputs[0], outputs[1]);
}

TEST(FlashInferStepCascade, CsrArraysHoldEveryPage) {
  const SharedStep step = testing::deep_step();
  DiscoveringGroup group(step.setup, step.lengths);
  DiscoveringGroup plain(step.setup, step.lengths, CascadeMode::kOff);
  FlashInferMetadataBuilder builder = group.make();
  FlashInferMetadataBuilder plain_builder = plain.make();
  const PagedKvArrays arrays = builder.paged_kv_arrays(builder.build(0, group.fixture.batch));
  const PagedKvArrays whole = plain_builder.paged_kv_arrays(plain_builder.build(0, plain.fixture.batch));
  EXPECT_TRUE(std::ranges::equal(arrays.indptr, whole.indptr));
  EXPECT_EQ(folio::testing::on_host(arrays.indices), folio::testing::on_host(whole.indices));
  EXPECT_TRUE(std::ranges::equal(arrays.last_page_len, whole.last_page_len));
  EXPECT_TRUE(arrays.shared_kv_page_indices.empty());
}

TEST(FlashInferStepCascade, OnlyTheHeuristicLooksAtTheCommonPrefix) {
  LayerSetup setup;
  setup.shared_prefix = 16;
  for (const CascadeMode mode : {CascadeMode::kOff, CascadeMode::kHeuristic, CascadeMode::kAuto}) {
    DiscoveringGroup group(setup, {"pair", {40, 50}, {1, 1}}, mode);
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(16, group.fixture.batch);
    EXPECT_EQ(metadata.common_prefix_len, mode == CascadeMode::kHeuristic ? 16 : 0) << to_string(mode);
    EXPECT_EQ(metadata.use_cascade, mode == CascadeMode::kHeuristic) << "16 tokens are too few for kAuto";
    group.forward(metadata);
    EXPECT_EQ(group.fixture.wrong_output(), "");
    EXPECT_THROW(builder.build(17, group.fixture.batch), Error);
  }
}

TEST(FlashInferStepCascade, LevelsAreBounded) {
  const SharedStep step = testing::deep_step();
  DiscoveringGroup group(step.setup, step.lengths);
  group.options.max_cascade_levels = 1;
  EXPECT_EQ(group.make().build(0, group.fixture.batch).cascade.num_levels, 1);
  for (const int32_t levels : {0, kMaxCascadeLevels + 1}) {
    group.options.max_cascade_levels = levels;
    EXPECT_THAT(message_of([&] { group.make(); }), ::testing::HasSubstr("1 to 8 are offered"));
  }
  group.options.max_cascade_levels = 1;
  group.options.cascade = static_cast<CascadeMode>(3);
  EXPECT_EQ(message_of([&] { group.make(); }), "cascade is 3; kOff, kHeuristic and kAuto are offered");
}

}  // namespace
}  // namespace folio::inline v0::backends
