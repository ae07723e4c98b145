#include "folio/backends/flashinfer/metadata_builder.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "backends/flashinfer/batch_fixture.hpp"
#include "folio/types/error.hpp"

namespace folio::backends {
namespace {

using testing::backend_batch;
using testing::BatchFixture;
using testing::BatchLengths;
using testing::LayerSetup;

std::string message_of(const std::function<void()>& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

/// A group of layers and what its builder is made from.
struct Group {
  explicit Group(const LayerSetup& setup = {}, const BatchLengths& lengths = backend_batch("mixed_small"))
      : fixture(setup, lengths), config(fixture.engine_config()), spec(fixture.spec()), layer(fixture.layer_config()) {
    options.profile = setup.profile;
    options.quantize_query = setup.quantize_query;
    // Sinks, where a test adds a layer with them.
    sinks.assign(static_cast<size_t>(setup.num_heads), 0.5f);
  }

  void add_layer() { impls.emplace_back(fixture.context, layer); }

  FlashInferMetadataBuilder make() {
    if (impls.empty()) add_layer();
    std::vector<AttentionLayer<FlashInferImpl>> layers;
    for (const FlashInferImpl& impl : impls) layers.push_back({"layer" + std::to_string(layers.size()), &impl});
    return FlashInferMetadataBuilder(fixture.context, spec, layers, config, options);
  }

  BatchFixture fixture;
  EngineConfig config;
  AttentionSpec spec;
  FlashInferLayerConfig layer;
  FlashInferOptions options;
  std::vector<FlashInferImpl> impls;
  std::vector<float> sinks;
};

std::string construction_refusal(const std::function<void(Group&)>& change,
                                 ErrorCode code = ErrorCode::kInvalidArgument) {
  Group group;
  change(group);
  return message_of([&] { group.make(); }, code);
}

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
  group.fixture.expect_correct();
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
  decode.fixture.expect_correct();
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
    layer.expect_correct();
  }
}

TEST(FlashInferMetadataBuilderTest, GivesTheSameBitsInAnyBatchWhenBatchInvariant) {
  LayerSetup setup;
  setup.determinism = Determinism::kBatchInvariant;
  const auto first_row = [&](const BatchLengths& lengths) {
    BatchFixture fixture(setup, lengths);
    fixture.run();
    fixture.expect_correct();
    return std::vector<std::byte>(fixture.out_memory.begin(), fixture.out_memory.begin() + 4 * 32 * 2);
  };
  // Equal seeds give the first request the same values whatever follows it.
  const std::vector<std::byte> alone = first_row({"alone", {300}, {1}});
  EXPECT_EQ(first_row({"with_others", {300, 900, 17}, {1, 1, 9}}), alone);
}

TEST(FlashInferMetadataBuilderTest, RefusesConfigurationsItCannotHonour) {
  const auto unsupported = [](const std::function<void(Group&)>& change) {
    return construction_refusal(change, ErrorCode::kUnsupported);
  };
  EXPECT_NE(unsupported([](Group& g) {
              g.config.parallel.decode_context_parallel_size = 2;
            }).find("decode_context_parallel_size is 2; the FlashInfer backend takes 1"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) {
              g.config.compilation.decode_graph_mode = DecodeGraphMode::kFull;
            }).find("decode_graph_mode"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) { g.config.use_block_table_kernels = true; }).find("use_block_table_kernels"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.options.quantize_query = true; }).find("needs fp8_e4m3"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.options.force_kernel = "no-such-kernel"; }).find("no-such-kernel"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) {
              for (int32_t window = 1; window <= 9; ++window) {
                g.layer.sliding_window = window;
                g.add_layer();
              }
            }).find("a group may have up to 8 different ones"),
            std::string::npos);
  Group group;
  group.config.use_block_table_kernels = false;
  group.make();
}

TEST(FlashInferMetadataBuilderTest, RefusesConfigurationsThatContradictThemselves) {
  EXPECT_NE(construction_refusal([](Group& g) {
              g.config.cache.cache_dtype = "float16";
            }).find("with a model of bfloat16 the cache is of that dtype or fp8"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.spec.dtype = DType::kFloat16; }).find("spec has dtype float16"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.config.model.num_attention_heads = 8; }).find("layer0 has 4 q heads"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              g.layer.kv_cache_dtype = "fp8";
              g.add_layer();
            }).find("layer0 has a cache of fp8_e4m3"),
            std::string::npos);
  const Group group;
  EXPECT_EQ(message_of([&] {
              FlashInferMetadataBuilder(group.fixture.context, group.spec,
                                        std::vector<AttentionLayer<FlashInferImpl>>{}, group.config);
            }),
            "No attention layers found in the model.");
  EXPECT_NE(message_of([&] {
              FlashInferMetadataBuilder(group.fixture.context, group.spec,
                                        std::vector<AttentionLayer<FlashInferImpl>>{{"empty", nullptr}}, group.config);
            }).find("layer empty has no implementation"),
            std::string::npos);
}

