#include "folio/page_table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "core/golden_test.hpp"

namespace folio {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using testing::expect_refused;
using testing::golden_cases;
using testing::GoldenCase;

TEST(PagesFor, RoundsUp) {
  EXPECT_EQ(pages_for(0, 16), 0);
  EXPECT_EQ(pages_for(1, 16), 1);
  EXPECT_EQ(pages_for(16, 16), 1);
  EXPECT_EQ(pages_for(17, 16), 2);
  EXPECT_EQ(pages_for(std::numeric_limits<int32_t>::max(), 1), std::numeric_limits<int32_t>::max());
  EXPECT_EQ(pages_for(std::numeric_limits<int32_t>::max(), 2), 1 << 30);
  expect_refused("tokens is -1", [] { pages_for(-1, 16); });
  expect_refused("page_size is 0", [] { pages_for(1, 0); });
}

TEST(PagedIndptr, GoldenCases) {
  for (const GoldenCase& c : golden_cases("kvcache/paged_indptr")) {
    SCOPED_TRACE(c.name);
    const std::vector<int32_t> seq_lens = c.ints("seq_lens");
    const auto page_size = c.at<int32_t>("page_size");
    std::vector<int32_t> indptr(seq_lens.size() + 1, -7);
    std::vector<int32_t> last(seq_lens.size(), -7);
    paged_indptr(seq_lens, page_size, indptr, last);
    EXPECT_THAT(indptr, ElementsAreArray(c.ints("indptr")));
    EXPECT_THAT(last, ElementsAreArray(c.ints("last_page_len")));

    std::vector<int32_t> lengths(seq_lens.size(), -7);
    seq_lens_from_paged(indptr, last, page_size, lengths);
    EXPECT_EQ(lengths, seq_lens);
  }
}

TEST(PagedIndptr, RefusesWhatDoesNotFit) {
  std::vector<int32_t> two(2), three(3);
  const std::vector<int32_t> lengths{5, -1};
  expect_refused("request 1 is -1", [&] { paged_indptr(lengths, 16, three, two); });
  expect_refused("page_size is -3", [&] { paged_indptr(lengths, -3, three, two); });
  expect_refused("indptr has 2 entries", [&] { paged_indptr(lengths, 16, two, two); });
  expect_refused("last_page_len has 3 entries", [&] { paged_indptr(lengths, 16, three, three); });
  const std::vector<int32_t> huge{std::numeric_limits<int32_t>::max(), 1};
  expect_refused("up to request 1 are 2147483648", [&] { paged_indptr(huge, 1, three, two); });
}

TEST(SeqLensFromPaged, TakesSlicesAndPadding) {
  // A slice of a longer indptr keeps its absolute offsets; padded requests may carry a last_page_len of 1.
  std::vector<int32_t> lengths(3);
  seq_lens_from_paged(std::vector<int32_t>{7, 9, 10, 10}, std::vector<int32_t>{3, 16, 1}, 16, lengths);
  EXPECT_THAT(lengths, ElementsAre(19, 16, 0));
}

TEST(SeqLensFromPaged, RefusesInconsistentArrays) {
  std::vector<int32_t> one(1);
  const auto from = [&](std::vector<int32_t> indptr, std::vector<int32_t> last, int32_t page_size) {
    seq_lens_from_paged(indptr, last, page_size, one);
  };
  expect_refused("indptr descends from 2 to 1", [&] { from({2, 1}, {1}, 16); });
  expect_refused("indptr starts at -1", [&] { from({-1, 1}, {1}, 16); });
  expect_refused("last_page_len of request 0 is 0", [&] { from({0, 1}, {0}, 16); });
  expect_refused("last_page_len of request 0 is 17", [&] { from({0, 1}, {17}, 16); });
  expect_refused("last_page_len of request 0 is -1", [&] { from({0, 0}, {-1}, 16); });
  expect_refused("indptr has 1 entries", [&] { from({0}, {1}, 16); });
  expect_refused("last_page_len has 2 entries", [&] { from({0, 1}, {1, 1}, 16); });
  expect_refused("length of request 0 is 4294967294", [&] { from({0, std::numeric_limits<int32_t>::max()}, {2}, 2); });
}

TEST(ToCsr, GoldenCases) {
  for (const GoldenCase& c : golden_cases("kvcache/paged_indptr", "tables")) {
    SCOPED_TRACE(c.name);
    const std::vector<int32_t> dense = c.ints("dense");
    const std::vector<int32_t> lengths = c.ints("seq_lens");
    const auto columns = c.at<int32_t>("columns");
    const auto page_size = c.at<int32_t>("page_size");
    const PagedMetadata csr =
        to_csr(dense_table(dense, static_cast<int32_t>(lengths.size()), columns), lengths, page_size);
    EXPECT_EQ(csr.indices, c.ints("indices"));
    EXPECT_EQ(csr.indptr, c.ints("indptr"));
    EXPECT_EQ(csr.last_page_len, c.ints("last_page_len"));
    EXPECT_EQ(to_dense(csr_table(csr.indices, csr.indptr), lengths, page_size, columns, -1), dense);
  }
}

TEST(ToCsr, FirstColumnSkipsASharedPrefix) {
  const std::vector<int32_t> dense{9, 1, 2, 9, 3, 4};
  const std::vector<int32_t> lengths{17, 2};
  const PagedMetadata csr = to_csr(dense_table(dense, 2, 3, 1), lengths, 16);
  EXPECT_THAT(csr.indices, ElementsAre(1, 2, 3));
}

TEST(ToCsr, BroadcastRow) {  // row_stride 0: every request reads the same row
  const std::vector<int32_t> row{4, 2};
  const std::vector<int32_t> lengths{3, 1, 4};
  EXPECT_THAT(to_csr(dense_table(row, 3, 0), lengths, 2).indices, ElementsAre(4, 2, 4, 4, 2));
}

TEST(ToCsr, CsrNeedNotStartAtZeroAndMayHaveSpareEntries) {
  const std::vector<int32_t> indices{9, 9, 5, 6, 7, 8};
  const std::vector<int32_t> indptr{2, 5, 6};
  const std::vector<int32_t> lengths{2, 1};
  EXPECT_THAT(to_csr(csr_table(indices, indptr), lengths, 1).indices, ElementsAre(5, 6, 8));
}

/// Random batches: dense -> CSR -> dense, and lengths -> indptr -> lengths, are the identity.
TEST(PageTables, RoundTripsOfRandomBatches) {
  std::mt19937 random(20240611);
  for (int round = 0; round < 300; ++round) {
    const int32_t page_size = 1 << (random() % 7);
    const auto rows = static_cast<int32_t>(random() % 9);
    const int32_t columns = 1 + static_cast<int32_t>(random() % 12);
    const int32_t stride = columns + static_cast<int32_t>(random() % 3);
    std::vector<int32_t> lengths(static_cast<size_t>(rows));
    for (int32_t& length : lengths)
      length = static_cast<int32_t>(random() % static_cast<uint32_t>(columns * page_size + 1));
    std::vector<int32_t> entries(static_cast<size_t>(rows * stride));
    for (int32_t& entry : entries) entry = static_cast<int32_t>(random() % 1000);

    const PageTableView dense = dense_table(entries, rows, stride);
    const PagedMetadata csr = to_csr(dense, lengths, page_size);
    std::vector<int32_t> read_back(lengths.size());
    seq_lens_from_paged(csr.indptr, csr.last_page_len, page_size, read_back);
    ASSERT_EQ(read_back, lengths);
    const std::vector<int32_t> again = to_dense(csr_table(csr.indices, csr.indptr), lengths, page_size, columns, -5);
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t pages = pages_for(lengths[static_cast<size_t>(r)], page_size);
      for (int32_t c = 0; c < columns; ++c) {
        ASSERT_EQ(again[static_cast<size_t>(r * columns + c)],
                  c < pages ? entries[static_cast<size_t>(r * stride + c)] : -5);
      }
    }
    EXPECT_NO_THROW(validate(dense, lengths, page_size, 1000));
  }
}

