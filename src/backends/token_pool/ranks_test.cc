// The backend over ranks: every rank's outputs are attention of its heads over the undivided sequences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/token_pool/pool_test_util.hpp"
#include "backends/token_pool/refusal_test_util.hpp"
#include "backends/token_pool/replay_test_util.hpp"
#include "core/instrumented_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using distributed::ProcessGroup;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using testing::refusal;
using testing::Replayed;

const PoolLengths kDividedDecodes{
    .mode = ForwardMode::kDecode, .prefix = {0, 1, 40, 600, 17}, .fresh = {1, 1, 1, 1, 1}};
const PoolLengths kDividedExtends{
    .mode = ForwardMode::kExtend, .prefix = {0, 5, 520, 20, 0}, .fresh = {7, 1, 20, 40, 1}};
const PoolLengths kDividedChains{.mode = ForwardMode::kTargetVerify, .prefix = {6, 510}, .fresh = {4, 4}};

using Division = std::tuple<int32_t, int32_t, std::string>;  ///< world, interleave, dcp_comm_backend

class TokenPoolRanks : public ::testing::TestWithParam<Division> {
 protected:
  /// A step's forwards of all layers that the setup has, on every rank.
  void expect_attention(PoolSetup setup, const PoolLengths& lengths) {
    const auto& [world, interleave, combine] = GetParam();
    setup.interleave = interleave;
    setup.combine = combine;
    testing::run_ranks(world, [&setup, &lengths](ProcessGroup& group) {
      PoolSetup own = setup;
      own.group = &group;
      PoolFixture fixture(own, lengths);
      TokenPoolBackend backend(fixture.context, fixture.config());
      backend.init_forward_metadata(fixture.batch);
      const auto* prefill = std::get_if<PrefillMetadata>(&backend.forward_metadata());
      std::vector<RadixAttention> layers{fixture.layer()};
      if (setup.window) layers.push_back(fixture.full_layer());
      if (setup.encoder_decoder) layers.push_back(fixture.cross_layer());
      for (const RadixAttention& layer : layers) {
        fixture.clear_output();
        fixture.forward(backend, layer);
        EXPECT_EQ(fixture.wrong_output(layer, prefill != nullptr && prefill->use_ragged), "")
            << "rank " << group.rank() << ", " << to_string(lengths.mode) << ", window " << layer.sliding_window_size;
        if (!layer.is_cross_attention) {
          EXPECT_EQ(fixture.wrong_cache(layer.layer_id), "") << group.rank();
        }
      }
      backend.check_plans();
    });
  }
};

TEST_P(TokenPoolRanks, GiveAttention) {
  for (const auto& [page_size, num_heads] : {std::pair(1, 4), {16, 4}, {1, 2}}) {
    PoolSetup setup;
    setup.num_heads = num_heads;
    setup.page_size = page_size;
    SCOPED_TRACE("pages of " + std::to_string(page_size) + ", heads " + std::to_string(num_heads));
    expect_attention(setup, kDividedDecodes);
    expect_attention(setup, kDividedChains);
    for (const ExtendPath path : {ExtendPath::kPaged, ExtendPath::kRagged}) {
      setup.extend_path = path;
      expect_attention(setup, kDividedExtends);
    }
  }
}

TEST_P(TokenPoolRanks, Windows_GiveAttention) {
  for (const int32_t window : {0, 6, 300}) {
    PoolSetup setup;
    setup.window = window;
    setup.page_size = window == 6 ? 16 : 1;
    expect_attention(setup, kDividedDecodes);
    expect_attention(setup, kDividedChains);
    for (const ExtendPath path : {ExtendPath::kPaged, ExtendPath::kRagged}) {
      setup.extend_path = path;
      expect_attention(setup, kDividedExtends);
    }
  }
}

/// Encoders' tokens are divided by their own positions; some ranks have none of some.
TEST_P(TokenPoolRanks, CrossAttention_GivesAttention) {
  for (const int32_t page_size : {1, 4}) {
    for (PoolLengths lengths : {kDividedDecodes, kDividedExtends}) {
      lengths.encoder = {8, 1, 33, 300, 0};
      PoolSetup setup;
      setup.encoder_decoder = true;
      setup.page_size = page_size;
      setup.v_head_dim = 24;
      SCOPED_TRACE(page_size);
      expect_attention(setup, lengths);
      lengths.encoder = {512, 512, 1024, 512, 0};  // pages end with it, whatever the rank
      if (std::get<0>(GetParam()) == 2) expect_attention(setup, lengths);
    }
  }
}

