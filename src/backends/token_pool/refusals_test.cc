#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "backends/token_pool/pool_test_util.hpp"
#include "backends/token_pool/refusal_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using ::testing::HasSubstr;
using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;
using testing::refusal;
using Ints = std::vector<int32_t>;

TEST(TokenPoolConfigs, ThatContradictThemselvesAreRefused) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {3}, .fresh = {1}});
  Ints one_row(4, 1), other(100, 0), twos(100, 2);
  struct Case {
    std::function<void(TokenPoolConfig&)> change;
    const char* text;
    ErrorCode code = ErrorCode::kInvalidArgument;
  };
  const std::vector<Case> cases = {
      {[](TokenPoolConfig& c) { c.num_heads = 0; }, "num_heads is 0"},
      {[](TokenPoolConfig& c) { c.num_kv_heads = 3; }, "num_"},
      {[](TokenPoolConfig& c) { c.page_size = 0; }, "page_size is 0"},
      {[](TokenPoolConfig& c) { c.max_context_len = 100; }, "req_to_token has 7 columns"},
      {[](TokenPoolConfig& c) { c.max_req_pool_size = 0; }, "max_req_pool_size is 0"},
      {[](TokenPoolConfig& c) { c.req_to_token.kind = PageTableKind::kCsr; }, "dense"},
      {[](TokenPoolConfig& c) { c.sliding_window_size = -1; }, "sliding_window_size is -1"},
      {[](TokenPoolConfig& c) {
         c.sliding_window_size = 4;
         c.is_encoder_decoder = true;
       },
       "Sliding window and cross attention are not supported together"},
      {[&](TokenPoolConfig& c) {
         c.sliding_window_size = 4;
         c.kv_indptr_buf = other;
       },
       "two wrappers"},
      {[&](TokenPoolConfig& c) { c.kv_indptr_buf = one_row; }, "kv_indptr_buf has 4 entries"},
      {[&](TokenPoolConfig& c) { c.kv_last_page_len_buf = one_row; }, "kv_last_page_len_buf has 4 entries"},
      {[&](TokenPoolConfig& c) { c.kv_last_page_len_buf = twos; }, "does not hold ones"},
      {[](TokenPoolConfig& c) { c.q_dtype = DType::kFloat8E4M3; }, "q_dtype is fp8_e4m3", ErrorCode::kUnsupported},
      {[](TokenPoolConfig& c) {
         c.extend_path = ExtendPath::kRagged;
         c.determinism = Determinism::kScheduleInvariant;
       },
       "kPaged", ErrorCode::kUnsupported},
  };
  for (const Case& c : cases) {
    TokenPoolConfig config = fixture.config();
    c.change(config);
    EXPECT_THAT(refusal([&] { TokenPoolBackend backend(fixture.context, config); }, c.code), HasSubstr(c.text));
  }
}

