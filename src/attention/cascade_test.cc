#include "folio/cascade.hpp"
#include "core/error_test_util.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "attention/cascade_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Variant {
  const char* name;
  CascadeSetup setup;
};
class CascadeVariants : public ::testing::TestWithParam<Variant> {};

TEST_P(CascadeVariants, AgreeWithTheOracleAndReadLess) {
  CascadeScene scene(GetParam().setup);
  CascadePlanner planner(scene.eager_costs());
  const Cascade& cascade = planner.discover(scene.batch());
  ASSERT_EQ(cascade.num_levels(), 2);
  const PlanSummary shared = scene.run_with(cascade);
  EXPECT_EQ(scene.wrong_result(), "");
  CascadePlanner none(scene.op(), 0);
  const PlanSummary alone = scene.run_with(none.discover(scene.batch()));
  EXPECT_EQ(scene.wrong_result(), "");
  EXPECT_LT(shared.kv_tokens_read, alone.kv_tokens_read);
}

INSTANTIATE_TEST_SUITE_P(
    Cascade, CascadeVariants,
    ::testing::Values(
        Variant{"float32", {}}, Variant{"csr", {.dense = false}},
        Variant{"bfloat16_hnd", {.q = DType::kBFloat16, .kv = DType::kBFloat16, .layout = CascadeLayout::kHnd}},
        Variant{"bfloat16_packed", {.q = DType::kBFloat16, .kv = DType::kBFloat16, .layout = CascadeLayout::kPacked}},
        Variant{"float16_pages_of_8", {.q = DType::kFloat16, .kv = DType::kFloat16, .page_size = 8}},
        Variant{"e4m3", {.q = DType::kBFloat16, .kv = DType::kFloat8E4M3}},
        Variant{"e5m2_packed", {.q = DType::kBFloat16, .kv = DType::kFloat8E5M2, .layout = CascadeLayout::kPacked}},
        Variant{"window", {.window_left = 100}},
        // Ends inside the second level for some requests and before every shared page for others.
        Variant{"short_window_hnd", {.layout = CascadeLayout::kHnd, .window_left = 20}},
        Variant{"alibi", {.alibi = true}}, Variant{"cap", {.soft_cap = 2.0f}}, Variant{"sinks", {.sinks = true}},
        Variant{"everything",
                {.q = DType::kBFloat16,
                 .kv = DType::kBFloat16,
                 .window_left = 150,
                 .alibi = true,
                 .sinks = true,
                 .soft_cap = 5.0f}}),
    [](const auto& variant) { return variant.param.name; });

TEST(Cascade, SegmentsAreViewsOfTheEnginesOwnTable) {
  CascadeScene scene({});
  CascadePlanner planner(scene.eager_costs());
  const CascadeBatch batch = scene.batch();
  const Cascade& cascade = planner.discover(batch);
  ASSERT_EQ(cascade.num_levels(), 2);
  for (const PageTableView& table : cascade.tables) EXPECT_EQ(table.indices, batch.table.indices);
  // The padding request parts the chats; the shared pages end where the shortest sharer's computed tokens do.
  const KvSegment& outer = cascade.segments[0];
  EXPECT_EQ(outer.num_groups, 3);
  EXPECT_THAT(std::vector<int32_t>(outer.group_indptr, outer.group_indptr + 4), ElementsAre(0, 3, 4, 8));
  EXPECT_THAT(std::vector<int32_t>(outer.kv_len, outer.kv_len + 3), ElementsAre(14 * 16, 0, 9 * 16));
  const KvSegment& inner = cascade.segments[1];
  EXPECT_THAT(std::vector<int32_t>(inner.group_indptr, inner.group_indptr + inner.num_groups + 1), ElementsAre(4, 7));
  EXPECT_EQ(inner.first_pos[0], 9 * 16);
  EXPECT_EQ(inner.kv_len[0], 3 * 16);
  const KvSegment& own = cascade.segments[2];
  EXPECT_EQ(own.group_indptr, nullptr);
  EXPECT_THAT(std::vector<int32_t>(own.first_pos, own.first_pos + 9),
              ElementsAre(224, 224, 224, 0, 192, 192, 192, 144, 0));
  for (size_t r = 0; r < 9; ++r) EXPECT_EQ(own.first_pos[r] + own.kv_len[r], scene.kv_len[r]) << r;
}

