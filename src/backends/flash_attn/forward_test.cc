#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::BatchLengths;
using testing::FlashAttnFixture;
using testing::LayerSetup;

const char* const kCacheDtypes[] = {"auto", "fp8_e4m3", "fp8_e5m2"};

void step_and_compare(const LayerSetup& setup, const BatchLengths& lengths) {
  FlashAttnFixture fixture(setup, lengths);
  fixture.step();
  EXPECT_EQ(fixture.wrong_output(), "");
  EXPECT_EQ(fixture.wrong_cache(), "");
}

TEST(FlashAttnForward, IsExactToFloat32InFloat32) {
  LayerSetup setup;
  setup.model_dtype = DType::kFloat32;
  step_and_compare(setup, backend_batch("mixed_small"));
}

TEST(FlashAttnForward, ReturnsThePaddedOutputAndLeavesThePaddingAlone) {
  for (const char* name : {"small_decode", "mixed_small"}) {
    LayerSetup setup;
    setup.padding_tokens = 5;
    setup.padding_slots = 2;
    setup.padding_requests = 2;
    FlashAttnFixture fixture(setup, backend_batch(name));
    const TensorView returned = fixture.step();
    EXPECT_EQ(returned.data, fixture.output.data);
    EXPECT_EQ(returned.shape[0], fixture.padded_rows()) << "what was given, not the rows that count";
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
  }
}

TEST(FlashAttnForward, FillsTheOutputWithZerosWithoutMetadata) {
  FlashAttnFixture fixture({}, backend_batch("small_decode"));
  const std::vector<std::byte> cache = fixture.cache_memory;
  fixture.make_impl().forward({}, {}, {}, {}, {}, nullptr, fixture.output);
  folio::testing::wait_for_device();
  EXPECT_EQ(fixture.out_memory, std::vector<std::byte>(fixture.out_memory.size(), std::byte{0}));
  EXPECT_EQ(fixture.cache_memory, cache);
}

TEST(FlashAttnForward, WritesTheCacheItselfWhereAsked) {
  FlashAttnFixture fixture;
  fixture.layer.update_kv_cache_in_forward = true;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  impl.forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv, &metadata, fixture.output);
  EXPECT_EQ(fixture.wrong_output(), "");
  EXPECT_EQ(fixture.wrong_cache(), "");
}

// The number of tokens written is that of the slots: keys and values are padded longer, slots are not.
TEST(FlashAttnCacheUpdate, WritesAsManyTokensAsThereAreSlots) {
  LayerSetup setup;
  setup.padding_tokens = 3;
  FlashAttnFixture fixture(setup);
  const FlashAttentionImpl impl = fixture.make_impl();
  impl.do_kv_cache_update(fixture.scales(), fixture.key, fixture.value, fixture.kv, fixture.slot_mapping);
  EXPECT_EQ(fixture.wrong_cache(), "");
  std::vector<int64_t> too_many(static_cast<size_t>(fixture.padded_rows()) + 1, -1);
  EXPECT_THROW(impl.do_kv_cache_update(fixture.scales(), fixture.key, fixture.value, fixture.kv, too_many), Error);
}

TEST(FlashAttnForward, ReadsASharedCacheWithoutWriting) {
  for (const char* cache_dtype : kCacheDtypes) {
    LayerSetup setup;
    setup.cache_dtype = cache_dtype;
    setup.share_kv = true;
    FlashAttnFixture fixture(setup);
    ASSERT_EQ(fixture.kv.dtype, DType::kUnset) << "the cache is handed over as bytes";
    fixture.key = ConstTensorView(fixture.k_memory.data(), DType::kBFloat16, {fixture.padded_rows(), 2, 32});
    fixture.value = fixture.key;
    fixture.step();
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "") << "what the layer computed for itself is not written";
  }
}

TEST(FlashAttnScales, AreAppliedOnceInDecodesAndPrefills) {
  for (const char* cache_dtype : {"fp8_e4m3", "fp8_e5m2"}) {
    for (const bool per_head : {false, true}) {
      LayerSetup setup;
      setup.cache_dtype = cache_dtype;
      setup.q_scale = 3.0f;  // of a checkpoint with quantised queries; these are not
      setup.k_scale = 0.5f;
      setup.v_scale = 2.0f;
      setup.scales_per_head = per_head;
      step_and_compare(setup, backend_batch("mixed_small"));
    }
  }
}

TEST(FlashAttnScales, ApplyToFp8Queries) {
  for (const bool per_head : {false, true}) {
    LayerSetup setup;
    setup.cache_dtype = "fp8_e4m3";
    setup.quantize_query = true;
    setup.q_scale = 0.5f;
    setup.k_scale = 2.0f;
    setup.v_scale = 0.25f;
    setup.scales_per_head = per_head;
    step_and_compare(setup, backend_batch("mixed_small"));
  }
}

TEST(FlashAttnScales, AreRefusedForCachesThatAreNotFp8) {
  FlashAttnFixture fixture;
  fixture.setup.k_scale = 0.5f;
  EXPECT_THROW(fixture.step(), Error);
  fixture.setup.k_scale = 1.0f;
  fixture.setup.v_scale = 0.5f;
  EXPECT_THROW(fixture.step(), Error);
  EXPECT_EQ(fixture.cache_memory, FlashAttnFixture().cache_memory) << "nothing was written";
}

// Not causal, a decoder's queries see all keys of their requests; a window ends at the query all the same.
TEST(FlashAttnNonCausal, SeesLaterKeysWhereTheLayerHasNoWindow) {
  for (const char* cache_dtype : kCacheDtypes) {
    LayerSetup setup;
    setup.cache_dtype = cache_dtype;
    setup.mask = MaskKind::kNone;
    setup.sinks = true;
    FlashAttnFixture fixture(setup);
    fixture.batch.causal = false;
    fixture.step();
    EXPECT_EQ(fixture.wrong_output(), "");
  }
  LayerSetup windowed;
  windowed.sliding_window = 24;
  FlashAttnFixture fixture(windowed);
  fixture.batch.causal = false;
  fixture.step();
  EXPECT_EQ(fixture.wrong_output(), "");
}

}  // namespace
}  // namespace folio::inline v0::backends
