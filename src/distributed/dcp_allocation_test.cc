#include "distributed/dcp_case_test_util.hpp"
#include "distributed/expectations_test_util.hpp"

namespace folio::distributed::testing {
namespace {

TEST(DcpAttention, AllocatesNothingOnceWarm) {
  for (const DcpCombine combine : {DcpCombine::kAllGatherReduceScatter, DcpCombine::kAllToAll}) {
    DcpSetup setup;
    setup.combine = combine;
    setup.alibi = setup.sinks = true;
    setup.num_cached = 1;
    setup.requests = {{5, 1}, {70, 4}, {64, 17}};
    DcpCase whole(setup);
    expect_no_allocations_once_warm<DcpAttention>(whole);
  }
}

}  // namespace
}  // namespace folio::distributed::testing
