#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "folio/page_table.hpp"

namespace folio {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

template <typename Call>
void expect_refused(const std::string& text, Call call) {
  try {
    call();
    ADD_FAILURE() << "did not throw: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
  }
}

struct ShardLenCase {
  int32_t world, interleave, length;
  std::vector<int32_t> per_rank;
};

// vLLM's tests of get_dcp_local_seq_lens (and a downstream fork's); the rows with length 100 and (4, 2) computed
// independently.
const ShardLenCase kShardLens[] = {
    {2, 1, 1, {1, 0}},
    {2, 1, 2, {1, 1}},
    {2, 1, 128, {64, 64}},
    {2, 1, 129, {65, 64}},
    {2, 1, 256, {128, 128}},
    {2, 1, 257, {129, 128}},
    {2, 128, 1, {1, 0}},
    {2, 128, 2, {2, 0}},
    {2, 128, 128, {128, 0}},
    {2, 128, 129, {128, 1}},
    {2, 128, 256, {128, 128}},
    {2, 128, 257, {129, 128}},
    {4, 128, 1, {1, 0, 0, 0}},
    {4, 128, 2, {2, 0, 0, 0}},
    {4, 128, 128, {128, 0, 0, 0}},
    {4, 128, 129, {128, 1, 0, 0}},
    {4, 128, 256, {128, 128, 0, 0}},
    {4, 128, 257, {128, 128, 1, 0}},
    {2, 4, 1, {1, 0}},
    {2, 4, 4, {4, 0}},
    {2, 4, 5, {4, 1}},
    {2, 4, 8, {4, 4}},
    {2, 4, 9, {5, 4}},
    {2, 4, 100, {52, 48}},
    {4, 2, 3, {2, 1, 0, 0}},
    {4, 2, 7, {2, 2, 2, 1}},
    {4, 2, 9, {3, 2, 2, 2}},
    {4, 2, 100, {26, 26, 24, 24}},
};

TEST(ShardLen, GoldenCases) {
  for (const ShardLenCase& c : kShardLens) {
    for (int32_t rank = 0; rank < c.world; ++rank) {
      EXPECT_EQ(shard_len(c.length, c.world, rank, c.interleave), c.per_rank[static_cast<size_t>(rank)])
          << "world " << c.world << " interleave " << c.interleave << " length " << c.length << " rank " << rank;
    }
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

TEST(ShardLen,
     KeysVisibleToChunkedPrefill) {  // a worked example of vLLM pull request 25438: 25 keys, 8 queries, rank 0 of 4
  std::vector<int32_t> visible;
  for (int32_t q_pos = 17; q_pos < 25; ++q_pos) visible.push_back(shard_len(q_pos + 1, 4, 0, 1));
  EXPECT_THAT(visible, ElementsAre(5, 5, 5, 6, 6, 6, 6, 7));
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

struct SlotCase {
  int32_t world, interleave, rank;
  std::vector<int64_t> slots;  ///< of positions 0, 1, 2, ...
};

// Computed independently: pages of 4 tokens, page table row [3, 7, 9].
const SlotCase kSlots[] = {
    {1, 1, 0, {12, 13, 14, 15, 28, 29}},
    {2, 1, 0, {12, -1, 13, -1, 14, -1, 15, -1, 28, -1, 29, -1, 30, -1, 31, -1, 36, -1}},
    {2, 1, 1, {-1, 12, -1, 13, -1, 14, -1, 15, -1, 28, -1, 29, -1, 30, -1, 31, -1, 36}},
    {2, 2, 0, {12, 13, -1, -1, 14, 15, -1, -1, 28, 29, -1, -1, 30, 31, -1, -1, 36, 37}},
    {2, 2, 1, {-1, -1, 12, 13, -1, -1, 14, 15, -1, -1, 28, 29, -1, -1, 30, 31, -1, -1}},
};

std::vector<int32_t> count_up(size_t n) {
  std::vector<int32_t> numbers(n);
  for (size_t i = 0; i < n; ++i) numbers[i] = static_cast<int32_t>(i);
  return numbers;
}

TEST(SlotMapping, GoldenCases) {
  const std::vector<int32_t> pages{3, 7, 9};
  const std::vector<int32_t> indptr{0, 3};
  for (const SlotCase& c : kSlots) {
    const std::vector<int32_t> rows(c.slots.size(), 0);
    std::vector<int64_t> slots(c.slots.size(), -9);
    slot_mapping(csr_table(pages, indptr), rows, count_up(c.slots.size()), 4, slots, c.world, c.rank, c.interleave);
    EXPECT_THAT(slots, ElementsAreArray(c.slots));
    slot_mapping(dense_table(pages, 1, 3), rows, count_up(c.slots.size()), 4, slots, c.world, c.rank, c.interleave);
    EXPECT_THAT(slots, ElementsAreArray(c.slots));
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
      EXPECT_THAT(owners, testing::Each(1));
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
