#include "folio/kvcache/req_to_token_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Ints = std::vector<int32_t>;

class ReqToTokenPoolGolden : public ::testing::TestWithParam<testing::GoldenCase> {};

TEST_P(ReqToTokenPoolGolden, HandsOutRows) {
  ReqToTokenPool pool(GetParam().at<int32_t>("max_reqs"), 4);
  for (const nlohmann::json& step : GetParam().data.at("ops")) {
    SCOPED_TRACE(step.dump());
    const auto op = step.at("op").get<std::string>();
    if (op == "alloc") {
      Ints rows(step.at("count").get<size_t>(), -7);
      const bool given = pool.alloc(rows);
      EXPECT_EQ(given, !step.at("rows").is_null());
      if (given) {
        EXPECT_EQ(rows, step.at("rows").get<Ints>());
      }
    } else if (op == "available") {
      EXPECT_EQ(pool.available(), step.at("rows").get<int32_t>());
    } else if (step.contains("error")) {
      EXPECT_THAT(message_of([&] { pool.free(step.at("row")); }), HasSubstr(step.at("error").get<std::string>()));
    } else {
      pool.free(step.at("row"));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ReqToTokenPoolGolden,
                         ::testing::ValuesIn(testing::golden_cases("kvcache/req_to_token_pool")),
                         testing::golden_case_name);

TEST(ReqToTokenPoolTest, WritesPositionsOfHeldRows) {
  ReqToTokenPool pool(2, 4);
  const int32_t row = pool.alloc().value();
  pool.write(row, 0, Ints{5, 6, 7});
  pool.write(row, 2, Ints{8, 9});
  pool.write(row, 4, Ints{});
  EXPECT_THAT(pool.row(row), ElementsAre(5, 6, 8, 9));
  EXPECT_THAT(message_of([&] { pool.write(row, 3, Ints{1, 2}); }), HasSubstr("positions 3 to 5 of row 1"));
  EXPECT_THAT(message_of([&] { pool.write(row, -1, Ints{1}); }), HasSubstr("positions -1 to 0"));
  EXPECT_THAT(message_of([&] { pool.write(row + 1, 0, Ints{1}); }), HasSubstr("row 2 is not held"));
  EXPECT_THAT(message_of([&] { pool.write(7, 0, Ints{1}); }), HasSubstr("row 7 is not of this pool"));
  EXPECT_THAT(pool.row(row), ElementsAre(5, 6, 8, 9));
}

// In pymllm a padded batch entry (row 0) could be a live request.
TEST(ReqToTokenPoolTest, KeepsRowZeroForPadding) {
  ReqToTokenPool pool(3, 4);
  Ints rows(3);
  ASSERT_TRUE(pool.alloc(rows));
  for (const int32_t row : rows) {
    EXPECT_NE(row, 0);
    pool.write(row, 0, Ints{1, 2, 3, 4});
  }
  EXPECT_THAT(message_of([&] { pool.write(0, 0, Ints{1}); }), HasSubstr("row 0 is the dummy row"));
  EXPECT_THAT(pool.row(0), Each(0));
}

TEST(ReqToTokenPoolTest, IsAPageTable) {
  ReqToTokenPool pool(2, 3);
  const int32_t row = pool.alloc().value();
  pool.write(row, 0, Ints{7, 5, 6});
  const PageTableView table = pool.table();
  EXPECT_EQ(table.num_rows, 3);
  validate(table, Ints{0, 3, 0}, 1, 8);
  const PagedMetadata csr = to_csr(table, Ints{1, 3, 0}, 1);
  EXPECT_THAT(csr.indices, ElementsAre(0, 7, 5, 6));
}

TEST(ReqToTokenPoolTest, IsAsNewAfterClear) {
  ReqToTokenPool pool(2, 3);
  const int32_t row = pool.alloc().value();
  pool.write(row, 0, Ints{7, 5, 6});
  (void)pool.alloc();
  EXPECT_EQ(pool.alloc(), std::nullopt);
  pool.free(row);
  EXPECT_THAT(pool.row(row), ElementsAre(7, 5, 6));
  pool.clear();
  EXPECT_FALSE(pool.is_held(2));
  EXPECT_THAT(pool.row(row), Each(0));
  EXPECT_EQ(pool.alloc(), 1);
}

TEST(ReqToTokenPoolTest, ChecksItsSizes) {
  EXPECT_THAT(message_of([] { ReqToTokenPool(0, 4); }), HasSubstr("max_reqs is 0"));
  EXPECT_THAT(message_of([] { ReqToTokenPool(4, 0); }), HasSubstr("max_context_len is 0"));
  EXPECT_THAT(message_of([] { (void)ReqToTokenPool(1, 1).row(2); }), HasSubstr("row 2 is not of this pool"));
}

}  // namespace
}  // namespace folio