TEST(Cascade, TokensOfTheStep_AreNotShared) {
  // Two requests compute the same 40 tokens in this step, after 33 that they had.
  const std::vector<int32_t> cu_q{0, 40, 80}, kv_len{73, 73}, entries{5, 6, 7, 8, 9, 5, 6, 7, 8, 9};
  CascadeScene scene({});
  CascadePlanner planner(scene.eager_costs());
  const CascadeBatch batch{2, cu_q.data(), kv_len.data(), dense_table(entries, 2, 5)};
  const Cascade& cascade = planner.discover(batch);
  ASSERT_EQ(cascade.num_levels(), 1);
  EXPECT_EQ(cascade.segments[0].kv_len[0], 32);
  EXPECT_EQ(planner.share(batch, 73).segments[0].kv_len[0], 32);
}

/// Which prefixes are shared depends on who else is in the batch, so the bits of a request would.
TEST(Cascade, InvariantLevelsShareNothing) {
  for (const Determinism level : {Determinism::kBatchInvariant, Determinism::kScheduleInvariant}) {
    CascadeScene scene({.determinism = level});
    CascadePlanner planner(scene.eager_costs());
    EXPECT_EQ(planner.discover(scene.batch()).num_levels(), 0);
    EXPECT_EQ(planner.share(scene.batch(), 0).num_levels(), 0);
    const std::vector<int32_t> cu_q{0, 1, 2}, kv_len{40, 40}, entries{5, 6, 7, 5, 6, 7};
    EXPECT_EQ(planner.share({2, cu_q.data(), kv_len.data(), dense_table(entries, 2, 3)}, 32).num_levels(), 0);
  }
}

TEST(Cascade, EqualBatchesGetEqualBits) {
  CascadeScene scene({.q = DType::kBFloat16, .kv = DType::kBFloat16});
  CascadePlanner planner(scene.eager_costs());
  scene.run_with(planner.discover(scene.batch()));
  const std::vector<float> first = scene.out;
  CascadePlanner other(scene.eager_costs());
  scene.run_with(other.discover(scene.batch()));
  EXPECT_EQ(scene.out, first);
}

TEST(Cascade, Share_OneLevelForAllRequests) {
  // The batch without its first chat's padding neighbour and the request that shares nothing.
  CascadeScene scene({});
  CascadePlanner planner(scene.op());
  CascadeBatch batch = scene.batch();
  batch.num_requests = 8;
  const Cascade& cascade = planner.share(batch, 9 * 16 + 5);
  ASSERT_EQ(cascade.num_levels(), 1);
  EXPECT_EQ(cascade.segments[0].num_groups, 1);
  EXPECT_EQ(cascade.segments[0].kv_len[0], 9 * 16);
  EXPECT_EQ(cascade.segments[1].first_pos[2], 9 * 16);
  EXPECT_EQ(cascade.segments[1].first_pos[3], 0);  // padding
  EXPECT_EQ(planner.share(batch, 15).num_levels(), 0);
  batch.num_requests = 1;
  EXPECT_EQ(planner.share(batch, 9 * 16).num_levels(), 0);
}

