// The token-pool backend's steps in C have the C++ steps' bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "c_step.hpp"
#include "folio/backends/token_pool.hpp"
#include "folio/c/backends.h"
#include "folio/pools.hpp"

namespace folio_c_test {
namespace {

using Ints = std::vector<int32_t>;

/// A pool, a request table and a backend over both, for two requests: three new tokens behind none, one behind two.
struct PoolStep {
  static constexpr int32_t kHeads = 2, kDim = 64, kSlots = 32, kContext = 64;
  Ints rows = {1, 2}, seq_lens = {3, 3}, prefix_lens = {0, 2};
  std::vector<int64_t> slots = {7, 3, 9, 12};
  std::vector<float> q = random_floats(4 * kHeads * kDim, 1), k = random_floats(4 * kDim, 2),
                     v = random_floats(4 * kDim, 3), out = std::vector<float>(4 * kHeads * kDim, -7.0f);

  Owned<folio_context> context = make_context();
  Owned<folio_req_to_token_pool> requests;
  Owned<folio_kv_pool> pool;
  std::unique_ptr<folio_token_pool_backend, FreeBackend> backend;
  folio_token_pool_config config = FOLIO_TOKEN_POOL_CONFIG_INIT;
  folio_radix_attention layer = FOLIO_RADIX_ATTENTION_INIT;
  folio_forward_batch batch = FOLIO_FORWARD_BATCH_INIT;

  PoolStep() {
    requests =
        make<folio_req_to_token_pool>([](auto made) { return folio_create_req_to_token_pool(4, kContext, made); });
    folio_kv_pool_config sizes = FOLIO_KV_POOL_CONFIG_INIT;
    sizes.num_slots = kSlots;
    sizes.num_layers = 1;
    sizes.num_kv_heads = 1;
    sizes.head_dim_qk = sizes.head_dim_v = kDim;
    sizes.dtype = FOLIO_DTYPE_FLOAT32;
    pool = make<folio_kv_pool>([&](auto made) { return folio_create_kv_pool(&sizes, made); });
    Ints taken(2);
    int32_t allocated = 0;
    EXPECT_EQ(folio_req_to_token_pool_alloc(requests.get(), taken.data(), 2, &allocated), FOLIO_OK);
    const Ints first = {7, 3, 9}, second = {5, 6, 12};
    EXPECT_EQ(folio_req_to_token_pool_write(requests.get(), 1, 0, first.data(), 3), FOLIO_OK);
    EXPECT_EQ(folio_req_to_token_pool_write(requests.get(), 2, 0, second.data(), 3), FOLIO_OK);
    config.num_heads = layer.num_heads = kHeads;
    config.num_kv_heads = layer.num_kv_heads = 1;
    config.head_dim = layer.head_dim = kDim;
    config.kv_cache_dtype = config.q_dtype = FOLIO_DTYPE_FLOAT32;
    config.max_context_len = kContext;
    config.max_req_pool_size = 4;
    config.logit_cap = 1;
    layer.logit_cap = 4.0f;
    EXPECT_EQ(folio_req_to_token_pool_table(requests.get(), &config.req_to_token), FOLIO_OK);
    backend = make_backend<folio_token_pool_backend>(
        [&](auto made) { return folio_create_token_pool_backend(context.get(), &config, made); });
    batch.forward_mode = FOLIO_FORWARD_EXTEND;
    batch.batch_size = 2;
    batch.req_pool_indices = rows.data();
    batch.seq_lens = seq_lens.data();
    batch.extend_prefix_lens = prefix_lens.data();
    batch.out_cache_loc = slots.data();
    batch.num_out_cache_loc = 4;
    batch.token_to_kv_pool = pool.get();
  }

