#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/snippet_test_util.hpp"
#include "folio/backends/flashinfer.hpp"

// The snippet of docs/backends.md, compiled and run.
namespace folio::inline v0::backends {
namespace {

/// An engine's data for one step: two requests of one layer, the first decoding its fifth token, the second beginning.
struct Step {
  static constexpr int32_t kNumPages = 4, kPageSize = 16, kNumHeads = 4, kNumKvHeads = 2, kHeadSize = 64;
  std::vector<float> pool = std::vector<float>(size_t{kNumPages} * 2 * kPageSize * kNumKvHeads * kHeadSize, 0.5f);
  std::vector<float> q = std::vector<float>(4 * kNumHeads * kHeadSize, 0.25f);
  std::vector<float> k = std::vector<float>(4 * kNumKvHeads * kHeadSize, 0.5f);
  std::vector<float> v = std::vector<float>(4 * kNumKvHeads * kHeadSize, 0.5f);
  std::vector<float> out = std::vector<float>(4 * kNumHeads * kHeadSize);
  std::vector<int32_t> query_start_loc{0, 1, 4};
  std::vector<int32_t> seq_lens{5, 3};
  std::vector<int32_t> table{2, 1};
  std::vector<int64_t> slots{2 * kPageSize + 4, 1 * kPageSize, 1 * kPageSize + 1, 1 * kPageSize + 2};
};

void serve_one_step(Step& step) {
  // [snippet]
  // Once per model: what the engine is, its layers, and a builder for each group of layers with one cache format.
  Context context = Context::cpu();
  EngineConfig engine;
  engine.model.dtype = DType::kFloat32;
  engine.model.num_attention_heads = Step::kNumHeads;
  engine.model.num_kv_heads = Step::kNumKvHeads;

  FlashInferLayerConfig layer;
  layer.num_heads = Step::kNumHeads;
  layer.num_kv_heads = Step::kNumKvHeads;
  layer.head_size = Step::kHeadSize;
  layer.scale = 0.125f;  // 1 / sqrt(64)
  layer.model_dtype = engine.model.dtype;
  FlashInferImpl attention(context, layer);

  AttentionSpec spec{Step::kPageSize, Step::kNumKvHeads, Step::kHeadSize, DType::kFloat32};
  std::vector<AttentionLayer<FlashInferImpl>> layers{{"model.layers.0.attn", &attention}};
  FlashInferMetadataBuilder builder(context, spec, layers, engine);

  // Once per layer: its KV cache, one tensor.
  auto shape =
      FlashInferBackend::get_kv_cache_shape(Step::kNumPages, spec.page_size, spec.num_kv_heads, spec.head_size);
  TensorView kv_cache = FlashInferBackend::kv_cache_tensor(step.pool.data(), spec.dtype, shape, engine.cache.layout);

  // Once per step: the batch, decodes in front, as builder.reorder_batch arranges it.
  CommonAttentionMetadata batch;
  batch.query_start_loc = step.query_start_loc;
  batch.seq_lens = step.seq_lens;
  batch.num_reqs = 2;
  batch.num_actual_tokens = 4;
  batch.max_query_len = 3;
  batch.max_seq_len = 5;
  batch.block_table = {step.table.data(), 2, 1, 1};
  batch.slot_mapping = step.slots;
  FlashInferMetadata metadata = builder.build(/*common_prefix_len=*/0, batch);

  // Once per layer and step: writes the new keys and values, then attends.
  ConstTensorView query(step.q.data(), DType::kFloat32, {4, Step::kNumHeads, Step::kHeadSize});
  ConstTensorView key(step.k.data(), DType::kFloat32, {4, Step::kNumKvHeads, Step::kHeadSize});
  ConstTensorView value(step.v.data(), DType::kFloat32, {4, Step::kNumKvHeads, Step::kHeadSize});
  TensorView output(step.out.data(), DType::kFloat32, {4, Step::kNumHeads, Step::kHeadSize});
  attention.forward(AttentionLayerScales{}, query, key, value, kv_cache, &metadata, output);
  // [/snippet]
}

TEST(Usage, TheSnippetRuns) {
  Step step;
  serve_one_step(step);
  for (float value : step.out) ASSERT_FLOAT_EQ(value, 0.5f) << "every value is one half";
}

TEST(Usage, TheDocumentShowsTheSnippetThatRuns) {
  folio::testing::expect_document_shows_snippet("docs/backends.md", "src/backends/flashinfer/usage_test.cc");
}

}  // namespace
}  // namespace folio::inline v0::backends
