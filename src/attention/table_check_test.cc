#include "kernels/cuda/common/tables/table_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "attention/attention_test_util.hpp"
#include "core/error_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

namespace cuda = kernels::cuda;

Context checking_context() {
  ContextOptions options;
  options.num_threads = 2;
  options.validate_tables = true;
  return Context::cpu(options);
}

/// What `run` of the batch says in a context that checks tables; empty if it runs.
std::string message_of_run(SmallDecode& small) {
  small.context = checking_context();
  const AttentionOp op = prepare(small.context, small.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan planned = plan(op, small.batch, buffer);
  const Workspace workspace = small.workspace(workspace_size(op));
  try {
    run(planned, small.args, workspace);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return {};
}

TEST(ValidateTables, PageBeyondTheCache_IsNamedAndNothingIsWritten) {
  SmallDecode small;
  small.indices[2] = 1'000'000'000;
  EXPECT_EQ(message_of_run(small),
            "segment 0, request 1: column 1 of row 1 of the table is page 1000000000; the cache has 4 pages");
  EXPECT_THAT(small.out, Each(-1.0f));
  EXPECT_THAT(small.lse, Each(-1.0f));
}

TEST(ValidateTables, TheFirstPageBehindTheCache_IsNamed) {
  SmallDecode small;
  small.indices[2] = 4;
  EXPECT_THAT(message_of_run(small), HasSubstr("is page 4; the cache has 4 pages"));
}

TEST(ValidateTables, NegativePage_IsNamed) {
  SmallDecode small;
  small.indices = {3, 0, -7, 4};
  EXPECT_THAT(message_of_run(small), HasSubstr("request 1: column 1 of row 1 of the table is page -7"));
}

TEST(ValidateTables, GoodTables_ComputeTheSame) {
  SmallDecode small;
  EXPECT_EQ(message_of_run(small), "");
  SmallDecode unchecked;
  const AttentionOp op = prepare(unchecked.context, unchecked.config);
  PlanBuffer buffer = make_plan_buffer(op);
  run(plan(op, unchecked.batch, buffer), unchecked.args, unchecked.workspace(workspace_size(op)));
  EXPECT_EQ(small.out, unchecked.out);
  EXPECT_EQ(small.lse, unchecked.lse);
}

/// Engines give such pages to others.
TEST(ValidateTables, PageBeforeTheWindow_IsNotLookedAt) {
  SmallDecode small;
  small.config.window_left = 7;
  small.indices[1] = -1;  // tokens 0 to 7 of a request whose query sees 12 to 19
  EXPECT_EQ(message_of_run(small), "");
  small.indices[2] = -1;
  EXPECT_THAT(message_of_run(small), HasSubstr("column 1 of row 1"));
}

TEST(ValidateTables, EnvironmentVariable_TurnsItOn) {
  const char* const before = std::getenv("FOLIO_VALIDATE_TABLES");
  const std::string kept = before == nullptr ? "" : before;
  const auto checks = [](const char* value) {
    setenv("FOLIO_VALIDATE_TABLES", value, 1);
    return Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}}).state().validate_tables;
  };
  EXPECT_FALSE(checks(""));
  EXPECT_FALSE(checks("0"));
  EXPECT_TRUE(checks("1"));
  EXPECT_THAT(folio::testing::message_of([&] { checks("yes"); }),
              HasSubstr("FOLIO_VALIDATE_TABLES is 'yes'; 0 and 1 are taken"));
  setenv("FOLIO_VALIDATE_TABLES", "0", 1);
  EXPECT_TRUE(checking_context().state().validate_tables) << "the code asks for it";
  setenv("FOLIO_VALIDATE_TABLES", kept.c_str(), 1);
}

