#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "backends/flashinfer/group_test_util.hpp"
#include "core/allocation_test_util.hpp"
#include "folio/quantize.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::BatchLengths;
using testing::Group;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

constexpr BackendProfile k2025_12 = BackendProfile::kVllm2025_12;
constexpr BackendProfile k2026_03 = BackendProfile::kVllm2026_03;

/// A dispatch on a GPU that has, or has not, block-table kernels.
KernelDispatch dispatch_of(BackendProfile profile, bool blackwell, std::optional<bool> force = std::nullopt,
                           bool batch_invariant = false) {
  DispatchFacts facts;
  facts.profile = profile;
  facts.device = {Platform::kCuda, DeviceCapability{blackwell ? 10 : 9, 0}};
  facts.has_flashinfer_cubin = true;
  facts.has_module = [](std::string_view) { return true; };
  facts.use_block_table_kernels = force;
  facts.batch_invariant = batch_invariant;
  return KernelDispatch(facts);
}

Group vllm_group(BackendProfile profile, bool blackwell, const std::string& cache_dtype, const BatchLengths& lengths,
                 std::optional<bool> force = std::nullopt) {
  LayerSetup setup;
  setup.profile = profile;
  setup.head_size = 64;
  if (blackwell) setup.layout = KvCacheLayout::kHnd;  // what the profiles require there
  setup.cache_dtype = cache_dtype;
  if (cache_dtype != "auto") {
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
  }
  Group group(setup, lengths);
  group.layer.dispatch = group.options.dispatch = dispatch_of(profile, blackwell, force);
  group.config.use_block_table_kernels = force;
  return group;
}

TEST(BlockTablePath, ServesWholeBatchesWhenForced) {
  for (const std::string name : {"small_decode", "small_prefill", "mixed_small", "mixed_medium"}) {
    for (const KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
      for (const bool rich : {false, true}) {
        LayerSetup setup;
        setup.layout = layout;
        setup.sinks = rich;
        if (rich) {
          setup.sliding_window = 24;
          setup.logits_soft_cap = 5.0f;
          setup.cache_dtype = "fp8";
          setup.k_scale = 0.5f;
          setup.v_scale = 2.0f;
          setup.padding_requests = 2;
          setup.padding_tokens = 3;
        }
        Group group(setup, backend_batch(name));
        group.config.use_block_table_kernels = true;
        FlashInferMetadataBuilder builder = group.make();
        EXPECT_TRUE(builder.use_trtllm_decode_attention());
        const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
        EXPECT_TRUE(metadata.prefill_use_trtllm && metadata.decode_use_trtllm);
        EXPECT_EQ(metadata.planned.num_requests, 0) << "nothing is planned for nothing";
        group.fixture.run(group.impls.front(), builder);
        EXPECT_EQ(group.fixture.wrong_output(), "") << name;
        EXPECT_EQ(group.fixture.wrong_cache(), "");
      }
    }
  }
}

TEST(BlockTablePath, VerifiesSeveralDraftTokensADecode) {
  Group group({}, {"drafts", {40, 33, 64, 50}, {4, 4, 4, 17}});
  group.config.speculative = SpeculativeConfig{3, false};
  group.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_EQ(metadata.split, (BatchSplit{3, 1, 12, 17})) << "tables are sliced by requests, not by tokens";
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(group.fixture.wrong_output(), "");
}

