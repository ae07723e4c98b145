#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "backends/flashinfer/batch_test_util.hpp"
#include "core/allocation_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchFixture;
using testing::LayerSetup;

TEST(FlashInferAllocations, AreNoneOnceWarm) {
  if (!folio::testing::counts_shared_libraries()) GTEST_SKIP() << "libfolio has a standard library of its own here";
  const TableChecks none(false);
  LayerSetup setup;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  setup.head_size = 16;
  setup.sliding_window = 30;
  std::vector<int32_t> seq_lens;
  for (int32_t i = 0; i < 256; ++i) seq_lens.push_back(1 + 7 * i % 300);
  BatchFixture decodes(setup, {"decodes", seq_lens, std::vector<int32_t>(256, 1)});
  BatchFixture mixed(setup, {"mixed", {300, 300, 40}, {1, 20, 40}});
  const FlashInferImpl impl(decodes.context, decodes.layer_config());
  FlashInferMetadataBuilder builder = decodes.make_builder(impl);
  const auto step = [&](BatchFixture& batch) {
    const FlashInferMetadata metadata = builder.build(0, batch.batch);
    impl.forward(batch.scales(), batch.query, batch.key, batch.value, batch.kv_cache, &metadata, batch.output);
    builder.paged_kv_arrays(metadata);
  };
  const int64_t cold = folio::testing::num_allocations();
  step(mixed);
  step(decodes);
  EXPECT_GT(folio::testing::num_allocations(), cold) << "the counter works";
  const int64_t warm = folio::testing::num_allocations();
  for (int round = 0; round < 3; ++round) {
    step(decodes);
    step(mixed);
  }
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

}  // namespace
}  // namespace folio::inline v0::backends
