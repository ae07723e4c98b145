#include <gtest/gtest.h>

#include <vector>

#include "core/snippet_test_util.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/pools.hpp"

namespace folio::inline v0::backends {
namespace {

/// A batch of two requests: three new tokens behind none, one behind two.
struct Step {
  static constexpr int32_t kMaxRequests = 4;
  static constexpr int32_t kMaxContextLen = 64;

  std::vector<int32_t> rows = {0, 0}, seq_lens = {3, 3}, prefix_lens = {0, 2};
  std::vector<int64_t> slots = {7, 3, 9, 12};
  std::vector<float> q_memory = std::vector<float>(4 * 2 * 64, 0.5f);
  std::vector<float> k_memory = std::vector<float>(4 * 64, 0.25f);
  std::vector<float> v_memory = std::vector<float>(4 * 64, 2.0f);
  std::vector<float> out_memory = std::vector<float>(4 * 2 * 64, -1.0f);
  ConstTensorView q{q_memory.data(), DType::kFloat32, {4, 128}};
  ConstTensorView k{k_memory.data(), DType::kFloat32, {4, 64}};
  ConstTensorView v{v_memory.data(), DType::kFloat32, {4, 64}};
  TensorView out{out_memory.data(), DType::kFloat32, {4, 128}};

  /// What a scheduler does: rows for the requests, and their slots in them.
  void schedule(ReqToTokenPool& requests) {
    ASSERT_TRUE(requests.alloc(rows));
    requests.write(rows[0], 0, std::vector<int32_t>{7, 3, 9});
    requests.write(rows[1], 0, std::vector<int32_t>{5, 6, 12});
  }
};

void serve_one_step(Step& step) {
  // [snippet]
  // Once per model.
  ReqToTokenPool requests(Step::kMaxRequests, Step::kMaxContextLen);
  KvPoolConfig sizes;
  sizes.num_slots = 1024;
  sizes.num_layers = 1;
  sizes.num_kv_heads = 1;
  sizes.head_dim_qk = sizes.head_dim_v = 64;
  sizes.dtype = DType::kFloat32;
  KvPool pool(sizes);
  TokenPoolConfig config;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 64;
  config.kv_cache_dtype = config.q_dtype = DType::kFloat32;
  config.max_context_len = Step::kMaxContextLen;
  config.req_to_token = requests.table();
  config.max_req_pool_size = requests.size();
  TokenPoolBackend backend(Context::cpu(), config);
  RadixAttention layer;
  layer.num_heads = 2;
  layer.num_kv_heads = 1;
  layer.head_dim = 64;
  layer.layer_id = 0;

  // Once per step: the scheduler writes the new tokens' slots into the requests' rows; then the metadata.
  step.schedule(requests);
  ForwardBatch batch;
  batch.forward_mode = ForwardMode::kExtend;
  batch.batch_size = 2;
  batch.req_pool_indices = step.rows;
  batch.seq_lens = step.seq_lens;
  batch.extend_prefix_lens = step.prefix_lens;
  batch.out_cache_loc = step.slots;
  batch.token_to_kv_pool = &pool;
  backend.init_forward_metadata(batch);

  // Once per layer: stores k and v in their slots, then attends.
  layer.forward(backend, step.q, step.k, step.v, batch, step.out);
  // [/snippet]
}

TEST(TokenPoolUsage, TheSnippetRuns) {
  Step step;
  serve_one_step(step);
  EXPECT_FLOAT_EQ(step.out_memory[0], 2.0f);
  EXPECT_GT(step.out_memory.back(), 0.0f);
  EXPECT_LT(step.out_memory.back(), 2.0f) << "two of its keys are the pool's zeros";
}

TEST(TokenPoolUsage, TheDocumentShowsTheSnippetThatRuns) {
  folio::testing::expect_document_shows_snippet("docs/token_pool.md", "src/backends/token_pool/usage_test.cc");
}

}  // namespace
}  // namespace folio::inline v0::backends