TEST(BlockTablePath, AllocatesNothingOnceWarm) {
  const TableChecks none(false);
  Group group;
  group.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder builder = group.make();
  const auto step = [&] {
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    group.impls.front().forward(group.fixture.scales(), group.fixture.query, group.fixture.key, group.fixture.value,
                                group.fixture.kv_cache, &metadata, group.fixture.output);
  };
  step();
  const int64_t warm = folio::testing::num_allocations();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

TEST(BlockTablePath, MetadataGoesStaleToo) {
  Group group;
  group.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata old = builder.build(0, group.fixture.batch);
  builder.build(0, group.fixture.batch);
  EXPECT_THAT(message_of(
                  [&] {
                    group.impls.front().forward(group.fixture.scales(), group.fixture.query, group.fixture.key,
                                                group.fixture.value, group.fixture.kv_cache, &old,
                                                group.fixture.output);
                  },
                  ErrorCode::kStalePlan),
              HasSubstr("of build 1; its builder has built 2 times"));
}

TEST(VllmPaths, FollowTheDispatch) {
  const BatchLengths& mixed = backend_batch("mixed_small");
  struct Case {
    BackendProfile profile;
    bool blackwell;
    std::string cache_dtype;
    std::optional<bool> force;
    bool prefill, decode;
    DType q;
  };
  const DType model = DType::kBFloat16;
  const Case cases[] = {
      {k2025_12, false, "auto", std::nullopt, false, false, model},
      {k2025_12, true, "auto", std::nullopt, true, true, model},
      {k2025_12, true, "fp8", std::nullopt, true, true, DType::kFloat8E4M3},
      // Forcing off stops prefill too: the original does not pass it on.
      {k2025_12, true, "auto", false, false, false, model},
      {k2025_12, true, "fp8", false, false, false, model},
      {k2025_12, false, "fp8", true, false, false, model},
      // Queries of e5m2 are offered by no kernel: they stay as the model has them, and prefills with them planned.
      {k2025_12, true, "fp8_e5m2", std::nullopt, false, true, model},
      {k2026_03, true, "auto", std::nullopt, true, true, model},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(std::string(to_string(test.profile)) + " " + test.cache_dtype);
    Group group = vllm_group(test.profile, test.blackwell, test.cache_dtype, mixed, test.force);
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    EXPECT_EQ(metadata.prefill_use_trtllm, test.prefill);
    EXPECT_EQ(metadata.decode_use_trtllm, test.decode);
    EXPECT_EQ(metadata.q_data_type, test.q);
    if (metadata.q_data_type != model) continue;
    group.fixture.run(group.impls.front(), builder);
    EXPECT_EQ(group.fixture.wrong_output(), "");
  }
}

/// Prefills over an fp8 cache with 16-bit queries go through a copy; decodes are planned or not: a batch in two parts.
TEST(VllmPaths, MayServeABatchInTwoParts) {
  Group group = vllm_group(k2025_12, true, "fp8_e5m2", backend_batch("mixed_small"));
  FlashInferMetadataBuilder builder = group.make();
  const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  EXPECT_EQ(metadata.planned.first_request, 2);
  EXPECT_EQ(metadata.planned.num_requests, 2);
  EXPECT_EQ(metadata.planned.first_token, 2);
  EXPECT_EQ(metadata.planned.num_tokens, 10);
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(group.fixture.wrong_output(), "");
}

TEST(VllmPaths, DequantiseForPrefillsWithSixteenBitQueries) {
  for (const BackendProfile profile : {k2025_12, k2026_03}) {
    Group group = vllm_group(profile, true, "fp8", backend_batch("mixed_small"), true);
    group.layer.disable_q_quantization = group.options.disable_q_quantization = true;
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    EXPECT_TRUE(metadata.prefill_use_trtllm);
    EXPECT_EQ(metadata.q_data_type, DType::kBFloat16);
    group.fixture.setup.q_scale = 3.0f;  // a checkpoint's: of 16-bit queries it is nobody's
    group.fixture.run(group.impls.front(), builder);
    EXPECT_EQ(group.fixture.wrong_output(), "") << "every scale once";
  }
}

TEST(VllmPaths, TheQueryDtypesFallbackIsOfOneBuild) {
  Group group = vllm_group(k2025_12, true, "fp8", {"shared", {40, 40}, {1, 1}});
  FlashInferMetadataBuilder builder = group.make();
  EXPECT_EQ(builder.build(0, group.fixture.batch).q_data_type, DType::kFloat8E4M3);
  EXPECT_EQ(builder.build(16, group.fixture.batch).q_data_type, DType::kBFloat16) << "a cascade is planned";
  EXPECT_EQ(builder.build(0, group.fixture.batch).q_data_type, DType::kFloat8E4M3) << "the original's stays";
}

TEST(VllmPaths, SinksAndDifferentLayersNeedBlockTablesThroughout) {
  const auto layers = [](Group& group, bool sinks) {
    if (sinks) group.layer.sinks = ConstTensorView(group.sinks.data(), DType::kFloat32, {4});
    group.add_layer();
    group.layer.sliding_window = 16;
    group.add_layer();
  };
  const std::string no_sinks =
      "FlashInfer backend currently does not support attention sinks, please use trtllm on blackwell or flash "
      "attention "
      "on earlier GPUs.";
  Group served = vllm_group(k2025_12, true, "auto", backend_batch("mixed_small"));
  layers(served, true);
  FlashInferMetadataBuilder builder = served.make();
  builder.build(0, served.fixture.batch);
  Group hopper = vllm_group(k2025_12, false, "auto", backend_batch("mixed_small"));
  layers(hopper, true);
  EXPECT_EQ(message_of([&] { hopper.make(); }, ErrorCode::kUnsupported), no_sinks);
  Group differ = vllm_group(k2025_12, false, "auto", backend_batch("mixed_small"));
  layers(differ, false);
  EXPECT_EQ(message_of([&] { differ.make().build(0, differ.fixture.batch); }),
            "Window left is not the same for all layers. One potential fix is to set disable_sliding_window=True");
  // December: prefills over an e5m2 cache are planned, so a batch of decodes alone is refused too; March: it is taken.
  for (const BackendProfile profile : {k2025_12, k2026_03}) {
    Group decodes = vllm_group(profile, true, "fp8_e5m2", backend_batch("small_decode"));
    layers(decodes, false);
    FlashInferMetadataBuilder of_decodes = decodes.make();
    if (profile == k2025_12) {
      EXPECT_THAT(message_of([&] { of_decodes.build(0, decodes.fixture.batch); }), HasSubstr("Window left"));
    } else {
      EXPECT_TRUE(of_decodes.build(0, decodes.fixture.batch).decode_use_trtllm);
    }
  }
}

TEST(BlockTablePath, EmptyRequestAmongDecodes_IsServed) {
  for (const std::vector<int32_t>& query_lens : {std::vector<int32_t>{1, 0, 1}, {0, 1, 1}, {1, 1, 0}}) {
    std::vector<int32_t> seq_lens{20, 40, 33};
    for (size_t i = 0; i < 3; ++i) seq_lens[i] *= query_lens[i];
    Group group({}, {"decodes", seq_lens, query_lens});
    group.config.use_block_table_kernels = true;
    FlashInferMetadataBuilder builder = group.make();
    EXPECT_EQ(builder.build(0, group.fixture.batch).split.num_decodes, 3);
    group.fixture.run(group.impls.front(), builder);
    EXPECT_EQ(group.fixture.wrong_output(), "");
  }
}

TEST(BlockTablePath, TableWithoutData_IsRefused) {
  Group group;
  group.config.use_block_table_kernels = true;
  FlashInferMetadataBuilder builder = group.make();
  FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
  metadata.block_table.data = nullptr;  // the prefills' rows begin behind the decodes'
  const auto& fixture = group.fixture;
  EXPECT_EQ(message_of([&] {
              group.impls.front().forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache,
                                          &metadata, fixture.output);
            }),
            "block_tables has no data; seq_lens has keys");
}

