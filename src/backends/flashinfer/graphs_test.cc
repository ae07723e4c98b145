#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "backends/flashinfer/group_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "core/golden_test.hpp"

namespace folio::inline v0::backends {
namespace {

using nlohmann::json;
using testing::BatchLengths;
using testing::Group;
using testing::LayerSetup;
using testing::message_of;

std::vector<int32_t> list(std::span<const int32_t> values) {
  return {values.begin(), values.end()};
}

/// A group whose decodes are replayed from graphs.
struct GraphGroup : Group {
  GraphGroup(const LayerSetup& setup, const BatchLengths& lengths) : Group(setup, lengths) {
    config.compilation.decode_graph_mode = DecodeGraphMode::kFull;
    config.scheduler.max_num_seqs = 16;
    config.model.max_model_len = 2048;
  }
};

BatchLengths decodes(const std::vector<int32_t>& seq_lens) {
  return {"decodes", seq_lens, std::vector<int32_t>(seq_lens.size(), 1)};
}

TEST(FlashInferPageTables, AreTheGoldenOnes) {
  const json document = folio::testing::golden("flashinfer/metadata");
  for (const json& golden : document.at("page_tables")) {
    LayerSetup setup;
    setup.page_size = golden.at("page_size");
    Group group(setup, decodes(golden.at("seq_lens")));
    FlashInferMetadataBuilder builder = group.make();
    const PagedKvArrays arrays = builder.paged_kv_arrays(builder.build(0, group.fixture.batch));
    EXPECT_EQ(list(arrays.indptr), golden.at("indptr").get<std::vector<int32_t>>()) << golden;
    EXPECT_EQ(list(arrays.last_page_len), golden.at("last_page_len").get<std::vector<int32_t>>()) << golden;
    EXPECT_EQ(list(arrays.seq_lens), golden.at("seq_lens").get<std::vector<int32_t>>());
  }
}

TEST(FlashInferGraphs, PadAsTheGoldenBatches) {
  const json document = folio::testing::golden("flashinfer/metadata");
  for (const json& golden : document.at("padded")) {
    LayerSetup setup;
    setup.page_size = golden.at("page_size");
    GraphGroup group(setup, decodes(golden.at("seq_lens")));
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    EXPECT_EQ(metadata.num_padded_reqs, golden.at("rows").get<int32_t>()) << golden;
    const PagedKvArrays arrays = builder.paged_kv_arrays(metadata);
    EXPECT_EQ(list(arrays.indptr), golden.at("indptr").get<std::vector<int32_t>>()) << golden;
    EXPECT_EQ(list(arrays.last_page_len), golden.at("last_page_len").get<std::vector<int32_t>>()) << golden;
    EXPECT_EQ(list(arrays.seq_lens), golden.at("padded_seq_lens").get<std::vector<int32_t>>()) << golden;
    group.fixture.run(group.impls.front(), builder);
    EXPECT_EQ(group.fixture.wrong_output(), "");
  }
}

TEST(FlashInferGraphs, HavePlansOfAFixedShapeForEverySize) {
  GraphGroup group({}, decodes({17, 16, 1}));
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.decode_cudagraph_max_bs(), 16);
  const auto plan_buffer = [&](const FlashInferMetadata& metadata) { return &metadata.plans[0]->plan.buffer(); };
  const FlashInferMetadata three = builder.build(0, group.fixture.batch);
  const auto* buffer_of_four = plan_buffer(three);
  Group five({}, decodes({5, 6, 7, 8, 9}));
  EXPECT_NE(plan_buffer(builder.build(0, five.fixture.batch)), buffer_of_four);
  Group four({}, decodes({100, 6, 7, 8}));
  EXPECT_EQ(plan_buffer(builder.build(0, four.fixture.batch)), buffer_of_four) << "4 requests and 3 use one";
  const int64_t warm = folio::testing::num_allocations();
  for (int i = 0; i < 3; ++i) {
    builder.build(0, five.fixture.batch);
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    builder.paged_kv_arrays(metadata);
  }
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

TEST(FlashInferGraphs, LeaveMixedAndLargeBatchesAndCascadesAlone) {
  LayerSetup setup;
  setup.shared_prefix = 16;
  GraphGroup mixed({}, {"mixed", {20, 30}, {1, 7}});
  EXPECT_EQ(mixed.make().build(0, mixed.fixture.batch).num_padded_reqs, 0);
  GraphGroup large({}, decodes(std::vector<int32_t>(17, 20)));
  large.config.scheduler.max_num_seqs = 17;
  large.config.compilation.max_capture_size = 16;
  FlashInferMetadataBuilder builder = large.make();
  EXPECT_EQ(builder.decode_cudagraph_max_bs(), 16);
  EXPECT_EQ(builder.build(0, large.fixture.batch).num_padded_reqs, 0);
  GraphGroup cascade(setup, decodes({40, 40}));
  EXPECT_EQ(cascade.make().build(16, cascade.fixture.batch).num_padded_reqs, 0);
  Group eager({}, decodes({40, 40}));
  EXPECT_EQ(eager.make().decode_cudagraph_max_bs(), 0);
  EXPECT_EQ(eager.make().build(0, eager.fixture.batch).num_padded_reqs, 0);
}

TEST(FlashInferGraphs, BatchOfExactlyTheLargestSize_IsPadded) {
  GraphGroup group({}, decodes(std::vector<int32_t>(16, 20)));
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.decode_cudagraph_max_bs(), 16);
  EXPECT_EQ(builder.build(0, group.fixture.batch).num_padded_reqs, 16);
}

TEST(FlashInferGraphs, CaptureSizes_AsGiven_AreWhatBatchesArePaddedTo) {
  GraphGroup group({}, decodes({17, 16}));
  group.options.capture_sizes = {3, 7, 12};
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.decode_cudagraph_max_bs(), 12);
  EXPECT_EQ(builder.build(0, group.fixture.batch).num_padded_reqs, 3);
  Group four({}, decodes({5, 6, 7, 8}));
  EXPECT_EQ(builder.build(0, four.fixture.batch).num_padded_reqs, 7);
  group.config.compilation.max_capture_size = 16;
  EXPECT_EQ(message_of([&] { group.make(); }), "max_capture_size is 16; the largest of capture_sizes is 12");
}

