// An engine's steps with every allocation failing once: an error, no leak, and a builder that plans the next ones
// right.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "core/allocation_failure_test_util.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::FlashAttnFixture;
using testing::LayerSetup;

LayerSetup small_layer() {
  LayerSetup setup;
  setup.num_heads = 2;
  setup.num_kv_heads = 1;
  setup.head_size = 16;
  setup.page_size = 4;
  setup.shared_prefix = 8;
  return setup;
}

/// Two batches through one builder, planned before either runs.
class EngineSteps {
 public:
  EngineSteps(CascadeMode cascade, bool aot_schedule)
      : decodes_(small_layer(), {"decodes", {12, 17, 9, 30, 21}, {1, 1, 1, 1, 1}}),
        mixed_(small_layer(), {"mixed", {20, 13, 26}, {1, 3, 6}}) {
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
  void drop() {
    builder_.reset();
    impl_.reset();
  }
  bool made() const { return builder_ != nullptr; }
  std::string wrong_output() const { return mixed_.wrong_output() + decodes_.wrong_output(); }
  std::vector<std::byte> outputs() const {
    std::vector<std::byte> all = mixed_.out_memory;
    all.insert(all.end(), decodes_.out_memory.begin(), decodes_.out_memory.end());
    return all;
  }
  void clear_outputs() {
    for (FlashAttnFixture* batch : {&mixed_, &decodes_}) std::ranges::fill(batch->out_memory, testing::kUnwritten);
  }

 private:
  FlashAttnFixture decodes_, mixed_;
  std::optional<FlashAttentionImpl> impl_;
  std::unique_ptr<FlashAttentionMetadataBuilder> builder_;
};

void expect_clean_failures(CascadeMode cascade, bool aot_schedule) {
  EngineSteps engine(cascade, aot_schedule);
  engine.make();
  engine.steps();
  EXPECT_EQ(engine.wrong_output(), "");
  const std::vector<std::byte> expected = engine.outputs();
  engine.drop();
  bool same = true;
  folio::testing::sweep_failing_allocations(
      [&] {
        engine.make();
        engine.steps();
      },
      [&] {
        if (engine.made()) {
          engine.clear_outputs();
          engine.steps();
          same = same && engine.outputs() == expected;
        }
        engine.drop();
      });
  EXPECT_TRUE(same) << "a builder whose step failed plans the next one otherwise";
}

TEST(FlashAttnAllocationFailure, StepsWithSchedulesAheadOfTime) {
  expect_clean_failures(CascadeMode::kHeuristic, true);
}
TEST(FlashAttnAllocationFailure, StepsWithFoundPrefixes) {
  expect_clean_failures(CascadeMode::kAuto, false);
}

}  // namespace
}  // namespace folio::inline v0::backends
