#include "folio/backends/flashinfer/impl.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::BatchFixture;
using testing::message_of;

struct ImplTest : ::testing::Test {
  BatchFixture fixture{{}, backend_batch("mixed_small")};
  FlashInferLayerConfig config = fixture.layer_config();

  std::string refusal(ErrorCode code = ErrorCode::kInvalidArgument) {
    return message_of([&] { FlashInferImpl(fixture.context, config); }, code);
  }
};

TEST_F(ImplTest, DerivesWhatItsOriginalDerives) {
  config.sliding_window = 128;
  config.logits_soft_cap = 30.0f;
  config.kv_cache_dtype = "fp8_e5m2";
  const FlashInferImpl impl(fixture.context, config);
  EXPECT_EQ(impl.window_left(), 127) << "a window of 128 keys reaches 127 to the left";
  EXPECT_EQ(impl.num_queries_per_kv(), 2);
  EXPECT_EQ(impl.num_heads(), 4);
  EXPECT_EQ(impl.num_kv_heads(), 2);
  EXPECT_EQ(impl.head_size(), 32);
  EXPECT_EQ(impl.kv_cache_dtype(), DType::kFloat8E5M2);
  EXPECT_EQ(impl.per_layer_parameters(), (PerLayerParameters{127, 30.0f, config.scale, false}));
  EXPECT_FALSE(impl.kv_sharing_target_layer_name().has_value());
  EXPECT_TRUE(FlashInferImpl::can_return_lse_for_decode);
  config.sliding_window.reset();
  EXPECT_EQ(FlashInferImpl(fixture.context, config).window_left(), -1);
}

TEST_F(ImplTest, RefusesAttentionThatIsNotADecoders) {
  for (AttentionType type : {AttentionType::kEncoder, AttentionType::kEncoderOnly, AttentionType::kEncoderDecoder}) {
    config.attn_type = type;
    EXPECT_EQ(refusal(ErrorCode::kUnsupported),
              "Encoder self-attention and encoder/decoder cross-attention are not implemented for FlashInferImpl");
  }
}

TEST_F(ImplTest, RefusesSinksOfOtherHeads) {
  const std::vector<float> sinks(3);
  config.sinks = ConstTensorView(sinks.data(), DType::kFloat32, {3});
  EXPECT_EQ(refusal(),
            "Sinks must have the same number of heads as the number of heads in the layer. Expected 4, but got 3.");
}

TEST_F(ImplTest, ConvertsSinksToFloat32) {
  const std::vector<uint16_t> ones(8, 0x3f80);  // bfloat16 1.0
  ConstTensorView view(ones.data(), DType::kBFloat16, {4});
  view.strides[0] = 2;
  config.sinks = view;
  FlashInferImpl impl(fixture.context, config);
  EXPECT_EQ(std::vector<float>(impl.sinks().begin(), impl.sinks().end()), std::vector<float>(4, 1.0f));
  EXPECT_TRUE(impl.per_layer_parameters().has_sinks);

  const std::vector<float> loaded{1.0f, 2.0f, 3.0f, 4.0f};
  impl.set_sinks(ConstTensorView(loaded.data(), DType::kFloat32, {4}));
  EXPECT_EQ(std::vector<float>(impl.sinks().begin(), impl.sinks().end()), loaded);
  EXPECT_THROW(impl.set_sinks({}), Error);
  config.sinks = ConstTensorView(ones.data(), DType::kFloat8E4M3, {4});
  EXPECT_NE(refusal().find("fp8_e4m3"), std::string::npos);
  config.sinks = {};
  FlashInferImpl without(fixture.context, config);
  EXPECT_THROW(without.set_sinks(ConstTensorView(loaded.data(), DType::kFloat32, {4})), Error);
}

