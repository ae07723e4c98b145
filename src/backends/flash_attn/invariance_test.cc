#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "backends/flash_attn/flash_attn_fixture.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchLengths;
using testing::FlashAttnFixture;
using testing::LayerSetup;

LayerSetup small_setup(Determinism determinism) {
  LayerSetup setup;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  setup.head_size = 16;
  setup.determinism = determinism;
  return setup;
}

// A request's bits depend neither on its neighbours nor on padding, in batches that a graph would be padded to and in
// others.
TEST(FlashAttnInvariance, HoldsInAHundredRandomBatches) {
  const BatchLengths fixed{"fixed", {700, 64, 300}, {3, 1, 40}};
  LayerSetup setup = small_setup(Determinism::kBatchInvariant);
  FlashAttnFixture alone(setup, fixed);
  alone.step();
  ASSERT_EQ(alone.wrong_output(), "");
  std::mt19937 random(5);
  for (uint32_t round = 0; round < 100; ++round) {
    BatchLengths lengths = fixed;
    for (auto i = random() % 6; i > 0; --i) {
      lengths.query_lens.push_back(1 + static_cast<int32_t>(random() % 2 == 0 ? 0 : random() % 30));
      lengths.seq_lens.push_back(lengths.query_lens.back() + static_cast<int32_t>(random() % 400));
    }
    setup.padding_requests = static_cast<int32_t>(random() % 3);
    setup.padding_tokens = static_cast<int32_t>(random() % 5);
    setup.padding_slots = setup.padding_tokens / 2;
    FlashAttnFixture among(setup, lengths);
    if (round % 2 == 1) {
      among.config.compilation = {DecodeGraphMode::kFull, 64};
      among.config.scheduler = {16, 512};
      among.config.model.max_model_len = 4096;
    }
    among.step();
    ASSERT_TRUE(std::equal(alone.out_memory.begin(), alone.out_memory.end(), among.out_memory.begin())) << round;
  }
}

// Nor, at the next level, on whether a token was computed as a decode or inside a prefill's chunk.
TEST(FlashAttnInvariance, OfTheScheduleHoldsForDecodesAndChunks) {
  const LayerSetup setup = small_setup(Determinism::kScheduleInvariant);
  FlashAttnFixture chunk(setup, {"chunk", {3000, 200}, {20, 5}});
  chunk.step();
  ASSERT_EQ(chunk.wrong_output(), "");
  FlashAttnFixture decodes(setup, {"decodes", {3000, 200}, {1, 1}});
  const auto row_bytes = static_cast<std::ptrdiff_t>(setup.num_heads * setup.head_size * 2);
  constexpr std::ptrdiff_t kLastRows[] = {19, 24};
  for (std::ptrdiff_t i = 0; i < 2; ++i) {
    std::copy_n(chunk.q_memory.begin() + kLastRows[i] * row_bytes, row_bytes, decodes.q_memory.begin() + i * row_bytes);
  }
  decodes.step();
  ASSERT_EQ(decodes.wrong_output(), "");
  for (std::ptrdiff_t i = 0; i < 2; ++i) {
    const auto in_chunk = chunk.out_memory.begin() + kLastRows[i] * row_bytes;
    EXPECT_TRUE(std::equal(in_chunk, in_chunk + row_bytes, decodes.out_memory.begin() + i * row_bytes)) << i;
  }
}

TEST(FlashAttnInvariance, HoldsForEncoders) {
  LayerSetup setup = small_setup(Determinism::kBatchInvariant);
  const auto encode = [&setup](const std::vector<int32_t>& lens) {
    FlashAttnFixture fixture(setup, {"encoder", lens, lens});
    fixture.layer.attn_type = AttentionType::kEncoderOnly;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
    EXPECT_EQ(metadata.max_num_splits, 1);
    impl.forward({}, fixture.query, fixture.key, fixture.value, {}, &metadata, fixture.output);
    return fixture.out_memory;
  };
  const std::vector<std::byte> alone = encode({300, 20});
  const std::vector<std::byte> among = encode({300, 20, 500, 1});
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), among.begin()));
}

}  // namespace
}  // namespace folio::inline v0::backends
