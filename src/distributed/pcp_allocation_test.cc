#include "distributed/expectations_test_util.hpp"
#include "distributed/pcp_case_test_util.hpp"

namespace folio::distributed::testing {
namespace {

TEST(PcpAttention, AllocatesNothingOnceWarm) {
  PcpSetup setup;
  setup.whole.alibi = setup.whole.sinks = true;
  setup.whole.requests = {{5, 1}, {170, 40}, {64, 17}};
  PcpSetup pass_kv = setup, bounded = setup;
  setup.exchange = PcpExchange::kPassQ;
  pass_kv.exchange = PcpExchange::kPassKv;
  bounded.bounds = GraphBounds{4, 80, 40, 200, 0};
  bounded.max_tokens = 40;
  for (const PcpSetup& one : {setup, pass_kv, bounded}) {
    PcpCase divided(one);
    expect_no_allocations_once_warm<PcpAttention>(divided);
  }
}

}  // namespace
}  // namespace folio::distributed::testing
