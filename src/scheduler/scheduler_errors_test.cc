#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "core/error_test_util.hpp"
#include "folio/types/error.hpp"
#include "scheduler/batch.hpp"
#include "scheduler/plan_storage.hpp"
#include "scheduler/plan_test_util.hpp"

/// Every batch and config that is refused, and what the refusal names.
namespace folio::inline v0::scheduler {
namespace {

using testing::OwnedBatch;
using testing::OwnedSegment;
using testing::paged_batch;

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

SchedulerConfig valid_config() {
  SchedulerConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.page_size = 4;
  config.tile = {.rows = 4, .kv_tokens = 4};
  config.num_workers = 2;
  config.fixed_split_tokens = 8;
  return config;
}

/// Expects a refusal whose message contains `text`, after which the storage holds no plan and can be used again.
void expect_refusal(const SchedulerConfig& config, const BatchView& batch, const std::string& text) {
  PlanStorage storage;
  OwnedBatch good = paged_batch({1, 2}, {3, 4});
  make_plan(valid_config(), good.view(), storage);
  try {
    make_plan(config, batch, storage);
    ADD_FAILURE() << "accepted; expected: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
  }
  EXPECT_EQ(storage.arrays().view.work_tiles, nullptr);
  EXPECT_EQ(storage.arrays().view.num_requests, 0);
  EXPECT_GT(make_plan(valid_config(), good.view(), storage).num_work_tiles, 0);
}

/// As above, for a good batch of three requests that `spoil` changes.
void expect_view_refusal(const std::function<void(BatchView&)>& spoil, const std::string& text) {
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  BatchView batch = owned.view();
  spoil(batch);
  expect_refusal(valid_config(), batch, text);
}

void expect_batch_refusal(const std::function<void(OwnedBatch&)>& spoil, const std::string& text) {
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  spoil(owned);
  expect_refusal(valid_config(), owned.view(), text);
}

void expect_config_refusal(const std::function<void(SchedulerConfig&)>& spoil, const std::string& text) {
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  SchedulerConfig config = valid_config();
  spoil(config);
  expect_refusal(config, owned.view(), text);
}

TEST(Refusals, Queries) {
  expect_view_refusal([](BatchView& b) { b.where = Where::kDevice; }, "host memory only");
  expect_view_refusal([](BatchView& b) { b.num_requests = -1; }, "num_requests is -1");
  expect_view_refusal([](BatchView& b) { b.num_tokens = -1; }, "num_tokens is -1");
  expect_view_refusal([](BatchView& b) { b.num_tokens = 5; }, "cu_q[num_requests] is 6, more than num_tokens, 5");
  expect_view_refusal([](BatchView& b) { b.cu_q = nullptr; }, "cu_q is null");
  expect_view_refusal([](BatchView& b) { b.segments = {}; }, "no segments");
  expect_view_refusal([](BatchView& b) { b.max_q_len = -2; }, "max_q_len is -2");
  expect_view_refusal([](BatchView& b) { b.max_kv_len = -2; }, "max_kv_len is -2");
  expect_view_refusal([](BatchView& b) { b.max_q_len = 2; }, "request 2: q_len is 3, but max_q_len says at most 2");
  expect_view_refusal([](BatchView& b) { b.max_kv_len = 19; },
                      "request 1: it has 20 keys, but max_kv_len says at most 19");
  const int32_t late[] = {1, 2, 3, 6};
  expect_view_refusal([&](BatchView& b) { b.cu_q = late; }, "cu_q[0] is 1");
  const int32_t falling[] = {0, 4, 3, 6};
  expect_view_refusal([&](BatchView& b) { b.cu_q = falling; }, "request 1: cu_q falls from 4 to 3");
  const int32_t many[] = {0, 1, 2, kMax / 2 + 1};
  expect_view_refusal(
      [&](BatchView& b) {
        b.cu_q = many;
        b.num_tokens = kMax;
      },
      "packed rows");
  expect_batch_refusal(
      [](OwnedBatch& b) {
        b.q_first_pos = {0, 0, kMax - 2};
      },
      "request 2: its 3 queries from position");
  expect_batch_refusal(
      [](OwnedBatch& b) {
        b.segments[0].first_pos = {0, 0, std::numeric_limits<int32_t>::min()};
        b.segments[0].kv_len[2] = 0;
      },
      "request 2: its 3 queries from position");
}

TEST(Refusals, Segments) {
  expect_batch_refusal([](OwnedBatch& b) { b.segments[0].kv_len[1] = -5; }, "segment 0, row 1: kv_len is -5");
  expect_batch_refusal([](OwnedBatch& b) { b.segments[0].kv_len[1] = kMaxKvLen + 1; },
                       "segment 0, row 1: kv_len is 2147479553; at most 2147479552 keys are offered");
  expect_batch_refusal(
      [](OwnedBatch& b) {
        b.segments[0].first_pos = {0, kMax - 19, 0};
      },
      "segment 0, row 1: first_pos");
  expect_batch_refusal(
      [](OwnedBatch& b) {
        b.segments[0].shard = {.world = 4, .rank = 0, .interleave = 1};
        b.segments[0].kv_len[2] = kMax / 4 + 2;
        b.q_first_pos = {0, 0, 0};
      },
      "segment 0, row 2: first_pos 0 with 536870913 tokens goes beyond");
  expect_batch_refusal([](OwnedBatch& b) { b.segments[0].source = static_cast<KvSource>(7); },
                       "segment 0: source is 7");
  expect_batch_refusal([](OwnedBatch& b) { b.segments[0].mask = static_cast<SegmentMask>(7); }, "segment 0: mask is 7");
  for (const KvShard shard : {KvShard{0, 0, 1}, KvShard{2, 2, 1}, KvShard{2, -1, 1}, KvShard{2, 0, 0}}) {
    expect_batch_refusal(
        [=](OwnedBatch& b) {
          b.q_first_pos = {0, 0, 0};
          b.segments[0].shard = shard;
        },
        "segment 0: shard is rank");
  }
  expect_batch_refusal([](OwnedBatch& b) { b.segments[0].shard = {.world = 2, .rank = 0, .interleave = 1}; },
                       "segment 0: it is sharded (world 2), so q_first_pos must be given");
  expect_batch_refusal(
      [](OwnedBatch& b) {
        b.segments.push_back(b.segments[0]);
        b.segments[0].kv_len[1] = b.segments[1].kv_len[1] = kMax / 2 + 1;
        b.segments[1].first_pos = {0, 0, 0};
      },
      "request 1: its segments hold more than 2^31 - 1 keys");
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  BatchView batch = owned.view();
  KvSegment segment = batch.segments[0];
  batch.segments = {&segment, 1};
  segment.num_groups = 2;
  expect_refusal(valid_config(), batch, "segment 0: num_groups is 2 without a group_indptr");
  segment.num_groups = 0;
  segment.kv_len = nullptr;
  expect_refusal(valid_config(), batch, "segment 0: kv_len is null");
}

TEST(Refusals, FirstPos_LeftOutWhereItIsNotKnown_IsRefused) {
  const auto add = [](OwnedBatch& b, std::vector<int32_t> kv_len, std::vector<int32_t> group_indptr) {
    OwnedSegment segment;
    segment.kv_len = std::move(kv_len);
    segment.group_indptr = std::move(group_indptr);
    b.segments.push_back(segment);
  };
  expect_batch_refusal(
      [&](OwnedBatch& b) {
        add(b, {7, 8}, {0, 1, 3});
      },
      "segment 1, row 1: first_pos is left out, but the keys before it end at position 20 in request "
      "1 and at 30 in request 2");
  const auto sharded = [&](OwnedBatch& b) {
    b.q_first_pos = {40, 40, 40};
    b.segments[0].shard = {.world = 2, .rank = 1, .interleave = 1};
    add(b, {7}, {0, 1});  // the others have no row here: it does not say where they stand
    b.segments[1].first_pos = {20};
    add(b, {1, 2, 3}, {});
  };
  expect_batch_refusal(sharded, "segment 2: first_pos is left out behind segment 0, a shard (world 2)");
  expect_batch_refusal(
      [](OwnedBatch& b) {
        b.segments[0].first_pos = {0, 0, kMax - 40};
        b.segments.push_back(b.segments[0]);
        b.segments[1].first_pos.clear();
      },
      "segment 1, row 2: first_pos 2147483637 with 30 tokens goes beyond");
}

TEST(Refusals, HugeBatches_AreRefusedBeforeMemoryIsTaken) {
  SchedulerConfig config = valid_config();
  config.num_q_heads = config.num_kv_heads = 8;
  config.num_workers = 64;
  config.tile = {.rows = 64, .kv_tokens = 64};
  constexpr int32_t kTokens = 1 << 30;
  OwnedBatch owned = paged_batch({3, kTokens}, {3, kTokens});
  PlanStorage storage;
  EXPECT_THAT(folio::testing::message_of([&] { make_plan(config, owned.view(), storage); }),
              ::testing::HasSubstr("too large for one plan"));
  config.num_q_heads = config.num_kv_heads = 1024;  // too many work tiles, however little each costs
  owned.segments[0].kv_len = {3, 3};
  EXPECT_THAT(folio::testing::message_of([&] { make_plan(config, owned.view(), storage); }),
              ::testing::HasSubstr("too large for one plan"));
  EXPECT_EQ(storage.arrays().tiles.data(), nullptr);
}

TEST(Refusals, Groups) {
  for (const std::vector<int32_t>& indptr : {std::vector<int32_t>{0, 2, 1}, {-1, 2, 3}, {0, 2, 4}}) {
    expect_batch_refusal(
        [&](OwnedBatch& b) {
          OwnedSegment shared;
          shared.kv_len = {4, 4};
          shared.group_indptr = indptr;
          b.segments.push_back(shared);
        },
        "segment 1: group_indptr[");
  }
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  BatchView batch = owned.view();
  KvSegment segment = batch.segments[0];
  batch.segments = {&segment, 1};
  const int32_t indptr = 0;
  segment.group_indptr = &indptr;
  segment.num_groups = -1;
  expect_refusal(valid_config(), batch, "segment 0: num_groups is -1");
}

TEST(Refusals, CustomMasks) {
  expect_batch_refusal([](OwnedBatch& b) { b.tail_len = {1, 1, 1}; }, "the op's mask is not kCustom");
  expect_batch_refusal([](OwnedBatch& b) { b.scope = CustomMaskScope::kTail; }, "the op's mask is not kCustom");
  SchedulerConfig config = valid_config();
  config.mask = MaskKind::kCustom;
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  owned.tail_len = {1, 1, 1};
  expect_refusal(config, owned.view(), "tail_len is given, but");
  owned.scope = CustomMaskScope::kTail;
  owned.tail_len = {};
  expect_refusal(config, owned.view(), "tail_len is null");
  owned.tail_len = {1, 21, 1};
  expect_refusal(config, owned.view(), "request 1: tail_len is 21");
  owned.tail_len = {1, 20, -1};
  expect_refusal(config, owned.view(), "request 2: tail_len is -1");
  owned.tail_len = {};
  owned.scope = static_cast<CustomMaskScope>(5);
  expect_refusal(config, owned.view(), "scope is 5");
}

TEST(Refusals, BeyondTheBounds) {
  const GraphBounds enough{
      .max_requests = 3, .max_tokens = 6, .max_q_len = 3, .max_kv_len = 30, .max_shared_levels = 0};
  SchedulerConfig config = valid_config();
  config.bounds = enough;
  OwnedBatch owned = paged_batch({1, 2, 3}, {10, 20, 30});
  PlanStorage storage;
  EXPECT_NO_THROW(make_plan(config, owned.view(), storage));
  const auto expect_beyond = [&](int32_t GraphBounds::*field, const std::string& text) {
    config.bounds = enough;
    --(*config.bounds.*field);
    expect_refusal(config, owned.view(), text);
  };
  expect_beyond(&GraphBounds::max_requests, "num_requests is 3; the op was prepared for at most 2");
  expect_beyond(&GraphBounds::max_tokens, "num_tokens is 6; the op was prepared for at most 5");
  expect_beyond(&GraphBounds::max_q_len, "request 2: q_len is 3; the op was prepared for at most 2");
  expect_beyond(&GraphBounds::max_kv_len, "request 2: it has 30 keys; the op was prepared for at most 29");
  OwnedSegment shared;
  shared.kv_len = {0};
  shared.group_indptr = {0, 3};
  owned.segments.push_back(shared);
  config.bounds = enough;
  expect_refusal(config, owned.view(), "shared segments is 1; the op was prepared for at most 0");
}

TEST(Refusals, Configs) {
  expect_config_refusal([](SchedulerConfig& c) { c.num_q_heads = 3; }, "num_q_heads is 3");
  expect_config_refusal([](SchedulerConfig& c) { c.num_kv_heads = 0; }, "num_kv_heads 0");
  expect_config_refusal([](SchedulerConfig& c) { c.window_left = -2; }, "the window is (-2, -1)");
  expect_config_refusal([](SchedulerConfig& c) { c.window_right = -2; }, "the window is (-1, -2)");
  expect_config_refusal([](SchedulerConfig& c) { c.tile.rows = 0; }, "the tile is 0 rows");
  expect_config_refusal([](SchedulerConfig& c) { c.tile.kv_tokens = 0; }, "by 0 tokens");
  expect_config_refusal([](SchedulerConfig& c) { c.num_workers = 0; }, "num_workers is 0");
  expect_config_refusal([](SchedulerConfig& c) { c.tile_cost = -1; }, "tile_cost is -1");
  expect_config_refusal([](SchedulerConfig& c) { c.tile_cost = c.row_cost = 0; }, "tile_cost is 0");
  expect_config_refusal([](SchedulerConfig& c) { c.row_cost = kMax; }, "a whole tile costs at most 2^31 - 1");
  expect_config_refusal([](SchedulerConfig& c) { c.start_row_cost = -1; }, "start_row_cost -1");
  expect_config_refusal([](SchedulerConfig& c) { c.start_row_cost = kMax; },
                        "a whole tile's start costs at most 2^31 - 1");
  expect_config_refusal([](SchedulerConfig& c) { c.start_free_rows = -1; }, "start_free_rows -1");
  expect_config_refusal([](SchedulerConfig& c) { c.page_size = 0; }, "segment 0: it is paged, but");
  expect_config_refusal([](SchedulerConfig& c) { c.start_cost = -1; }, "start_cost is -1");
  expect_config_refusal([](SchedulerConfig& c) { c.min_split_tokens = 0; }, "min_split_tokens is 0");
  expect_config_refusal([](SchedulerConfig& c) { c.tile.schedule = static_cast<Schedule>(2); },
                        "kStatic and kDynamic are offered");
  expect_config_refusal(
      [](SchedulerConfig& c) {
        c.determinism = Determinism::kBatchInvariant;
        c.fixed_split_tokens = 6;
      },
      "fixed_split_tokens is 6; it must be a positive multiple of the tile's 4 tokens");
}

TEST(Refusals, WorkThatDoesNotFit) {
  SchedulerConfig config = valid_config();
  config.tile = {.rows = 1, .kv_tokens = 1};
  config.tile_cost = kMax - 1;
  config.mask = MaskKind::kNone;
  OwnedBatch owned = paged_batch({1, 2, 3}, {kMaxKvLen, kMaxKvLen, kMaxKvLen});
  expect_refusal(config, owned.view(), "too large for one plan");
  config.tile_cost = 1;  // the sums fit, but the work tiles do not
  config.determinism = Determinism::kBatchInvariant;
  config.fixed_split_tokens = 1;
  expect_refusal(config, owned.view(), "too large for one plan");
  config.tile.schedule = Schedule::kDynamic;
  expect_refusal(config, owned.view(), "too large for one plan");
}

}  // namespace
}  // namespace folio::inline v0::scheduler
