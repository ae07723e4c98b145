// An engine's steps with every allocation failing once: an error, no leak, and a backend that serves the next step
// right.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "backends/token_pool/pool_test_util.hpp"
#include "core/allocation_failure_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;

/// A backend over one batch: its metadata and forwards of a layer with the window and of one without.
void expect_clean_failures(const PoolSetup& setup, const PoolLengths& lengths) {
  PoolFixture fixture(setup, lengths, 1);
  ASSERT_EQ(fixture.wrong_step(), "");
  std::unique_ptr<TokenPoolBackend> backend;
  const auto step = [&] {
    for (int round = 0; round < 2; ++round) {
      backend->init_forward_metadata(fixture.batch);
      fixture.layer().forward(*backend, fixture.q, fixture.k, fixture.v, fixture.batch, fixture.out);
    }
  };
  const std::vector<std::byte> expected = fixture.out_memory;
  bool same = true;
  folio::testing::sweep_failing_allocations(
      [&] {
        backend = std::make_unique<TokenPoolBackend>(fixture.context, fixture.config());
        step();
        backend->init_cuda_graph_state(4, 8);
      },
      [&] {
        if (backend == nullptr) return;
        fixture.clear_output();
        step();
        same = same && fixture.out_memory == expected;
        backend.reset();
      });
  EXPECT_TRUE(same) << "a backend whose step failed serves the next one otherwise";
}

PoolSetup small_pool() {
  PoolSetup setup;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  setup.head_dim = setup.v_head_dim = 16;
  setup.page_size = 2;
  return setup;
}

PoolLengths lengths_of(ForwardMode mode, std::vector<int32_t> prefix, std::vector<int32_t> fresh) {
  PoolLengths lengths;
  lengths.mode = mode;
  lengths.prefix = std::move(prefix);
  lengths.fresh = std::move(fresh);
  return lengths;
}

TEST(TokenPoolAllocationFailure, DecodesWithAWindow) {
  PoolSetup setup = small_pool();
  setup.window = 5;
  expect_clean_failures(setup, lengths_of(ForwardMode::kDecode, {9, 4, 13}, {1, 1, 1}));
}
TEST(TokenPoolAllocationFailure, RaggedExtends) {
  PoolSetup setup = small_pool();
  setup.extend_path = ExtendPath::kRagged;
  expect_clean_failures(setup, lengths_of(ForwardMode::kExtend, {6, 0, 11}, {3, 7, 1}));
}
TEST(TokenPoolAllocationFailure, TreesOfDrafts) {
  PoolLengths lengths = lengths_of(ForwardMode::kTargetVerify, {6, 11}, {4, 4});
  lengths.parents = {-1, 0, 0, 1};
  expect_clean_failures(small_pool(), lengths);
}

}  // namespace
}  // namespace folio::inline v0::backends
