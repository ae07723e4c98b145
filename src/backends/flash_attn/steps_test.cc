#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/table_checks_test_util.hpp"
#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "core/allocation_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::FlashAttnFixture;
using testing::LayerSetup;
using testing::message_of;

// The next step may be built before the last has run; each has buffers and a workspace of its own.
TEST(FlashAttnSteps, AreAsManyInFlightAsAsked) {
  for (const bool aot : {false, true}) {
    if (aot && folio::testing::on_gpu()) continue;  // there a schedule is the plan
    LayerSetup setup;
    setup.shared_prefix = 16;
    FlashAttnFixture first(setup, backend_batch("mixed_small"));
    FlashAttnFixture second(setup, backend_batch("small_prefill"));
    FlashAttnFixture third(setup, backend_batch("medium_decode"));
    first.options.aot_schedule = aot;
    first.options.steps_in_flight = 3;
    const FlashAttentionImpl impl = first.make_impl();
    FlashAttentionMetadataBuilder builder = first.make_builder({&impl});
    for (int round = 0; round < 2; ++round) {
      const FlashAttentionMetadata a = builder.build(16, first.batch);
      const FlashAttentionMetadata b = builder.build(0, second.batch);
      const FlashAttentionMetadata c = builder.build(16, third.batch);
      EXPECT_NE(a.workspace.data, b.workspace.data);
      third.forward(impl, c);
      first.forward(impl, a);
      second.forward(impl, b);
      EXPECT_EQ(first.wrong_output(), "");
      EXPECT_EQ(second.wrong_output(), "");
      EXPECT_EQ(third.wrong_output(), "");
    }
  }
}

// A step's memory is built into again, with a schedule or without: what was made of it before is refused.
TEST(FlashAttnSteps, GoStaleAfterwards) {
  FlashAttnFixture fixture;
  fixture.layer.update_kv_cache_in_forward = true;
  fixture.options.steps_in_flight = 2;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const std::vector<std::byte> cache = fixture.cache_memory;
  for (const bool first_is_fast : {false, true}) {
    for (const bool later_is_fast : {false, true}) {
      const FlashAttentionMetadata old = builder.build(0, fixture.batch, first_is_fast);
      builder.build(0, fixture.batch, later_is_fast);
      builder.build(0, fixture.batch, later_is_fast);
      EXPECT_NE(
          message_of(
              [&] { impl.forward({}, fixture.query, fixture.key, fixture.value, fixture.kv, &old, fixture.output); },
              ErrorCode::kStalePlan),
          "");
    }
  }
  EXPECT_EQ(fixture.cache_memory, cache) << "refused before the cache is written";
}

TEST(FlashAttnSteps, SurviveARefusedBuild) {
  FlashAttnFixture fixture;
  fixture.options.steps_in_flight = 1;
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, fixture.batch);
  CommonAttentionMetadata bad = fixture.batch;
  bad.max_query_len = 1;
  EXPECT_THROW(builder.build(0, bad), Error);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_output(), "");
}

TEST(FlashAttnAllocations, AreNoneOnceWarm) {
  if (!folio::testing::counts_shared_libraries()) GTEST_SKIP() << "libfolio has a standard library of its own here";
  const TableChecks none(false);
  LayerSetup setup;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  setup.head_size = 16;
  setup.shared_prefix = 16;
  std::vector<int32_t> seq_lens;
  for (int32_t i = 0; i < 256; ++i) seq_lens.push_back(20 + 7 * i % 300);
  FlashAttnFixture decodes(setup, {"decodes", seq_lens, std::vector<int32_t>(256, 1)});
  FlashAttnFixture mixed(setup, {"mixed", {300, 300, 40}, {1, 20, 20}});
  FlashAttnFixture encoder(setup, {"encoder", {30, 60}, {30, 60}});
  encoder.layer.attn_type = AttentionType::kEncoder;
  const FlashAttentionImpl impl = decodes.make_impl();
  const FlashAttentionImpl encoder_impl = encoder.make_impl();
  FlashAttentionMetadataBuilder builder = decodes.make_builder({&impl});
  FlashAttentionMetadataBuilder encoder_builder = encoder.make_builder({&encoder_impl});
  const auto steps = [&] {
    for (FlashAttnFixture* fixture : {&decodes, &mixed}) {
      fixture->forward(impl, builder.build(0, fixture->batch));
      fixture->forward(impl, builder.build(16, fixture->batch));
      fixture->forward(impl, builder.build_for_drafting(fixture->batch));
      builder.update_block_table(builder.build(0, fixture->batch), fixture->batch.block_table, fixture->slot_mapping);
    }
    const FlashAttentionMetadata metadata = encoder_builder.build(0, encoder.batch);
    encoder_impl.forward({}, encoder.query, encoder.key, encoder.value, {}, &metadata, encoder.output);
  };
  const int64_t cold = folio::testing::num_allocations();
  for (int round = 0; round < 3; ++round) steps();  // every step in flight meets every batch
  EXPECT_GT(folio::testing::num_allocations(), cold) << "the counter works";
  const int64_t warm = folio::testing::num_allocations();
  for (int round = 0; round < 3; ++round) steps();
  EXPECT_EQ(folio::testing::num_allocations(), warm);
}

}  // namespace
}  // namespace folio::inline v0::backends