  folio_status forward(int64_t tokens) {
    const folio_const_tensor_view q_view = const_packed(q.data(), FOLIO_DTYPE_FLOAT32, {tokens, kHeads * kDim});
    const folio_const_tensor_view k_view = const_packed(k.data(), FOLIO_DTYPE_FLOAT32, {tokens, kDim});
    const folio_const_tensor_view v_view = const_packed(v.data(), FOLIO_DTYPE_FLOAT32, {tokens, kDim});
    const folio_tensor_view out_view = packed(out.data(), FOLIO_DTYPE_FLOAT32, {tokens, kHeads * kDim});
    return folio_token_pool_forward(backend.get(), &layer, &batch, &q_view, &k_view, &v_view, &out_view, 0, nullptr);
  }
  void decode_next() {
    seq_lens = {4, 4};
    slots = {10, 11};
    const Ints first = {10}, second = {11};
    EXPECT_EQ(folio_req_to_token_pool_write(requests.get(), 1, 3, first.data(), 1), FOLIO_OK);
    EXPECT_EQ(folio_req_to_token_pool_write(requests.get(), 2, 3, second.data(), 1), FOLIO_OK);
    batch.forward_mode = FOLIO_FORWARD_DECODE;
    batch.extend_prefix_lens = nullptr;
    batch.out_cache_loc = slots.data();
    batch.num_out_cache_loc = 2;
  }
};

/// The same in C++.
struct CppPoolStep {
  folio::ReqToTokenPool requests{4, PoolStep::kContext};
  folio::KvPool pool{{.num_slots = PoolStep::kSlots,
                      .num_layers = 1,
                      .num_kv_heads = 1,
                      .head_dim_qk = PoolStep::kDim,
                      .head_dim_v = PoolStep::kDim,
                      .dtype = folio::DType::kFloat32}};
  folio::backends::RadixAttention layer;
  std::unique_ptr<folio::backends::TokenPoolBackend> backend;
  std::vector<float> out = std::vector<float>(4 * PoolStep::kHeads * PoolStep::kDim, -7.0f);