std::string build_refusal(const std::function<void(Group&, CommonAttentionMetadata&)>& change,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
  Group group;
  CommonAttentionMetadata batch = group.fixture.batch;
  change(group, batch);
  FlashInferMetadataBuilder builder = group.make();
  return message_of([&] { builder.build(0, batch); }, code);
}

TEST(FlashInferMetadataBuilderTest, RefusesBatchesThatContradictThemselves) {
  struct Case {
    std::function<void(Group&, CommonAttentionMetadata&)> change;
    std::string expected;
  };
  const std::vector<int32_t> from_one{1, 2, 3, 8, 13};
  const std::vector<int32_t> falling{0, 1, 0, 6, 12};
  const std::vector<int32_t> short_seq{32, 40, 4, 56};
  const Case cases[] = {
      {[](Group&, auto& b) { b.where = Where::kDevice; }, "on a device"},
      {[](Group& g, auto&) { g.config.scheduler.max_num_seqs = 3; }, "num_reqs is 4; max_num_seqs is 3"},
      {[](Group& g, auto&) { g.config.scheduler.max_num_batched_tokens = 8; },
       "num_actual_tokens is 12; max_num_batched_tokens is 8"},
      {[](Group& g, auto&) { g.config.model.max_model_len = 50; },
       "request 3 has a seq_len of 56; max_model_len is 50"},
      {[](Group&, auto& b) { b.num_reqs = -1; }, "num_reqs is -1"},
      {[](Group&, auto& b) { b.query_start_loc = b.query_start_loc.first(4); }, "query_start_loc has 4 entries"},
      {[](Group&, auto& b) { b.seq_lens = b.seq_lens.first(3); }, "seq_lens has 3 entries"},
      {[](Group&, auto& b) { b.num_actual_tokens = 11; }, "slot_mapping has 12 entries; num_actual_tokens is 11"},
      {[](Group&, auto& b) {
         b.num_actual_tokens = 11;
         b.slot_mapping = {};
       },
       "the requests have 12 query tokens; num_actual_tokens is 11"},
      {[](Group&, auto& b) { b.block_table.num_rows = 3; }, "the block table has 3 rows"},
      {[](Group&, auto& b) { b.block_table.row_stride = 1; }, "row stride of 1"},
      {[](Group&, auto& b) { b.block_table.num_columns = 3; },
       "request 3 has a seq_len of 56; a row of the block table has 3 pages of 16 tokens"},
      {[](Group&, auto& b) { b.max_query_len = 4; }, "request 2 has 5 query tokens; max_query_len is 4"},
      {[](Group&, auto& b) { b.max_seq_len = 50; }, "max_seq_len is 50"},
      {[&](Group&, auto& b) { b.query_start_loc = from_one; }, "query_start_loc begins with 1"},
      {[&](Group&, auto& b) { b.query_start_loc = falling; }, "request 1 has -1 query tokens"},
      {[&](Group&, auto& b) { b.seq_lens = short_seq; }, "request 2 has a seq_len of 4 and 5 query tokens"},
  };
  for (const Case& test : cases) {
    EXPECT_NE(build_refusal(test.change).find(test.expected), std::string::npos) << test.expected;
  }
}

TEST(FlashInferMetadataBuilderTest, RefusesBatchesItHasNoKernelsFor) {
  const auto unsupported = [](const std::function<void(Group&, CommonAttentionMetadata&)>& change) {
    return build_refusal(change, ErrorCode::kUnsupported);
  };
  unsupported([](Group&, auto& b) { b.causal = false; });
  unsupported([](Group&, auto& b) { b.encoder_seq_lens = b.seq_lens; });
  unsupported([](Group&, auto& b) { b.dcp_local_seq_lens = b.seq_lens; });
  unsupported([](Group&, auto& b) { b.logits_indices_padded = b.seq_lens; });
  Group group;
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_NE(message_of([&] { builder.build(16, group.fixture.batch); }, ErrorCode::kUnsupported)
                .find("common_prefix_len is 16"),
            std::string::npos);
}

TEST(FlashInferMetadataBuilderTest, TakesAnEmptyBatch) {
  Group group({}, {"empty", {}, {}});
  FlashInferMetadataBuilder builder = group.make();
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(builder.build(0, group.fixture.batch).split, BatchSplit{});
}

TEST(FlashInferReorder, FollowsTheProfile) {
  const std::vector<int32_t> scheduled{100, 200, 1, 1};
  const std::vector<int32_t> computed{100, 200, 10, 20};
  const auto order_of = [&](BackendProfile profile) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    FlashInferMetadataBuilder builder = group.make();
    std::vector<int32_t> order{0, 1, 2, 3};
    EXPECT_TRUE(builder.reorder_batch(scheduled, computed, [&](int32_t a, int32_t b) {
      std::swap(order[static_cast<size_t>(a)], order[static_cast<size_t>(b)]);
    }));
    return order;
  };
  EXPECT_EQ(order_of(BackendProfile::kNative), (std::vector<int32_t>{2, 3, 0, 1}));
  EXPECT_EQ(order_of(BackendProfile::kVllm2025_12), (std::vector<int32_t>{2, 3, 0, 1}));
  EXPECT_EQ(order_of(BackendProfile::kVllm2025_07), (std::vector<int32_t>{3, 2, 1, 0}));
}