/// The check of one work tile of row 1, keys [16, 40), with pages of 16 tokens.
cuda::TableFault fault_of(const cuda::CheckedSegment& segment, int32_t lane = 0, int32_t lanes = 1) {
  const scheduler::WorkTile tile{.segment = 2,
                                 .kv_row = 1,
                                 .kv_head = 0,
                                 .request = 5,
                                 .row_begin = 0,
                                 .row_end = 1,
                                 .kv_begin = 16,
                                 .kv_end = 40,
                                 .partial = -1,
                                 .flags = 0,
                                 .combine_tile = -1};
  return cuda::check_tile(segment, tile, lane, lanes);
}

/// On a device these are not seen by the host's checks.
TEST(TableCheck, RowsThatDoNotFit_AreFaults) {
  const std::vector<int32_t> indices{0, 1, 2, 3, 9};
  std::vector<int32_t> indptr{0, 1, 4};
  cuda::CheckedSegment segment;
  segment.page_size = 16;
  segment.num_pages = 8;
  segment.table = csr_table(indices, indptr);
  EXPECT_EQ(fault_of(segment).problem, cuda::TableProblem::kNone);

  indptr[2] = 3;
  cuda::TableFault fault = fault_of(segment);
  EXPECT_EQ(fault.problem, cuda::TableProblem::kShortRow);
  EXPECT_EQ(fault.value, 2);
  EXPECT_EQ(fault.bound, 3);
  EXPECT_EQ(fault.segment, 2);
  EXPECT_EQ(fault.request, 5);
  for (const std::vector<int32_t>& wrong : {std::vector<int32_t>{0, -1, 4}, {0, 5, 4}, {0, 1, 6}}) {
    segment.table.indptr = wrong.data();
    EXPECT_EQ(fault_of(segment).problem, cuda::TableProblem::kRowEnds) << wrong[1] << " " << wrong[2];
  }
  segment.table.indptr = indptr.data();
  segment.table.num_rows = 1;
  EXPECT_EQ(fault_of(segment).problem, cuda::TableProblem::kRow);

  segment.table = dense_table(indices, 2, 2);  // row 1 would run on into memory behind the table
  fault = fault_of(segment);
  EXPECT_EQ(fault.problem, cuda::TableProblem::kShortRow);
  EXPECT_EQ(fault.value, 2);

  const std::vector<int32_t> tokens{0, 10, 49};
  cuda::CheckedSegment ragged;
  ragged.paged = false;
  ragged.indptr = tokens.data();
  ragged.num_tokens = 49;
  EXPECT_EQ(fault_of(ragged).problem, cuda::TableProblem::kShortRow) << "39 tokens, 40 needed";
  ragged.num_tokens = 48;
  EXPECT_EQ(fault_of(ragged).problem, cuda::TableProblem::kRowEnds);
}

TEST(TableCheck, LanesShareTheColumns) {
  const std::vector<int32_t> indices{0, 0, -1, -2};
  const std::vector<int32_t> indptr{0, 1, 4};
  cuda::CheckedSegment segment;
  segment.page_size = 16;
  segment.num_pages = 8;
  segment.table = csr_table(indices, indptr);
  EXPECT_EQ(fault_of(segment, 0, 2).column, 1);
  EXPECT_EQ(fault_of(segment, 1, 2).column, 2);
  EXPECT_EQ(fault_of(segment, 2, 3).problem, cuda::TableProblem::kNone);
  EXPECT_TRUE(cuda::comes_before(fault_of(segment, 0, 2), fault_of(segment, 1, 2)));
  EXPECT_FALSE(cuda::comes_before(cuda::TableFault{}, fault_of(segment)));
}

TEST(TableCheck, Report_ThrowsOnce) {
  cuda::TableFault fault{.problem = cuda::TableProblem::kPage,
                         .segment = 0,
                         .request = 3,
                         .row = 3,
                         .column = 4,
                         .value = 70,
                         .bound = 64};
  EXPECT_EQ(folio::testing::message_of([&] { report_tables(fault, "a replay: "); }),
            "a replay: segment 0, request 3: column 4 of row 3 of the table is page 70; the cache has 64 pages");
  EXPECT_NO_THROW(report_tables(fault, "a replay: "));
}

}  // namespace
}  // namespace folio::inline v0::attention
