#include <gtest/gtest.h>

#include "attention/table_checks_test_util.hpp"
#include "backends/token_pool/pool_test_util.hpp"
#include "core/allocation_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;

/// Metadata and forwards of any mode, also of readings that layers need besides, allocate nothing once they have run.
TEST(TokenPoolAllocations, AreNoneOnceWarm) {
  if (!folio::testing::counts_shared_libraries()) GTEST_SKIP() << "libfolio has a standard library of its own here";
  const TableChecks none(false);
  PoolSetup setup;
  setup.window = 30;
  for (const PoolLengths& lengths :
       {PoolLengths{.mode = ForwardMode::kDecode, .prefix = {50, 3, 700}, .fresh = {1, 1, 1}},
        PoolLengths{.mode = ForwardMode::kExtend, .prefix = {50, 0, 700}, .fresh = {5, 80, 1}},
        PoolLengths{.mode = ForwardMode::kTargetVerify,
        .prefix = {50, 700},
        .fresh = {4, 4},
        .encoder = {},
        .parents = {-1, 0, 0, 1}}}) {
    for (const ExtendPath path : {ExtendPath::kRagged, ExtendPath::kPaged}) {
      setup.extend_path = path;
      PoolFixture fixture(setup, lengths);
      TokenPoolBackend backend(fixture.context, fixture.config());
      const auto step = [&] {
        backend.init_forward_metadata(fixture.batch);
        for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) {
          fixture.forward(backend, layer);
          layer.forward(backend, fixture.q, {}, {}, fixture.batch, fixture.out);
        }
      };
      const int64_t cold = folio::testing::num_allocations();
      step();
      EXPECT_GT(folio::testing::num_allocations(), cold) << "the counter works";
      const int64_t warm = folio::testing::num_allocations();
      for (int round = 0; round < 3; ++round) step();
      EXPECT_EQ(folio::testing::num_allocations(), warm) << to_string(lengths.mode);
    }
  }
}

/// Counted between barriers, over all ranks.
TEST(TokenPoolAllocations, OverRanks_AreNoneOnceWarm) {
  FOLIO_CPU_ONLY("groups of threads bring a GPU's memory to the host");
  if (!folio::testing::counts_shared_libraries()) GTEST_SKIP() << "libfolio has a standard library of its own here";
  const TableChecks none(false);
  for (const PoolLengths& lengths :
       {PoolLengths{.mode = ForwardMode::kDecode, .prefix = {50, 3, 700}, .fresh = {1, 1, 1}},
        PoolLengths{.mode = ForwardMode::kExtend, .prefix = {50, 0, 700}, .fresh = {5, 80, 1}}}) {
    testing::run_ranks(2, [&](distributed::ProcessGroup& group) {
      PoolSetup setup;
      setup.window = 30;
      setup.group = &group;
      PoolFixture fixture(setup, lengths);
      TokenPoolBackend backend(fixture.context, fixture.config());
      const auto step = [&] {
        backend.init_forward_metadata(fixture.batch);
        for (const RadixAttention& layer : {fixture.layer(), fixture.full_layer()}) fixture.forward(backend, layer);
      };
      for (int round = 0; round < 2; ++round) step();
      group.barrier();
      const int64_t warm = folio::testing::num_allocations();
      group.barrier();
      for (int round = 0; round < 3; ++round) step();
      group.barrier();
      const int64_t now = folio::testing::num_allocations();
      group.barrier();
      EXPECT_EQ(now, warm) << to_string(lengths.mode);
    });
  }
}

TEST(TokenPoolAllocations, ReplaysMakeNone) {
  const TableChecks none(false);
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {50, 3, 700}, .fresh = {1, 1, 1}});
  TokenPoolBackend backend(fixture.context, fixture.config());
  GraphInputs inputs(3);
  testing::OwnBatch own;
  backend.init_cuda_graph_state(3, 3);
  backend.init_forward_metadata_capture_cuda_graph(3, 3, fixture.rows, fixture.seq_lens, ForwardMode::kDecode);
  fixture.forward(backend, fixture.layer());
  const auto replay = [&] {
    const ForwardBatch padded = own.copy(inputs.pad(fixture.batch, 3));
    backend.init_forward_metadata_replay_cuda_graph(3, padded.req_pool_indices, padded.seq_lens, padded.seq_lens_sum,
                                                    ForwardMode::kDecode, padded.seq_lens_cpu);
    fixture.forward(backend, fixture.layer());
  };
  replay();
  const int64_t warm = folio::testing::num_allocations();
  for (int round = 0; round < 3; ++round) replay();
  EXPECT_EQ(folio::testing::num_allocations(), warm);
  EXPECT_EQ(fixture.wrong_output(fixture.layer(), false), "");
}

}  // namespace
}  // namespace folio::inline v0::backends
