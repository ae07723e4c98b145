#include "replay/workload.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "folio/types/error.hpp"
#include "replay/prefix_count.hpp"

namespace folio::replay {
namespace {

Trace two_requests(std::vector<uint64_t> first, std::vector<uint64_t> second, int32_t tail) {
  Trace trace;
  trace.format = TraceFormat::kMooncake;
  const auto length = [&](const std::vector<uint64_t>& ids) {
    return static_cast<int32_t>(ids.size() - 1) * kTokensPerHash + tail;
  };
  trace.requests.push_back({0.0, length(first), 100, 1, first});
  trace.requests.push_back({1.0, length(second), 100, 2, second});
  return trace;
}

size_t common_prefix(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

TEST(Workload, ScalesUpwardsAndKeepsHashesWhole) {
  const Workload workload = make_workload(two_requests({1, 2, 3}, {1, 2, 4}, 102), 32, 0);
  EXPECT_EQ(workload.tokens_per_hash, 16);
  EXPECT_EQ(workload.requests[0].input_length, 16 + 16 + 4);  // 102 / 32, rounded up
  EXPECT_EQ(workload.requests[0].output_length, 4);
  EXPECT_EQ(workload.requests[0].computed_length(), 39);
}

TEST(Workload, NothingScalesToZero) {
  Trace trace;
  trace.format = TraceFormat::kAzure;
  trace.requests.push_back({0.0, 1, 0, 1, {}});
  const Workload workload = make_workload(trace, 1000, 0);
  EXPECT_EQ(workload.requests[0].input_length, 1);
  EXPECT_EQ(workload.requests[0].output_length, 1);
}

TEST(Workload, ScaleMustDivideAHash) {
  EXPECT_THROW(make_workload(two_requests({1}, {2}, 5), 3, 0), Error);
  EXPECT_THROW(make_workload(two_requests({1}, {2}, 5), 1024, 0), Error);
  EXPECT_THROW(make_workload(two_requests({1}, {2}, 5), 0, 0), Error);
}

TEST(Workload, SortsByArrivalAndLimits) {
  Trace trace;
  trace.format = TraceFormat::kAzure;
  trace.requests = {{500.0, 3, 1, 1, {}}, {100.0, 1, 1, 2, {}}, {500.0, 4, 1, 3, {}}, {100.0, 2, 1, 4, {}}};
  const Workload workload = make_workload(trace, 1, 3);
  ASSERT_EQ(workload.requests.size(), 3u);
  EXPECT_EQ(workload.requests[0].input_length, 1);
  EXPECT_EQ(workload.requests[1].input_length, 2);
  EXPECT_EQ(workload.requests[2].input_length, 3);
  EXPECT_EQ(workload.requests[0].arrival_ms, 0.0);
  EXPECT_EQ(workload.requests[2].arrival_ms, 400.0);
}

TEST(TokenChain, EqualExactlyAsFarAsTheHashesAre) {
  const Workload workload = make_workload(two_requests({1, 2, 3}, {1, 2, 4}, 102), 32, 0);
  EXPECT_EQ(common_prefix(token_chain(workload, 0), token_chain(workload, 1)), 32u);
}

TEST(TokenChain, PartialLastBlocksAreSharedTokenByTokenAndGeneratedTokensAreNot) {
  const Workload workload = make_workload(two_requests({1, 2, 3}, {1, 2, 3}, 102), 32, 0);
  EXPECT_EQ(common_prefix(token_chain(workload, 0), token_chain(workload, 1)), 36u);
}

TEST(TokenChain, ADifferentBeginningChangesEverythingBehindIt) {
  const Workload workload = make_workload(two_requests({7, 2, 3}, {8, 2, 3}, 512), 32, 0);
  const std::vector<uint64_t> a = token_chain(workload, 0);
  const std::vector<uint64_t> b = token_chain(workload, 1);
  for (size_t p = 0; p < a.size(); ++p) EXPECT_NE(a[p], b[p]) << p;
}

TEST(TokenChain, RequestsWithoutHashesShareNothing) {
  Trace trace;
  trace.format = TraceFormat::kAzure;
  trace.requests = {{0.0, 50, 5, 1, {}}, {0.0, 50, 5, 2, {}}};
  const Workload workload = make_workload(trace, 1, 0);
  EXPECT_EQ(common_prefix(token_chain(workload, 0), token_chain(workload, 1)), 0u);
}

/// The excerpt's counts were made by examples/traces/expected_hits.py, which shares no code with this.
TEST(PrefixCount, ExcerptMatchesTheIndependentCount) {
  std::ifstream file(FOLIO_EXAMPLE_TRACES "/expected_hits.json");
  const nlohmann::json expected = nlohmann::json::parse(file);
  const Trace trace = read_trace(FOLIO_EXAMPLE_TRACES "/mooncake_excerpt.jsonl", TraceFormat::kMooncake);
  const BlockHits blocks = count_block_hits(trace, 0);
  EXPECT_EQ(blocks.full_blocks, expected["blocks"]["full_blocks"].get<int64_t>());
  EXPECT_EQ(blocks.with_partial, expected["blocks"]["with_partial"].get<int64_t>());
  ASSERT_FALSE(expected["pages"].empty());
  for (const nlohmann::json& row : expected["pages"]) {
    const Workload workload = make_workload(trace, row["scale"].get<int32_t>(), 0);
    const PrefixCount count = count_prefix_hits(workload, row["page_size"].get<int32_t>());
    EXPECT_EQ(count.input_tokens, row["input_tokens"].get<int64_t>()) << row;
    EXPECT_EQ(count.hit_tokens, row["hit_tokens"].get<int64_t>()) << row;
    EXPECT_EQ(count.leaked_pages, 0) << row;
  }
}

TEST(Workload, RequestRate_ScalesArrivals) {
  Workload workload;
  for (const double ms : {0.0, 10.0, 40.0}) workload.requests.push_back({ms, 1, 1, 0, {}});
  set_request_rate(workload, 4.0);
  EXPECT_EQ(workload.requests[1].arrival_ms, 125.0);
  EXPECT_EQ(workload.requests[2].arrival_ms, 500.0) << "the third of three requests at four a second";
  set_request_rate(workload, std::numeric_limits<double>::infinity());
  EXPECT_EQ(workload.requests[2].arrival_ms, 0.0);
  EXPECT_THROW(set_request_rate(workload, 4.0), Error) << "they arrive at once";
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(set_request_rate(workload, rate), Error) << rate;
  }
}

/// The first 2,000 rows of the whole trace, which is not shipped: cmake -DFOLIO_FULL_MOONCAKE_TRACE=path.
TEST(PrefixCount, FullTraceHasThePublishedHits) {
  const std::string path = FOLIO_FULL_MOONCAKE_TRACE;
  if (path.empty()) GTEST_SKIP() << "configure with -DFOLIO_FULL_MOONCAKE_TRACE=path to the conversation trace";
  const Trace trace = read_trace(path, TraceFormat::kMooncake);
  const BlockHits blocks = count_block_hits(trace, 2000);
  EXPECT_EQ(blocks.input_tokens, 27441774);
  EXPECT_EQ(blocks.full_blocks, 8066048);
  EXPECT_EQ(blocks.with_partial, 8070959);
  const PrefixCount unscaled = count_prefix_hits(make_workload(trace, 1, 2000), 512);
  EXPECT_EQ(unscaled.input_tokens, 27441774);
  EXPECT_EQ(unscaled.hit_tokens, 8066048);
  EXPECT_EQ(unscaled.leaked_pages, 0);
  const PrefixCount scaled = count_prefix_hits(make_workload(trace, 32, 2000), 16);
  EXPECT_EQ(scaled.hit_tokens, 8066048 / 32);
}

}  // namespace
}  // namespace folio::replay
