#include "attention/cascade_levels.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::attention {
namespace {

using nlohmann::json;

CascadeCosts costs_of(const json& given) {
  CascadeCosts costs;
  costs.tile_rows = given.at("tile_rows");
  costs.tile_tokens = given.at("tile_tokens");
  costs.group_size = given.at("group_size");
  costs.page_size = given.at("page_size");
  costs.window_left = given.at("window_left");
  costs.kv_token_bytes = given.at("kv_token_bytes");
  costs.q_row_bytes = given.at("q_row_bytes");
  costs.partial_row_bytes = given.at("partial_row_bytes");
  return costs;
}

/// A batch of page tables, whose prefixes are those of full pages computed before the step.
struct Batch {
  explicit Batch(const json& given, int32_t page_size) : kv_len(given.at("kv_len").get<std::vector<int32_t>>()) {
    for (const int32_t q_len : given.at("q_len")) cu_q.push_back(cu_q.back() + q_len);
    for (const auto& row : given.at("pages")) {
      for (const int32_t page : row) indices.push_back(page);
      indptr.push_back(static_cast<int32_t>(indices.size()));
    }
    for (size_t r = 0; r < kv_len.size(); ++r) {
      const int32_t q_len = cu_q[r + 1] - cu_q[r];
      full_pages.push_back(q_len == 0 ? 0 : (kv_len[r] - q_len) / page_size);
    }
    batch = {static_cast<int32_t>(kv_len.size()), cu_q.data(), kv_len.data(), csr_table(indices, indptr)};
  }
  std::vector<int32_t> cu_q{0}, kv_len, indptr{0}, indices, full_pages;
  CascadeBatch batch;
};

TEST(CascadeLevels, Choice_SavesMostOfAll) {
  const json golden = folio::testing::golden("cascade/levels");
  CascadeLevels levels;  // one for all cases: nothing may be left of the one before
  SharedPrefixFinder finder;
  size_t nested = 0;
  for (const json& given : golden.at("cases")) {
    SCOPED_TRACE(given.at("name").get<std::string>());
    const CascadeCosts costs = costs_of(given.at("costs"));
    const Batch batch(given, costs.page_size);
    const auto groups =
        levels.choose(costs, given.at("max_levels"), batch.batch, finder.find(batch.batch.table, batch.full_pages));
    json found = json::array();
    for (const CascadeGroup& group : groups) {
      found.push_back({group.level, group.begin, group.end, group.first_page, group.end_page});
      nested += group.level > 0 ? 1 : 0;
    }
    EXPECT_EQ(found, given.at("expected").at("groups"));
    EXPECT_EQ(levels.saved(), given.at("expected").at("saved").get<int64_t>());
  }
  EXPECT_GT(nested, 10u);
}

/// A staircase: every request shares one page more with its successor than with its predecessor.
TEST(CascadeLevels, DeepNesting_StaysWithinItsLevels) {
  constexpr int32_t kRequests = 40;
  json given;
  for (int32_t r = 0; r < kRequests; ++r) {
    std::vector<int32_t> row;
    for (int32_t page = 0; page <= 4 * r; ++page) row.push_back(page);
    row.push_back(1000 + r);
    given["kv_len"].push_back(16 * static_cast<int32_t>(row.size()));
    given["pages"].push_back(row);
    given["q_len"].push_back(1);
  }
  CascadeCosts costs;
  costs.tile_rows = 1024;
  costs.tile_tokens = 16;
  costs.group_size = 4;
  costs.page_size = 16;
  costs.kv_token_bytes = 512;
  const Batch batch(given, 16);
  SharedPrefixFinder finder;
  CascadeLevels levels;
  const auto prefixes = finder.find(batch.batch.table, batch.full_pages);
  int64_t saved = 0;
  for (int32_t most = 0; most <= kMaxCascadeLevels; ++most) {
    const auto groups = levels.choose(costs, most, batch.batch, prefixes);
    EXPECT_EQ(groups.size(), static_cast<size_t>(most));  // of a staircase every level has one group
    for (size_t g = 0; g < groups.size(); ++g) {
      EXPECT_EQ(groups[g].level, static_cast<int32_t>(g));
      EXPECT_EQ(groups[g].first_page, g == 0 ? 0 : groups[g - 1].end_page);
    }
    EXPECT_GT(levels.saved(), most == 0 ? -1 : saved);
    saved = levels.saved();
  }
}

TEST(CascadeLevels, CostsBeyond64Bits_AreRefused) {
  constexpr int64_t kHuge = int64_t{1} << 60;
  const json batch_of = {{"q_len", {1, 1}}, {"kv_len", {65, 65}}, {"pages", {{1, 2, 3, 4, 5}, {1, 2, 3, 4, 6}}}};
  const Batch batch(batch_of, 16);
  CascadeCosts costs;
  costs.tile_rows = costs.tile_tokens = 16;
  costs.group_size = 4;
  costs.page_size = 16;
  costs.kv_token_bytes = 256;
  CascadePlanner planner(costs, 2);
  EXPECT_EQ(planner.discover(batch.batch).num_levels(), 1);
  for (int64_t CascadeCosts::*cost :
       {&CascadeCosts::kv_token_bytes, &CascadeCosts::q_row_bytes, &CascadeCosts::partial_row_bytes}) {
    CascadeCosts huge = costs;
    huge.*cost = kHuge;
    CascadePlanner refusing(huge, 2);
    folio::testing::expect_refused("do not fit in 64 bits", [&] { refusing.discover(batch.batch); });
  }
}

}  // namespace
}  // namespace folio::inline v0::attention