TEST(TokenPoolBatches, ThatContradictThemselvesAreRefused) {
  const Ints short_list{1}, fewer{3, 4}, wrong_fresh{3, 2}, negative{3, -4}, too_long{3, 4000}, long_prefix{9, 4};
  const Ints far_rows{1, 77}, indptr{0, 2}, slots{1, 2}, deep_slots{1, 4000}, past_indptr{0, 5};
  const std::vector<uint8_t> mask(2, 0xff);
  struct Case {
    std::function<void(ForwardBatch&)> change;
    const char* text;
  };
  const std::vector<Case> any = {
      {[&](ForwardBatch& b) { b.forward_mode = ForwardMode(9); }, "forward_mode is 9"},
      {[&](ForwardBatch& b) { b.batch_size = -1; }, "batch_size is -1"},
      {[&](ForwardBatch& b) { b.batch_size = 1000; }, "batch_size is 1000"},
      {[&](ForwardBatch& b) { b.seq_lens = short_list; }, "seq_lens has 1 entries"},
      {[&](ForwardBatch& b) { b.seq_lens_cpu = fewer; }, "seq_lens and seq_lens_cpu differ"},
      {[&](ForwardBatch& b) { b.seq_lens = negative; }, "request 1 has seq_len -4"},
      {[&](ForwardBatch& b) { b.seq_lens = too_long; }, "max_context_len"},
      {[&](ForwardBatch& b) { b.seq_lens_sum = 5; }, "seq_lens_sum is 5"},
      {[&](ForwardBatch& b) { b.req_pool_indices = short_list; }, "req_pool_indices has 1"},
      {[&](ForwardBatch& b) { b.req_pool_indices = far_rows; }, "77"},
      {[&](ForwardBatch& b) { b.encoder_lens = fewer; }, "no encoder-decoder"},
      {[&](ForwardBatch& b) { b.spec_info.tree_mask = mask; }, "spec_info.tree_mask is given"},
      {[&](ForwardBatch& b) { b.spec_info.draft_token_num = 2; }, "spec_info.draft_token_num is given"},
  };
  const std::vector<Case> extends = {
      {[&](ForwardBatch& b) { b.extend_prefix_lens = short_list; }, "extend_prefix_lens has 1"},
      {[&](ForwardBatch& b) { b.extend_prefix_lens = long_prefix; }, "request 0 has a prefix of 9"},
      {[&](ForwardBatch& b) { b.extend_seq_lens = wrong_fresh; }, "request 1 has extend_seq_len 2"},
      {[&](ForwardBatch& b) { b.extend_seq_lens = short_list; }, "extend_seq_lens has 1"},
      {[&](ForwardBatch& b) { b.spec_info.kv_indptr = indptr; }, "spec_info.kv_indptr is given"},
  };
  const std::vector<Case> decodes = {
      {[&](ForwardBatch& b) { b.extend_prefix_lens = fewer; }, "forward_mode is decode"},
      {[&](ForwardBatch& b) { b.spec_info.kv_indices = slots; }, "without kv_indptr"},
      {[&](ForwardBatch& b) {
         b.spec_info.kv_indptr = past_indptr;
         b.spec_info.kv_indices = slots;
       },
       "rows"},
      {[&](ForwardBatch& b) {
         b.batch_size = 1;
         b.seq_lens = short_list;
         b.seq_lens_sum = -1;
         b.spec_info.kv_indptr = past_indptr;
         b.spec_info.kv_indices = slots;
       },
       "draft row 0 has entries [0, 5)"},
      {[&](ForwardBatch& b) {
         b.batch_size = 1;
         b.seq_lens = short_list;
         b.seq_lens_sum = -1;
         b.spec_info.kv_indptr = indptr;
         b.spec_info.kv_indices = deep_slots;
       },
       "slot 4000"},
  };
  const auto expect_all = [](const std::vector<Case>& cases, const PoolLengths& lengths) {
    for (const Case& c : cases) {
      PoolFixture fixture({}, lengths);
      TokenPoolBackend backend(fixture.context, fixture.config());
      backend.init_forward_metadata(fixture.batch);
      c.change(fixture.batch);
      EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }), HasSubstr(c.text));
      EXPECT_TRUE(std::holds_alternative<std::monostate>(backend.forward_metadata()));
    }
  };
  const PoolLengths extend{.mode = ForwardMode::kExtend, .prefix = {2, 4}, .fresh = {3, 1}};
  const PoolLengths decode{.mode = ForwardMode::kDecode, .prefix = {2, 4}, .fresh = {1, 1}};
  expect_all(any, extend);
  expect_all(any, decode);
  expect_all(extends, extend);
  expect_all(decodes, decode);
}

TEST(TokenPoolBatches, TreesAreChecked) {
  PoolFixture fixture(
      {},
      {.mode = ForwardMode::kTargetVerify, .prefix = {5, 6}, .fresh = {3, 3}, .encoder = {}, .parents = {-1, 0, 0}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  const std::vector<uint8_t> blind(4, 0);
  fixture.batch.spec_info.tree_mask = blind;
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }), HasSubstr("does not see itself"));
  fixture.batch.spec_info.tree_mask = std::span(blind).first(3);
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }), HasSubstr("tree_mask has 3 bytes"));
  fixture.batch.spec_info.draft_token_num = 0;
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }), HasSubstr("draft_token_num is 0"));
}

