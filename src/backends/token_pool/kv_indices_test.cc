#include "folio/backends/token_pool/kv_indices.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "backends/token_pool/device/kv_indices_rule.hpp"
#include "backends/token_pool/refusal_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"
#include "folio/pools.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using testing::refusal;
using Ints = std::vector<int32_t>;

std::vector<GoldenCase> kv_cases(const char* array) {
  return golden_cases("token_pool/kv_indices", array);
}

Ints arange(int64_t count) {
  Ints values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

/// The arrays of one call.
struct KvCase {
  explicit KvCase(const GoldenCase& c)
      : entries(c.data.contains("table") ? c.ints("table") : arange(c.at<int64_t>("arange"))),
        rows(c.ints("rows")),
        lens(c.ints("lens")),
        starts(c.value("starts", Ints{})),
        indptr(c.ints("indptr")),
        output(c.value("output_size", indptr.back() < 1000 ? static_cast<size_t>(indptr.back()) : 0), -1) {
    const int32_t columns = c.at<int32_t>("columns");
    const auto num_rows = c.value("num_rows", static_cast<int32_t>(entries.size()) / columns);
    args.req_to_token = {
        PageTableKind::kDense,      entries.data(), static_cast<int64_t>(entries.size()), nullptr, columns,
        c.value("first_column", 0), num_rows};
    args.req_pool_indices = rows;
    args.paged_kernel_lens = lens;
    args.kv_indptr = indptr;
    args.kv_start_idx = starts;
    args.page_size = c.value("page_size", 1);
    args.num_slots = c.value("num_slots", int64_t{0});
  }

  Ints entries, rows, lens, starts, indptr, output;
  KvIndicesArgs args;
};

class KvIndicesGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(KvIndicesGolden, AreGathered) {
  KvCase c(GetParam());
  create_kv_indices(c.args, c.output);
  Ints expected = GetParam().ints("indices");
  expected.resize(c.output.size(), -1);
  EXPECT_EQ(c.output, expected);
}
INSTANTIATE_TEST_SUITE_P(Data, KvIndicesGolden, ::testing::ValuesIn(kv_cases("cases")), golden_case_name);

class KvIndicesRefused : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(KvIndicesRefused, BeforeAnythingIsWritten) {
  KvCase c(GetParam());
  const Ints before = c.output;
  EXPECT_THAT(refusal([&] { create_kv_indices(c.args, c.output); }),
              ::testing::HasSubstr(GetParam().at<std::string>("error")));
  EXPECT_EQ(c.output, before);
}
INSTANTIATE_TEST_SUITE_P(Data, KvIndicesRefused, ::testing::ValuesIn(kv_cases("refused")), golden_case_name);

TEST(KvIndicesTest, ReadTablesOfSlotsOnly) {
  const Ints entries = arange(8), indptr = {0, 4, 8}, rows = {0}, lens = {2}, out_indptr = {0, 2};
  Ints out(2);
  KvIndicesArgs args;
  args.req_pool_indices = rows;
  args.paged_kernel_lens = lens;
  args.kv_indptr = out_indptr;
  args.req_to_token = csr_table(entries, indptr);
  EXPECT_THAT(refusal([&] { create_kv_indices(args, out); }), ::testing::HasSubstr("not a dense table"));
  args.req_to_token = dense_table(entries, 2, 4);
  args.req_to_token.num_rows = 1 << 30;
  args.req_to_token.row_stride = int64_t{1} << 40;
  EXPECT_THAT(refusal([&] { create_kv_indices(args, out); }), ::testing::HasSubstr("overflows"));
  args.req_to_token = dense_table(entries, 2, 4);
  args.req_to_token.indices = nullptr;
  EXPECT_THAT(refusal([&] { create_kv_indices(args, out); }), ::testing::HasSubstr("null"));
}

TEST(KvIndicesTest, ReadTheRequestTablePool) {
  ReqToTokenPool pool(3, 8);
  const Ints slots = {9, 4, 6};
  const int32_t row = *pool.alloc();
  pool.write(row, 0, slots);
  const Ints rows = {row, 0}, lens = {3, 1};
  Ints indptr(3), out(4, -1);
  EXPECT_EQ(kv_indptr_from_lens(lens, 1, indptr), 4);
  KvIndicesArgs args{pool.table(), rows, lens, indptr, {}, 1, 10};
  create_kv_indices(args, out);
  EXPECT_EQ(out, (Ints{9, 4, 6, 0}));
}

TEST(KvIndptrTest, SumsLengths) {
  for (const GoldenCase& c : kv_cases("indptr")) {
    SCOPED_TRACE(c.data.dump());
    const Ints lens = c.ints("lens");
    Ints indptr(c.value("size", lens.size() + 1), -1);
    const Ints before = indptr;
    const auto call = [&] { return kv_indptr_from_lens(lens, c.at<int32_t>("page_size"), indptr); };
    if (c.data.contains("error")) {
      EXPECT_THAT(refusal(call), ::testing::HasSubstr(c.at<std::string>("error")));
      EXPECT_EQ(indptr, before);
    } else {
      EXPECT_EQ(call(), c.ints("indptr")[lens.size()]);
      EXPECT_EQ(indptr, c.ints("indptr"));
    }
  }
}

/// Calls, and compares lens and starts with the case's, or the refusal.
template <typename Call>
void check_window(const GoldenCase& c, size_t num_requests, Call&& call) {
  SCOPED_TRACE(c.data.dump());
  Ints lens(num_requests, -7), starts(num_requests, -7);
  const Ints untouched = lens;
  if (c.data.contains("error")) {
    EXPECT_THAT(refusal([&] { call(lens, starts); }), ::testing::HasSubstr(c.at<std::string>("error")));
    EXPECT_EQ(lens, untouched);
    EXPECT_EQ(starts, untouched);
    return;
  }
  call(lens, starts);
  EXPECT_EQ(lens, c.ints("lens"));
  EXPECT_EQ(starts, c.ints("starts"));
}

TEST(WindowKvRanges, KeepTheQueryAndTheWindow) {
  for (const GoldenCase& c : kv_cases("windows")) {
    const Ints seq_lens = c.ints("seq_lens"), prefix_lens = c.value("prefix_lens", Ints{});
    check_window(c, seq_lens.size(), [&](Ints& lens, Ints& starts) {
      window_kv_ranges(seq_lens, prefix_lens, c.at<int32_t>("window_left"), c.value("page_size", 1), lens, starts);
    });
  }
}

TEST(WindowPrefixRanges, LeaveTheNewTokensOut) {
  for (const GoldenCase& c : kv_cases("prefix_windows")) {
    const Ints prefix_lens = c.ints("prefix_lens");
    check_window(c, prefix_lens.size(), [&](Ints& lens, Ints& starts) {
      window_prefix_ranges(prefix_lens, c.at<int32_t>("window_left"), c.value("page_size", 1), lens, starts);
    });
  }
}

TEST(WindowKvRanges, RefuseOutputsOfOtherSizes) {
  const Ints seq_lens = {3, 4};
  Ints two(2), three(3);
  EXPECT_THAT(refusal([&] { window_kv_ranges(seq_lens, {}, 1, 1, three, two); }), ::testing::HasSubstr("lens has 3"));
  EXPECT_THAT(refusal([&] { window_kv_ranges(seq_lens, {}, 1, 1, two, three); }), ::testing::HasSubstr("starts has 3"));
  EXPECT_THAT(refusal([&] { window_prefix_ranges(seq_lens, 1, 1, two, three); }), ::testing::HasSubstr("starts has 3"));
}

/// Every key that a query of [prefix, seq) sees is kept, and with pages of one token the first kept one is seen.
TEST(WindowKvRanges, HoldWhatQueriesSee) {
  for (int32_t window = 0; window <= 5; ++window) {
    for (int32_t page_size : {1, 2, 3}) {
      for (int32_t seq = 1; seq <= 12; ++seq) {
        for (int32_t prefix = 0; prefix < seq; ++prefix) {
          Ints lens(1), starts(1);
          window_kv_ranges({&seq, 1}, {&prefix, 1}, window, page_size, lens, starts);
          int32_t first_seen = 0;
          while (first_seen < prefix - window) ++first_seen;
          EXPECT_EQ(starts[0], first_seen - first_seen % page_size);
          EXPECT_EQ(starts[0] + lens[0], seq);
        }
      }
    }
  }
}

struct RandomBatch {
  Ints rows, lens, starts, indptr;
};

RandomBatch random_batch(std::mt19937& random, int32_t batch, int32_t num_rows, int32_t columns, int32_t page_size,
                         bool with_starts) {
  const auto draw = [&random](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  RandomBatch b;
  b.indptr.push_back(0);
  for (int32_t r = 0; r < batch; ++r) {
    b.rows.push_back(draw(0, num_rows - 1));
    const int32_t start = with_starts ? draw(0, (columns - 1) / page_size) * page_size : 0;
    if (with_starts) b.starts.push_back(start);
    b.lens.push_back(draw(0, 9) == 0 ? 0 : draw(1, columns - start));
    b.indptr.push_back(b.indptr.back() + (b.lens.back() + page_size - 1) / page_size);
  }
  return b;
}

TEST(KvIndicesTest, EqualsANaiveGather) {
  std::mt19937 random(5);
  for (const GoldenCase& c : kv_cases("shapes")) {
    SCOPED_TRACE(c.data.dump());
    const auto num_rows = c.at<int32_t>("rows"), columns = c.at<int32_t>("columns");
    const Ints table = arange(int64_t{num_rows} * columns);
    for (bool with_starts : {false, true}) {
      const RandomBatch b = random_batch(random, c.at<int32_t>("batch"), num_rows, columns, 1, with_starts);
      Ints out(static_cast<size_t>(b.indptr.back()) + 256, -1);
      KvIndicesArgs args{dense_table(table, num_rows, columns), b.rows, b.lens, b.indptr, b.starts, 1,
                         static_cast<int64_t>(table.size())};
      create_kv_indices(args, out);
      Ints expected;
      for (size_t r = 0; r < b.rows.size(); ++r) {
        for (int32_t j = 0; j < b.lens[r]; ++j) {
          expected.push_back(b.rows[r] * columns + (with_starts ? b.starts[r] : 0) + j);
        }
      }
      expected.resize(out.size(), -1);
      EXPECT_EQ(out, expected);
    }
  }
}

/// A table whose rows are pages in random order.
Ints table_of_pages(std::mt19937& random, int32_t num_rows, int32_t columns, int32_t page_size) {
  const int32_t pages_a_row = (columns + page_size - 1) / page_size;
  Ints pages = arange(int64_t{num_rows} * pages_a_row);
  std::shuffle(pages.begin(), pages.end(), random);
  Ints table;
  for (int32_t row = 0; row < num_rows; ++row) {
    for (int32_t p = 0; p < columns; ++p) {
      table.push_back(pages[static_cast<size_t>(row * pages_a_row + p / page_size)] * page_size + p % page_size);
    }
  }
  return table;
}

TEST(KvIndicesTest, PagesAreThoseOfTheirTokens) {
  std::mt19937 random(7);
  for (int32_t page_size : {1, 2, 3, 4, 16}) {
    const Ints table = table_of_pages(random, 6, 50, page_size);
    for (int32_t round = 0; round < 40; ++round) {
      const RandomBatch b = random_batch(random, 5, 6, 50, page_size, round % 2 == 1);
      Ints out(static_cast<size_t>(b.indptr.back()), -1);
      KvIndicesArgs args{dense_table(table, 6, 50), b.rows, b.lens, b.indptr, b.starts, page_size, 0};
      create_kv_indices(args, out);
      for (size_t r = 0; r < b.rows.size(); ++r) {
        const int32_t start = b.starts.empty() ? 0 : b.starts[r];
        for (int32_t j = 0; j < b.lens[r]; ++j) {
          const int32_t slot = table[static_cast<size_t>(b.rows[r] * 50 + start + j)];
          EXPECT_EQ(out[static_cast<size_t>(b.indptr[r] + j / page_size)] * page_size + j % page_size, slot);
        }
      }
    }
  }
}

/// A device runs the same bodies with many lanes a request.
TEST(KvIndicesRule, LanesShareARequest) {
  std::mt19937 random(11);
  const Ints table = table_of_pages(random, 4, 40, 4);
  for (int32_t page_size : {1, 4}) {
    const RandomBatch b = random_batch(random, 8, 4, 40, page_size, true);
    Ints one(static_cast<size_t>(b.indptr.back()), -1), many = one;
    create_kv_indices({dense_table(table, 4, 40), b.rows, b.lens, b.indptr, b.starts, page_size, 0}, one);
    token_pool::KvIndicesJob job;
    job.table = {table.data(), 40, 40, 160, 4};
    job.rows = b.rows.data();
    job.lens = b.lens.data();
    job.indptr = b.indptr.data();
    job.starts = b.starts.data();
    job.page_size = page_size;
    job.out = many.data();
    job.capacity = static_cast<int64_t>(many.size());
    for (int32_t r = 0; r < 8; ++r) {
      ASSERT_EQ(range_fault(job, r), token_pool::KvRangeFault::kNone);
      for (int32_t lane = 6; lane >= 0; --lane) write_entries(job, r, lane, 7);
    }
    EXPECT_EQ(many, one);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
