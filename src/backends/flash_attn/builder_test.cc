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
}

TEST(FlashAttnBuilder, Windows_UpToTheMost_AreServedInOneGroup) {
  FlashAttnFixture fixture;
  std::vector<FlashAttentionImpl> many;
  for (int32_t window = 1; window <= 33; ++window) {
    fixture.layer.sliding_window = window;
    many.push_back(fixture.make_impl());
  }
  std::vector<const FlashAttentionImpl*> all;
  for (const FlashAttentionImpl& one : many) all.push_back(&one);
  EXPECT_EQ(message_of([&] { fixture.make_builder(all); }, ErrorCode::kUnsupported),
            "layer layer32 has another window than 32 layers before it; a group may have up to 32 different ones");
  all.pop_back();
  FlashAttentionMetadataBuilder builder = fixture.make_builder(all);
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  fixture.setup.sliding_window = 32;
  fixture.forward(many[31], metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

// A CPU makes them: tests/backends/dcp_schedule_test.cc.
TEST(FlashAttnBuilder, Schedules_OfDividedKv_AreRefusedOnAGpu) {
  FlashAttnFixture fixture;
  if (fixture.context.device().type == DeviceType::kCpu) GTEST_SKIP() << "the context is a CPU's";
  fixture.config.parallel.decode_context_parallel_size = 2;
  fixture.options.aot_schedule = true;
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }, ErrorCode::kUnsupported),
            "aot_schedule is true with a decode_context_parallel_size of 2 on a GPU; there a changed schedule is found "
            "when ranks already exchange what it left out");
}

// The fields that repeat what the lengths say.
TEST(FlashAttnBuilder, Batches_WhoseFieldsSayOtherwiseThanTheLengths_AreRefused) {
  FOLIO_CPU_ONLY("positions on a GPU are not read");
  FlashAttnFixture fixture({}, {"mixed", {40, 17, 64}, {7, 1, 30}});
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  std::vector<int64_t> positions;
  for (int64_t position = 33; position < 40; ++position) positions.push_back(position);
  positions.push_back(16);
  for (int64_t position = 34; position < 64; ++position) positions.push_back(position);
  std::vector<uint8_t> prefilling{1, 0, 0};
  std::vector<int32_t> bounds{40, 20, 64};
  fixture.batch.positions = positions;
  fixture.batch.is_prefilling = prefilling;
  fixture.batch.seq_lens_host_upper_bound = bounds;
  fixture.forward(impl, builder.build(0, fixture.batch));
  EXPECT_EQ(fixture.wrong_output(), "");

  const auto refusal = [&](auto& value, auto wrong) {
    const auto right = value;
    value = static_cast<std::decay_t<decltype(value)>>(wrong);
    const std::string message = message_of([&] { builder.build(0, fixture.batch); });
    value = right;
    return message;
  };
  EXPECT_EQ(refusal(positions[7], 1 << 30),
            "request 1 has positions 1073741824 to 1073741824; its lengths say 16 to 16");
  EXPECT_EQ(refusal(positions[37], 7), "request 2 has positions 34 to 7; its lengths say 34 to 63");
  EXPECT_EQ(refusal(prefilling[2], 7), "request 2 has an is_prefilling of 7; it is 0 or 1");
  EXPECT_EQ(refusal(bounds[2], 63),
            "request 2 has a seq_lens_host_upper_bound of 63; its seq_len is 64, which it must not be below");
  EXPECT_EQ(refusal(bounds[0], 41),
            "request 0 has a seq_lens_host_upper_bound of 41; its seq_len is 40, which it must be while the prompt is "
            "computed");
  fixture.batch.is_prefilling = std::span(prefilling).first(2);
  EXPECT_EQ(message_of([&] { builder.build(0, fixture.batch); }), "is_prefilling has 2 entries; num_reqs is 3");
}

TEST(FlashAttnBuilder, Caches_OfAnotherLayoutThanTheConfigurations_AreRefused) {
  LayerSetup setup;
  setup.layout = KvCacheLayout::kHnd;
  FlashAttnFixture fixture(setup);
  fixture.config.cache.layout = KvCacheLayout::kNhd;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_EQ(message_of([&] { fixture.forward(impl, metadata); }),
            "kv_cache lies in memory as HND, with strides 32 between tokens and 512 between heads; CacheConfig::layout "
            "is NHD");
}

TEST(FlashAttnBuilder, Layers_MadeForAnotherVersion_AreRefused) {
  FlashAttnFixture fixture;
  fixture.options.facts = testing::vllm_on_hopper();
  const FlashAttentionImpl impl = fixture.make_impl();
  fixture.options.facts = testing::vllm_on_ampere();
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }),
            "layer layer0 was made for FlashAttention version 3; the builder's platform has 2");
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

// Encoders have no cache, and an engine gives them a table all the same, or an empty one.
TEST(FlashAttnBuilder, UpdateBlockTable_OfEncoders_TakesAnyTable) {
  LayerSetup setup;
  setup.mask = MaskKind::kNone;
  FlashAttnFixture encoder(setup, {"encoder", {30, 60}, {30, 60}});
  encoder.layer.attn_type = AttentionType::kEncoder;
  const FlashAttentionImpl impl = encoder.make_impl();
  FlashAttentionMetadataBuilder builder = encoder.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, encoder.batch);
  const std::vector<int32_t> one_page(2);
  for (const BlockTableView& table : {BlockTableView{}, BlockTableView{one_page.data(), 2, 1, 1}}) {
    const FlashAttentionMetadata updated = builder.update_block_table(metadata, table, {});
    EXPECT_EQ(updated.block_table.data, table.data);
    impl.forward({}, encoder.query, encoder.key, encoder.value, {}, &updated, encoder.output);
    EXPECT_EQ(encoder.wrong_output(), "");
  }
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