/// Bits of n x n from the drafts that each row sees.
std::vector<uint8_t> tree_bits(const std::vector<Ints>& rows) {
  const size_t n = rows.size();
  std::vector<uint8_t> bits((n * n + 7) / 8, 0);
  for (size_t row = 0; row < n; ++row) {
    for (const int32_t column : rows[row]) {
      const size_t bit = row * n + static_cast<size_t>(column);
      bits[bit / 8] = static_cast<uint8_t>(bits[bit / 8] | 1u << bit % 8);
    }
  }
  return bits;
}

TEST(TokenPoolBatches, TreesWhoseRowsAreNotAncestors_AreRefused) {
  struct Case {
    std::vector<Ints> rows;
    const char* text;  ///< empty: a tree
  };
  const std::vector<Case> cases = {
      {{{0}, {0, 1}, {0, 1, 2}, {0, 3}}, ""},
      {{{0}, {0, 1}, {0, 2}, {0, 2, 3}}, ""},
      {{{0}, {0, 1}, {1, 2}, {0, 3}}, "draft 2 and its parent, draft 1, do not both see draft 0"},
      {{{0}, {0, 1}, {0, 2}, {0, 1, 2, 3}}, "draft 3 and its parent, draft 2, do not both see draft 1"},
      {{{0}, {0, 1}, {2}, {0, 3}}, "draft 2 does not see draft 0, the root"},
      {{{0}, {0, 1, 3}, {0, 2}, {0, 3}}, "draft 1 sees draft 3"},
      {{{0}, {0}, {0, 2}, {0, 3}}, "draft 1 does not see itself"},
  };
  for (const Case& c : cases) {
    PoolFixture fixture({},
                        {.mode = ForwardMode::kTargetVerify, .prefix = {5}, .fresh = {4}, .parents = {-1, 0, 0, 0}});
    TokenPoolBackend backend(fixture.context, fixture.config());
    const std::vector<uint8_t> bits = tree_bits(c.rows);
    fixture.batch.spec_info.tree_mask = bits;
    if (folio::testing::on_gpu()) fixture.batch.spec_info.tree_mask_cpu = bits;
    const auto init = [&] { backend.init_forward_metadata(fixture.batch); };
    if (*c.text == '\0') {
      EXPECT_NO_THROW(init());
    } else {
      EXPECT_THAT(refusal(init), HasSubstr(c.text));
    }
  }
}

/// Rows of more than one word: a comb of 70 drafts, with one bit too few and one too many.
TEST(TokenPoolBatches, LargeTrees_AreCheckedToTheLastDraft) {
  constexpr int32_t kDrafts = 70;
  Ints parents{-1};
  std::vector<Ints> rows{{0}};
  for (int32_t draft = 1; draft < kDrafts; ++draft) {
    parents.push_back(draft < 3 ? 0 : draft - 2);
    rows.push_back(rows[static_cast<size_t>(parents.back())]);
    rows.back().push_back(draft);
  }
  PoolFixture fixture({}, {.mode = ForwardMode::kTargetVerify, .prefix = {5}, .fresh = {kDrafts}, .parents = parents});
  EXPECT_EQ(fixture.wrong_step(), "");
  TokenPoolBackend backend(fixture.context, fixture.config());
  const auto message = [&](const std::vector<Ints>& changed) {
    const std::vector<uint8_t> bits = tree_bits(changed);
    fixture.batch.spec_info.tree_mask = bits;
    if (folio::testing::on_gpu()) fixture.batch.spec_info.tree_mask_cpu = bits;
    return refusal([&] { backend.init_forward_metadata(fixture.batch); });
  };
  std::vector<Ints> changed = rows;
  changed[69].push_back(66);
  EXPECT_THAT(message(changed), HasSubstr("draft 69 and its parent, draft 67, do not both see draft 66"));
  changed = rows;
  std::erase(changed[69], 65);
  EXPECT_THAT(message(changed), HasSubstr("draft 69 and its parent, draft 67, do not both see draft 65"));
  changed = rows;
  changed[2].push_back(69);
  EXPECT_THAT(message(changed), HasSubstr("draft 2 sees draft 69"));
}

