// Both engine backends over a cache that is divided between processes. Run by mpirun.
#include <gtest/gtest.h>
#include <mpi.h>

#include "dcp_backend_step.hpp"
#include "folio/distributed/mpi_group.hpp"

namespace folio::backends::testing {
namespace {

TEST(DcpBackendsUnderMpi, BatchesOfVllmsTests) {
  const auto group = distributed::make_mpi_group();
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  int32_t turn = 0;
  for (const std::string& name :
       std::vector<std::string>{"small_decode", "small_prefill", "mixed_small", "mixed_medium", "single_decode"}) {
    for (const BackendKind kind : kBackends) {
      for (const auto combine :
           {distributed::DcpCombine::kAllGatherReduceScatter, distributed::DcpCombine::kAllToAll}) {
        DcpSetup setup;
        setup.name = name;
        setup.world = group->size();
        setup.requests = backend_batch(name);
        setup.sampled_rows = 40;
        setup.dim_qk = 64;
        setup.combine = combine;
        setup.interleave = turn % 3 == 0 ? 1 : turn % 3 == 1 ? 16 : 32;
        setup.hnd = turn % 2 == 0;
        setup.model = setup.cache = DType::kBFloat16;
        if (turn % 4 == 1) setup.cache = DType::kFloat8E4M3;
        if (turn % 4 == 2) setup.cache = DType::kFloat8E5M2;
        if (turn % 5 == 0) setup.window_left = 63;
        setup.alibi = turn % 3 == 2;
        setup.sinks = turn % 2 == 1;
        ++turn;
        setup = for_backend(setup, kind);
        DcpCase whole(setup);
        run_backend(whole, kind, *group, context);
        EXPECT_EQ(whole.wrong_output(group->rank()), "") << name << ", " << distributed::to_string(combine);
      }
    }
  }
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