/// A layer that says that it takes fp8 queries takes them, whatever its builder planned for.
TEST(FlashInferForward, Fp8QueriesOfADefaultBuilder_GiveTheOraclesOutput) {
  for (const bool per_head : {false, true}) {
    LayerSetup setup;
    setup.cache_dtype = "fp8";
    setup.quantize_query = true;
    setup.q_scale = 0.25f;
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
    setup.scales_per_head = per_head;
    setup.sliding_window = 30;
    setup.sinks = true;
    Group group(setup);
    group.options.quantize_query = false;
    FlashInferMetadataBuilder builder = group.make();
    EXPECT_TRUE(group.impls.front().supports_quant_query_input());
    EXPECT_EQ(builder.q_data_type(), DType::kBFloat16);
    group.fixture.run(group.impls.front(), builder);
    EXPECT_EQ(group.fixture.wrong_output(), "");
    group.impls.clear();
    group.layer.disable_q_quantization = group.options.disable_q_quantization = true;
    FlashInferMetadataBuilder disabled = group.make();
    EXPECT_EQ(message_of([&] { group.fixture.run(group.impls.front(), disabled); }),
              "Query dtype mismatch: expected bfloat16, got fp8_e4m3");
  }
}

/// The vLLM profiles with fp8 queries, in their block-table kernels.
TEST(VllmPaths, Fp8Queries_GiveTheOraclesOutput) {
  for (const BackendProfile profile : {k2025_12, k2026_03}) {
    for (const std::string name : {"small_decode", "mixed_small", "small_prefill"}) {
      LayerSetup setup;
      setup.profile = profile;
      setup.head_size = 64;
      setup.layout = KvCacheLayout::kHnd;
      setup.cache_dtype = "fp8";
      setup.quantize_query = true;
      setup.q_scale = 0.25f;
      setup.k_scale = 0.5f;
      setup.v_scale = 2.0f;
      Group group(setup, backend_batch(name));
      group.options.quantize_query = false;  // the profile decides
      group.layer.dispatch = group.options.dispatch = dispatch_of(profile, true);
      FlashInferMetadataBuilder builder = group.make();
      EXPECT_EQ(builder.build(0, group.fixture.batch).q_data_type, DType::kFloat8E4M3);
      group.fixture.run(group.impls.front(), builder);
      EXPECT_EQ(group.fixture.wrong_output(), "") << to_string(profile) << ' ' << name;
      EXPECT_EQ(group.fixture.wrong_cache(), "");
    }
  }
}

