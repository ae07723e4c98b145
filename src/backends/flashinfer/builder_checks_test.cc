#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::Group;
using testing::LayerSetup;
using testing::message_of;

std::string construction_refusal(const std::function<void(Group&)>& change,
                                 ErrorCode code = ErrorCode::kInvalidArgument) {
  Group group;
  change(group);
  return message_of([&] { group.make(); }, code);
}

TEST(FlashInferMetadataBuilderTest, RefusesConfigurationsItCannotHonour) {
  const auto unsupported = [](const std::function<void(Group&)>& change) {
    return construction_refusal(change, ErrorCode::kUnsupported);
  };
  EXPECT_NE(construction_refusal([](Group& g) { g.config.parallel.decode_context_parallel_size = 2; },
                                 ErrorCode::kInvalidArgument)
                .find("decode_context_parallel_size is 2; dcp_group must be given"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              g.config.compilation.decode_graph_mode = DecodeGraphMode::kFull;
            }).find("decode_graph_mode is kFull, which fixes shapes: max_num_seqs and max_model_len must be given"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) {
              g.config.use_block_table_kernels = true;
              g.options.profile = BackendProfile::kVllm2025_07;
            }).find("use_block_table_kernels"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              g.config.use_block_table_kernels = true;
              g.options.dispatch = KernelDispatch();
            }).find("use_block_table_kernels is true in the engine's configuration and not given in the dispatch"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) {
              DispatchFacts facts;
              facts.profile = BackendProfile::kVllm2026_03;
              g.options.dispatch = KernelDispatch(facts);
            }).find("the dispatch was made for the profile vllm-2026-03; the builder's is native"),
            std::string::npos);
  LayerSetup december;
  december.profile = BackendProfile::kVllm2025_12;
  december.head_size = 64;
  december.quantize_query = true;
  EXPECT_NE(message_of([&] { Group(december).make(); }).find("vllm-2025-12 decides by itself"), std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.options.quantize_query = true; }).find("needs fp8_e4m3"),
            std::string::npos);
  EXPECT_NE(construction_refusal([](Group& g) { g.options.force_kernel = "no-such-kernel"; }).find("no-such-kernel"),
            std::string::npos);
  EXPECT_NE(unsupported([](Group& g) {
              for (int32_t window = 1; window <= 33; ++window) {
                g.layer.sliding_window = window;
                g.add_layer();
              }
            }).find("a group may have up to 32 different ones"),
            std::string::npos);
  Group group;
  group.config.use_block_table_kernels = false;
  group.make();
}

TEST(FlashInferOptions, ThatNothingUses_AreRefused) {
  using Profile = BackendProfile;
  const auto refusal = [](Profile profile, const std::function<void(Group&)>& change) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    Group group(setup);
    change(group);
    return message_of([&] { group.make(); });
  };
  EXPECT_EQ(refusal(Profile::kVllm2025_12, [](Group& g) { g.options.output_dtype = DType::kFloat8E4M3; }),
            "output_dtype is fp8_e4m3; the profile vllm-2025-12 takes quantised outputs from forward to forward");
  EXPECT_EQ(refusal(Profile::kNative, [](Group& g) { g.options.output_dtype = DType::kFloat8E5M2; }),
            "output_dtype is fp8_e5m2; fp8_e4m3 and fp4_e2m1x2 are offered");
  EXPECT_EQ(refusal(Profile::kVllm2025_12, [](Group& g) { g.options.force_tensor_cores = true; }),
            "force_tensor_cores is set; only the profile vllm-2025-07 has it");
  EXPECT_EQ(refusal(Profile::kNative,
                    [](Group& g) {
                      g.options.capture_sizes = {1, 2};
                    }),
            "capture_sizes has 2 entries; decode_graph_mode is kNone");
  EXPECT_EQ(
      refusal(Profile::kNative, [](Group& g) { g.options.quantize_query = g.options.disable_q_quantization = true; }),
      "quantize_query and disable_q_quantization are both set");
  EXPECT_EQ(refusal(Profile::kVllm2025_07, [](Group& g) { g.options.workspace_buffer_size = 1 << 20; }),
            "workspace_buffer_size is 1048576; the profile vllm-2025-07 has 256 MiB");
  EXPECT_EQ(refusal(Profile::kVllm2025_12,
                    [](Group& g) {
                      g.options.workspace_buffer_size = 1 << 20;
                      g.config.determinism = Determinism::kBatchInvariant;
                    }),
            "workspace_buffer_size is 1048576; the profile vllm-2025-12 has 2 GiB under batch invariance");
}