TEST(ToDense, RefusesTooFewColumns) {
  const std::vector<int32_t> indices{1, 2, 3}, indptr{0, 3}, lengths{33};
  expect_refused("needs 3 pages; the dense table has 2", [&] { to_dense(csr_table(indices, indptr), lengths, 16, 2); });
  expect_refused("columns is -1", [&] { to_dense(csr_table(indices, indptr), lengths, 16, -1); });
}

TEST(ExpandPages, GoldenCases) {
  for (const GoldenCase& c : golden_cases("kvcache/paged_indptr", "expansions")) {
    EXPECT_EQ(expand_pages(c.ints("pages"), c.at<int32_t>("ratio")), c.ints("expected")) << c.data;
  }
}

TEST(ExpandPages, Refuses) {
  expect_refused("ratio is 0", [] { expand_pages({}, 0); });
  expect_refused("pages[1] is -1", [] { expand_pages(std::vector<int32_t>{1, -1}, 2); });
  expect_refused("no 32-bit page id", [] { expand_pages(std::vector<int32_t>{1073741824}, 2); });
}

TEST(Validate, NamesTheFirstBadEntry) {
  const std::vector<int32_t> dense{0, 5, 99, 1, 7, 99};
  const std::vector<int32_t> lengths{32, 32};
  const PageTableView table = dense_table(dense, 2, 3);
  EXPECT_NO_THROW(validate(table, lengths, 16, 8));  // the entries beyond the lengths do not count
  expect_refused("row 1, column 1 of the table is page 7; the cache has 7 pages",
                 [&] { validate(table, lengths, 16, 7); });
  expect_refused("row 0, column 2 of the table is page 99", [&] {
    validate(table, std::vector<int32_t>{33, 1}, 16, 50);
  });
  expect_refused("row 0 needs 4 pages", [&] { validate(table, std::vector<int32_t>{64, 1}, 16, 100); });
  expect_refused("row 0 needs 3 pages from column 1", [&] {  // it would run into row 1
    validate(dense_table(dense, 2, 3, 1), std::vector<int32_t>{48, 1}, 16, 100);
  });
  expect_refused("3 lengths for a table of 2 rows", [&] { validate(table, std::vector<int32_t>{1, 1, 1}, 16, 100); });
  expect_refused("request 0 is -2", [&] { validate(table, std::vector<int32_t>{-2}, 16, 100); });
  expect_refused("num_pages is -1", [&] { validate(table, lengths, 16, -1); });
  const std::vector<int32_t> negative{-1};
  expect_refused("page -1", [&] { validate(dense_table(negative, 1, 1), std::vector<int32_t>{1}, 16, 9); });
}

