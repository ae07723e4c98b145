#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"

/// FlashAttentionOptions::plan_from_device_lengths: steps whose lengths the host does not know.
namespace folio::inline v0::backends {
namespace {

using testing::BatchLengths;
using testing::FlashAttnFixture;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

/// A step without host lengths, as an engine hands it over that has not yet heard which drafts were taken.
struct DeviceLengthsFixture : FlashAttnFixture {
  explicit DeviceLengthsFixture(LayerSetup given = {},
                                const BatchLengths& lengths = testing::backend_batch("mixed_small"))
      : FlashAttnFixture(std::move(given), lengths) {
    options.plan_from_device_lengths = true;
    config.scheduler = {64, 512};
    config.model.max_model_len = 4096;
    batch.query_start_loc_host = batch.seq_lens_host = {};
    batch.max_seq_len = batch.block_table.num_columns * setup.page_size;  // a bound, no maximum
  }
};

#define FOLIO_GPU_ONLY() \
  if (!folio::testing::on_gpu()) GTEST_SKIP() << "a CPU's lengths are the host's"

TEST(FlashAttnDeviceLengths, Steps_OfAnyKind_MatchFloat64) {
  FOLIO_GPU_ONLY();
  LayerSetup plain;
  LayerSetup features;
  features.sliding_window = 24;
  features.sinks = features.alibi = true;
  features.padding_requests = 2;
  features.padding_tokens = features.padding_slots = 3;
  LayerSetup fp8;
  fp8.cache_dtype = "fp8";
  fp8.k_scale = 0.5f;
  fp8.v_scale = 2.0f;
  for (const char* lengths : {"small_decode", "mixed_small", "mixed_medium"}) {
    for (const LayerSetup& setup : {plain, features, fp8}) {
      for (const bool graphs : {false, true}) {
        SCOPED_TRACE(std::string(lengths) + (graphs ? ", graphs" : ""));
        DeviceLengthsFixture fixture(setup, testing::backend_batch(lengths));
        if (graphs) fixture.config.compilation = {DecodeGraphMode::kFull, 16};
        fixture.options.steps_in_flight = 1;
        const FlashAttentionImpl impl = fixture.make_impl();
        FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
        const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
        EXPECT_TRUE(metadata.seq_lens.empty());
        fixture.forward(impl, metadata);
        EXPECT_EQ(fixture.wrong_output(), "");
        EXPECT_EQ(fixture.wrong_cache(), "");
      }
    }
  }
}

TEST(FlashAttnDeviceLengths, CrossAttention_ReadsTheEncodersLengths) {
  FOLIO_GPU_ONLY();
  LayerSetup setup;
  setup.mask = MaskKind::kNone;
  setup.share_kv = true;
  DeviceLengthsFixture fixture(setup, {"cross", {33, 2}, {20, 5}});
  fixture.layer.attn_type = AttentionType::kEncoderDecoder;
  const std::vector<int32_t> encoder_lens = fixture.seq_lens;
  const std::vector<int32_t> decoder_lens{20, 5};
  fixture.batch.seq_lens = decoder_lens;
  fixture.batch.encoder_seq_lens = encoder_lens;
  fixture.step();
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnDeviceLengths, Prefixes_AreNotShared) {
  FOLIO_GPU_ONLY();
  LayerSetup setup;
  setup.shared_prefix = 32;
  DeviceLengthsFixture fixture(setup, {"few", {64, 50, 33, 80}, {4, 1, 1, 7}});
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(32, fixture.batch);
  EXPECT_FALSE(metadata.use_cascade);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnDeviceLengths, Bounds_ThatContradict_AreRefused) {
  FOLIO_GPU_ONLY();
  DeviceLengthsFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const auto refusal = [&](const auto& change) {
    CommonAttentionMetadata batch = fixture.batch;
    change(batch);
    return message_of([&] { builder.build(0, batch); });
  };
  using Batch = CommonAttentionMetadata;
  EXPECT_THAT(refusal([](Batch& batch) { batch.max_seq_len = 5000; }), HasSubstr("max_model_len"));
  EXPECT_THAT(refusal([](Batch& batch) { batch.block_table.num_columns = 1; }), HasSubstr("row of the block table"));
  const std::vector<int32_t> bounds(4, 4000);
  EXPECT_THAT(refusal([&](Batch& batch) { batch.seq_lens_host_upper_bound = bounds; }),
              HasSubstr("request 0 has a seq_lens_host_upper_bound of 4000"));
  fixture.options.plan_from_device_lengths = false;
  FlashAttentionMetadataBuilder host_builder = fixture.make_builder({&impl});
  EXPECT_THAT(message_of([&] { host_builder.build(0, fixture.batch); }), HasSubstr("needed for planning"));
}

TEST(FlashAttnDeviceLengths, OnACpu_AreRefused) {
  FOLIO_CPU_ONLY("a GPU has them");
  DeviceLengthsFixture fixture;
  const FlashAttentionImpl impl = fixture.make_impl();
  EXPECT_EQ(message_of([&] { fixture.make_builder({&impl}); }),
            "plan_from_device_lengths is set; the context is a CPU's, whose lengths are the host's");
}

}  // namespace
}  // namespace folio::inline v0::backends
