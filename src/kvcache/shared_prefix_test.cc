#include "folio/shared_prefix.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Rows = std::vector<std::vector<int32_t>>;

/// Page tables of rows in both forms, with ids that nothing may look at beyond each row's end.
struct Tables {
  explicit Tables(const Rows& rows) : num_rows(static_cast<int32_t>(rows.size())) {
    size_t columns = 1;
    for (const auto& row : rows) columns = std::max(columns, row.size() + 1);
    stride = static_cast<int32_t>(columns);
    for (const auto& row : rows) {
      full_pages.push_back(static_cast<int32_t>(row.size()));
      indices.insert(indices.end(), row.begin(), row.end());
      indptr.push_back(static_cast<int32_t>(indices.size()));
      dense.insert(dense.end(), row.begin(), row.end());
      dense.resize(static_cast<size_t>(stride) * (indptr.size() - 1), 7);  // the same in all rows
    }
  }
  PageTableView as_dense() const { return dense_table(dense, num_rows, stride); }
  PageTableView as_csr() const { return csr_table(indices, indptr); }

  int32_t num_rows, stride = 0;
  std::vector<int32_t> full_pages, indices, dense, indptr{0};
};

std::vector<SharedPrefix> found(const Rows& rows) {
  const Tables tables(rows);
  SharedPrefixFinder finder;
  const auto dense = finder.find(tables.as_dense(), tables.full_pages);
  std::vector<SharedPrefix> prefixes(dense.begin(), dense.end());
  const auto csr = finder.find(tables.as_csr(), tables.full_pages);
  EXPECT_EQ(prefixes, std::vector<SharedPrefix>(csr.begin(), csr.end()));
  return prefixes;
}

TEST(SharedPrefix, FindsNestedPrefixesInnermostFirst) {
  EXPECT_THAT(found({{1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2, 6}, {8}, {9, 4}, {9, 4}}),
              ElementsAre(SharedPrefix{0, 2, 3, 1}, SharedPrefix{0, 3, 2, -1}, SharedPrefix{4, 6, 2, -1}));
}

TEST(SharedPrefix, NothingIsSharedByRowsOfOtherFirstPagesOrNone) {
  EXPECT_THAT(found({{1, 2}, {3, 2}, {}, {3, 2}}), IsEmpty());
  EXPECT_THAT(found({}), IsEmpty());
  EXPECT_THAT(found({{1, 2, 3}}), IsEmpty());
}

TEST(SharedPrefix, EqualPagesAfterADifferenceAreNotShared) {
  // An engine may copy on write in the middle: later pages agree again, and are other tokens' keys.
  Rows rows(2, std::vector<int32_t>(200));
  for (size_t i = 0; i < 200; ++i) rows[0][i] = rows[1][i] = static_cast<int32_t>(i);
  rows[1][71] = 1000;
  EXPECT_THAT(found(rows), ElementsAre(SharedPrefix{0, 2, 71, -1}));
}

TEST(SharedPrefix, OnlyFullPagesCount) {
  const Tables tables({{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}});
  SharedPrefixFinder finder;
  const std::vector<int32_t> full_pages{4, 2, 3};
  EXPECT_THAT(finder.find(tables.as_dense(), full_pages), ElementsAre(SharedPrefix{0, 3, 2, -1}));
  EXPECT_THAT(finder.find(tables.as_dense(), std::vector<int32_t>{4, 0, 3}), IsEmpty());
  EXPECT_THAT(finder.find(tables.as_dense(), std::vector<int32_t>{4, 4}), ElementsAre(SharedPrefix{0, 2, 4, -1}));
}

TEST(SharedPrefix, NegativePageCounts_AreRefused) {
  const Tables tables({{1, 2, 3, 4}, {1, 2, 3, 4}});
  SharedPrefixFinder finder;
  std::vector<int32_t> rows{0, 1};
  for (const PageTableView& table : {tables.as_dense(), tables.as_csr()}) {
    for (const std::vector<int32_t>& full_pages : {std::vector<int32_t>{-1, 3}, {3, -1}, {-1, -1}}) {
      const std::string text = full_pages[0] < 0 ? "row 0 is to have -1 pages" : "row 1 is to have -1 pages";
      folio::testing::expect_refused(text, [&] { finder.find(table, full_pages); });
      folio::testing::expect_refused(text, [&] { finder.order(table, full_pages, rows); });
    }
  }
}

Rows random_rows(std::mt19937& random) {
  const auto pick = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  Rows rows;
  for (int r = pick(12); r > 0; --r) {
    std::vector<int32_t> row = rows.empty() || pick(3) == 0 ? std::vector<int32_t>{} : rows[rows.size() - 1];
    row.resize(static_cast<size_t>(pick(static_cast<int>(row.size()))));
    for (int more = pick(pick(9) == 0 ? 90 : 3); more > 0; --more) row.push_back(pick(2));
    rows.push_back(row);
  }
  return rows;
}

