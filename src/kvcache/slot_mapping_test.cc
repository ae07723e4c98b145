#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"

namespace folio {
namespace {

using ::testing::ElementsAre;
using testing::expect_refused;
using testing::golden_cases;
using testing::GoldenCase;

TEST(ShardLen, GoldenCases) {
  for (const GoldenCase& c : golden_cases("kvcache/slot_mapping", "shard_lens")) {
    const auto world = c.at<int32_t>("world");
    std::vector<int32_t> per_rank;
    for (int32_t rank = 0; rank < world; ++rank) {
      per_rank.push_back(shard_len(c.at<int32_t>("length"), world, rank, c.at<int32_t>("interleave")));
    }
    EXPECT_EQ(per_rank, c.ints("per_rank")) << c.data;
  }
}

TEST(ShardLen, CountsPositions) {  // the property that vLLM's tests state
  std::vector<int32_t> lengths;
  for (int32_t length = 0; length <= 32; ++length) lengths.push_back(length);
  for (int32_t near : {64, 128, 256, 512}) lengths.insert(lengths.end(), {near - 1, near, near + 1});
  for (int32_t world : {1, 2, 4}) {
    for (int32_t interleave : {1, 2, 4, 64}) {
      // No rank has more than ceil(L / (W * I)) * I tokens: what engines reserve.
      for (int32_t length : lengths) {
        const int32_t bound = (length + world * interleave - 1) / (world * interleave) * interleave;
        int32_t sum = 0;
        for (int32_t rank = 0; rank < world; ++rank) {
          int32_t count = 0;
          for (int32_t p = 0; p < length; ++p) count += p / interleave % world == rank ? 1 : 0;
          const int32_t got = shard_len(length, world, rank, interleave);
          EXPECT_EQ(got, count);
          EXPECT_LE(got, bound);
          sum += got;
        }
        EXPECT_EQ(sum, length);
      }
    }
  }
}

TEST(ShardLen, KeysVisibleToChunkedPrefill) {
  for (const GoldenCase& c : golden_cases("kvcache/slot_mapping", "visible")) {
    std::vector<int32_t> keys;
    const auto kv_len = c.at<int32_t>("kv_len");
    for (int32_t q_pos = kv_len - c.at<int32_t>("q_len"); q_pos < kv_len; ++q_pos) {
      keys.push_back(shard_len(q_pos + 1, c.at<int32_t>("world"), c.at<int32_t>("rank"), c.at<int32_t>("interleave")));
    }
    EXPECT_EQ(keys, c.ints("keys"));
  }
}

TEST(ShardLen, LargeNumbersDoNotOverflow) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(shard_len(kMax, kMax, 0, kMax), kMax);
  EXPECT_EQ(shard_len(kMax, kMax, kMax - 1, kMax), 0);
  EXPECT_EQ(shard_len(kMax, 1, 0, 1), kMax);
  EXPECT_EQ(shard_len(kMax, kMax, kMax - 1, 1), 1);
}

TEST(ShardLen, Refuses) {
  expect_refused("length is -1", [] { shard_len(-1, 1, 0, 1); });
  expect_refused("world is 0", [] { shard_len(1, 0, 0, 1); });
  expect_refused("rank is 2", [] { shard_len(1, 2, 2, 1); });
  expect_refused("rank is -1", [] { shard_len(1, 2, -1, 1); });
  expect_refused("interleave is 0", [] { shard_len(1, 2, 0, 0); });
}

std::vector<int32_t> count_up(size_t n) {
  std::vector<int32_t> numbers(n);
  for (size_t i = 0; i < n; ++i) numbers[i] = static_cast<int32_t>(i);
  return numbers;
}

TEST(SlotMapping, GoldenCases) {
  for (const GoldenCase& c : golden_cases("kvcache/slot_mapping")) {
    SCOPED_TRACE(c.name);
    const std::vector<int32_t> pages = c.ints("pages");
    const auto num_pages = static_cast<int32_t>(pages.size());
    const std::vector<int32_t> indptr{0, num_pages};
    const auto expected = c.at<std::vector<int64_t>>("slots");
    const std::vector<int32_t> rows(expected.size(), 0);
    for (const PageTableView& table : {csr_table(pages, indptr), dense_table(pages, 1, num_pages)}) {
      std::vector<int64_t> slots(expected.size(), -9);
      slot_mapping(table, rows, count_up(expected.size()), c.at<int32_t>("page_size"), slots, c.at<int32_t>("world"),
                   c.at<int32_t>("rank"), c.at<int32_t>("interleave"));
      EXPECT_EQ(slots, expected);
    }
  }
}

/// The tokens of one rank fill its pages' slots in order, without gaps; every token lies on exactly one rank.
TEST(SlotMapping, ShardsFillTheirPagesInOrder) {
  constexpr int32_t kPageSize = 8;
  const std::vector<int32_t> pages{5, 2, 11, 0, 6, 3, 9, 1};
  for (int32_t world : {1, 2, 3, 4}) {
    for (int32_t interleave : {1, 2, 4, 8}) {
      const auto tokens = static_cast<size_t>(world * kPageSize * 2 + 5);
      std::vector<int32_t> owners(tokens, 0);
      for (int32_t rank = 0; rank < world; ++rank) {
        std::vector<int64_t> slots(tokens);
        slot_mapping(dense_table(pages, 1, 8), std::vector<int32_t>(tokens, 0), count_up(tokens), kPageSize, slots,
                     world, rank, interleave);
        int32_t local = 0;
        for (size_t t = 0; t < tokens; ++t) {
          if (slots[t] < 0) continue;
          ++owners[t];
          EXPECT_EQ(slots[t], pages[static_cast<size_t>(local / kPageSize)] * kPageSize + local % kPageSize);
          ++local;
        }
        EXPECT_EQ(local, shard_len(static_cast<int32_t>(tokens), world, rank, interleave));
      }
      EXPECT_THAT(owners, ::testing::Each(1));
    }
  }
}

TEST(SlotMapping, PaddingNeedsNoRow) {
  const std::vector<int32_t> pages{2};
  std::vector<int64_t> slots(3, 5);
  slot_mapping(dense_table(pages, 1, 1), std::vector<int32_t>{0, 77, -1}, std::vector<int32_t>{3, -1, -5}, 16, slots);
  EXPECT_THAT(slots, ElementsAre(35, -1, -1));
}

TEST(SlotMapping, SlotsAre64Bit) {
  const std::vector<int32_t> pages{std::numeric_limits<int32_t>::max()};
  std::vector<int64_t> slots(1);
  slot_mapping(dense_table(pages, 1, 1), std::vector<int32_t>{0}, std::vector<int32_t>{15}, 16, slots);
  EXPECT_THAT(slots, ElementsAre(int64_t{2147483647} * 16 + 15));
}

TEST(SlotMapping, Refuses) {
  const std::vector<int32_t> pages{3, -1};
  const PageTableView table = dense_table(pages, 1, 2);
  std::vector<int64_t> slots(1);
  const auto map = [&](int32_t row, int32_t position, int32_t world = 1, int32_t rank = 0, int32_t interleave = 1) {
    slot_mapping(table, std::vector<int32_t>{row}, std::vector<int32_t>{position}, 16, slots, world, rank, interleave);
  };
  EXPECT_NO_THROW(map(0, 15));
  expect_refused("token 0 belongs to row 1", [&] { map(1, 0); });
  expect_refused("token 0 belongs to row -1", [&] { map(-1, 0); });
  expect_refused("row 0 needs 3 pages", [&] { map(0, 32); });
  expect_refused("lies on page -1", [&] { map(0, 16); });
  expect_refused("interleave is 3; it must divide page_size (16)", [&] { map(0, 0, 2, 0, 3); });
  expect_refused("interleave is 32; it must divide page_size (16)", [&] { map(0, 0, 2, 0, 32); });
  expect_refused("rank is 2", [&] { map(0, 0, 2, 2); });
  expect_refused("world is 0", [&] { map(0, 0, 0); });
  std::vector<int64_t> two(2);
  expect_refused("1, 1 and 2 entries",
                 [&] { slot_mapping(table, std::vector<int32_t>{0}, std::vector<int32_t>{0}, 16, two); });
  expect_refused("page_size is 0",
                 [&] { slot_mapping(table, std::vector<int32_t>{0}, std::vector<int32_t>{0}, 0, slots); });
}

}  // namespace
}  // namespace folio
