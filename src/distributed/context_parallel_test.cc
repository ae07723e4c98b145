// Which tokens lie where: lengths, bounds, slots, and what a rank's queries see of its shard.
#include "folio/distributed/context_parallel.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/golden_test.hpp"
#include "folio/attention.hpp"
#include "folio/kv_cache.hpp"
#include "folio/page_table.hpp"

namespace folio::distributed {
namespace {

using folio::testing::golden;
using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;

class LocalLengths : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(LocalLengths, OfOneRankAndOfAll) {
  const GoldenCase& c = GetParam();
  const auto world = c.at<int32_t>("world"), interleave = c.at<int32_t>("interleave");
  const std::vector<int32_t> lengths = c.ints("lengths");
  const auto expected = c.at<std::vector<std::vector<int32_t>>>("local");
  std::vector<int32_t> all(lengths.size() * static_cast<size_t>(world)), one(lengths.size());
  get_dcp_local_seq_lens(lengths, world, interleave, all);
  for (int32_t rank = 0; rank < world; ++rank) {
    get_dcp_local_seq_lens(lengths, world, rank, interleave, one);
    for (size_t i = 0; i < lengths.size(); ++i) {
      EXPECT_EQ(one[i], expected[i][static_cast<size_t>(rank)]) << "length " << lengths[i] << ", rank " << rank;
      EXPECT_EQ(all[i * static_cast<size_t>(world) + static_cast<size_t>(rank)], one[i]);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Golden, LocalLengths, ::testing::ValuesIn(golden_cases("distributed/local_lengths")),
                         golden_case_name);

TEST(LocalLengths, CountPositions) {
  const nlohmann::json property = golden("distributed/local_lengths").at("property");
  const auto lengths = property.at("lengths").get<std::vector<int32_t>>();
  for (const int32_t world : property.at("worlds").get<std::vector<int32_t>>()) {
    for (const int32_t interleave : property.at("interleaves").get<std::vector<int32_t>>()) {
      std::vector<int32_t> all(lengths.size() * static_cast<size_t>(world));
      get_dcp_local_seq_lens(lengths, world, interleave, all);
      for (size_t i = 0; i < lengths.size(); ++i) {
        std::vector<int32_t> counts(static_cast<size_t>(world));
        for (int32_t p = 0; p < lengths[i]; ++p) ++counts[static_cast<size_t>(p / interleave % world)];
        EXPECT_THAT(std::vector<int32_t>(all.begin() + static_cast<std::ptrdiff_t>(i * counts.size()),
                                         all.begin() + static_cast<std::ptrdiff_t>((i + 1) * counts.size())),
                    ::testing::ElementsAreArray(counts));
      }
    }
  }
}

TEST(LocalLengths, MayBeWrittenInPlaceAndRefuseWhatCannotBe) {
  std::vector<int32_t> lengths{5, 0, 9};
  get_dcp_local_seq_lens(lengths, 2, 1, 1, lengths);
  EXPECT_THAT(lengths, ::testing::ElementsAre(2, 0, 4));
  std::vector<int32_t> local(3), none;
  EXPECT_THROW(get_dcp_local_seq_lens(lengths, 2, 2, 1, local), Error);
  EXPECT_THROW(get_dcp_local_seq_lens(lengths, 0, 0, 1, local), Error);
  EXPECT_THROW(get_dcp_local_seq_lens(none, 2, 2, 1, none), Error);
  EXPECT_THROW(get_dcp_local_seq_lens(lengths, 2, 0, 1, none), Error);
  EXPECT_THROW(get_dcp_local_seq_lens(lengths, 2, 1, local), Error);
}

class ContextBound : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(ContextBound, NoRankHasMore) {
  const GoldenCase& c = GetParam();
  const auto max_len = c.at<int32_t>("max_len"), world = c.at<int32_t>("world");
  const auto interleave = c.at<int32_t>("interleave");
  const int32_t bound = max_dcp_context_len(max_len, world, interleave);
  EXPECT_EQ(bound, c.at<int32_t>("bound"));
  for (int32_t rank = 0; rank < world; ++rank) EXPECT_LE(shard_len(max_len, world, rank, interleave), bound);
}
INSTANTIATE_TEST_SUITE_P(Golden, ContextBound, ::testing::ValuesIn(golden_cases("distributed/local_lengths", "bounds")),
                         golden_case_name);

TEST(ContextBoundErrors, NegativeAndTooLarge) {
  EXPECT_THROW(max_dcp_context_len(-1, 2, 1), Error);
  EXPECT_THROW(max_dcp_context_len(INT32_MAX, 1, 1 << 30), Error);  // two stripes of 2^30
}

class ShardedSlots : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(ShardedSlots, FollowTheInterleave) {
  const nlohmann::json document = golden("distributed/slot_mapping");
  const auto page_size = document.at("page_size").get<int32_t>();
  const auto table = document.at("table").get<std::vector<int32_t>>();
  const GoldenCase& c = GetParam();
  const auto world = c.at<int32_t>("world");
  const auto ranks = c.at<std::vector<std::vector<int64_t>>>("ranks");
  for (int32_t rank = 0; rank < world; ++rank) {
    const std::vector<int64_t>& expected = ranks[static_cast<size_t>(rank)];
    std::vector<int32_t> positions(expected.size()), rows(expected.size(), 0);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<int64_t> slots(expected.size());
    slot_mapping(dense_table(table, 1, static_cast<int64_t>(table.size())), rows, positions, page_size, slots, world,
                 rank, c.at<int32_t>("interleave"));
    EXPECT_THAT(slots, ::testing::ElementsAreArray(expected)) << "rank " << rank;
  }
}
INSTANTIATE_TEST_SUITE_P(Golden, ShardedSlots, ::testing::ValuesIn(golden_cases("distributed/slot_mapping")),
                         golden_case_name);

TEST(ShardedSlots, KernelPagesOfAManagersPages) {
  const nlohmann::json document = golden("distributed/slot_mapping").at("expanded_pages");
  const auto pages = document.at("pages").get<std::vector<int32_t>>();
  EXPECT_THAT(expand_pages(pages, document.at("ratio").get<int32_t>()),
              ::testing::ElementsAreArray(document.at("expanded").get<std::vector<int32_t>>()));
}

class VisibleKeys : public ::testing::TestWithParam<GoldenCase> {};

// With queries of zero every visible key weighs the same, and the LSE is the logarithm of their number.
TEST_P(VisibleKeys, OfARanksShard) {
  const GoldenCase& c = GetParam();
  const KvShard shard{c.at<int32_t>("world"), c.at<int32_t>("rank"), c.at<int32_t>("interleave")};
  const auto q_len = c.at<int32_t>("q_len"), seq_len = c.at<int32_t>("seq_len");
  const std::vector<int32_t> visible = c.ints("visible");
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = 8;
  config.q = config.kv = config.out = DType::kFloat32;
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  const AttentionOp op = prepare(context, config);
  PlanBuffer buffer = make_plan_buffer(op);
  const int32_t cu_q[] = {0, q_len}, first_pos = seq_len - q_len;
  const int32_t kv_len = shard_len(seq_len, shard.world, shard.rank, shard.interleave);
  KvSegment segment;
  segment.kv_len = &kv_len;
  segment.shard = shard;
  BatchView batch;
  batch.num_requests = 1;
  batch.num_tokens = q_len;
  batch.cu_q = cu_q;
  batch.q_first_pos = &first_pos;
  batch.segments = {&segment, 1};
  const AttentionPlan planned = plan(op, batch, buffer);
  std::vector<float> keys(16 * 8, 1.0f), values(16 * 8, 1.0f), q(static_cast<size_t>(q_len) * 8), out(q.size());
  std::vector<float> lse(static_cast<size_t>(q_len));
  const int32_t page = 0;
  SegmentArgs keys_args;
  keys_args.cache = make_nhd_view({1, 16, 1, 8, 8, DType::kFloat32}, keys.data(), values.data());
  keys_args.table = dense_table({&page, 1}, 1, 1);
  AttentionArgs args;
  args.q = ConstTensorView(q.data(), DType::kFloat32, {q_len, 1, 8});
  args.out = TensorView(out.data(), DType::kFloat32, {q_len, 1, 8});
  args.lse = {lse.data(), 1, 1};
  args.segments = {&keys_args, 1};
  core::AlignedBuffer workspace(workspace_size(op), core::AlignedBuffer::kWorkspaceAlignment);
  run(planned, args, {workspace.data(), workspace.bytes()});
  for (size_t i = 0; i < visible.size(); ++i) EXPECT_EQ(std::lround(std::exp(lse[i])), visible[i]) << "query " << i;
}
INSTANTIATE_TEST_SUITE_P(Golden, VisibleKeys,
                         ::testing::ValuesIn(golden_cases("distributed/slot_mapping", "visible_keys")),
                         golden_case_name);

}  // namespace
}  // namespace folio::distributed
