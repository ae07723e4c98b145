#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::FlashAttnFixture;
using testing::LayerSetup;
using testing::message_of;

TEST(FlashAttnBuilder, DescribesTheStep) {
  LayerSetup setup;
  setup.padding_slots = 2;
  setup.padding_tokens = 2;
  setup.padding_requests = 1;
  FlashAttnFixture fixture(setup);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_EQ(metadata.num_reqs, 5);
  EXPECT_EQ(metadata.num_actual_tokens, 14);
  EXPECT_EQ(metadata.max_query_len, 5);
  EXPECT_EQ(metadata.max_seq_len, 56);
  EXPECT_EQ(metadata.query_start_loc.data(), fixture.query_start_loc.data());
  EXPECT_EQ(metadata.query_start_loc.size(), 6u);
  EXPECT_EQ(metadata.seq_lens.data(), fixture.seq_lens.data()) << "read where it is, never written";
  EXPECT_EQ(metadata.block_table.data, fixture.block_table.data());
  EXPECT_EQ(metadata.slot_mapping.data(), fixture.slot_mapping.data());
  EXPECT_TRUE(metadata.causal);
  EXPECT_FALSE(metadata.use_cascade);
  EXPECT_EQ(metadata.max_dcp_context_kv_len, 0);
  EXPECT_TRUE(metadata.dcp_context_kv_lens.empty());
  EXPECT_EQ(metadata.q_data_type, DType::kBFloat16);
  EXPECT_FALSE(builder.reorder_batch_threshold().has_value());
  EXPECT_EQ(builder.get_cudagraph_support(), GraphSupport::kAlways);
}

// No order is asked for: prefills may stand before decodes.
TEST(FlashAttnBuilder, TakesRequestsInAnyOrder) {
  FlashAttnFixture fixture({}, {"unordered", {40, 17, 64, 9}, {7, 1, 30, 1}});
  fixture.step();
  EXPECT_EQ(fixture.wrong_output(), "");
}

// Every layer of the group has a window, cap, ALiBi slopes and sinks of its own.
TEST(FlashAttnBuilder, ServesLayersThatDiffer) {
  LayerSetup plain;
  LayerSetup other;
  other.sliding_window = 24;
  other.sinks = true;
  other.logits_soft_cap = 20.0f;
  FlashAttnFixture first(plain);
  FlashAttnFixture second(other);
  const FlashAttentionImpl first_impl = first.make_impl();
  const FlashAttentionImpl second_impl = second.make_impl();
  FlashAttentionMetadataBuilder builder = first.make_builder({&first_impl, &second_impl});
  EXPECT_FALSE(builder.global_hyperparameters().has_same_all_params);
  for (const bool causal : {true, false}) {
    first.setup.mask = causal ? MaskKind::kCausal : MaskKind::kNone;
    first.batch.causal = causal;
    const FlashAttentionMetadata metadata = builder.build(0, first.batch);
    first.forward(first_impl, metadata);
    second.forward(second_impl, metadata);
    EXPECT_EQ(first.wrong_output(), "");
    EXPECT_EQ(second.wrong_output(), "") << "a window ends at the query, causal or not";
  }
}

TEST(FlashAttnBuilder, RefusesWindowsItWasNotMadeFor) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  fixture.layer.sliding_window = 5;
  const FlashAttentionImpl stranger = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_EQ(message_of([&] { fixture.forward(stranger, metadata); }),
            "the layer's window_left is 4; the metadata was planned for -1");
  std::vector<FlashAttentionImpl> many;
  std::vector<const FlashAttentionImpl*> all;
  for (int32_t window = 1; window <= 9; ++window) {
    fixture.layer.sliding_window = window;
    many.push_back(fixture.make_impl());
  }
  for (const FlashAttentionImpl& one : many) all.push_back(&one);
  EXPECT_THROW(fixture.make_builder(all), Error);
}

TEST(FlashAttnBuilder, RefusesWhatContradictsItself) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  const auto refused = [&](const auto& change) {
    FlashAttnFixture changed;
    change(changed);
    EXPECT_THROW(changed.make_builder({&impl}), Error);
  };
  refused([](FlashAttnFixture& f) { f.config.model.num_attention_heads = 8; });
  refused([](FlashAttnFixture& f) { f.config.cache.cache_dtype = "fp8"; });
  refused([](FlashAttnFixture& f) { f.options.quantize_query = true; });
  refused([](FlashAttnFixture& f) { f.options.steps_in_flight = 0; });
  refused([](FlashAttnFixture& f) { f.options.max_num_splits_for_graphs = 0; });
  refused([](FlashAttnFixture& f) { f.options.facts = testing::vllm_on_hopper(); });
  refused([](FlashAttnFixture& f) { f.config.use_block_table_kernels = true; });
  refused([](FlashAttnFixture& f) { f.options.force_kernel = "no such kernel"; });
  EXPECT_THROW(fixture.make_builder({}), Error);
  EXPECT_THROW(fixture.make_builder({nullptr}), Error);
}

