#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchLengths;
using testing::FlashAttnFixture;
using testing::LayerSetup;
using testing::message_of;

/// A batch of an encoder: every token is a query and a key, none is in a cache.
struct EncoderFixture : FlashAttnFixture {
  EncoderFixture(LayerSetup given, const BatchLengths& lengths, AttentionType type)
      : FlashAttnFixture(bidirectional(std::move(given)), lengths) {
    layer.attn_type = type;
    batch.block_table = {};
    batch.slot_mapping = {};
    if (!folio::testing::on_gpu()) batch.seq_lens = {};  // on the host the query lengths say it all
    batch.max_seq_len = 0;
  }
  TensorView step() {
    const FlashAttentionImpl impl = make_impl();
    FlashAttentionMetadataBuilder builder = make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, batch);
    return impl.forward({}, query, key, value, {}, &metadata, output);
  }

 private:
  static LayerSetup bidirectional(LayerSetup setup) {
    setup.mask = MaskKind::kNone;
    setup.window_both_sides = true;
    return setup;
  }
};

TEST(FlashAttnEncoder, LeavesPaddingAloneAndSeesNoOtherRequest) {
  LayerSetup setup;
  setup.padding_tokens = 4;
  setup.padding_slots = 3;
  setup.padding_requests = 2;
  EncoderFixture fixture(setup, {"padded", {5, 1, 33}, {5, 1, 33}}, AttentionType::kEncoderOnly);
  const TensorView returned = fixture.step();
  EXPECT_EQ(returned.shape[0], fixture.padded_rows());
  EXPECT_EQ(fixture.wrong_output(), "");
}

