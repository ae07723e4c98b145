// Which new tokens lie on which rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "folio/distributed/pcp_tokens.hpp"
#include "folio/types/error.hpp"

namespace folio::distributed::testing {
namespace {

int32_t tokens_of(int32_t q_len, int32_t request, int32_t world, int32_t rank) {
  const auto [first, second] = pcp_chunks(q_len, request, world, rank);
  return first.size() + second.size();
}

TEST(PcpTokens, ZigZag) {
  // 21 tokens on two ranks: chunks of 6, 5, 5 and 5.
  EXPECT_EQ(pcp_chunks(21, 0, 2, 0), (std::array<PcpChunk, 2>{PcpChunk{0, 6}, PcpChunk{16, 21}}));
  EXPECT_EQ(pcp_chunks(21, 0, 2, 1), (std::array<PcpChunk, 2>{PcpChunk{6, 11}, PcpChunk{11, 16}}));
  // The next request's pairs belong to the other rank.
  EXPECT_EQ(pcp_chunks(21, 1, 2, 0), pcp_chunks(21, 0, 2, 1));
  EXPECT_EQ(pcp_chunks(21, 1, 2, 1), pcp_chunks(21, 0, 2, 0));
}

TEST(PcpTokens, EveryTokenOnceAndEvenly) {
  for (const int32_t world : {1, 2, 3, 4, 7, 8}) {
    for (int32_t q_len = 0; q_len < 70; ++q_len) {
      std::vector<int32_t> owners(static_cast<size_t>(q_len)), counts;
      for (int32_t rank = 0; rank < world; ++rank) {
        const auto [first, second] = pcp_chunks(q_len, 5, world, rank);
        EXPECT_LE(first.end, second.begin);
        for (const PcpChunk& chunk : {first, second}) {
          for (int32_t k = chunk.begin; k < chunk.end; ++k) owners[static_cast<size_t>(k)] += 1;
        }
        counts.push_back(first.size() + second.size());
      }
      EXPECT_TRUE(std::ranges::all_of(owners, [](int32_t n) { return n == 1; })) << q_len << " on " << world;
      const auto [least, most] = std::ranges::minmax(counts);
      EXPECT_LE(most - least, 1);
      EXPECT_EQ(most, (q_len + world - 1) / world);
    }
  }
}

TEST(PcpTokens, CausalWorkIsEven) {
  constexpr int32_t kWorld = 4, kLength = 4096;
  std::vector<int64_t> work;
  for (int32_t rank = 0; rank < kWorld; ++rank) {
    int64_t pairs = 0;
    for (const PcpChunk& chunk : pcp_chunks(kLength, 0, kWorld, rank)) {
      for (int32_t k = chunk.begin; k < chunk.end; ++k) pairs += k + 1;
    }
    work.push_back(pairs);
  }
  EXPECT_EQ(std::ranges::max(work), std::ranges::min(work));
}

TEST(PcpTokens, DecodesFallToDifferentRanks) {
  std::vector<int32_t> cu_q(33);
  std::iota(cu_q.begin(), cu_q.end(), 0);
  EXPECT_EQ(max_pcp_tokens(cu_q, 4), 8);
}

TEST(PcpTokens, RowsFindEveryToken) {
  const std::vector<int32_t> cu_q{0, 1, 18, 18, 40, 43};
  for (const int32_t world : {1, 2, 3, 5}) {
    const int32_t padded = max_pcp_tokens(cu_q, world) + 1;
    std::vector<int32_t> rows(static_cast<size_t>(cu_q.back()));
    pcp_token_rows(cu_q, world, padded, rows);
    int32_t most = 0;
    for (int32_t rank = 0; rank < world; ++rank) {
      std::vector<int32_t> local(cu_q.size());
      pcp_local_cu_q(cu_q, world, rank, local);
      for (int32_t i = 0; i < 5; ++i) {
        const auto at = static_cast<size_t>(i);
        EXPECT_EQ(local[at + 1] - local[at], tokens_of(cu_q[at + 1] - cu_q[at], i, world, rank));
      }
      most = std::max(most, local.back());
      std::vector<int32_t> tokens(static_cast<size_t>(local.back()));
      pcp_tokens(cu_q, world, rank, tokens);
      EXPECT_TRUE(std::ranges::is_sorted(tokens));
      for (size_t j = 0; j < tokens.size(); ++j) {
        EXPECT_EQ(rows[static_cast<size_t>(tokens[j])], rank * padded + static_cast<int32_t>(j));
      }
    }
    EXPECT_EQ(padded, most + 1);
  }
}

TEST(PcpTokens, RefusesWhatCannotBe) {
  const std::vector<int32_t> cu_q{0, 4, 9}, descending{0, 4, 3}, late{1, 4};
  std::vector<int32_t> few(2), nine(9);
  EXPECT_THROW(pcp_chunks(-1, 0, 2, 0), Error);
  EXPECT_THROW(pcp_chunks(1, -1, 2, 0), Error);
  EXPECT_THROW(pcp_chunks(1, 0, 0, 0), Error);
  EXPECT_THROW(pcp_chunks(1, 0, 2, 2), Error);
  EXPECT_THROW(max_pcp_tokens(descending, 2), Error);
  EXPECT_THROW(max_pcp_tokens(late, 2), Error);
  EXPECT_THROW(max_pcp_tokens({}, 2), Error);
  EXPECT_THROW(pcp_local_cu_q(cu_q, 2, 0, few), Error);
  EXPECT_THROW(pcp_tokens(cu_q, 2, 0, few), Error);
  EXPECT_THROW(pcp_token_rows(cu_q, 2, 5, few), Error);
  EXPECT_THROW(pcp_token_rows(cu_q, 2, 4, nine), Error);
}

}  // namespace
}  // namespace folio::distributed::testing