TEST(FlashInferReorder, OfJuly2025TellsBuildWhatToExpect) {
  LayerSetup setup;
  setup.profile = BackendProfile::kVllm2025_07;
  setup.head_size = 64;
  Group group(setup);
  FlashInferMetadataBuilder builder = group.make();
  const auto build = [&] { return builder.build(0, group.fixture.batch); };
  EXPECT_NE(message_of(build).find("reorder_batch has not been called"), std::string::npos);
  const SwapStates no_swap = [](int32_t, int32_t) { ADD_FAILURE() << "the batch is in order"; };
  const std::vector<int32_t> others{1, 1, 4};
  builder.reorder_batch(others, {}, no_swap);
  EXPECT_NE(message_of(build).find("reorder_batch saw 3 requests of 6 tokens; the batch has 4 of 12"),
            std::string::npos);
  const std::vector<int32_t> scheduled{1, 1, 5, 5};
  builder.reorder_batch(scheduled, {}, no_swap);
  EXPECT_EQ(build().split, (BatchSplit{2, 2, 2, 10}));
  group.fixture.run(group.impls.front(), builder);
  group.fixture.expect_correct();
}

TEST(FlashInferProfiles, RefuseWhatTheirOriginalsRefused) {
  const auto refusal = [](BackendProfile profile, ErrorCode code, const std::function<void(Group&)>& change) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    change(group);
    return message_of([&] { group.make().build(0, group.fixture.batch); }, code);
  };
  constexpr BackendProfile k2025_12 = BackendProfile::kVllm2025_12;
  constexpr BackendProfile k2025_07 = BackendProfile::kVllm2025_07;
  const auto windows = [](Group& group) {
    group.add_layer();
    group.layer.sliding_window = 16;
    group.add_layer();
  };
  const auto caps = [](Group& group) {
    group.add_layer();
    group.layer.logits_soft_cap = 30.0f;
    group.add_layer();
  };
  const auto with_sinks = [](Group& group) {
    group.layer.sinks = ConstTensorView(group.sinks.data(), DType::kFloat32, {4});
  };
  const std::string one_set =
      "FlashInfer backend currently only supports models in which all layers share the same values for the following "
      "hyperparameters: `window_left`, `logits_soft_cap`, `sm_scale`.";
  EXPECT_EQ(refusal(k2025_12, ErrorCode::kInvalidArgument, windows),
            "Window left is not the same for all layers. One potential fix is to set disable_sliding_window=True");
  EXPECT_EQ(refusal(k2025_07, ErrorCode::kInvalidArgument, windows), one_set);
  EXPECT_EQ(refusal(k2025_12, ErrorCode::kInvalidArgument, caps), one_set);
  EXPECT_EQ(refusal(k2025_07, ErrorCode::kInvalidArgument, caps), one_set);
  EXPECT_EQ(refusal(k2025_12, ErrorCode::kUnsupported, with_sinks),
            "FlashInfer backend currently does not support attention sinks, please use trtllm on blackwell or flash "
            "attention on earlier GPUs.");
  EXPECT_NE(refusal(k2025_12, ErrorCode::kUnsupported, [](Group& group) { group.spec.page_size = 8; })
                .find("page_size 8 is not supported by FLASHINFER of vllm-2025-12"),
            std::string::npos);
  EXPECT_NE(
      refusal(k2025_12, ErrorCode::kUnsupported, [](Group& group) { group.config.cache.cache_dtype = "bfloat16"; })
          .find("cache_dtype bfloat16"),
      std::string::npos);

  LayerSetup setup;
  setup.profile = k2025_12;
  setup.head_size = 80;
  EXPECT_NE(message_of([&] { Group(setup).make(); }).find("Head size 80 is not supported"), std::string::npos);
  setup.head_size = 64;
  setup.model_dtype = DType::kFloat32;
  EXPECT_NE(message_of([&] { Group(setup).make(); }, ErrorCode::kUnsupported).find("model dtype float32"),
            std::string::npos);
}

TEST(FlashInferProfiles, VerifyDraftsAsDecodesInTheNativeOneOnly) {
  for (BackendProfile profile : {BackendProfile::kNative, BackendProfile::kVllm2025_12}) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    group.config.speculative = SpeculativeConfig{3, false};
    EXPECT_EQ(group.make().reorder_batch_threshold(), profile == BackendProfile::kNative ? 4 : 1);
  }
}

}  // namespace
}  // namespace folio::backends
