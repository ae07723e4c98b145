#include "folio/backends/token_pool/draft_kv_indices.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "backends/token_pool/refusal_test_util.hpp"
#include "core/golden_test.hpp"
#include "folio/page_table.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using testing::refusal;
using Ints = std::vector<int32_t>;

std::vector<GoldenCase> draft_cases(const char* array) {
  return golden_cases("token_pool/draft_kv_indices", array);
}

DraftBranches branches_of(const GoldenCase& c) {
  return {c.value("topk", 1), c.value("num_steps", 1), c.value("page_size", 1)};
}

constexpr int32_t kSentinel = -1;

/// The arrays of one call. Strides are what the batch needs where the case does not say.
struct DraftCase {
  explicit DraftCase(const GoldenCase& c)
      : rows(c.ints("rows")), lens(c.ints("lens")), starts(c.value("starts", Ints{})) {
    const auto num_rows = c.at<int32_t>("num_rows"), columns = c.at<int32_t>("columns");
    for (int32_t row = 0; row < num_rows; ++row) {
      for (int32_t p = 0; p < columns; ++p) entries.push_back(row * c.value("row_factor", 100) + p);
    }
    args.req_to_token = dense_table(entries, num_rows, columns);
    args.req_pool_indices = rows;
    args.paged_kernel_lens = lens;
    args.kv_start_idx = starts;
    args.branches = branches_of(c);
    args.num_iterations = c.at<int32_t>("iterations");
    args.num_slots = c.value("num_slots", int64_t{0});
  }

  void make_output(int64_t indptr_stride, int64_t indices_stride, int64_t indptr_size, int64_t indices_size) {
    indptr.assign(static_cast<size_t>(indptr_size), kSentinel);
    indices.assign(static_cast<size_t>(indices_size), kSentinel);
    out = {indptr, indptr_stride, indices, indices_stride};
  }

  Ints entries, rows, lens, starts, indptr, indices;
  DraftKvIndicesArgs args;
  DraftKvIndices out;
};

class DraftKvIndicesGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(DraftKvIndicesGolden, AreThoseOfEveryStepAndBranch) {
  DraftCase c(GetParam());
  const auto& steps = GetParam().data.at("steps");
  const auto count = static_cast<int64_t>(steps.size());
  // Rows with room to spare: what is behind a step's entries must stay.
  const auto last = steps.back().at("indices").get<Ints>();
  const int64_t indptr_stride = static_cast<int64_t>(c.rows.size()) * c.args.branches.topk + 3;
  const int64_t indices_stride = static_cast<int64_t>(last.size()) + 5;
  c.make_output(indptr_stride, indices_stride, count * indptr_stride, count * indices_stride);
  generate_draft_decode_kv_indices(c.args, c.out);
  Ints expected_indptr, expected_indices;
  for (int64_t t = 0; t < count; ++t) {
    for (int32_t value : steps[static_cast<size_t>(t)].at("indptr").get<Ints>()) expected_indptr.push_back(value);
    for (int32_t value : steps[static_cast<size_t>(t)].at("indices").get<Ints>()) expected_indices.push_back(value);
    expected_indptr.resize(static_cast<size_t>((t + 1) * indptr_stride), kSentinel);
    expected_indices.resize(static_cast<size_t>((t + 1) * indices_stride), kSentinel);
  }
  EXPECT_EQ(c.indptr, expected_indptr);
  EXPECT_EQ(c.indices, expected_indices);
}
INSTANTIATE_TEST_SUITE_P(Data, DraftKvIndicesGolden, ::testing::ValuesIn(draft_cases("cases")), golden_case_name);

class DraftKvIndicesRefused : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(DraftKvIndicesRefused, BeforeAnythingIsWritten) {
  const GoldenCase& c = GetParam();
  DraftCase call(c);
  const int64_t indptr_stride = c.value("indptr_stride", int64_t{5});
  const int64_t indices_stride = c.value("indices_stride", int64_t{18});
  call.make_output(indptr_stride, indices_stride, c.value("indptr_size", 2 * indptr_stride),
                   c.value("indices_size", 2 * indices_stride));
  EXPECT_THAT(refusal([&] { generate_draft_decode_kv_indices(call.args, call.out); }),
              ::testing::HasSubstr(c.at<std::string>("error")));
  EXPECT_THAT(call.indptr, ::testing::Each(kSentinel));
  EXPECT_THAT(call.indices, ::testing::Each(kSentinel));
}
INSTANTIATE_TEST_SUITE_P(Data, DraftKvIndicesRefused, ::testing::ValuesIn(draft_cases("refused")), golden_case_name);