TEST(Cascade, RefusesWhatContradictsItself) {
  CascadeScene scene({});
  CascadePlanner planner(scene.eager_costs());
  const std::vector<int32_t> cu_q{0, 1, 2}, kv_len{70, 70}, entries{5, 6, 7, 8, 9, 5, 6, 4, 8, 9};
  EXPECT_THAT(folio::testing::message_of([&] {
                planner.share({2, cu_q.data(), kv_len.data(), dense_table(entries, 2, 5)}, 64);
              }),
              HasSubstr("request 1 has page 4 at column 2, request 0 page 7: they do not share a prefix of 4 pages"));
  EXPECT_THAT(folio::testing::message_of([&] { planner.share(scene.batch(), -1); }), HasSubstr("prefix_tokens is -1"));
  CascadeBatch batch = scene.batch();
  batch.table.num_rows = 3;
  EXPECT_THAT(folio::testing::message_of([&] { planner.discover(batch); }),
              HasSubstr("there are 9 lengths for a table of 3 rows"));
  batch = scene.batch();
  batch.cu_q = nullptr;
  EXPECT_THAT(folio::testing::message_of([&] { planner.discover(batch); }), HasSubstr("cu_q or kv_len is null"));
  scene.kv_len[1] = 4000;
  EXPECT_THAT(folio::testing::message_of([&] { planner.discover(scene.batch()); }), HasSubstr("row 1 needs 250 pages"));
  scene.kv_len[1] = -1;
  EXPECT_THAT(folio::testing::message_of([&] { planner.discover(scene.batch()); }),
              HasSubstr("request 1: q_len is 3 and kv_len -1"));

  EXPECT_THAT(folio::testing::message_of([&] { CascadePlanner(scene.op(), 9); }),
              HasSubstr("max_levels is 9; 0 to 8 are offered"));
  CascadeCosts costs = scene.eager_costs();
  costs.kv_token_bytes = 0;
  EXPECT_THAT(folio::testing::message_of([&] { CascadePlanner{costs}; }), HasSubstr("kv_token_bytes is 0"));
  costs = scene.eager_costs();
  costs.tile_rows = 0;
  EXPECT_THAT(folio::testing::message_of([&] { CascadePlanner{costs}; }), HasSubstr("the tile is 0 rows"));
}

TEST(Cascade, DenseTableOfOneRow_IsNotShared) {
  // One row for all requests.
  const std::vector<int32_t> cu_q{0, 1, 2}, kv_len{40, 40}, entries{5, 6, 7};
  CascadeScene scene({});
  CascadePlanner planner(scene.eager_costs());
  const CascadeBatch batch{2, cu_q.data(), kv_len.data(), dense_table(entries, 2, 0)};
  EXPECT_EQ(planner.discover(batch).num_levels(), 0);
  EXPECT_EQ(planner.share(batch, 32).num_levels(), 0);
}

TEST(Cascade, BoundsLimitTheLevels) {
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = 16;
  PrepareOptions options;
  options.bounds = GraphBounds{8, 64, 8, 512, 1};
  EXPECT_EQ(CascadePlanner(prepare(Context::cpu(), config, options)).max_levels(), 1);
  EXPECT_EQ(CascadePlanner(prepare(Context::cpu(), config)).max_levels(), 4);
}

/// What the kernel's tile and dtypes come to, for a model whose numbers are easy to check.
TEST(Cascade, CostsAreTheOps) {
  AttentionConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim_qk = 128;
  config.head_dim_v = 64;
  config.q = DType::kBFloat16;
  config.kv = DType::kFloat8E4M3;
  config.page_size = 32;
  config.window_left = 99;
  const CascadeCosts costs = cascade_costs(prepare(Context::cpu(), config));
  EXPECT_EQ(costs.group_size, 4);
  EXPECT_EQ(costs.page_size, 32);
  EXPECT_EQ(costs.window_left, 99);
  EXPECT_EQ(costs.kv_token_bytes, 192);
  EXPECT_EQ(costs.q_row_bytes, 256);
  EXPECT_EQ(costs.partial_row_bytes, 66 * 4);
  EXPECT_GE(costs.tile_rows, 1);
  EXPECT_GE(costs.tile_tokens, 1);
}

}  // namespace
}  // namespace folio::inline v0::attention