TEST_P(TokenPoolRanks, CapsScalesAndDeterminism_GiveAttention) {
  PoolSetup setup;
  setup.logit_cap = 1.5f;
  setup.kv_dtype = DType::kFloat8E4M3;
  setup.k_scale = 0.5f;
  setup.v_scale = 2.0f;
  for (const PoolLengths& lengths : {kDividedDecodes, kDividedExtends, kDividedChains}) {
    for (const Determinism determinism : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
      if (folio::testing::on_gpu() && determinism == Determinism::kScheduleInvariant) continue;
      setup.determinism = determinism;
      expect_attention(setup, lengths);
    }
  }
  PoolLengths mixed = kDividedExtends;
  mixed.mode = ForwardMode::kMixed;
  PoolLengths accepted = kDividedExtends;
  accepted.mode = ForwardMode::kDraftExtend;
  for (const PoolLengths& lengths : {mixed, accepted}) expect_attention({}, lengths);
}

/// Queries of all ranks' heads on each of them, and their results.
TEST_P(TokenPoolRanks, ReplicatedQueries_GiveAttention) {
  PoolSetup setup;
  setup.replicated_queries = true;
  for (const bool all_heads : {false, true}) {
    if (all_heads && std::get<2>(GetParam()) == "a2a") continue;  // leaves every rank its own
    setup.all_heads_out = all_heads;
    SCOPED_TRACE(all_heads);
    expect_attention(setup, kDividedDecodes);
    expect_attention(setup, kDividedExtends);
  }
}

TEST_P(TokenPoolRanks, SixteenBitPartialResults_GiveAttention) {
  PoolSetup setup;
  setup.q_dtype = setup.kv_dtype = setup.partial = DType::kBFloat16;
  for (const PoolLengths& lengths : {kDividedDecodes, kDividedExtends}) expect_attention(setup, lengths);
}

/// Layers that see all keys, those that see the new tokens only, and those that share another's cache.
TEST_P(TokenPoolRanks, OtherReadingsOfAStep_GiveAttention) {
  const auto& [world, interleave, combine] = GetParam();
  for (const ExtendPath path : {ExtendPath::kPaged, ExtendPath::kRagged}) {
    for (const bool cached : {true, false}) {
      PoolSetup setup;
      setup.extend_path = path;
      setup.interleave = interleave;
      setup.combine = combine;
      PoolLengths lengths = kDividedExtends;
      if (!cached) lengths.prefix.assign(lengths.prefix.size(), 0);
      testing::run_ranks(world, [&](ProcessGroup& group) {
        PoolSetup own = setup;
        own.group = &group;
        PoolFixture fixture(own, lengths);
        TokenPoolBackend backend(fixture.context, fixture.config());
        backend.init_forward_metadata(fixture.batch);
        RadixAttention layer = fixture.layer();
        for (const RadixAttentionType type :
             {RadixAttentionType::kDecoder, RadixAttentionType::kDecoderBidirectional}) {
          layer.attn_type = type;
          fixture.clear_output();
          fixture.forward(backend, layer);
          EXPECT_EQ(fixture.wrong_output(layer, path == ExtendPath::kRagged), "") << static_cast<int32_t>(type);
        }
        layer.attn_type = RadixAttentionType::kDecoder;
        fixture.clear_output();
        layer.forward(backend, fixture.q, {}, {}, fixture.batch, fixture.out);
        EXPECT_EQ(fixture.wrong_output(layer, false), "") << "the cache alone";
        if (cached) return;
        layer.attn_type = RadixAttentionType::kEncoderOnly;
        fixture.clear_output();
        fixture.forward(backend, layer);
        EXPECT_EQ(fixture.wrong_output(layer, true), "") << "encoder-only";
      });
    }
  }
}

