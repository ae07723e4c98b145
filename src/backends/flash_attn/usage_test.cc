#include <gtest/gtest.h>

#include <vector>

#include "core/snippet_test_util.hpp"
#include "folio/backends/flash_attn.hpp"

// The snippet of docs/flash_attn.md, compiled and run.
namespace folio::inline v0::backends {
namespace {

/// An engine's data for one step: two requests of one layer, whose first page is the same.
struct Step {
  static constexpr int32_t kNumPages = 4, kPageSize = 16, kNumHeads = 4, kNumKvHeads = 2, kHeadSize = 64;
  std::vector<float> pool = std::vector<float>(size_t{kNumPages} * 2 * kPageSize * kNumKvHeads * kHeadSize, 0.5f);
  std::vector<float> q = std::vector<float>(3 * kNumHeads * kHeadSize, 0.25f);
  std::vector<float> k = std::vector<float>(3 * kNumKvHeads * kHeadSize, 0.5f);
  std::vector<float> v = std::vector<float>(3 * kNumKvHeads * kHeadSize, 0.5f);
  std::vector<float> out = std::vector<float>(3 * kNumHeads * kHeadSize);
  std::vector<int32_t> query_start_loc{0, 1, 3};
  std::vector<int32_t> seq_lens{20, 18};
  std::vector<int32_t> table{1, 2, 1, 3};
  std::vector<int64_t> slots{2 * kPageSize + 3, 3 * kPageSize, 3 * kPageSize + 1};
};

void serve_one_step(Step& step) {
  Context context = Context::cpu();
  // [snippet]
  // Once per model: a layer, and a builder for its group.
  EngineConfig engine;
  engine.model.dtype = DType::kFloat32;
  engine.model.num_attention_heads = Step::kNumHeads;
  engine.model.num_kv_heads = Step::kNumKvHeads;

  FlashAttentionLayerConfig layer;
  layer.num_heads = Step::kNumHeads;
  layer.num_kv_heads = Step::kNumKvHeads;
  layer.head_size = Step::kHeadSize;
  layer.scale = 0.125f;  // 1 / sqrt(64)
  layer.model_dtype = engine.model.dtype;
  FlashAttentionImpl attention(context, layer);

  AttentionSpec spec{Step::kPageSize, Step::kNumKvHeads, Step::kHeadSize, DType::kFloat32};
  std::vector<AttentionLayer<FlashAttentionImpl>> layers{{"model.layers.0.attn", &attention}};
  FlashAttentionMetadataBuilder builder(context, spec, layers, engine);

  auto shape =
      FlashAttentionBackend::get_kv_cache_shape(Step::kNumPages, spec.page_size, spec.num_kv_heads, spec.head_size);
  TensorView kv_cache =
      FlashAttentionBackend::kv_cache_tensor(step.pool.data(), spec.dtype, shape, engine.cache.layout);

  // Once per step: the batch, in any order. The requests have their first page in common.
  CommonAttentionMetadata batch;
  batch.query_start_loc = step.query_start_loc;
  batch.seq_lens = step.seq_lens;
  batch.num_reqs = 2;
  batch.num_actual_tokens = 3;
  batch.max_query_len = 2;
  batch.max_seq_len = 20;
  batch.block_table = {step.table.data(), 2, 2, 2};
  batch.slot_mapping = step.slots;
  FlashAttentionMetadata metadata = builder.build(/*common_prefix_len=*/16, batch);

  // Once per layer and step: the cache, then attention.
  ConstTensorView query(step.q.data(), DType::kFloat32, {3, Step::kNumHeads, Step::kHeadSize});
  ConstTensorView key(step.k.data(), DType::kFloat32, {3, Step::kNumKvHeads, Step::kHeadSize});
  ConstTensorView value(step.v.data(), DType::kFloat32, {3, Step::kNumKvHeads, Step::kHeadSize});
  TensorView output(step.out.data(), DType::kFloat32, {3, Step::kNumHeads, Step::kHeadSize});
  attention.do_kv_cache_update({}, key, value, kv_cache, metadata.slot_mapping);
  attention.forward({}, query, key, value, kv_cache, &metadata, output);
  // [/snippet]
}

TEST(FlashAttnUsage, TheSnippetRuns) {
  Step step;
  serve_one_step(step);
  for (float value : step.out) ASSERT_FLOAT_EQ(value, 0.5f) << "every value is one half";
}

TEST(FlashAttnUsage, TheDocumentShowsTheSnippetThatRuns) {
  folio::testing::expect_document_shows_snippet("docs/flash_attn.md", "src/backends/flash_attn/usage_test.cc");
}

}  // namespace
}  // namespace folio::inline v0::backends
