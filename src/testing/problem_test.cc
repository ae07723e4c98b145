#include "testing/problem.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace folio::verify {
namespace {

Problem problem_of(const std::string& text) {
  return make_problem(parse_case(text));
}

TEST(Problem, IsTheSameForTheSameCase) {
  const Problem a = problem_of("seed=4 segments=cascade2 queries=mixed scales=head");
  const Problem b = problem_of("seed=4 segments=cascade2 queries=mixed scales=head");
  EXPECT_EQ(a.requests[0].q, b.requests[0].q);
  EXPECT_EQ(a.segments[0].rows[0].pages, b.segments[0].rows[0].pages);
  EXPECT_EQ(a.segments[0].k_scale.values, b.segments[0].k_scale.values);
}

TEST(Problem, EdgeLengthsStandAroundThePage) {
  std::set<int32_t> lengths;
  const Problem problem = problem_of("lengths=edges page=32");
  for (const KvRowModel& row : problem.segments[0].rows) lengths.insert(row.kv_len);
  for (const int32_t length : {31, 32, 33, 0, 1}) EXPECT_TRUE(lengths.count(length) != 0) << length;
}

TEST(Problem, EmptyProfilesHaveEmptyRequestsAndMoreQueriesThanKeys) {
  bool no_queries = false, no_keys = false, more_queries = false;
  for (int seed = 1; seed < 10; ++seed) {
    const Problem problem = problem_of("lengths=empty queries=mixed seed=" + std::to_string(seed));
    for (size_t r = 0; r < problem.requests.size(); ++r) {
      no_queries |= problem.requests[r].q_len == 0;
      no_keys |= problem.num_keys(r) == 0 && problem.requests[r].q_len > 0;
      more_queries |= problem.requests[r].q_len > problem.num_keys(r) && problem.num_keys(r) > 0;
    }
  }
  EXPECT_TRUE(no_queries);
  EXPECT_TRUE(no_keys);
  EXPECT_TRUE(more_queries);
}

TEST(Problem, LongProfilesPassOneFixedSplit) {
  int32_t longest = 0;
  for (int seed = 1; seed < 8; ++seed) {
    const Problem problem = problem_of("lengths=long seed=" + std::to_string(seed));
    for (size_t r = 0; r < problem.requests.size(); ++r) longest = std::max(longest, problem.num_keys(r));
  }
  EXPECT_GT(longest, 2048);
}

TEST(Problem, PagesAreSharedOnlyWholeAndWithEqualContents) {
  bool shared_somewhere = false;
  for (int seed = 1; seed < 8; ++seed) {
    const Problem problem = problem_of("lengths=medium page=8 seed=" + std::to_string(seed));
    const std::vector<KvRowModel>& rows = problem.segments[0].rows;
    const int64_t page_values = int64_t{8} * problem.config.num_kv_heads * problem.config.head_dim_qk;
    for (size_t a = 0; a < rows.size(); ++a) {
      for (size_t b = a + 1; b < rows.size(); ++b) {
        for (size_t i = 0; i < rows[a].pages.size(); ++i) {
          const auto found = std::find(rows[b].pages.begin(), rows[b].pages.end(), rows[a].pages[i]);
          if (found == rows[b].pages.end()) continue;
          shared_somewhere = true;
          ASSERT_EQ(found - rows[b].pages.begin(), static_cast<int64_t>(i));
          EXPECT_TRUE(std::equal(rows[a].k.begin() + static_cast<int64_t>(i) * page_values,
                                 rows[a].k.begin() + static_cast<int64_t>(i + 1) * page_values,
                                 rows[b].k.begin() + static_cast<int64_t>(i) * page_values));
        }
      }
    }
  }
  EXPECT_TRUE(shared_somewhere);
}

TEST(Problem, ShardsOfAWholeWorldHoldEveryPositionOnce) {
  for (int seed = 1; seed < 12; ++seed) {
    const Problem problem = problem_of("segments=shard2 lengths=medium seed=" + std::to_string(seed));
    const int32_t world = problem.segments[0].shard.world;
    const auto ranks = std::count_if(problem.segments.begin(), problem.segments.end(),
                                     [](const SegmentModel& s) { return s.source == KvSource::kPaged; });
    if (ranks != world) continue;
    std::multiset<int32_t> positions;
    int32_t tokens = 0;
    for (const SegmentModel& segment : problem.segments) {
      if (segment.source != KvSource::kPaged) continue;
      for (int32_t j = 0; j < segment.rows[0].kv_len; ++j) positions.insert(segment.position(segment.rows[0], j));
      tokens += segment.rows[0].kv_len;
    }
    const int32_t first = problem.segments[0].rows[0].first_pos;
    for (int32_t p = first; p < first + tokens; ++p) EXPECT_EQ(positions.count(p), 1u) << p;
  }
}

TEST(Problem, AliasedValuesAreTheKeys) {
  const Problem problem = problem_of("format=alias dims=192/128 lengths=medium");
  const KvRowModel& row = problem.segments[0].rows[0];
  EXPECT_EQ(row.v[5], row.k[static_cast<size_t>(problem.alias_offset) + 5]);
}

}  // namespace
}  // namespace folio::verify
