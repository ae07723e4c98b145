#include "folio/backends/flashinfer/metadata_builder.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::BatchFixture;
using testing::BatchLengths;
using testing::Group;
using testing::LayerSetup;

TEST(FlashInferMetadataBuilderTest, DescribesTheGroupAndTheBatch) {
  Group group;
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.num_qo_heads(), 4);
  EXPECT_EQ(builder.num_kv_heads(), 2);
  EXPECT_EQ(builder.head_dim(), 32);
  EXPECT_EQ(builder.page_size(), 16);
  EXPECT_EQ(builder.kv_cache_dtype(), DType::kBFloat16);
  EXPECT_EQ(builder.q_data_type(), DType::kBFloat16);
  EXPECT_EQ(builder.reorder_batch_threshold(), 1);
  EXPECT_TRUE(builder.global_hyperparameters().has_same_all_params);
  EXPECT_FALSE(builder.kernel_name().empty());

  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_EQ(metadata.num_reqs, 4);
  EXPECT_EQ(metadata.num_actual_tokens, 12);
  EXPECT_EQ(metadata.split, (BatchSplit{2, 2, 2, 10}));
  EXPECT_EQ(metadata.max_q_len, 5);
  EXPECT_EQ(metadata.max_q_len_prefill, 5);
  EXPECT_EQ(metadata.max_seq_len, 56);
  EXPECT_EQ(metadata.qo_indptr.data(), group.fixture.query_start_loc.data()) << "the engine's array, not a copy";
  EXPECT_EQ(metadata.qo_indptr.size(), 5u);
  EXPECT_EQ(metadata.seq_lens.data(), group.fixture.seq_lens.data());
  EXPECT_EQ(metadata.slot_mapping.size(), 12u);
  EXPECT_EQ(metadata.block_table.data, group.fixture.block_table.data());
  EXPECT_EQ(metadata.q_data_type, DType::kBFloat16);
  EXPECT_EQ(metadata.data_type, DType::kBFloat16);
  EXPECT_EQ(metadata.num_qo_heads, 4);
  EXPECT_EQ(metadata.num_kv_heads, 2);
  EXPECT_EQ(metadata.head_dim, 32);
  EXPECT_EQ(metadata.page_size, 16);
  EXPECT_TRUE(metadata.plans[0].has_value());
  EXPECT_FALSE(metadata.plans[1].has_value());
}

TEST(FlashInferMetadataBuilderTest, CountsShortQueriesThatAreNotUniformWithThePrefills) {
  Group group({}, {"drafts", {20, 20, 20, 20}, {3, 3, 2, 3}});
  group.config.speculative = SpeculativeConfig{2, false};
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.reorder_batch_threshold(), 3);
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_EQ(metadata.split, (BatchSplit{2, 2, 6, 5}));
  EXPECT_EQ(metadata.max_q_len_prefill, 3);

  Group uneven({}, {"short_tail", {20, 20, 20}, {3, 3, 1}});
  uneven.config.speculative = SpeculativeConfig{2, false};
  EXPECT_EQ(uneven.make().build(0, uneven.fixture.batch).max_q_len_prefill, 1) << "of the prefills, not of the batch";
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(group.fixture.wrong_output(), "");
}

TEST(FlashInferMetadataBuilderTest, DoesNotTouchTheBatch) {
  Group group;
  const std::vector<int32_t> seq_lens = group.fixture.seq_lens;
  const std::vector<int32_t> starts = group.fixture.query_start_loc;
  const std::vector<int32_t> table = group.fixture.block_table;
  FlashInferMetadataBuilder builder = group.make();
  builder.paged_kv_arrays(builder.build(0, group.fixture.batch));
  EXPECT_EQ(group.fixture.seq_lens, seq_lens) << "another builder reads them next";
  EXPECT_EQ(group.fixture.query_start_loc, starts);
  EXPECT_EQ(group.fixture.block_table, table);
}

TEST(FlashInferMetadataBuilderTest, KeepsTheQueryDtypeFromBatchToBatch) {
  LayerSetup setup;
  setup.cache_dtype = "fp8";
  setup.quantize_query = true;
  Group mixed(setup);
  Group decode(setup, backend_batch("small_decode"));
  FlashInferMetadataBuilder builder = mixed.make();
  EXPECT_EQ(builder.build(0, decode.fixture.batch).q_data_type, DType::kFloat8E4M3);
  EXPECT_EQ(builder.build(0, mixed.fixture.batch).q_data_type, DType::kFloat8E4M3);
  decode.fixture.run(mixed.impls.front(), builder);
  EXPECT_EQ(decode.fixture.wrong_output(), "");
}

TEST(FlashInferMetadataBuilderTest, PlansOncePerWindowSoThatLayersMayDiffer) {
  Group group;
  group.add_layer();
  group.layer.sliding_window = 20;
  group.layer.logits_soft_cap = 2.0f;
  group.layer.scale = 0.5f;
  group.add_layer();
  group.layer.sliding_window.reset();
  group.layer.sinks = ConstTensorView(group.sinks.data(), DType::kFloat32, {4});
  group.add_layer();
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_FALSE(builder.global_hyperparameters().has_same_window_lefts);
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  ASSERT_TRUE(metadata.plans[0] && metadata.plans[1] && !metadata.plans[2]);
  EXPECT_EQ(metadata.plans[0]->window_left, -1);
  EXPECT_EQ(metadata.plans[1]->window_left, 19);

  for (size_t i = 0; i < group.impls.size(); ++i) {
    SCOPED_TRACE(i);
    LayerSetup setup;
    setup.sliding_window = i == 1 ? std::optional(20) : std::nullopt;
    if (i > 0) {
      setup.logits_soft_cap = 2.0f;
      setup.scale = 0.5f;
    }
    setup.sinks = i == 2;
    BatchFixture layer(setup, backend_batch("mixed_small"));
    if (i == 2) {
      layer.sinks = group.sinks;
      group.impls[i].set_sinks(ConstTensorView(group.sinks.data(), DType::kFloat32, {4}));
    }
    layer.run(group.impls[i], builder);
    EXPECT_EQ(layer.wrong_output(), "");
  }
}

TEST(FlashInferMetadataBuilderTest, TakesAnEmptyBatch) {
  Group group({}, {"empty", {}, {}});
  FlashInferMetadataBuilder builder = group.make();
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(builder.build(0, group.fixture.batch).split, BatchSplit{});
}

}  // namespace
}  // namespace folio::inline v0::backends