/// By the definition: all ranges and lengths that are maximal.
std::vector<SharedPrefix> by_definition(const Rows& rows) {
  const auto common = [&](int32_t begin, int32_t end) {
    size_t pages = rows[static_cast<size_t>(begin)].size();
    for (int32_t r = begin + 1; r < end; ++r) {
      const auto& a = rows[static_cast<size_t>(begin)];
      const auto& b = rows[static_cast<size_t>(r)];
      size_t same = 0;
      while (same < std::min(pages, b.size()) && a[same] == b[same]) ++same;
      pages = same;
    }
    return static_cast<int32_t>(pages);
  };
  const auto n = static_cast<int32_t>(rows.size());
  std::vector<SharedPrefix> prefixes;
  for (int32_t end = 2; end <= n; ++end) {
    for (int32_t begin = end - 2; begin >= 0; --begin) {
      const int32_t pages = common(begin, end);
      const bool wider = (begin > 0 && common(begin - 1, end) == pages) || (end < n && common(begin, end + 1) == pages);
      if (pages > 0 && !wider) prefixes.push_back({begin, end, pages, -1});
    }
  }
  for (SharedPrefix& prefix : prefixes) {
    int32_t smallest = n + 1;
    for (size_t i = 0; i < prefixes.size(); ++i) {
      const SharedPrefix& other = prefixes[i];
      const int32_t size = other.end - other.begin;
      if (other.begin <= prefix.begin && other.end >= prefix.end && size > prefix.end - prefix.begin &&
          size < smallest) {
        smallest = size;
        prefix.parent = static_cast<int32_t>(i);
      }
    }
  }
  return prefixes;
}

TEST(SharedPrefix, IsWhatTheDefinitionSays) {
  std::mt19937 random(1);
  size_t prefixes = 0;
  for (int i = 0; i < 2000; ++i) {
    const Rows rows = random_rows(random);
    ASSERT_EQ(found(rows), by_definition(rows)) << i;
    prefixes += found(rows).size();
  }
  EXPECT_GT(prefixes, 3000u);
}

TEST(SharedPrefix, TablesThatAreTooShortAreRefused) {
  const Tables tables({{1, 2}, {1, 2}});
  SharedPrefixFinder finder;
  const auto message = [&](const std::vector<int32_t>& full_pages) -> std::string {
    try {
      finder.find(tables.as_csr(), full_pages);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message({2, 3}), HasSubstr("row 1 needs 3 pages; the table has 2"));
  EXPECT_THAT(message({2, 2, 0}), HasSubstr("there are 3 lengths for a table of 2 rows"));
  EXPECT_EQ(message({2, 2}), "accepted");
}

std::vector<int32_t> ordered(const Rows& rows, std::vector<int32_t> order) {
  const Tables tables(rows);
  SharedPrefixFinder finder;
  finder.order(tables.as_dense(), tables.full_pages, order);
  return order;
}

TEST(SharedPrefixOrder, BringsSharersTogetherWhereTheirFirstStands) {
  // Rows 1, 3 and 5 begin alike, 1 and 5 the longest; the others keep their order.
  EXPECT_THAT(ordered({{9}, {5, 1, 2}, {4}, {5, 3}, {}, {5, 1, 2, 3}}, {0, 1, 2, 3, 4, 5}),
              ElementsAre(0, 1, 5, 3, 2, 4));
  EXPECT_THAT(ordered({{9}, {5, 1}, {4}, {5, 1}}, {2, 3, 1}), ElementsAre(2, 3, 1));
  EXPECT_THAT(ordered({{3}, {2}, {}, {1}}, {0, 1, 2, 3}), ElementsAre(0, 1, 2, 3));
}

TEST(SharedPrefixOrder, KeepsEveryRowOnceAndLosesNoSharing) {
  std::mt19937 random(2);
  const auto shared = [](const Rows& rows) {
    int64_t pages = 0;
    for (size_t r = 1; r < rows.size(); ++r) {
      const size_t most = std::min(rows[r - 1].size(), rows[r].size());
      for (size_t i = 0; i < most && rows[r - 1][i] == rows[r][i]; ++i) ++pages;
    }
    return pages;
  };
  int64_t before = 0, after = 0;
  for (int i = 0; i < 500; ++i) {
    Rows rows = random_rows(random);
    std::shuffle(rows.begin(), rows.end(), random);
    std::vector<int32_t> order(rows.size());
    for (size_t r = 0; r < rows.size(); ++r) order[r] = static_cast<int32_t>(r);
    const std::vector<int32_t> all = order;
    order = ordered(rows, order);
    Rows moved;
    for (const int32_t row : order) moved.push_back(rows[static_cast<size_t>(row)]);
    EXPECT_THAT(order, ::testing::UnorderedElementsAreArray(all));
    ASSERT_GE(shared(moved), shared(rows)) << i;
    before += shared(rows);
    after += shared(moved);
  }
  EXPECT_GT(after, before);
}

TEST(SharedPrefixOrder, RefusesRowsThatAreNotThere) {
  std::vector<int32_t> order{0, 2};
  const Tables tables({{1}, {1}});
  SharedPrefixFinder finder;
  EXPECT_THROW(finder.order(tables.as_dense(), tables.full_pages, order), Error);
}

}  // namespace
}  // namespace folio