/// Facts that layers, builder, dispatch and engine hold are compared, with both values in the message.
TEST(FlashInferGroupFacts, OfLayerBuilderAndDispatch_AreCompared) {
  constexpr BackendProfile kDecember = BackendProfile::kVllm2025_12;
  const auto dispatch = [](BackendProfile profile, bool batch_invariant) {
    DispatchFacts facts;
    facts.profile = profile;
    facts.batch_invariant = batch_invariant;
    facts.device = {Platform::kCuda, DeviceCapability{10, 0}};
    facts.has_flashinfer_cubin = true;
    return KernelDispatch(facts);
  };
  const auto refusal = [&](const std::function<void(Group&)>& change) {
    LayerSetup setup;
    setup.profile = kDecember;
    setup.head_size = 64;
    setup.layout = KvCacheLayout::kHnd;
    Group group(setup);
    group.layer.dispatch = group.options.dispatch = dispatch(kDecember, false);
    change(group);
    return message_of([&] { group.make(); });
  };
  EXPECT_EQ(refusal([](Group& g) {
              g.layer.profile = BackendProfile::kNative;
              g.layer.dispatch.reset();
            }),
            "layer layer0 has the profile native; its builder's is vllm-2025-12");
  EXPECT_EQ(refusal([](Group& g) { g.layer.profile = BackendProfile::kNative; }),
            "the layer's profile is native; its dispatch was made for vllm-2025-12");
  EXPECT_EQ(refusal([](Group& g) { g.layer.disable_q_quantization = true; }),
            "layer layer0 has a disable_q_quantization of true; its builder's is false");
  EXPECT_EQ(refusal([](Group& g) { g.options.disable_q_quantization = true; }),
            "layer layer0 has a disable_q_quantization of false; its builder's is true");
  EXPECT_EQ(
      refusal([](Group& g) { g.layer.dispatch.reset(); }),
      "layer layer0 has a support_trtllm_attn of false; its builder's dispatch says true: both are to be given one "
      "dispatch");
  EXPECT_EQ(refusal([&](Group& g) { g.options.dispatch = dispatch(BackendProfile::kVllm2026_03, false); }),
            "the dispatch was made for the profile vllm-2026-03; the builder's is vllm-2025-12");
  EXPECT_EQ(refusal([](Group& g) { g.config.determinism = Determinism::kBatchInvariant; }),
            "the engine's configuration is batch-invariant; the dispatch is not batch-invariant");
  EXPECT_EQ(refusal([&](Group& g) { g.options.dispatch = dispatch(kDecember, true); }),
            "the engine's configuration is not batch-invariant; the dispatch is batch-invariant");
}