/// March 2026 writes the cache by a call of its own: `forward` leaves it as it is.
TEST(VllmPaths, CacheOfMarch2026_IsWrittenByItsOwnCall) {
  Group group = vllm_group(k2026_03, true, "auto", backend_batch("mixed_small"));
  FlashInferMetadataBuilder builder = group.make();
  const auto& fixture = group.fixture;
  const FlashInferImpl& impl = group.impls.front();
  const std::vector<std::byte> before = fixture.cache_memory;
  const FlashInferMetadata metadata = builder.build(0, fixture.batch);
  impl.forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache, &metadata,
               fixture.output);
  EXPECT_EQ(fixture.cache_memory, before);
  ConstTensorView short_key = fixture.key;
  short_key.shape[0] = 3;
  EXPECT_THAT(message_of([&] {
                impl.do_kv_cache_update(fixture.scales(), short_key, fixture.value, fixture.kv_cache,
                                        metadata.slot_mapping);
              }),
              HasSubstr("key has shape [3, 2, 64]"));
  impl.do_kv_cache_update(fixture.scales(), fixture.key, fixture.value, fixture.kv_cache, metadata.slot_mapping);
  EXPECT_EQ(fixture.wrong_cache(), "");
  impl.forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache, &metadata,
               fixture.output);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(VllmProfiles, ReportWhatTheirOriginalsHad) {
  const auto make = [](BackendProfile profile, bool blackwell, Determinism determinism, int32_t heads = 4,
                       bool force_tensor_cores = false) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    setup.determinism = determinism;
    setup.num_heads = heads;
    if (blackwell) setup.layout = KvCacheLayout::kHnd;
    Group group(setup);
    const bool asks = profile != BackendProfile::kVllm2025_07 && profile != BackendProfile::kNative;
    if (asks) {
      const bool invariant = determinism >= Determinism::kBatchInvariant;
      group.layer.dispatch = group.options.dispatch = dispatch_of(profile, blackwell, std::nullopt, invariant);
    }
    group.options.force_tensor_cores = force_tensor_cores;
    group.config.speculative = SpeculativeConfig{3, true};
    return group.make();
  };
  constexpr Determinism kNone = Determinism::kRunToRun;
  constexpr Determinism kInvariant = Determinism::kBatchInvariant;
  constexpr BackendProfile k2025_07 = BackendProfile::kVllm2025_07;
  EXPECT_EQ(make(k2025_12, true, kInvariant).split_sizes(), (SplitSizes{2048, 4096, true}));
  EXPECT_EQ(make(k2025_12, true, kNone).split_sizes(), (SplitSizes{-1, -1, false}));
  EXPECT_EQ(make(k2025_07, true, kInvariant).split_sizes(), SplitSizes{});
  EXPECT_EQ(make(BackendProfile::kNative, true, kInvariant).split_sizes(), (SplitSizes{2048, 2048, false}));
  EXPECT_EQ(make(k2025_07, true, kNone).workspace_buffer_size(), 268435456u);
  EXPECT_EQ(make(k2025_12, true, kNone).workspace_buffer_size(), 413138944u);
  EXPECT_EQ(make(k2026_03, true, kInvariant).workspace_buffer_size(), 2147483648u);
  EXPECT_GT(make(BackendProfile::kNative, true, kNone).workspace_buffer_size(), 0u);
  EXPECT_FALSE(make(k2025_07, true, kNone).use_tensor_cores()) << "2 q heads a KV head";
  EXPECT_FALSE(make(k2025_07, true, kNone, 8).use_tensor_cores()) << "4";
  EXPECT_TRUE(make(k2025_07, true, kNone, 10).use_tensor_cores()) << "5";
  EXPECT_TRUE(make(k2025_07, true, kNone, 4, true).use_tensor_cores()) << "forced";
  EXPECT_TRUE(make(k2025_12, true, kNone).use_tensor_cores());
  EXPECT_EQ(make(k2025_12, true, kNone).reorder_batch_threshold(), 1 + 3) << "parallel drafting counts since 2026";
  EXPECT_EQ(make(k2026_03, true, kNone).reorder_batch_threshold(), 1 + 2 * 3);
  EXPECT_EQ(make(k2025_12, false, kNone).reorder_batch_threshold(), 1);
  EXPECT_EQ(make(BackendProfile::kNative, false, kNone).reorder_batch_threshold(), 1 + 2 * 3);
}