/// Captured shapes with padding. On a GPU threads cannot capture: tests/backends/token_pool_ranks_cuda_test.cc does.
TEST_P(TokenPoolRanks, Replays_GiveAttention) {
  FOLIO_CPU_ONLY("the operations of a group of threads wait on the host");
  const auto& [world, interleave, combine] = GetParam();
  PoolLengths encoded = kDividedDecodes;
  encoded.encoder = {8, 1, 33, 30, 0};
  for (const PoolLengths& lengths : {kDividedDecodes, kDividedChains, encoded}) {
    PoolSetup setup;
    setup.interleave = interleave;
    setup.combine = combine;
    setup.encoder_decoder = !lengths.encoder.empty();
    setup.page_size = setup.encoder_decoder ? 4 : 1;
    if (!setup.encoder_decoder) setup.window = 20;
    testing::run_ranks(world, [&](ProcessGroup& group) {
      PoolSetup own = setup;
      own.group = &group;
      PoolFixture fixture(own, lengths);
      TokenPoolBackend backend(fixture.context, fixture.config());
      backend.init_cuda_graph_state(8, 8 * lengths.fresh[0]);
      const auto count = static_cast<int32_t>(fixture.num_requests());
      for (const int32_t bs : {count + 2, count}) {
        Replayed replayed(fixture, backend, bs);
        replayed.capture();
        for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) {
          EXPECT_EQ(replayed.replay(layer), "") << "rank " << group.rank() << ", " << bs;
        }
        if (!setup.encoder_decoder) continue;
        write_kv_cache(fixture.context, fixture.pool->write_args(1, fixture.encoder_k, fixture.encoder_v,
                                                                 fixture.encoder_out_cache_loc));
        EXPECT_EQ(replayed.replay(fixture.cross_layer()), "") << bs;
      }
      backend.init_forward_metadata(fixture.batch);
      fixture.clear_output();
      fixture.forward(backend, fixture.layer());
      EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "") << "an eager step behind them";
    });
  }
}

