// An engine's steps with every allocation failing once: an error, no leak, and a builder that plans the next ones
// right.
#include <gtest/gtest.h>

#include <memory>
#include <span>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "backends/flashinfer/two_batches_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::FlashAttnFixture;

/// Both batches are planned before either runs.
class EngineSteps : public testing::TwoBatches<FlashAttnFixture, FlashAttentionImpl, FlashAttentionMetadataBuilder> {
 public:
  EngineSteps(CascadeMode cascade, bool aot_schedule) : TwoBatches(small_layer()) {
    mixed_.options.cascade = cascade;
    mixed_.options.aot_schedule = aot_schedule;
  }

  void make() {
    impl_.emplace(mixed_.make_impl());
    const AttentionLayer<FlashAttentionImpl> layer{"layer", &*impl_};
    builder_ = std::make_unique<FlashAttentionMetadataBuilder>(mixed_.context, mixed_.spec(), std::span(&layer, 1),
                                                               mixed_.config, mixed_.options);
  }
  void steps() {
    for (int round = 0; round < 2; ++round) {
      const FlashAttentionMetadata mixed = builder_->build(8, mixed_.batch);
      const FlashAttentionMetadata decodes = builder_->build(8, decodes_.batch);
      mixed_.forward(*impl_, mixed);
      decodes_.forward(*impl_, decodes);
    }
  }
};

void expect_clean_failures(CascadeMode cascade, bool aot_schedule) {
  EngineSteps engine(cascade, aot_schedule);
  testing::expect_clean_failures(engine);
}

TEST(FlashAttnAllocationFailure, StepsWithSchedulesAheadOfTime) {
  expect_clean_failures(CascadeMode::kHeuristic, true);
}
TEST(FlashAttnAllocationFailure, StepsWithFoundPrefixes) {
  expect_clean_failures(CascadeMode::kAuto, false);
}

}  // namespace
}  // namespace folio::inline v0::backends
