// The batches of vLLM's tests of attention backends through both backends, in every layout, KV cache dtype and feature,
// on one rank and divided over several, against the float64 oracle. The table is data:
// tests/golden/backends/batches.json.
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "batch_table.hpp"
#include "covering_design.hpp"

namespace folio::backends::testing {
namespace {

using folio::testing::GoldenCase;

class BackendBatches : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(BackendBatches, MatchFloat64) {
  for (const BatchRun& batch_run : batch_runs(GetParam())) {
    SCOPED_TRACE(batch_run.setup.name);
    DcpCase whole(batch_run.setup);
    distributed::run_ranks(batch_run.setup.world, [&](distributed::ProcessGroup& group) {
      const int32_t threads = group.size() == 1 ? 2 : 1;
      run_backend(whole, batch_run.kind, group,
                  Context::cpu({.executor = {}, .num_threads = threads, .force_kernel = {}}));
    });
    EXPECT_EQ(whole.wrong_outputs(), "");
    for (int32_t rank = 0; rank < batch_run.setup.world && !batch_run.setup.encoder; ++rank) {
      EXPECT_EQ(whole.wrong_cache(rank), "");
    }
  }
}

std::vector<GoldenCase> batches_of_this_program() {
  std::vector<GoldenCase> batches;
  for (const GoldenCase& batch : table_batches()) {
    if (batch.value("slow", false) == FOLIO_SLOW_BATCHES) batches.push_back(batch);
  }
  return batches;
}

INSTANTIATE_TEST_SUITE_P(Golden, BackendBatches, ::testing::ValuesIn(batches_of_this_program()),
                         folio::testing::golden_case_name);

// What the runs are worth: every batch meets every value of every axis together with every value of every other.
TEST(BackendBatchTable, MeetsEveryPairOfValues) {
  for (const GoldenCase& batch : table_batches()) {
    const BatchAxes axes = batch_axes(batch);
    using Value = std::pair<size_t, int32_t>;
    std::set<std::pair<Value, Value>> met;
    size_t wanted = 0;
    const std::vector<DesignRow> rows = covering_design(axes.num_values, 7);
    for (size_t a = 0; a < axes.names.size(); ++a) {
      for (size_t b = a + 1; b < axes.names.size(); ++b) {
        wanted += static_cast<size_t>(axes.num_values[a] * axes.num_values[b]);
        for (const DesignRow& row : rows) met.insert({{a, row[a]}, {b, row[b]}});
      }
    }
    EXPECT_EQ(met.size(), wanted) << batch.name;
    EXPECT_LE(rows.size(), 30u) << batch.name;
  }
}

}  // namespace
}  // namespace folio::backends::testing
