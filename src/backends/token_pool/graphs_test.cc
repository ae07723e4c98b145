#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "backends/token_pool/pool_test_util.hpp"
#include "backends/token_pool/replay_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using testing::Replayed;
using Ints = std::vector<int32_t>;

PoolSetup windowed() {
  PoolSetup setup;
  setup.window = 6;
  return setup;
}

void expect_replays_give_attention(const PoolSetup& setup, const PoolLengths& lengths) {
  PoolFixture fixture(setup, lengths);
  TokenPoolBackend backend(fixture.context, fixture.config());
  const int32_t drafts = lengths.fresh[0];
  backend.init_cuda_graph_state(8, 8 * drafts);
  const auto count = static_cast<int32_t>(fixture.num_requests());
  for (const int32_t bs : {count + 4, count}) {  // larger first, as engines capture
    Replayed replayed(fixture, backend, bs);
    replayed.capture();
    EXPECT_EQ(replayed.replay(fixture.layer()), "") << bs;
    EXPECT_EQ(replayed.replay(fixture.full_layer()), "") << bs;
    if (lengths.parents.empty()) {  // trees are planned from the host's
      replayed.host_lengths = false;
      EXPECT_EQ(replayed.replay(fixture.layer()), "") << bs << ", lengths on the device only";
      replayed.host_lengths = true;
    }
    backend.check_plans();
    if (setup.encoder_decoder) {
      PoolFixture& f = fixture;
      write_kv_cache(f.context, f.pool->write_args(1, f.encoder_k, f.encoder_v, f.encoder_out_cache_loc));
      EXPECT_EQ(replayed.replay(fixture.cross_layer()), "") << bs;
    }
  }
}

TEST(TokenPoolGraphs, ReplayedDecodesGiveAttention) {
  const PoolLengths lengths{.mode = ForwardMode::kDecode, .prefix = {3, 17, 40}, .fresh = {1, 1, 1}};
  expect_replays_give_attention({}, lengths);
  expect_replays_give_attention(windowed(), lengths);
  PoolSetup pages = windowed();
  pages.page_size = 16;
  expect_replays_give_attention(pages, lengths);
  PoolLengths encoded = lengths;
  encoded.encoder = {4, 1, 9};
  PoolSetup encoder_decoder;
  encoder_decoder.encoder_decoder = true;
  expect_replays_give_attention(encoder_decoder, encoded);
  encoder_decoder.page_size = 4;
  expect_replays_give_attention(encoder_decoder, encoded);
  encoder_decoder.joint_pages = true;
  expect_replays_give_attention(encoder_decoder, encoded);
}

TEST(TokenPoolGraphs, ReplayedVerificationsGiveAttention) {
  const PoolLengths chains{.mode = ForwardMode::kTargetVerify, .prefix = {3, 17, 9}, .fresh = {4, 4, 4}};
  expect_replays_give_attention({}, chains);
  expect_replays_give_attention(windowed(), chains);
  PoolLengths trees = chains;
  trees.parents = {-1, 0, 0, 1};
  expect_replays_give_attention({}, trees);
  expect_replays_give_attention(windowed(), trees);
}

/// Padding requests verify drafts too: 1 + n positions of row 0, all in the dummy slot, whatever the page size.
TEST(TokenPoolGraphs, VerificationsWithPages_PaddedBatches_GiveAttention) {
  PoolLengths lengths{.mode = ForwardMode::kTargetVerify, .prefix = {3, 17, 30}, .fresh = {4, 4, 4}};
  for (const bool tree : {false, true}) {
    if (tree) lengths.parents = {-1, 0, 0, 1};
    for (const int32_t page_size : {1, 4, 16}) {
      for (PoolSetup setup : {PoolSetup(), windowed()}) {
        SCOPED_TRACE("pages of " + std::to_string(page_size) + (tree ? ", trees" : ""));
        setup.page_size = page_size;
        expect_replays_give_attention(setup, lengths);
      }
    }
  }
}

/// Shapes of different sizes and modes stand beside each other, and the larger leave nothing behind in the smaller.
TEST(TokenPoolGraphs, ShapesStandBesideEachOther) {
  PoolFixture large({}, {.mode = ForwardMode::kDecode, .prefix = {30, 31, 32, 33, 34}, .fresh = {1, 1, 1, 1, 1}});
  TokenPoolBackend backend(large.context, large.config());
  backend.init_cuda_graph_state(8, 32);
  Replayed eight(large, backend, 8);
  eight.capture();
  EXPECT_EQ(eight.replay(large.layer()), "");
  Replayed five(large, backend, 5);
  five.capture();
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(eight.replay(large.layer()), "");
    EXPECT_EQ(five.replay(large.layer()), "");
    backend.init_forward_metadata(large.batch);
    large.clear_output();
    large.forward(backend, large.layer());
    EXPECT_EQ(large.wrong_output(large.layer(), false), "");
  }
}