/// One of them under sanitizers, which look for other mistakes than wrong sums.
std::vector<Division> divisions() {
  if (folio::testing::kInstrumented) return {{2, 16, "a2a"}};
  std::vector<Division> all;
  for (const int32_t world : {2, 3}) {
    for (const int32_t interleave : {1, 16, 256}) {
      for (const char* const combine : {"ag_rs", "a2a"}) all.emplace_back(world, interleave, combine);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Divisions, TokenPoolRanks, ::testing::ValuesIn(divisions()), [](const auto& test) {
  return "W" + std::to_string(std::get<0>(test.param)) + "I" + std::to_string(std::get<1>(test.param)) + "_" +
         std::get<2>(test.param);
});

/// What one rank's fixture and backend say alone: nothing here is collective.
struct OneOfTwo {
  explicit OneOfTwo(int32_t rank, const PoolLengths& lengths, PoolSetup setup = {})
      : groups(distributed::make_thread_groups(2, testing::group_options())),
        fixture(with_group(setup, *groups[static_cast<size_t>(rank)]), lengths) {}
  static PoolSetup with_group(PoolSetup setup, ProcessGroup& group) {
    setup.group = &group;
    return setup;
  }
  std::vector<std::unique_ptr<ProcessGroup>> groups;
  PoolFixture fixture;
};

TEST(TokenPoolRank, Metadata_HaveItsTokens) {
  FOLIO_CPU_ONLY("plans of ranks on GPUs are made together");
  OneOfTwo one(1, {.mode = ForwardMode::kDecode, .prefix = {40, 16, 0}, .fresh = {1, 1, 1}});
  TokenPoolBackend backend(one.fixture.context, one.fixture.config());
  backend.init_forward_metadata(one.fixture.batch);
  const KvWrapper& wrapper = std::get<DecodeMetadata>(backend.forward_metadata()).decode_wrappers[0];
  EXPECT_THAT(wrapper.kv_lens, ElementsAre(20, 8, 0));
  EXPECT_THAT(wrapper.kv_starts, ElementsAre(0, 0, 0));
  EXPECT_THAT(wrapper.kv_indptr, ElementsAre(0, 20, 28, 28));
  for (int32_t i = 0; i < 20; ++i)
    EXPECT_EQ(wrapper.kv_indices[static_cast<size_t>(i)], one.fixture.slot(0, 2 * i + 1));
}

TEST(TokenPoolRank, AGroupOfOne_DividesNothing) {
  const auto groups = distributed::make_thread_groups(1);
  const PoolSetup setup = OneOfTwo::with_group({}, *groups[0]);
  PoolFixture fixture(setup, kDividedDecodes), plain({}, kDividedDecodes);
  EXPECT_EQ(fixture.wrong_step(), "");
  ASSERT_EQ(plain.wrong_step(), "");
}

TEST(TokenPoolRank, ConfigurationsThatContradictTheGroup_AreRefused) {
  FOLIO_CPU_ONLY("the messages are the same");
  OneOfTwo one(0, kDividedDecodes);
  struct Case {
    std::function<void(TokenPoolConfig&)> change;
    const char* text;
    ErrorCode code = ErrorCode::kInvalidArgument;
  };
  const std::vector<Case> cases = {
      {[](TokenPoolConfig& c) { c.cp_kv_cache_interleave_size = 0; }, "cp_kv_cache_interleave_size is 0"},
      {[](TokenPoolConfig& c) { c.dcp_comm_backend = "ring"; }, "ring"},
      {[](TokenPoolConfig& c) { c.dcp_all_heads_out = true; }, "dcp_replicated_queries false"},
      {[](TokenPoolConfig& c) {
         c.dcp_all_heads_out = c.dcp_replicated_queries = true;
         c.dcp_comm_backend = "a2a";
       },
       "needs ag_rs"},
      {[](TokenPoolConfig& c) { c.dcp_transport = distributed::DcpTransport::kPeer; }, "transport is peer",
       ErrorCode::kUnsupported},
      {[](TokenPoolConfig& c) { c.dcp_partial_dtype = DType::kInt8; }, "partial_dtype is int8"},
      {[](TokenPoolConfig& c) { c.max_context_len = 4000; }, "max_context_len is 4000, of which this rank has 2000"},
  };
  for (const Case& c : cases) {
    TokenPoolConfig config = one.fixture.config();
    c.change(config);
    EXPECT_THAT(refusal([&] { TokenPoolBackend backend(one.fixture.context, config); }, c.code), HasSubstr(c.text));
  }
}

TEST(TokenPoolRank, WhatAttentionOverRanksHasNot_IsRefused) {
  PoolLengths trees{.mode = ForwardMode::kTargetVerify, .prefix = {6, 11}, .fresh = {4, 4}};
  trees.parents = {-1, 0, 0, 1};
  OneOfTwo tree(0, trees);
  TokenPoolBackend of_trees(tree.fixture.context, tree.fixture.config());
  EXPECT_THAT(refusal([&] { of_trees.init_forward_metadata(tree.fixture.batch); }, ErrorCode::kUnsupported),
              HasSubstr("tree_mask is given with a dcp_group"));
  OneOfTwo drafts(0, {.mode = ForwardMode::kDecode, .prefix = {3}, .fresh = {1}});
  TokenPoolBackend of_drafts(drafts.fixture.context, drafts.fixture.config());
  const std::vector<int32_t> indptr{0, 2}, indices{1, 2};
  drafts.fixture.batch.spec_info.kv_indptr = drafts.fixture.batch.spec_info.kv_indptr_cpu = indptr;
  drafts.fixture.batch.spec_info.kv_indices = indices;
  EXPECT_THAT(refusal([&] { of_drafts.init_forward_metadata(drafts.fixture.batch); }, ErrorCode::kUnsupported),
              HasSubstr("kv_indptr is given with a dcp_group"));
}

TEST(TokenPoolRank, PaddingWithoutAPosition_IsRefused) {
  OneOfTwo one(0, {.mode = ForwardMode::kDecode, .prefix = {3, 4}, .fresh = {1, 1}});
  TokenPoolBackend backend(one.fixture.context, one.fixture.config());
  std::vector<int32_t> lens = one.fixture.seq_lens;
  lens[1] = 0;
  one.fixture.batch.seq_lens = lens;
  if (folio::testing::on_gpu()) one.fixture.batch.seq_lens_cpu = lens;
  one.fixture.batch.seq_lens_sum = -1;
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(one.fixture.batch); }),
              HasSubstr("request 1 has seq_len 0; over ranks padding requests have length 1"));
}

/// A slot for a token of another rank would hold what nobody reads.
TEST(TokenPoolRank, SlotsForTokensOfOtherRanks_AreRefused) {
  FOLIO_CPU_ONLY("a GPU's slots are not looked at");
  OneOfTwo one(1, {.mode = ForwardMode::kExtend, .prefix = {3}, .fresh = {4}});
  PoolFixture& fixture = one.fixture;
  TokenPoolBackend backend(fixture.context, fixture.config());
  backend.init_forward_metadata(fixture.batch);
  ASSERT_EQ(fixture.out_cache_loc[1], -1) << "position 4 is rank 0's";
  fixture.out_cache_loc[1] = fixture.out_cache_loc[0];
  EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }),
              HasSubstr("for token 1, position 4 of request 0, which lies on another rank than this, 1"));
  fixture.out_cache_loc[1] = -1;
  std::swap(fixture.out_cache_loc[0], fixture.out_cache_loc[2]);
  EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }), HasSubstr("of the request table"));
}

}  // namespace
}  // namespace folio::inline v0::backends