TEST(TokenPoolBatches, OnlyDecodesWithoutPrefill) {
  PoolFixture fixture({}, {.mode = ForwardMode::kExtend, .prefix = {2}, .fresh = {3}});
  TokenPoolConfig config = fixture.config();
  config.skip_prefill = true;
  TokenPoolBackend backend(fixture.context, config);
  EXPECT_THAT(refusal([&] { backend.init_forward_metadata(fixture.batch); }), HasSubstr("skip_prefill"));
  PoolFixture decode({}, {.mode = ForwardMode::kDecode, .prefix = {2}, .fresh = {1}});
  config = decode.config();
  config.skip_prefill = true;
  TokenPoolBackend decoder(decode.context, config);
  decoder.init_forward_metadata(decode.batch);
  decode.forward(decoder, decode.layer());
  EXPECT_EQ(decode.wrong_output(decode.layer(), false), "");
}

/// Nothing is written where a forward is refused.
TEST(TokenPoolForwards, AreRefusedBeforeAnythingIsWritten) {
  struct Case {
    std::function<void(PoolFixture&, RadixAttention&)> change;
    const char* text;
  };
  const std::vector<Case> cases = {
      {[](PoolFixture&, RadixAttention& l) { l.num_heads = 8; }, "the layer has num_heads 8"},
      {[](PoolFixture&, RadixAttention& l) { l.v_head_dim = 8; }, "v_head_dim 8"},
      {[](PoolFixture&, RadixAttention& l) { l.layer_id = 7; }, "7"},
      {[](PoolFixture&, RadixAttention& l) { l.sliding_window_size = 4; }, "sliding_window_size is 4"},
      {[](PoolFixture&, RadixAttention& l) { l.sliding_window_size = -3; }, "sliding_window_size is -3"},
      {[](PoolFixture&, RadixAttention& l) { l.is_cross_attention = true; }, "is_encoder_decoder"},
      {[](PoolFixture&, RadixAttention& l) { l.logit_cap = 2.0f; }, "no logit_cap"},
      {[](PoolFixture&, RadixAttention& l) { l.logit_cap = -2.0f; }, "logit_cap is -2"},
      {[](PoolFixture&, RadixAttention& l) { l.scaling = 1.0f / 0.0f; }, "scaling"},
      {[](PoolFixture&, RadixAttention& l) { l.attn_type = RadixAttentionType::kEncoderOnly; }, "encoder-only"},
      {[](PoolFixture& f, RadixAttention&) { f.v = {}; }, "k and v are both given"},
      {[](PoolFixture& f, RadixAttention&) { f.q.shape[0] = 1; }, "q is [1, 64]"},
      {[](PoolFixture& f, RadixAttention&) { f.out.shape[1] = 32; }, "out is [2, 32]"},
      {[](PoolFixture& f, RadixAttention&) { f.q.dtype = DType::kFloat16; }, "q is float16"},
      {[](PoolFixture& f, RadixAttention&) { f.out.data = nullptr; }, "out.data is null"},
      {[](PoolFixture& f, RadixAttention&) { f.batch.out_cache_loc = f.batch.out_cache_loc.first(1); }, ""},
      {[](PoolFixture& f, RadixAttention&) { f.out_cache_loc[1] = 4000; }, "4000"},
      {[](PoolFixture& f, RadixAttention&) { f.batch.token_to_kv_pool = nullptr; }, "token_to_kv_pool is null"},
  };
  for (const Case& c : cases) {
    PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {2, 4}, .fresh = {1, 1}});
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    RadixAttention layer = fixture.layer();
    c.change(fixture, layer);
    const auto k_bytes = KvPool::k_bytes_per_layer(fixture.pool->config());
    const auto* k = static_cast<const std::byte*>(fixture.pool->view(0).k);
    const std::vector<std::byte> before(k, k + k_bytes);
    const std::vector<std::byte> out = fixture.out_memory;
    EXPECT_THAT(refusal([&] { fixture.forward(backend, layer); }), HasSubstr(c.text));
    EXPECT_EQ(before, std::vector<std::byte>(k, k + k_bytes)) << c.text;
    EXPECT_EQ(out, fixture.out_memory);
  }
}