TEST(Views, RefuseSizesThatDisagree) {
  const std::vector<int32_t> six{0, 1, 2, 3, 4, 5};
  expect_refused("indptr is empty", [&] { csr_table(six, {}); });
  expect_refused("num_rows is -1", [&] { dense_table(six, -1, 3); });
  expect_refused("row_stride is -3", [&] { dense_table(six, 2, -3); });
  expect_refused("first_column is -1", [&] { dense_table(six, 2, 3, -1); });
  expect_refused("does not fit into 6 entries", [&] { dense_table(six, 3, 4); });
  expect_refused("overflows", [&] { dense_table(six, 3, std::numeric_limits<int64_t>::max()); });
  EXPECT_EQ(dense_table({}, 0, 5).num_rows, 0);
}

TEST(Views, HandMadeHostileTablesAreRefused) {
  const std::vector<int32_t> lengths{16, 16};
  const std::vector<int32_t> ids{1, 2, 3};
  const std::vector<int32_t> indptr{0, 1, 2};
  const PageTableView good = csr_table(ids, indptr);
  const auto refused = [&](const std::string& text, auto change) {
    PageTableView table = good;
    change(table);
    expect_refused(text, [&] { validate(table, lengths, 16, 100); });
    expect_refused(text, [&] { to_csr(table, lengths, 16); });
    expect_refused(text, [&] { to_dense(table, lengths, 16, 2); });
  };
  refused("table.kind is 7", [](PageTableView& t) { t.kind = static_cast<PageTableKind>(7); });
  refused("num_rows is -1", [](PageTableView& t) { t.num_rows = -1; });
  refused("num_indices is -5", [](PageTableView& t) { t.num_indices = -5; });
  refused("indices is null", [](PageTableView& t) { t.indices = nullptr; });
  refused("indptr is null", [](PageTableView& t) { t.indptr = nullptr; });
  refused("must ascend within [0, 1]", [](PageTableView& t) { t.num_indices = 1; });
  static const std::vector<int32_t> bad{-1, 1, 2};
  static const std::vector<int32_t> down{2, 1, 3};
  refused("must ascend", [](PageTableView& t) { t.indptr = bad.data(); });
  refused("must ascend", [](PageTableView& t) { t.indptr = down.data(); });
  const auto dense = [](int64_t stride, int32_t column) {
    return [=](PageTableView& t) {
      t.kind = PageTableKind::kDense;
      t.indptr = nullptr;
      t.row_stride = stride;
      t.first_column = column;
    };
  };
  refused("row_stride is 2 and first_column 0; a CSR table has neither", [](PageTableView& t) { t.row_stride = 2; });
  refused("row_stride is 0 and first_column 1; a CSR table has neither", [](PageTableView& t) { t.first_column = 1; });
  refused("a dense table has none", [](PageTableView& t) { t.kind = PageTableKind::kDense; });
  refused("beyond the table's 3 entries", dense(std::numeric_limits<int64_t>::max(), 0));
  refused("needs 1 pages from column 2147483647", dense(2, std::numeric_limits<int32_t>::max()));
  refused("needs 1 pages from column 2", dense(2, 2));
}