  CppPoolStep() {
    Ints taken(2);
    EXPECT_TRUE(requests.alloc(taken));
    requests.write(1, 0, Ints{7, 3, 9, 10});
    requests.write(2, 0, Ints{5, 6, 12, 11});
    folio::backends::TokenPoolConfig config;
    config.num_heads = layer.num_heads = PoolStep::kHeads;
    config.num_kv_heads = layer.num_kv_heads = 1;
    config.head_dim = layer.head_dim = PoolStep::kDim;
    config.kv_cache_dtype = config.q_dtype = folio::DType::kFloat32;
    config.max_context_len = PoolStep::kContext;
    config.max_req_pool_size = 4;
    config.logit_cap = true;
    layer.logit_cap = 4.0f;
    config.req_to_token = requests.table();
    backend = std::make_unique<folio::backends::TokenPoolBackend>(make_cpp_context(), config);
  }
  void step(const PoolStep& c, int64_t tokens) {
    folio::backends::ForwardBatch batch;
    batch.forward_mode = static_cast<folio::backends::ForwardMode>(c.batch.forward_mode);
    batch.batch_size = 2;
    batch.req_pool_indices = c.rows;
    batch.seq_lens = c.seq_lens;
    if (c.batch.extend_prefix_lens != nullptr) batch.extend_prefix_lens = c.prefix_lens;
    batch.out_cache_loc = c.slots;
    batch.token_to_kv_pool = &pool;
    backend->init_forward_metadata(batch);
    layer.forward(*backend, {c.q.data(), folio::DType::kFloat32, {tokens, PoolStep::kHeads * PoolStep::kDim}},
                  {c.k.data(), folio::DType::kFloat32, {tokens, PoolStep::kDim}},
                  {c.v.data(), folio::DType::kFloat32, {tokens, PoolStep::kDim}}, batch,
                  {out.data(), folio::DType::kFloat32, {tokens, PoolStep::kHeads * PoolStep::kDim}});
  }
};

TEST(CTokenPool, ExtendsAndDecodesHaveTheCppStepsBits) {
  PoolStep c;
  CppPoolStep cpp;
  ASSERT_EQ(folio_token_pool_init_forward_metadata(c.backend.get(), &c.batch, nullptr), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(c.forward(4), FOLIO_OK) << folio_last_error();
  cpp.step(c, 4);
  expect_same(c.out, cpp.out);
  c.decode_next();
  ASSERT_EQ(folio_token_pool_init_forward_metadata(c.backend.get(), &c.batch, nullptr), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(c.forward(2), FOLIO_OK) << folio_last_error();
  cpp.step(c, 2);
  expect_same(c.out, cpp.out);
  EXPECT_EQ(folio_token_pool_check_plans(c.backend.get()), FOLIO_OK);
  const char* name = nullptr;
  ASSERT_EQ(folio_token_pool_kernel_name(c.backend.get(), &name), FOLIO_OK);
  EXPECT_EQ(name, cpp.backend->kernel_name());
}

TEST(CTokenPool, CapturedStepsAreReplayed) {
  PoolStep c;
  ASSERT_EQ(folio_token_pool_init_forward_metadata(c.backend.get(), &c.batch, nullptr), FOLIO_OK);
  ASSERT_EQ(c.forward(4), FOLIO_OK) << folio_last_error();
  c.decode_next();
  ASSERT_EQ(folio_token_pool_init_forward_metadata(c.backend.get(), &c.batch, nullptr), FOLIO_OK);
  ASSERT_EQ(c.forward(2), FOLIO_OK);
  const std::vector<float> eager = c.out;
  c.out.assign(c.out.size(), 0.0f);
  expect_refusal(folio_token_pool_replay_metadata(c.backend.get(), &c.batch, 8, nullptr), FOLIO_INVALID_ARGUMENT,
                 "init_cuda_graph_state");
  ASSERT_EQ(folio_token_pool_init_cuda_graph_state(c.backend.get(), 4, 4), FOLIO_OK) << folio_last_error();
  const Ints ones = {1, 1};
  c.batch.seq_lens = ones.data();
  ASSERT_EQ(folio_token_pool_capture_metadata(c.backend.get(), &c.batch, 2, nullptr), FOLIO_OK) << folio_last_error();
  c.batch.seq_lens = c.seq_lens.data();
  expect_refusal(folio_token_pool_replay_metadata(c.backend.get(), &c.batch, 9, nullptr), FOLIO_INVALID_ARGUMENT, "9");
  ASSERT_EQ(folio_token_pool_replay_metadata(c.backend.get(), &c.batch, 8, nullptr), FOLIO_OK) << folio_last_error();
  ASSERT_EQ(c.forward(2), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(std::vector<float>(c.out.begin(), c.out.begin() + 256),
            std::vector<float>(eager.begin(), eager.begin() + 256));
}

TEST(CTokenPool, BadArguments) {
  PoolStep c;
  folio_token_pool_backend* none = nullptr;
  expect_null_refused(folio_create_token_pool_backend(nullptr, &c.config, &none), "context");
  expect_null_refused(folio_create_token_pool_backend(c.context.get(), nullptr, &none), "config");
  expect_null_refused(folio_create_token_pool_backend(c.context.get(), &c.config, nullptr), "backend");
  c.config.num_heads = 0;
  EXPECT_EQ(folio_create_token_pool_backend(c.context.get(), &c.config, &none), FOLIO_INVALID_ARGUMENT);
  c.config.num_heads = 2;
  c.config.reserved = 5;
  expect_refusal(folio_create_token_pool_backend(c.context.get(), &c.config, &none), FOLIO_INVALID_ARGUMENT,
                 "config.reserved is 5");
  EXPECT_EQ(none, nullptr);
  folio_token_pool_backend* const backend = c.backend.get();
  expect_null_refused(folio_token_pool_init_forward_metadata(nullptr, &c.batch, nullptr), "backend");
  expect_null_refused(folio_token_pool_init_forward_metadata(backend, nullptr, nullptr), "batch");
  for (const int32_t wrong : {0, 7, -1}) {
    c.batch.forward_mode = wrong;
    expect_refusal(folio_token_pool_init_forward_metadata(backend, &c.batch, nullptr), FOLIO_INVALID_ARGUMENT,
                   "batch.forward_mode is " + std::to_string(wrong) + "; 1 to 6 are known");
  }
  c.batch.forward_mode = FOLIO_FORWARD_EXTEND;
  c.batch.batch_size = -1;
  expect_refusal(folio_token_pool_init_forward_metadata(backend, &c.batch, nullptr), FOLIO_INVALID_ARGUMENT,
                 "batch.batch_size is -1");
  c.batch.batch_size = 2;
  c.batch.req_pool_indices = nullptr;
  expect_null_refused(folio_token_pool_init_forward_metadata(backend, &c.batch, nullptr), "batch.req_pool_indices");
  c.batch.req_pool_indices = c.rows.data();
  c.batch.num_branches = -1;
  expect_refusal(folio_token_pool_init_forward_metadata(backend, &c.batch, nullptr), FOLIO_INVALID_ARGUMENT,
                 "batch.num_branches is -1");
  c.batch.num_branches = 0;
  c.batch.token_to_kv_pool = nullptr;
  ASSERT_NE(c.forward(4), FOLIO_OK);
  c.batch.token_to_kv_pool = c.pool.get();
  ASSERT_EQ(folio_token_pool_init_forward_metadata(backend, &c.batch, nullptr), FOLIO_OK) << folio_last_error();
  c.layer.attn_type = 3;
  expect_refusal(c.forward(4), FOLIO_INVALID_ARGUMENT, "layer.attn_type is 3");
  c.layer.attn_type = FOLIO_RADIX_DECODER;
  c.layer.struct_size = 0;
  expect_refusal(c.forward(4), FOLIO_INVALID_ARGUMENT, "folio_radix_attention_init");
  EXPECT_EQ(c.out[0], -7.0f);
}

}  // namespace
}  // namespace folio_c_test