/// A token that is stored where its row does not say is lost. Negative slots are not stored.
TEST(TokenPoolForwards, SlotsThatAreNotTheRows_AreRefusedBeforeAnythingIsWritten) {
  FOLIO_CPU_ONLY("the slots are the device's there");
  const PoolLengths extend{.mode = ForwardMode::kExtend, .prefix = {2, 4}, .fresh = {3, 2}};
  const PoolLengths decode{.mode = ForwardMode::kDecode, .prefix = {2, 4}, .fresh = {1, 1}};
  const PoolLengths verify{.mode = ForwardMode::kTargetVerify, .prefix = {2, 4}, .fresh = {3, 3}};
  for (const PoolLengths& lengths : {extend, decode, verify}) {
    PoolFixture fixture({}, lengths);
    TokenPoolBackend backend(fixture.context, fixture.config());
    backend.init_forward_metadata(fixture.batch);
    std::vector<int64_t> other(fixture.out_cache_loc);
    std::swap(other.front(), other.back());
    const std::span<const int64_t> right = fixture.batch.out_cache_loc;
    fixture.batch.out_cache_loc = other;
    EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }),
                HasSubstr("out_cache_loc has slot " + std::to_string(other.front()) +
                          " for token 0; request 0 has slot " + std::to_string(right.front())));
    EXPECT_EQ(fixture.out_memory.front(), std::byte{0xff});
    fixture.batch.out_cache_loc = right;
    fixture.forward(backend, fixture.layer());
    EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
    const std::vector<int64_t> nowhere(right.size(), -1);
    fixture.batch.out_cache_loc = nowhere;
    EXPECT_NO_THROW(fixture.forward(backend, fixture.layer()));
    fixture.batch.out_cache_loc = other;  // the step was checked with other slots
    EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }), HasSubstr("out_cache_loc has slot"));
  }
}

TEST(TokenPoolForwards, NeedTheirMetadata) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {2}, .fresh = {1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }), HasSubstr("call init_forward_metadata"));
  backend.init_forward_metadata(fixture.batch);
  const auto extend = [&] {
    backend.forward_extend(fixture.q, fixture.k, fixture.v, fixture.layer(), fixture.batch, fixture.out);
  };
  EXPECT_THAT(refusal(extend), HasSubstr("not an extend's"));
}

/// Slots are held against the pool that is read, also where the metadata were made without one.
TEST(TokenPoolForwards, RefuseSlotsThatThePoolDoesNotHave) {
  for (const bool known : {true, false}) {
    PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {20}, .fresh = {1}});
    TokenPoolBackend backend(fixture.context, fixture.config());
    ForwardBatch batch = fixture.batch;
    if (!known) batch.token_to_kv_pool = nullptr;
    backend.init_forward_metadata(batch);
    fixture.forward(backend, fixture.layer());
    EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "");
    KvPoolConfig config = fixture.pool->config();
    config.num_slots = 5;
    const KvPool small(config);
    fixture.batch.token_to_kv_pool = &small;
    EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }), HasSubstr("the pool has 6"));
  }
}

TEST(TokenPoolForwards, RefusePoolsOfAnotherModel) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {2}, .fresh = {1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  backend.init_forward_metadata(fixture.batch);
  KvPoolConfig config = fixture.pool->config();
  config.dtype = DType::kFloat16;
  const KvPool half(config);
  fixture.batch.token_to_kv_pool = &half;
  EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }), HasSubstr("the pool holds float16"));
  config = fixture.pool->config();
  config.num_kv_heads = 4;
  const KvPool wide(config);
  fixture.batch.token_to_kv_pool = &wide;
  EXPECT_THAT(refusal([&] { fixture.forward(backend, fixture.layer()); }), HasSubstr("4 KV heads"));
}

/// Windows are keys left of the query: a layer of another window than the configuration's has no wrapper.
TEST(TokenPoolForwards, RefuseOtherWindows) {
  PoolSetup setup;
  setup.window = 4;
  PoolFixture fixture(setup, {.mode = ForwardMode::kDecode, .prefix = {2}, .fresh = {1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  backend.init_forward_metadata(fixture.batch);
  RadixAttention layer = fixture.layer();
  layer.sliding_window_size = 5;
  EXPECT_THAT(refusal([&] { fixture.forward(backend, layer); }), HasSubstr("the configuration's is 4"));
}

}  // namespace
}  // namespace folio::inline v0::backends