/// Random garbage with honest sizes: every function either answers or throws Error, and a sanitizer sees no bad access.
TEST(PageTables, RandomGarbageIsAnsweredOrRefused) {
  std::mt19937 random(7);
  const auto number = [&]() -> int32_t {
    switch (random() % 6) {
      case 0: return static_cast<int32_t>(random());
      case 1: return std::numeric_limits<int32_t>::max();
      case 2: return -1;
      default: return static_cast<int32_t>(random() % 20);
    }
  };
  const auto numbers = [&] {
    std::vector<int32_t> list(random() % 6);
    for (int32_t& n : list) n = number();
    return list;
  };
  int refused = 0;
  int answered = 0;
  const auto attempt = [&](auto call) {
    try {
      call();
      ++answered;
    } catch (const Error&) {
      ++refused;
    }
  };
  for (int round = 0; round < 4000; ++round) {
    const std::vector<int32_t> a = numbers(), b = numbers(), c = numbers();
    std::vector<int32_t> out(random() % 6), out2(random() % 6);
    std::vector<int64_t> slots(random() % 6);
    const int32_t page_size = number();
    PageTableView table;
    attempt([&] { table = random() % 2 == 0 ? csr_table(a, b) : dense_table(a, number(), number(), number()); });
    attempt([&] { paged_indptr(a, page_size, out, out2); });
    attempt([&] { seq_lens_from_paged(a, b, page_size, out); });
    attempt([&] { to_csr(table, c, page_size); });
    attempt([&] { to_dense(table, c, page_size, static_cast<int32_t>(random() % 100), 0); });
    attempt([&] { validate(table, c, page_size, number()); });
    attempt([&] { slot_mapping(table, b, c, page_size, slots, number(), number(), number()); });
    attempt([&] { expand_pages(a, static_cast<int32_t>(random() % 50)); });
    attempt([&] { shard_len(number(), number(), number(), number()); });
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(answered, 1000);
}

}  // namespace
}  // namespace folio
