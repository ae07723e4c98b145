#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::FlashAttnFixture;
using testing::LayerSetup;
using testing::message_of;

TEST(FlashAttnImpl, RefusesWhatContradictsItself) {
  const auto refusal = [](const auto& change) {
    FlashAttnFixture fixture;
    change(fixture.layer);
    return message_of([&] { fixture.make_impl(); });
  };
  using Layer = FlashAttentionLayerConfig;
  EXPECT_NE(refusal([](Layer& layer) { layer.num_kv_heads = 3; }), "");
  EXPECT_NE(refusal([](Layer& layer) { layer.head_size = 0; }), "");
  EXPECT_NE(refusal([](Layer& layer) { layer.scale = 0.0f; }), "");
  EXPECT_NE(refusal([](Layer& layer) { layer.sliding_window = 0; }), "");
  EXPECT_NE(refusal([](Layer& layer) { layer.logits_soft_cap = -1.0f; }), "");
  EXPECT_NE(refusal([](Layer& layer) { layer.kv_cache_dtype = "int8"; }), "");
  EXPECT_NE(refusal([](Layer& layer) { layer.attn_type = static_cast<AttentionType>(9); }), "");
  const std::vector<float> slopes(3);
  EXPECT_NE(refusal([&](Layer& layer) { layer.alibi_slopes = slopes; }), "");
}

TEST(FlashAttnImpl, WantsASinkForEveryHead) {
  FlashAttnFixture fixture;
  const std::vector<float> sinks(3);
  fixture.layer.sinks = ConstTensorView(sinks.data(), DType::kFloat32, {3});
  EXPECT_EQ(message_of([&] { fixture.make_impl(); }),
            "Sinks must have the same number of heads as the number of heads in the layer");
}

TEST(FlashAttnImpl, TakesSinksOfSixteenBits) {
  FlashAttnFixture fixture;
  const std::vector<uint16_t> bits{0x3f80, 0xbf00, 0x0000, 0x4000};  // 1, -0.5, 0, 2 in bfloat16
  fixture.layer.sinks = ConstTensorView(bits.data(), DType::kBFloat16, {4});
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_EQ(std::vector<float>(impl.sinks().begin(), impl.sinks().end()),
            (std::vector<float>{1.0f, -0.5f, 0.0f, 2.0f}));
}

TEST(FlashAttnImpl, SaysWhatTheLayerIs) {
  LayerSetup setup;
  setup.sliding_window = 9;
  setup.logits_soft_cap = 5.0f;
  setup.sinks = true;
  FlashAttnFixture fixture(setup);
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_EQ(impl.per_layer_parameters(), (PerLayerParameters{8, 5.0f, fixture.layer.scale, true}));
  EXPECT_EQ(impl.num_heads(), 4);
  EXPECT_EQ(impl.num_kv_heads(), 2);
  EXPECT_EQ(impl.num_queries_per_kv(), 2);
  EXPECT_EQ(impl.head_size(), 32);
  EXPECT_EQ(impl.scale(), fixture.layer.scale);
  EXPECT_EQ(impl.attn_type(), AttentionType::kDecoder);
  EXPECT_EQ(impl.kv_cache_dtype(), DType::kBFloat16);
  EXPECT_EQ(impl.sinks().size(), 4u);
  EXPECT_TRUE(impl.alibi_slopes().empty());
  EXPECT_FALSE(impl.kv_sharing_target_layer_name().has_value());
  EXPECT_TRUE(FlashAttentionImpl::can_return_lse_for_decode);
  EXPECT_TRUE(FlashAttentionImpl::supports_quant_query_input);
  EXPECT_EQ(impl.flash_attn_version(), 3);
  fixture.layer.logits_soft_cap.reset();
  EXPECT_EQ(fixture.make_impl().logits_soft_cap(), 0.0f) << "none is off";
}

TEST(FlashAttnImplOfVllm, RefusesFp8CachesAndSinksWhereItsKernelsHaveNone) {
  LayerSetup fp8;
  fp8.cache_dtype = "fp8";
  FlashAttnFixture quantised(fp8);
  quantised.options.facts = testing::vllm_on_ampere();
  EXPECT_EQ(message_of([&] { quantised.make_impl(); }, ErrorCode::kUnsupported),
            "FlashAttention does not support fp8 kv-cache on this device.");
  quantised.options.facts = testing::vllm_on_hopper();
  EXPECT_NO_THROW(quantised.make_impl());
  LayerSetup sinks;
  sinks.sinks = true;
  FlashAttnFixture sunk(sinks);
  sunk.options.facts = testing::vllm_on_ampere();
  EXPECT_EQ(message_of([&] { sunk.make_impl(); }), "Sinks are only supported in FlashAttention 3");
  sunk.options.facts = testing::vllm_on_hopper();
  EXPECT_NO_THROW(sunk.make_impl());
}

TEST(FlashAttnImplOfVllm, LogsItsVersionOnce) {
  std::vector<std::string> lines;
  const OnceLog log([&lines](LogLevel level, std::string_view text) {
    if (level == LogLevel::kInfo) lines.emplace_back(text);
  });
  FlashAttnFixture fixture;
  for (int i = 0; i < 2; ++i) FlashAttentionImpl(fixture.context, fixture.layer, testing::vllm_on_hopper(), log);
  EXPECT_EQ(lines, std::vector<std::string>{"Using FlashAttention version 3"});
}