/// A replay's bits are an eager step's where results do not depend on the batch.
TEST(TokenPoolGraphs, ReplaysEqualEagerStepsBitForBit) {
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    PoolSetup setup = windowed();
    setup.determinism = level;
    PoolFixture fixture(setup, {.mode = ForwardMode::kDecode, .prefix = {300, 1, 2000}, .fresh = {1, 1, 1}});
    EXPECT_EQ(fixture.wrong_step(fixture.full_layer()), "");
    const std::vector<std::byte> eager = fixture.out_memory;
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_cuda_graph_state(8, 8);
    Replayed replayed(fixture, backend, 7);
    replayed.capture();
    EXPECT_EQ(replayed.replay(fixture.full_layer()), "");
    EXPECT_EQ(fixture.out_memory, eager);
  }
}

TEST(TokenPoolGraphs, FillAndPadAsTheOriginal) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {3, 4}, .fresh = {1, 1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  EXPECT_EQ(backend.get_cuda_graph_seq_len_fill_value(), 1);
  GraphInputs inputs(8);
  const auto list = [](const auto& values) { return Ints(values.begin(), values.end()); };
  const ForwardBatch padded = inputs.pad(fixture.batch, 4);
  EXPECT_EQ(padded.batch_size, 4);
  EXPECT_EQ(list(padded.seq_lens), (Ints{4, 5, 1, 1}));
  EXPECT_EQ(padded.seq_lens_sum, 11) << "padding counts";
  EXPECT_EQ(list(padded.req_pool_indices), (Ints{fixture.rows[0], fixture.rows[1], 0, 0}));
  EXPECT_EQ(padded.out_cache_loc[2], 0);
  EXPECT_EQ(padded.out_cache_loc[3], 0);
  // Nothing is left of a larger batch.
  PoolFixture large({}, {.mode = ForwardMode::kDecode, .prefix = {9, 8, 7, 6}, .fresh = {1, 1, 1, 1}});
  inputs.pad(large.batch, 4);
  const ForwardBatch again = inputs.pad(fixture.batch, 4);
  EXPECT_EQ(list(again.seq_lens), (Ints{4, 5, 1, 1}));
  EXPECT_EQ(list(again.req_pool_indices), (Ints{fixture.rows[0], fixture.rows[1], 0, 0}));
  EXPECT_EQ(again.out_cache_loc[3], 0);
  EXPECT_THROW(inputs.pad(fixture.batch, 9), Error);
  EXPECT_THROW(inputs.pad(fixture.batch, 1), Error);
}

TEST(TokenPoolGraphs, RefuseWhatWasNotCaptured) {
  FOLIO_CPU_ONLY("lengths of captured shapes are the device's, and not looked at");
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {3, 4}, .fresh = {1, 1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  const auto message = [&](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "nothing was refused";
  };
  using ::testing::HasSubstr;
  const auto capture = [&](int32_t bs, int32_t tokens, ForwardMode mode) {
    backend.init_forward_metadata_capture_cuda_graph(bs, tokens, fixture.rows, fixture.seq_lens, mode);
  };
  const auto replay = [&](int32_t bs, int64_t sum, const Ints& seq_lens) {
    backend.init_forward_metadata_replay_cuda_graph(bs, fixture.rows, seq_lens, sum, ForwardMode::kDecode, seq_lens);
  };
  EXPECT_THAT(message([&] { capture(2, 2, ForwardMode::kDecode); }), HasSubstr("init_cuda_graph_state"));
  EXPECT_THAT(message([&] { replay(2, 9, fixture.seq_lens); }), HasSubstr("init_cuda_graph_state"));
  EXPECT_THAT(message([&] { backend.init_cuda_graph_state(0, 4); }), HasSubstr("max_bs"));
  Ints buffer(6);
  backend.init_cuda_graph_state(2, 2, buffer);
  for (const ForwardMode mode : {ForwardMode::kExtend, ForwardMode::kMixed, ForwardMode::kDraftExtend}) {
    EXPECT_THAT(message([&] { capture(2, 2, mode); }), HasSubstr("decode, idle and target_verify"));
  }
  EXPECT_THAT(message([&] { capture(3, 3, ForwardMode::kDecode); }), HasSubstr("up to 2"));
  EXPECT_THAT(message([&] { capture(1, 2, ForwardMode::kDecode); }), HasSubstr("num_tokens is 2"));
  EXPECT_THAT(message([&] { capture(2, 2, ForwardMode::kDecode); }), HasSubstr("kv_indices")) << "9 entries into 6";
  const Ints ones{1, 1};
  backend.init_forward_metadata_capture_cuda_graph(2, 2, fixture.rows, ones, ForwardMode::kDecode);
  EXPECT_THAT(message([&] { replay(2, 9, fixture.seq_lens); }), HasSubstr("kv_indices"));
  EXPECT_TRUE(std::holds_alternative<std::monostate>(backend.forward_metadata()));
  EXPECT_THAT(message([&] { replay(1, 1, ones); }), HasSubstr("no batch of 1"));
  EXPECT_THAT(message([&] { replay(2, 1, ones); }), HasSubstr("seq_lens_sum is 1")) << "padding counts";
  EXPECT_THAT(message([&] { replay(2, 2, {1, 2}); }), HasSubstr("seq_lens_sum is 2"));
  EXPECT_THAT(message([&] { replay(2, -1, {1, 1000}); }), HasSubstr("max_context_len"));
  replay(2, 2, ones);
}

}  // namespace
}  // namespace folio::inline v0::backends
