#include "folio/backends/token_pool/graph_inputs.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "backends/token_pool/device/graph_inputs_rule.hpp"
#include "backends/token_pool/refusal_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::refusal;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

/// Two requests of three drafts, in all that inputs have.
struct Drafts {
  Drafts() {
    batch.forward_mode = ForwardMode::kTargetVerify;
    batch.batch_size = 2;
    batch.req_pool_indices = rows;
    batch.seq_lens = seq_lens;
    batch.out_cache_loc = slots;
    batch.window_out_cache_loc = window_slots;
    batch.encoder_lens = encoder_lens;
    batch.spec_info.draft_token_num = 3;
    batch.spec_info.tree_mask = tree;
  }
  Ints rows{4, 9}, seq_lens{30, 40}, encoder_lens{5, 6};
  Longs slots{1, 2, 3, 4, 5, 6}, window_slots{11, 12, 13, 14, 15, 16};
  Bytes tree{0xd9, 0x00, 0xdb, 0x01};
  ForwardBatch batch;
};

void expect_padded(const ForwardBatch& padded) {
  EXPECT_EQ(padded.batch_size, 4);
  EXPECT_THAT(padded.req_pool_indices, ElementsAre(4, 9, 0, 0));
  EXPECT_THAT(padded.seq_lens, ElementsAre(30, 40, 1, 1));
  EXPECT_THAT(padded.seq_lens_cpu, ElementsAre(30, 40, 1, 1));
  EXPECT_EQ(padded.seq_lens_sum, 72);
  EXPECT_THAT(padded.encoder_lens, ElementsAre(5, 6, 0, 0));
  EXPECT_THAT(padded.encoder_lens_cpu, ElementsAre(5, 6, 0, 0));
  EXPECT_THAT(padded.out_cache_loc, ElementsAre(1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(padded.window_out_cache_loc, ElementsAre(11, 12, 13, 14, 15, 16, 0, 0, 0, 0, 0, 0));
  // Rows 1, 11 and 111: a chain.
  EXPECT_THAT(padded.spec_info.tree_mask, ElementsAre(0xd9, 0x00, 0xdb, 0x01, 0xd9, 0x01, 0xd9, 0x01));
  EXPECT_THAT(padded.spec_info.tree_mask_cpu, ElementsAre(0xd9, 0x00, 0xdb, 0x01, 0xd9, 0x01, 0xd9, 0x01));
}

TEST(GraphInputsTest, PadEveryInput) {
  Drafts drafts;
  GraphInputs inputs(5, 3);
  expect_padded(inputs.pad(drafts.batch, 4));
  GraphInputs of_context(Context::cpu(), 5, 3);
  expect_padded(of_context.pad_from_host(drafts.batch, 4));
  // Copies on the host alone are enough where all is on the host.
  ForwardBatch copies = drafts.batch;
  copies.seq_lens_cpu = copies.seq_lens;
  copies.encoder_lens_cpu = copies.encoder_lens;
  copies.spec_info.tree_mask_cpu = copies.spec_info.tree_mask;
  copies.seq_lens = copies.encoder_lens = {};
  copies.spec_info.tree_mask = {};
  expect_padded(of_context.pad_from_host(copies, 4));
}

TEST(GraphInputsTest, MemoryStaysWhereItIs) {
  Drafts drafts;
  GraphInputs inputs(5, 3);
  const ForwardBatch first = inputs.pad(drafts.batch, 5);
  GraphInputs moved = std::move(inputs);
  const ForwardBatch second = moved.pad(drafts.batch, 2);
  EXPECT_EQ(first.seq_lens.data(), second.seq_lens.data());
  EXPECT_EQ(first.out_cache_loc.data(), second.out_cache_loc.data());
  EXPECT_EQ(first.spec_info.tree_mask.data(), second.spec_info.tree_mask.data());
}

TEST(GraphInputsTest, ABatchWithoutRequestsIsPadding) {
  GraphInputs inputs(3);
  ForwardBatch idle;
  const ForwardBatch padded = inputs.pad(idle, 3);
  EXPECT_THAT(padded.req_pool_indices, ElementsAre(0, 0, 0));
  EXPECT_THAT(padded.seq_lens_cpu, ElementsAre(1, 1, 1));
  EXPECT_THAT(padded.out_cache_loc, ElementsAre(0, 0, 0));
  EXPECT_EQ(padded.seq_lens_sum, 3);
  EXPECT_TRUE(padded.encoder_lens.empty());
  EXPECT_TRUE(padded.spec_info.tree_mask.empty());
}

TEST(GraphInputsTest, RefuseOtherSizes_AndWriteNothing) {
  Drafts drafts;
  GraphInputs inputs(5, 3);
  const ForwardBatch padded = inputs.pad(drafts.batch, 4);
  const auto with = [&](auto&& change) {
    ForwardBatch batch = drafts.batch;
    change(batch);
    return refusal([&] { inputs.pad(batch, 4); });
  };
  using B = ForwardBatch;
  const Ints one{1};
  const Longs wide{1};
  const Bytes byte{1};
  EXPECT_THAT(with([&](B& b) { b.req_pool_indices = one; }),
              HasSubstr("req_pool_indices has 1 entries; the batch has 2"));
  EXPECT_THAT(with([&](B& b) { b.seq_lens = one; }), HasSubstr("seq_lens has 1"));
  EXPECT_THAT(with([&](B& b) { b.seq_lens_cpu = one; }), HasSubstr("seq_lens has 1"));
  EXPECT_THAT(with([&](B& b) { b.encoder_lens = one; }), HasSubstr("encoder_lens has 1"));
  const Ints other{7, 8};
  EXPECT_THAT(with([&](B& b) { b.seq_lens_cpu = other; }), HasSubstr("seq_lens and seq_lens_cpu differ"));
  EXPECT_THAT(with([&](B& b) { b.encoder_lens_cpu = other; }), HasSubstr("encoder_lens and encoder_lens_cpu differ"));
  const Bytes other_tree(drafts.batch.spec_info.tree_mask.size(), 0xff);
  EXPECT_THAT(with([&](B& b) { b.spec_info.tree_mask_cpu = other_tree; }), HasSubstr("tree_mask_cpu differ"));
  EXPECT_THAT(with([&](B& b) { b.out_cache_loc = wide; }), HasSubstr("out_cache_loc has 1 entries; the batch has 6"));
  EXPECT_THAT(with([&](B& b) { b.window_out_cache_loc = wide; }), HasSubstr("window_out_cache_loc has 1"));
  EXPECT_THAT(with([&](B& b) { b.spec_info.tree_mask = byte; }), HasSubstr("tree_mask has 1 entries; the batch has 4"));
  EXPECT_THAT(with([&](B& b) { b.spec_info.draft_token_num = 2; }), HasSubstr("draft_token_num is 2"));
  EXPECT_THAT(with([&](B& b) { b.forward_mode = ForwardMode::kExtend; }), HasSubstr("forward_mode is extend"));
  EXPECT_THAT(refusal([&] { inputs.pad(drafts.batch, 1); }), HasSubstr("a batch of 2 requests is padded to 1"));
  EXPECT_THAT(refusal([&] { inputs.pad(drafts.batch, 6); }), HasSubstr("room for 5"));
  EXPECT_THAT(refusal([] { GraphInputs(0); }), HasSubstr("max_bs is 0"));
  EXPECT_THAT(refusal([] { GraphInputs(Context::cpu(), 1, 0); }), HasSubstr("tokens_per_request 0"));
  expect_padded(padded);
}

/// A kernel's threads share a request.
TEST(GraphInputsRule, LanesShareARequest) {
  Drafts drafts;
  Ints rows(4, -7), seq_lens(4, -7), encoder_lens(4, -7);
  Longs slots(12, -7);
  Bytes tree(8, 0xaa);
  token_pool::GraphInputsJob job;
  job.num_requests = 2;
  job.padded = 4;
  job.tokens_per_request = 3;
  job.rows = {drafts.rows.data(), rows.data()};
  job.seq_lens = {drafts.seq_lens.data(), seq_lens.data()};
  job.encoder_lens = {drafts.encoder_lens.data(), encoder_lens.data()};
  job.slots = {drafts.slots.data(), slots.data()};
  job.tree = {drafts.tree.data(), tree.data()};
  for (int32_t r = 3; r >= 0; --r) {
    for (int32_t lane = 1; lane >= 0; --lane) fill_graph_request(job, r, lane, 2);
  }
  EXPECT_EQ(rows, (Ints{4, 9, 0, 0}));
  EXPECT_EQ(seq_lens, (Ints{30, 40, 1, 1}));
  EXPECT_EQ(encoder_lens, (Ints{5, 6, 0, 0}));
  EXPECT_EQ(slots, (Longs{1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(tree, (Bytes{0xd9, 0x00, 0xdb, 0x01, 0xd9, 0x01, 0xd9, 0x01}));
}

TEST(GraphInputsRule, ChainsSeeWhatIsBeforeThem) {
  for (int32_t drafts = 1; drafts < 20; ++drafts) {
    for (int32_t bit = 0; bit < (drafts * drafts + 7) / 8 * 8; ++bit) {
      const bool seen = (token_pool::chain_byte(drafts, bit / 8) >> bit % 8 & 1) != 0;
      EXPECT_EQ(seen, bit < drafts * drafts && bit % drafts <= bit / drafts) << drafts << ", bit " << bit;
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