TEST(FlashAttnImplOfVllm, ComputesNothingWithoutAVersion) {
  FlashAttnFixture fixture;
  fixture.options.facts.profile = BackendProfile::kVllm2026_03;  // on a CPU
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_FALSE(impl.flash_attn_version().has_value());
  EXPECT_EQ(message_of([&] { impl.forward({}, {}, {}, {}, {}, nullptr, fixture.output); }),
            "FlashAttention version not detected.");
  EXPECT_EQ(message_of([&] { impl.forward({}, {}, {}, {}, {}, nullptr, {}); }), "Output tensor must be provided.");
}

TEST(FlashAttnImplOfVllm, RefusesQuantisedOutputs) {
  FlashAttnFixture fixture;
  fixture.options.facts = testing::vllm_on_hopper();
  const FlashAttentionImpl impl = fixture.make_impl();
  const float scale = 1.0f;
  OutputQuantization quantization;
  quantization.scale = &scale;
  EXPECT_EQ(message_of([&] { impl.forward({}, {}, {}, {}, {}, nullptr, fixture.output, quantization); },
                       ErrorCode::kUnsupported),
            "fused output quantization is not yet supported for FlashAttentionImpl");
  fixture.options.output_dtype = DType::kFloat8E4M3;
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }, ErrorCode::kUnsupported),
            "fused output quantization is not yet supported for FlashAttentionImpl");
}

TEST(FlashAttnImpl, SaysWhichQuantisedOutputsThereAre) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  const float scale = 1.0f;
  OutputQuantization quantization;
  quantization.scale = &scale;
  EXPECT_EQ(
      message_of([&] { impl.forward({}, fixture.query, {}, {}, fixture.kv, &metadata, fixture.output, quantization); },
                 ErrorCode::kUnsupported),
      "fused output quantization is not yet supported for FlashAttentionImpl; it is with metadata of builders whose "
      "output_dtype is fp8 or fp4_e2m1x2");
  fixture.options.output_dtype = DType::kFloat16;
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }),
            "output_dtype is float16; the model's, bfloat16, fp8 and fp4_e2m1x2 are offered");
}

// Its validation takes e5m2 and its code does not: it raises when it computes. The native profile computes.
TEST(FlashAttnImplOfVllm, RaisesForE5m2OnceItComputes) {
  LayerSetup setup;
  setup.cache_dtype = "fp8_e5m2";
  FlashAttnFixture fixture(setup);
  fixture.options.facts = testing::vllm_on_hopper();
  ASSERT_TRUE(FlashAttentionBackend::supports_kv_cache_dtype("fp8_e5m2", fixture.options.facts));
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  EXPECT_EQ(message_of([&] { builder.build(0, fixture.batch); }), "Unrecognized FP8 dtype: fp8_e5m2");
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch, /*fast_build=*/true);
  EXPECT_EQ(
      message_of([&] { impl.forward(fixture.scales(), fixture.query, {}, {}, fixture.kv, &metadata, fixture.output); }),
      "Unrecognized FP8 dtype: fp8_e5m2");
}

TEST(FlashAttnImplOfVllm, GetsQuantisedQueriesWithFp8Caches) {
  LayerSetup setup;
  setup.cache_dtype = "fp8";
  setup.quantize_query = true;
  setup.q_scale = 0.5f;
  FlashAttnFixture fixture(setup);
  fixture.options.quantize_query.reset();
  fixture.options.facts = testing::vllm_on_hopper();
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  EXPECT_EQ(builder.q_data_type(), DType::kFloat8E4M3);
  fixture.forward(impl, builder.build(0, fixture.batch));
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnForward, ChecksShapesAndDtypesBeforeItWrites) {
  FlashAttnFixture fixture;
  fixture.layer.update_kv_cache_in_forward = true;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  const std::vector<std::byte> cache = fixture.cache_memory;
  const auto forward = [&](const ConstTensorView& query, const ConstTensorView& key, const TensorView& kv,
                           const TensorView& output) {
    return message_of([&] { impl.forward(fixture.scales(), query, key, fixture.value, kv, &metadata, output); });
  };
  ConstTensorView short_query = fixture.query;
  --short_query.shape[0];
  EXPECT_NE(forward(short_query, fixture.key, fixture.kv, fixture.output).find("query has shape"), std::string::npos);
  ConstTensorView wrong_query = fixture.query;
  wrong_query.dtype = DType::kFloat16;
  EXPECT_EQ(forward(wrong_query, fixture.key, fixture.kv, fixture.output),
            "Query dtype mismatch: expected bfloat16, got float16");
  TensorView narrow = fixture.output;
  --narrow.shape[2];
  EXPECT_NE(forward(fixture.query, fixture.key, fixture.kv, narrow).find("output has shape"), std::string::npos);
  ConstTensorView short_key = fixture.key;
  --short_key.shape[0];
  EXPECT_NE(forward(fixture.query, short_key, fixture.kv, fixture.output).find("key has shape"), std::string::npos);
  TensorView flat = fixture.kv;
  flat.rank = 4;
  EXPECT_NE(forward(fixture.query, fixture.key, flat, fixture.output), "");
  EXPECT_EQ(fixture.cache_memory, cache);
}

}  // namespace
}  // namespace folio::inline v0::backends