// Bidirectional whatever the batch says: an engine's default is causal.
TEST(FlashAttnEncoder, IsNeverCausal) {
  for (const bool causal : {false, true}) {
    EncoderFixture fixture({}, {"few", {5, 9}, {5, 9}}, AttentionType::kEncoder);
    fixture.batch.causal = causal;
    fixture.step();
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

TEST(FlashAttnEncoder, WindowsReachAsFarToBothSides) {
  FlashAttnFixture fixture;
  fixture.layer.sliding_window = 8;
  const auto window_of = [&fixture](AttentionType type) {
    fixture.layer.attn_type = type;
    return fixture.make_impl().sliding_window();
  };
  EXPECT_EQ(window_of(AttentionType::kEncoder), (SlidingWindow{7, 7}));
  EXPECT_EQ(window_of(AttentionType::kEncoderOnly), (SlidingWindow{7, 7}));
  EXPECT_EQ(window_of(AttentionType::kDecoder), (SlidingWindow{7, 0}));
  EXPECT_EQ(window_of(AttentionType::kEncoderDecoder), (SlidingWindow{7, 0}));
  fixture.layer.sliding_window.reset();
  EXPECT_EQ(window_of(AttentionType::kEncoder), (SlidingWindow{-1, -1}));
}

TEST(FlashAttnEncoder, Windows_InVllmsProfile_ReachToBothSidesOfEncoderOnlyLayersAlone) {
  for (const AttentionType type : {AttentionType::kEncoder, AttentionType::kEncoderOnly}) {
    const bool both_sides = type == AttentionType::kEncoderOnly;
    LayerSetup setup;
    setup.sliding_window = 8;
    EncoderFixture fixture(setup, {"few", {40, 9}, {40, 9}}, type);
    fixture.setup.window_both_sides = both_sides;
    if (!both_sides) fixture.setup.mask = MaskKind::kCausal;  // what such a window leaves
    fixture.options.facts = testing::vllm_on_hopper();
    EXPECT_EQ(fixture.make_impl().sliding_window(), (SlidingWindow{7, both_sides ? 7 : 0}));
    fixture.step();
    EXPECT_EQ(fixture.wrong_output(), "");
  }
}

TEST(FlashAttnEncoder, HasNoCacheToWrite) {
  EncoderFixture fixture({}, {"few", {5, 9}, {5, 9}}, AttentionType::kEncoder);
  const std::vector<std::byte> before = fixture.cache_memory;
  fixture.make_impl().do_kv_cache_update({}, fixture.key, fixture.value, fixture.kv, fixture.slot_mapping);
  EXPECT_EQ(fixture.cache_memory, before);
}

TEST(FlashAttnEncoder, RefusesQuantisedCachesAndMissingKeys) {
  LayerSetup fp8;
  fp8.cache_dtype = "fp8";
  EncoderFixture quantised(fp8, {"few", {5}, {5}}, AttentionType::kEncoder);
  const FlashAttentionImpl impl = quantised.make_impl();
  EXPECT_EQ(message_of([&] { quantised.make_builder({&impl}); }, ErrorCode::kUnsupported),
            "quantization is not supported for encoder attention");
  EncoderFixture plain({}, {"few", {5}, {5}}, AttentionType::kEncoder);
  const FlashAttentionImpl plain_impl = plain.make_impl();
  FlashAttentionMetadataBuilder builder = plain.make_builder({&plain_impl});
  const FlashAttentionMetadata metadata = builder.build(0, plain.batch);
  EXPECT_EQ(message_of([&] { impl.forward({}, plain.query, plain.key, plain.value, {}, &metadata, plain.output); },
                       ErrorCode::kUnsupported),
            "quantization is not supported for encoder attention");
  EXPECT_THROW(plain_impl.forward({}, plain.query, {}, {}, {}, &metadata, plain.output), Error);
  EXPECT_THROW(builder.build(16, plain.batch), Error) << "encoders share no prefixes";
}

// Queries of the decoder, keys of the encoder: more of either, none masked. They are written once; later steps of the
// decoder bring none.
TEST(FlashAttnCross, AttendsToTheEncodersKeys) {
  for (const char* cache_dtype : {"auto", "fp8_e4m3", "fp8_e5m2"}) {
    LayerSetup setup;
    setup.cache_dtype = cache_dtype;
    setup.mask = MaskKind::kNone;
    setup.sinks = true;
    FlashAttnFixture fixture(setup, {"cross", {40, 7, 33}, {3, 7, 1}});
    fixture.layer.attn_type = AttentionType::kEncoderDecoder;
    // The last step's queries; before it the other encoder tokens had been written.
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata first = builder.build(0, fixture.batch);
    fixture.forward(impl, first);
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "");

    fixture.key = fixture.value = {};
    std::fill(fixture.out_memory.begin(), fixture.out_memory.end(), testing::kUnwritten);
    const FlashAttentionMetadata later = builder.build(0, fixture.batch);
    fixture.forward(impl, later);
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
  }
}

TEST(FlashAttnCross, TakesMoreQueriesThanKeysAndTheEncodersLengths) {
  LayerSetup setup;
  setup.mask = MaskKind::kNone;
  setup.share_kv = true;
  FlashAttnFixture fixture(setup, {"cross", {3, 2}, {20, 5}});
  fixture.layer.attn_type = AttentionType::kEncoderDecoder;
  const std::vector<int32_t> encoder_lens = fixture.seq_lens;
  const std::vector<int32_t> decoder_lens{20, 5};
  const std::vector<int64_t> many_slots(100, -1);  // the encoder's tokens, not the queries'
  fixture.batch.slot_mapping = many_slots;
  fixture.batch.max_seq_len = 20;
  fixture.batch.seq_lens = decoder_lens;
  fixture.batch.encoder_seq_lens = encoder_lens;
  fixture.batch.seq_lens_host = decoder_lens;
  fixture.batch.encoder_seq_lens_host = encoder_lens;
  fixture.step();
  EXPECT_EQ(fixture.wrong_output(), "");
}

// An encoder that has not said anything yet: no key at all, and nobody else's.
TEST(FlashAttnCross, GivesZerosForNoKeys) {
  LayerSetup setup;
  setup.mask = MaskKind::kNone;
  setup.share_kv = true;
  FlashAttnFixture fixture(setup, {"cross", {0, 5}, {2, 3}});
  fixture.layer.attn_type = AttentionType::kEncoderDecoder;
  fixture.step();
  EXPECT_EQ(fixture.wrong_output(), "");
  const auto rows = static_cast<std::ptrdiff_t>(2 * setup.num_heads * setup.head_size * 2);
  EXPECT_TRUE(std::all_of(fixture.out_memory.begin(), fixture.out_memory.begin() + rows,
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(FlashAttnTypes, AreOneOfAGroup) {
  FlashAttnFixture fixture;
  const FlashAttentionImpl decoder = fixture.make_impl();
  fixture.layer.attn_type = AttentionType::kEncoderDecoder;
  const FlashAttentionImpl cross = fixture.make_impl();
  EXPECT_EQ(message_of([&] {
              fixture.make_builder({&decoder, &cross});
            }),
            "layer layer1 is for encoder_decoder attention; the layers before it for decoder");
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&decoder});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  EXPECT_EQ(message_of([&] { fixture.forward(cross, metadata); }),
            "the layer is for encoder_decoder attention; the metadata was built for decoder");
}

}  // namespace
}  // namespace folio::inline v0::backends