TEST(LayerQuestions, AnswerByProfile) {
  const testing::BatchFixture fixture({}, backend_batch("small_decode"));
  const auto layer = [&](BackendProfile profile, bool blackwell, const std::string& cache_dtype, bool disable = false) {
    FlashInferLayerConfig config = fixture.layer_config();
    config.profile = profile;
    config.kv_cache_dtype = cache_dtype;
    config.disable_q_quantization = disable;
    if (profile != BackendProfile::kNative) config.dispatch = dispatch_of(profile, blackwell);
    return FlashInferImpl(fixture.context, config);
  };
  for (const QuantKey key : {QuantKey::kFp8StaticTensorSym, QuantKey::kNvfp4}) {
    EXPECT_TRUE(layer(k2025_12, true, "fp8").fused_output_quant_supported(key));
    EXPECT_FALSE(layer(k2025_12, true, "auto").fused_output_quant_supported(key));
    EXPECT_FALSE(layer(k2025_12, false, "fp8").fused_output_quant_supported(key));
    EXPECT_FALSE(layer(BackendProfile::kVllm2025_07, true, "fp8").fused_output_quant_supported(key));
    EXPECT_TRUE(layer(BackendProfile::kNative, false, "auto").fused_output_quant_supported(key));
  }
  EXPECT_FALSE(layer(k2025_12, true, "fp8").fused_output_quant_supported(QuantKey::kFp8DynamicTokenSym));
  EXPECT_FALSE(
      layer(BackendProfile::kNative, true, "fp8").fused_output_quant_supported(QuantKey::kFp8DynamicTensorSym));
  EXPECT_TRUE(layer(k2025_12, true, "fp8").supports_quant_query_input());
  EXPECT_FALSE(layer(k2025_12, true, "fp8", true).supports_quant_query_input());
  EXPECT_FALSE(layer(k2025_12, false, "fp8").supports_quant_query_input());
  EXPECT_TRUE(layer(BackendProfile::kNative, false, "fp8").supports_quant_query_input());
  EXPECT_FALSE(layer(BackendProfile::kNative, false, "fp8", true).supports_quant_query_input());
  EXPECT_FALSE(layer(BackendProfile::kNative, false, "auto").supports_quant_query_input()) << "no kernel takes them";
}

