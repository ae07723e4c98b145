// Both engine backends over a cache that is divided between processes. Run by mpirun.
#include <gtest/gtest.h>
#include <mpi.h>

#include "batch_table.hpp"
#include "core/instrumented_test_util.hpp"
#include "folio/distributed/mpi_group.hpp"

namespace folio::backends::testing {
namespace {

// The runs of the table that are for as many ranks as there are processes, but those of its large batches.
TEST(DcpBackendsUnderMpi, MatchFloat64InEveryBatchOfTheTable) {
  const auto group = distributed::make_mpi_group();
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  int32_t num_runs = 0;
  for (const auto& batch : table_batches()) {
    if (batch.value("slow", false)) continue;
    for (const BatchRun& batch_run : batch_runs(batch)) {
      if (batch_run.setup.world != group->size()) continue;
      ++num_runs;
      DcpCase whole(batch_run.setup);
      run_backend(whole, batch_run.kind, *group, context);
      EXPECT_EQ(whole.wrong_output(group->rank()), "") << batch_run.setup.name;
      if (!batch_run.setup.encoder) {
        EXPECT_EQ(whole.wrong_cache(group->rank()), "") << batch_run.setup.name;
      }
    }
  }
  EXPECT_GT(num_runs, folio::testing::random_cases(50));
}

}  // namespace
}  // namespace folio::backends::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  MPI_Init(&argc, &argv);
  const int failed = RUN_ALL_TESTS();
  MPI_Finalize();
  return failed;
}