TEST_F(ImplTest, RefusesNumbersThatMakeNoLayer) {
  const auto refused = [&](auto&& change) {
    config = fixture.layer_config();
    change(config);
    return refusal();
  };
  const std::vector<float> slopes(3);
  EXPECT_NE(refused([](auto& c) { c.num_heads = 3; }).find("num_heads is 3"), std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.num_kv_heads = 0; }).find("num_kv_heads 0"), std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.head_size = 0; }).find("head_size is 0"), std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.scale = 0.0f; }).find("scale is 0"), std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.scale = std::numeric_limits<float>::infinity(); }).find("scale is inf"),
            std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.sliding_window = 0; }).find("sliding_window is 0"), std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.logits_soft_cap = -1.0f; }).find("logits_soft_cap is -1"), std::string::npos);
  EXPECT_NE(refused([&](auto& c) { c.alibi_slopes = slopes; }).find("alibi_slopes has 3"), std::string::npos);
  EXPECT_NE(refused([](auto& c) { c.kv_cache_dtype = "int4"; }).find("int4"), std::string::npos);
}

/// forward's refusals: each must leave the cache and the output as they were.
struct ForwardRefusal : ::testing::Test {
  BatchFixture fixture{{}, backend_batch("mixed_small")};
  FlashInferImpl impl{fixture.context, fixture.layer_config()};
  FlashInferMetadataBuilder builder = fixture.make_builder(impl);
  FlashInferMetadata metadata = builder.build(0, fixture.batch);
  OutputQuantization quantization;

  std::string refusal(ErrorCode code = ErrorCode::kInvalidArgument) {
    const std::vector<std::byte> cache_before = fixture.cache_memory;
    const std::vector<std::byte> out_before = fixture.out_memory;
    const std::string message = message_of(
        [&] {
          impl.forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache, &metadata,
                       fixture.output, quantization);
        },
        code);
    EXPECT_EQ(fixture.cache_memory, cache_before);
    EXPECT_EQ(fixture.out_memory, out_before);
    return message;
  }
};

TEST_F(ForwardRefusal, WithoutAnOutput) {
  fixture.output.data = nullptr;
  EXPECT_EQ(refusal(), "Output tensor must be provided.");
}

TEST_F(ForwardRefusal, OfQueriesInAnotherDtype) {
  fixture.query.dtype = DType::kFloat16;
  EXPECT_EQ(refusal(), "Query dtype mismatch: expected bfloat16, got float16");
}

TEST_F(ForwardRefusal, OfTensorsThatDoNotFitTheBatch) {
  fixture.query.shape[0] = fixture.num_tokens() - 1;
  EXPECT_EQ(refusal(), "query has shape [11, 4, 32]; [tokens, 4, 32] with at least 12 tokens is needed");
  fixture.query.shape[0] = fixture.num_tokens();
  fixture.output.shape[1] = 3;
  EXPECT_NE(refusal().find("output has shape [12, 3, 32]"), std::string::npos);
  fixture.output.shape[1] = 4;
  fixture.key.shape[0] = 3;
  EXPECT_NE(refusal().find("key has shape [3, 2, 32]"), std::string::npos);
  fixture.key.shape[0] = fixture.num_tokens();
  fixture.value.strides[2] = 2;
  EXPECT_NE(refusal().find("value has stride 2"), std::string::npos);
  fixture.value.strides[2] = 1;
  fixture.key.data = nullptr;
  EXPECT_NE(refusal().find("key has no data"), std::string::npos);
}

TEST_F(ForwardRefusal, OfLayersThatTheMetadataIsNotFor) {
  FlashInferLayerConfig config = fixture.layer_config();
  config.sliding_window = 5;
  impl = FlashInferImpl(fixture.context, config);
  EXPECT_NE(refusal().find("the layer's window_left is 4; the metadata was planned for -1"), std::string::npos);
}

TEST_F(ForwardRefusal, OfMetadataOfAnEarlierStep) {
  builder.build(0, fixture.batch);
  refusal(ErrorCode::kStalePlan);
}

}  // namespace
}  // namespace folio::inline v0::backends