TEST(LayerQuestions, SinksAreReadAgainAfterLoading) {
  LayerSetup setup;
  setup.sinks = true;
  testing::BatchFixture fixture(setup, backend_batch("small_decode"));
  std::vector<uint16_t> weights(4, 0);
  FlashInferLayerConfig config = fixture.layer_config();
  config.sinks = ConstTensorView(weights.data(), DType::kBFloat16, {4});
  FlashInferImpl impl(fixture.context, config);
  FlashInferMetadataBuilder builder = fixture.make_builder(impl);
  for (size_t head = 0; head < 4; ++head) {
    weights[head] = float_to_bfloat16(fixture.sinks[head]);
    fixture.sinks[head] = bfloat16_to_float(weights[head]);
  }
  impl.process_weights_after_loading();
  fixture.run(impl, builder);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(LayerQuestions, JulysParametersAreJulys) {
  const testing::BatchFixture fixture({}, backend_batch("small_decode"));
  std::vector<std::string> lines;
  FlashInferLayerConfig config = fixture.layer_config();
  config.use_irope = true;
  config.log = OnceLog([&](LogLevel level, std::string_view line) {
    EXPECT_EQ(level, LogLevel::kWarning);
    lines.emplace_back(line);
  });
  EXPECT_THAT(message_of([&] { FlashInferImpl(fixture.context, config); }), HasSubstr("use_irope is set"));
  config.profile = BackendProfile::kVllm2025_07;
  const FlashInferImpl july(fixture.context, config);
  const FlashInferImpl second_layer(fixture.context, config);
  EXPECT_EQ(lines,
            std::vector<std::string>{"Using irope in FlashInfer is not supported yet, it will fall back to global "
                                     "attention for long context."});
  config.blocksparse_params = true;
  EXPECT_THAT(message_of([&] { FlashInferImpl(fixture.context, config); }, ErrorCode::kUnsupported),
              HasSubstr("blocksparse_params are given"));
  std::vector<std::byte> memory(64, std::byte{7});
  const TensorView output(memory.data(), DType::kBFloat16, {1, 4, 8});
  july.forward({}, {}, {}, {}, {}, nullptr, output);
  EXPECT_EQ(memory, std::vector<std::byte>(64, std::byte{7})) << "July left the output of a profiling run alone";
  const float scale = 1.0f;
  EXPECT_EQ(message_of(
                [&] {
                  july.forward({}, {}, {}, {}, {}, nullptr, output, {&scale, {}});
                },
                ErrorCode::kUnsupported),
            "fused output quantization is not yet supported for FlashInferImpl")
      << "asked before it is known to be a profiling run";
}

}  // namespace
}  // namespace folio::inline v0::backends