/// Both values are in the message, and the refusal comes before a new key is written.
TEST(FlashInferCacheLayout, OtherThanTheConfigurations_IsRefusedByForward) {
  using enum KvCacheLayout;
  for (const BackendProfile profile : {BackendProfile::kNative, BackendProfile::kVllm2025_07}) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    setup.layout = kHnd;
    Group group(setup);
    group.config.cache.layout = kNhd;
    FlashInferMetadataBuilder builder = group.make();
    if (profile == BackendProfile::kVllm2025_07) {
      std::vector<int32_t> scheduled, computed;
      for (int32_t r = 0; r < group.fixture.batch.num_reqs; ++r) {
        scheduled.push_back(group.fixture.batch.query_len(r));
        computed.push_back(group.fixture.batch.num_computed_tokens(r));
      }
      builder.reorder_batch(scheduled, computed, [](int32_t, int32_t) { FAIL() << "the batch is in order"; });
    }
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    const std::vector<std::byte> cache = group.fixture.cache_memory;
    testing::BatchFixture& step = group.fixture;
    EXPECT_EQ(message_of([&] {
                group.impls.front().forward(step.scales(), step.query, step.key, step.value, step.kv_cache, &metadata,
                                            step.output);
              }),
              "kv_cache lies in memory as HND, with strides 64 between tokens and 1024 between heads; "
              "CacheConfig::layout is NHD");
    EXPECT_EQ(step.cache_memory, cache);
  }
}

TEST(FlashInferCacheLayout, RequiredOnBlackwell_IsComparedWithTheConfigurations) {
  const auto make = [](BackendProfile profile, int32_t major, KvCacheLayout layout) {
    DispatchFacts facts;
    facts.profile = profile;
    facts.device = {Platform::kCuda, DeviceCapability{major, 0}};
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    setup.layout = layout;
    Group group(setup);
    group.layer.dispatch = group.options.dispatch = KernelDispatch(facts);
    group.make();
  };
  using enum KvCacheLayout;
  EXPECT_EQ(message_of([&] { make(BackendProfile::kVllm2025_12, 10, kNhd); }),
            "CacheConfig::layout is NHD; vllm-2025-12 requires HND on devices of compute capability 10.x");
  EXPECT_EQ(message_of([&] { make(BackendProfile::kVllm2026_03, 10, kNhd); }),
            "CacheConfig::layout is NHD; vllm-2026-03 requires HND on devices of compute capability 10.x");
  make(BackendProfile::kVllm2025_12, 10, kHnd);
  make(BackendProfile::kVllm2026_03, 10, kHnd);
  make(BackendProfile::kVllm2025_12, 9, kNhd);
  make(BackendProfile::kVllm2025_07, 10, kNhd);
  make(BackendProfile::kNative, 10, kNhd);
}

TEST(FlashInferProfiles, Head256WithPages16_OnBlackwell_IsRefused) {
  const auto make = [](BackendProfile profile, int32_t minor, int32_t page_size) {
    DispatchFacts facts;
    facts.profile = profile;
    facts.device = {Platform::kCuda, DeviceCapability{10, minor}};
    LayerSetup setup;
    setup.layout = KvCacheLayout::kHnd;
    setup.profile = profile;
    setup.head_size = 256;
    setup.page_size = page_size;
    Group group(setup);
    group.layer.dispatch = group.options.dispatch = KernelDispatch(facts);
    group.make();
  };
  EXPECT_EQ(
      message_of([&] { make(BackendProfile::kVllm2025_12, 0, 16); }),
      "There is a bug in FlashInfer block_size 16 head size 256 support. Please avoid this combination by passing "
      "--block-size 32 or --block-size 64.");
  message_of([&] { make(BackendProfile::kVllm2026_03, 0, 16); });
  make(BackendProfile::kVllm2025_12, 0, 32);
  make(BackendProfile::kVllm2025_12, 3, 16);
  make(BackendProfile::kVllm2025_07, 0, 16);
  make(BackendProfile::kNative, 0, 16);
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
      {[](Group&, auto& b) { b.block_table.data = nullptr; }, "the block table has no data"},
      {[](Group& g, auto& b) {
         g.config.use_block_table_kernels = true;
         b.block_table.data = nullptr;
       },
       "the block table has no data"},
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
  for (const int32_t prefix : {-16, 8, 17}) {
    EXPECT_NE(message_of([&] { builder.build(prefix, group.fixture.batch); }).find("a multiple of the page size, 16"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
