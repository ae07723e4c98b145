// An engine's steps with every allocation failing once: an error, no leak, and a builder that plans the next step
// right.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backends/flashinfer/two_batches_test_util.hpp"
#include "folio/backends/flashinfer/wrappers.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchFixture;
using testing::LayerSetup;

/// The batches differ in size, so that arrays grow between them.
class EngineSteps : public testing::TwoBatches<BatchFixture, FlashInferImpl, FlashInferMetadataBuilder> {
 public:
  EngineSteps(CascadeMode cascade, bool block_tables) : TwoBatches(layer()), config_(mixed_.engine_config()) {
    options_.cascade = cascade;
    if (block_tables) config_.use_block_table_kernels = true;
  }

  void make() {
    impl_.emplace(mixed_.context, mixed_.layer_config());
    const AttentionLayer<FlashInferImpl> layer{"layer", &*impl_};
    builder_ = std::make_unique<FlashInferMetadataBuilder>(mixed_.context, mixed_.spec(), std::span(&layer, 1), config_,
                                                           options_);
  }
  void steps() {
    for (BatchFixture* batch : {&mixed_, &decodes_, &mixed_}) {
      const FlashInferMetadata metadata = builder_->build(8, batch->batch);
      impl_->forward(batch->scales(), batch->query, batch->key, batch->value, batch->kv_cache, &metadata,
                     batch->output);
      builder_->paged_kv_arrays(metadata);
    }
  }

 private:
  static LayerSetup layer() {
    LayerSetup setup = small_layer();
    setup.sinks = true;
    return setup;
  }

  EngineConfig config_;
  FlashInferOptions options_;
};

void expect_clean_failures(CascadeMode cascade, bool block_tables) {
  EngineSteps engine(cascade, block_tables);
  testing::expect_clean_failures(engine);
}

TEST(FlashInferAllocationFailure, StepsWithAGivenPrefix) {
  expect_clean_failures(CascadeMode::kHeuristic, false);
}
TEST(FlashInferAllocationFailure, StepsWithFoundPrefixes) {
  expect_clean_failures(CascadeMode::kAuto, false);
}
TEST(FlashInferAllocationFailure, StepsOfBlockTables) {
  expect_clean_failures(CascadeMode::kOff, true);
}

TEST(FlashInferAllocationFailure, PlanAndRunOfAWrapper) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 3, .force_kernel = {}});
  WrapperPlanOptions options;
  options.num_qo_heads = options.num_kv_heads = 1;
  options.head_dim_qk = 8;
  options.page_size = 2;
  options.q_data_type = DType::kFloat32;
  const std::vector<int32_t> qo_indptr{0, 2, 5}, indptr{0, 2, 5}, indices{3, 1, 0, 2, 4}, last_page_len{1, 2};
  const std::vector<int32_t> one_qo_indptr{0, 1}, one_indptr{0, 2}, one_last{2};
  const std::vector<uint8_t> mask(2 * 3 + 3 * 6, 1);
  std::vector<float> q(5 * 8), k(5 * 2 * 8), v(5 * 2 * 8), out(5 * 8), lse(5), expected;
  for (size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(i % 7) / 7.0f;
    v[i] = static_cast<float>(i % 11) / 11.0f;
  }
  for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 5) / 5.0f;
  std::optional<BatchPrefillWithPagedKVCacheWrapper> wrapper;
  const auto plan_and_run = [&](bool masked) {
    WrapperMask bits;
    if (masked) bits.bools = mask;
    wrapper->plan(qo_indptr, {indptr, indices, last_page_len}, options, bits);
    WrapperRunArgs args;
    args.lse = lse.data();
    wrapper->run({q.data(), DType::kFloat32, {5, 1, 8}},
                 {{k.data(), DType::kFloat32, {5, 2, 1, 8}}, {v.data(), DType::kFloat32, {5, 2, 1, 8}}},
                 {out.data(), DType::kFloat32, {5, 1, 8}}, args);
  };
  wrapper.emplace(context);
  plan_and_run(false);
  expected = out;
  wrapper.reset();
  bool same = true;
  folio::testing::sweep_failing_allocations(
      [&] {
        wrapper.emplace(context);
        wrapper->plan(one_qo_indptr, {one_indptr, indices, one_last}, options);  // then a larger one: arrays grow
        plan_and_run(false);
        plan_and_run(true);
      },
      [&] {
        if (!wrapper) return;
        std::ranges::fill(out, -1.0f);
        plan_and_run(false);
        same = same && out == expected;
        wrapper.reset();
      });
  EXPECT_TRUE(same) << "a wrapper whose plan failed gives other results";
}

}  // namespace
}  // namespace folio::inline v0::backends