/// Compares a call's result with the case's field, or its refusal.
template <typename Call>
void check_size(const GoldenCase& c, const char* field, Call&& call) {
  SCOPED_TRACE(c.data.dump());
  if (c.data.contains("error")) {
    EXPECT_THAT(refusal(call), ::testing::HasSubstr(c.at<std::string>("error")));
  } else {
    EXPECT_EQ(call(), c.at<int64_t>(field));
  }
}

TEST(DraftSizes, CountEveryBranch) {
  for (const GoldenCase& c : draft_cases("sizes")) {
    check_size(c, "len", [&] {
      return draft_kv_indices_len(c.at<int64_t>("sum_lens"), c.at<int32_t>("batch_size"), branches_of(c),
                                  c.at<int32_t>("step"));
    });
  }
  for (const GoldenCase& c : draft_cases("capacities")) {
    check_size(c, "capacity", [&] {
      return draft_kv_indices_capacity(c.at<int32_t>("max_batch_size"), branches_of(c),
                                       c.at<int32_t>("max_context_len"));
    });
  }
  for (const GoldenCase& c : draft_cases("columns")) {
    check_size(c, "columns", [&] { return draft_row_columns(c.at<int32_t>("row_len"), branches_of(c)); });
  }
}

TEST(DraftKvIndicesTest, NoIterationsWriteNothing) {
  const Ints entries(4), rows = {0}, lens = {1};
  DraftKvIndicesArgs args{dense_table(entries, 1, 4), rows, lens, {}, {}, 0, 0};
  generate_draft_decode_kv_indices(args, {});
}

/// A request's list at a step, token by token: its own tokens, then what its branch has drafted.
Ints naive_branch(const DraftBranches& b, int32_t row, int32_t columns, int32_t len, int32_t branch, int32_t step) {
  Ints slots;
  for (int32_t p = 0; p < len; ++p) slots.push_back(row * columns + p);
  int32_t position = len;
  if (b.page_size > 1 && b.topk > 1) {
    int32_t page = len;
    while (page % b.page_size != 0) --page;
    int32_t pages = 0;
    while (pages * b.page_size < len - page + b.num_steps) ++pages;
    position += branch * pages * b.page_size;
  } else {
    for (int32_t before = 0; before < branch; ++before) position += b.num_steps;
  }
  for (int32_t j = 0; j < step; ++j) slots.push_back(row * columns + position + j);
  return slots;
}

TEST(DraftKvIndicesTest, EqualsANaiveGather) {
  for (const GoldenCase& c : draft_cases("grids")) {
    const Ints lens = c.ints("lens");
    const auto batch = static_cast<int32_t>(lens.size());
    for (const GoldenCase& grid : draft_cases("grid_branches")) {
      for (int32_t steps : {2, 3, 4}) {
        SCOPED_TRACE(c.data.dump() + grid.data.dump() + std::to_string(steps));
        DraftBranches b = branches_of(grid);
        b.num_steps = steps;
        int64_t columns = 0;
        for (int32_t len : lens) columns = std::max(columns, draft_row_columns(len, b));
        Ints table(static_cast<size_t>(columns * (batch + 1))), rows;
        std::iota(table.begin(), table.end(), 0);
        for (int32_t r = 0; r < batch; ++r) rows.push_back(batch - r);
        const int64_t indptr_stride = int64_t{batch} * b.topk + 1;
        const int64_t stride =
            draft_kv_indices_len(std::accumulate(lens.begin(), lens.end(), int64_t{0}), batch, b, steps);
        Ints indptr(static_cast<size_t>(steps * indptr_stride), kSentinel);
        Ints indices(static_cast<size_t>(steps * stride), kSentinel);
        generate_draft_decode_kv_indices(
            {dense_table(table, batch + 1, columns), rows, lens, {}, b, steps, static_cast<int64_t>(table.size())},
            {indptr, indptr_stride, indices, stride});
        for (int32_t t = 1; t <= steps; ++t) {
          Ints expected, offsets = {0};
          for (size_t r = 0; r < lens.size(); ++r) {
            for (int32_t k = 0; k < b.topk; ++k) {
              const Ints slots = naive_branch(b, rows[r], static_cast<int32_t>(columns), lens[r], k, t);
              expected.insert(expected.end(), slots.begin(), slots.end());
              offsets.push_back(static_cast<int32_t>(expected.size()));
            }
          }
          expected.resize(static_cast<size_t>(stride), kSentinel);
          EXPECT_TRUE(std::equal(offsets.begin(), offsets.end(), indptr.begin() + (t - 1) * indptr_stride));
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), indices.begin() + (t - 1) * stride));
        }
      }
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