/// Workspaces are counted as they are held: of captured sizes, of block tables, and what the engine asks for.
TEST(FlashInferWorkspace, Size_IsWhatIsHeld) {
  GraphGroup group({}, decodes({17, 16, 1}));
  FlashInferMetadataBuilder builder = group.make();
  const size_t before = builder.workspace_buffer_size();
  const size_t of_graph = builder.build(0, group.fixture.batch).workspace.bytes;
  ASSERT_GT(of_graph, 0u);
  EXPECT_EQ(builder.workspace_buffer_size(), before + of_graph);

  Group tables;
  tables.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder of_tables = tables.make();
  const size_t planned = of_tables.workspace_buffer_size();
  tables.fixture.run(tables.impls.front(), of_tables);
  EXPECT_GT(of_tables.workspace_buffer_size(), planned);

  Group given;
  given.options.workspace_buffer_size = size_t{64} << 20;
  FlashInferMetadataBuilder of_given = given.make();
  EXPECT_GE(of_given.workspace_buffer_size(), size_t{64} << 20);
  EXPECT_GE(of_given.build(0, given.fixture.batch).workspace.bytes, size_t{64} << 20);
  LayerSetup december;
  december.profile = BackendProfile::kVllm2025_12;
  december.head_size = 64;
  Group reported(december);
  reported.options.workspace_buffer_size = size_t{5} << 20;
  EXPECT_EQ(reported.make().workspace_buffer_size(), size_t{5} << 20);
}

TEST(FlashInferGraphs, CountDraftsIntoTheLargestBatch) {
  GraphGroup group({}, {"drafts", {20, 30, 40}, {4, 4, 4}});
  group.config.speculative = SpeculativeConfig{3, false};
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.decode_cudagraph_max_bs(), 4 * 16);
  EXPECT_EQ(builder.build(0, group.fixture.batch).num_padded_reqs, 16) << "12 tokens";
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(group.fixture.wrong_output(), "");
}

// On a GPU `build` makes the plans that captured layers read; on both, each step's own lengths count.
TEST(FlashInferGraphs, OfBlockTablesHaveEachStepsLengths) {
  for (const bool windowed : {false, true}) {
    LayerSetup setup;
    setup.padding_requests = 1;
    setup.sinks = setup.alibi = windowed;
    if (windowed) setup.sliding_window = 20;
    GraphGroup group(setup, decodes({17, 16, 1}));
    group.config.use_block_table_kernels = true;
    FlashInferMetadataBuilder builder = group.make();
    for (const std::vector<int32_t>& seq_lens : {std::vector<int32_t>{17, 16, 1}, {300, 2, 40}, {5, 6, 7, 8}}) {
      testing::BatchFixture step(setup, decodes(seq_lens));
      const FlashInferMetadata metadata = builder.build(0, step.batch);
      EXPECT_TRUE(metadata.decode_use_trtllm);
      EXPECT_GT(metadata.num_padded_reqs, 0);
      step.run(group.impls.front(), builder);
      EXPECT_EQ(step.wrong_output(), "");
    }
  }
}

TEST(FlashInferBuilderArrays, AreHadAtConstructionWhereTheConfigurationBoundsThem) {
  GraphGroup group({}, decodes({17, 16, 1}));
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  const int64_t before = folio::testing::num_allocations();
  builder.paged_kv_arrays(metadata);
  EXPECT_EQ(folio::testing::num_allocations(), before) << "the first time, too";
}

}  // namespace
}  // namespace folio::inline v0::backends