TEST(FlashAttnBuilder, RefusesBatchesThatContradictThemselves) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const auto refusal = [&](const auto& change) {
    CommonAttentionMetadata batch = fixture.batch;
    change(batch);
    return message_of([&] { builder.build(0, batch); });
  };
  using Batch = CommonAttentionMetadata;
  EXPECT_EQ(refusal([](Batch& batch) { batch.max_query_len = 4; }), "request 2 has 5 query tokens; max_query_len is 4");
  EXPECT_NE(refusal([](Batch& batch) { batch.max_seq_len = 50; }).find("request 3"), std::string::npos);
  EXPECT_NE(refusal([](Batch& batch) { batch.num_reqs = 9; }), "");
  EXPECT_NE(refusal([](Batch& batch) { batch.num_actual_tokens = 3; }), "");
  EXPECT_NE(refusal([](Batch& batch) { batch.block_table.num_columns = 3; }).find("request 3"), std::string::npos);
  EXPECT_NE(refusal([](Batch& batch) { batch.where = Where::kDevice; }), "");
  EXPECT_NE(refusal([](Batch& batch) { batch.encoder_seq_lens = batch.seq_lens; }), "");
  EXPECT_NO_THROW(builder.build(0, fixture.batch));
}

TEST(FlashAttnBuilder, RefusesMasksByRequestThatItWouldNotApply) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const std::vector<uint8_t> causal(static_cast<size_t>(fixture.batch.num_reqs), 1);
  const std::vector<BidirectionalRange> image{{0, 0, 1}};
  CommonAttentionMetadata by_request = fixture.batch;
  by_request.causal_per_request = causal;
  CommonAttentionMetadata of_images = fixture.batch;
  of_images.mm_req_doc_ranges = image;
  for (const CommonAttentionMetadata& batch : {by_request, of_images}) {
    EXPECT_NE(message_of([&] { builder.build(0, batch); }, ErrorCode::kUnsupported).find("mm_req_doc_ranges"),
              std::string::npos);
  }
}

// A group whose layers differ in nothing but their pages: the same step, the same schedule, another table.
TEST(FlashAttnBuilder, UpdatesTheBlockTableAlone) {
  FlashAttnFixture first({}, backend_batch("mixed_small"));
  FlashAttnFixture second({}, backend_batch("mixed_small"));
  const FlashAttentionImpl impl = first.make_impl();
  FlashAttentionMetadataBuilder builder = first.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, first.batch);
  const FlashAttentionMetadata updated =
      builder.update_block_table(metadata, second.batch.block_table, second.slot_mapping);
  EXPECT_EQ(updated.scheduler_metadata.data(), metadata.scheduler_metadata.data());
  EXPECT_EQ(updated.block_table.data, second.block_table.data());
  EXPECT_EQ(updated.slot_mapping.data(), second.slot_mapping.data());
  EXPECT_EQ(metadata.block_table.data, first.block_table.data()) << "a copy";
  second.forward(impl, updated);
  first.forward(impl, metadata);
  EXPECT_EQ(second.wrong_output(), "");
  EXPECT_EQ(first.wrong_output(), "");

  BlockTableView narrow = second.batch.block_table;
  narrow.num_columns = 3;
  EXPECT_THROW(builder.update_block_table(metadata, narrow, second.slot_mapping), Error);
  narrow = second.batch.block_table;
  narrow.num_rows = 3;
  EXPECT_THROW(builder.update_block_table(metadata, narrow, second.slot_mapping), Error);
}

// A request's bits do not depend on its neighbours, on padding, or on a prefix that the engine found.
TEST(FlashAttnBuilder, IsBatchInvariantWhereAsked) {
  LayerSetup setup;
  setup.determinism = Determinism::kBatchInvariant;
  setup.shared_prefix = 32;
  FlashAttnFixture alone(setup, {"alone", {700, 64}, {3, 1}});
  setup.padding_requests = 2;
  setup.padding_tokens = 4;
  FlashAttnFixture among(setup, {"among", {700, 64, 1900, 40}, {3, 1, 20, 1}});
  alone.step(0);
  among.step(32);
  EXPECT_EQ(alone.wrong_output(), "");
  EXPECT_EQ(among.wrong_output(), "");
  EXPECT_TRUE(std::equal(alone.out_memory.begin(), alone.out_memory.end(), among.out_memory.begin()));
}

TEST(FlashAttnBuilder, RefusesInVllmsProfileWhatTheOriginalRefuses) {
  LayerSetup setup;
  setup.page_size = 8;
  setup.model_dtype = DType::kFloat32;
  FlashAttnFixture fixture(setup);
  fixture.options.facts = testing::vllm_on({7, 5});
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }, ErrorCode::kUnsupported),
            "FLASH_ATTN of vllm-2026-03: dtype not supported; block_size not supported; compute capability not "
            "supported");
  fixture.options.facts = {};
  const FlashAttentionImpl native = fixture.make_impl();
  EXPECT_NO_THROW(fixture.make_builder({&native}));
}

// Attention over a divided cache is tested in tests/backends/dcp_test.cc.
TEST(FlashAttnBuilder, NeedsAGroupForDecodeContextParallelism) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  fixture.config.parallel.decode_context_parallel_size = 2;
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }),
            "decode_context_parallel_size is 2; dcp_group must be given");
}

}  // namespace
}  // namespace folio::inline v0::backends
