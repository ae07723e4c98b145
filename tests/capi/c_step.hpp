#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "c_handles.hpp"
#include "folio/backends/common.hpp"
#include "folio/c/backends.h"
#include "folio/context.hpp"

namespace folio_c_test {

struct FreeBackend {
  void operator()(folio_flashinfer_layer* handle) const { folio_free_flashinfer_layer(handle); }
  void operator()(folio_flashinfer_builder* handle) const { folio_free_flashinfer_builder(handle); }
  void operator()(folio_flashinfer_metadata* handle) const { folio_free_flashinfer_metadata(handle); }
  void operator()(folio_flash_attn_layer* handle) const { folio_free_flash_attn_layer(handle); }
  void operator()(folio_flash_attn_builder* handle) const { folio_free_flash_attn_builder(handle); }
  void operator()(folio_flash_attn_metadata* handle) const { folio_free_flash_attn_metadata(handle); }
  void operator()(folio_token_pool_backend* handle) const { folio_free_token_pool_backend(handle); }
};

/// As make, of the backends' handles.
template <typename Handle, typename Create>
std::unique_ptr<Handle, FreeBackend> make_backend(const Create& create) {
  Handle* handle = nullptr;
  EXPECT_EQ(create(&handle), FOLIO_OK) << folio_last_error();
  return std::unique_ptr<Handle, FreeBackend>(handle);
}

/// Two threads, as make_context's.
inline folio::Context make_cpp_context() {
  folio::ContextOptions options;
  options.num_threads = 2;
  return folio::Context::cpu(options);
}

/// A step of two requests for vLLM's backends, in C and in C++: a decode at 20 tokens and a prefill of 3, whose first
/// page both have. Windows, sinks, a soft cap and ALiBi are a layer's.
struct Step {
  static constexpr int32_t kNumPages = 6, kPageSize = 16, kHeads = 4, kKvHeads = 2, kHeadSize = 64, kTokens = 4;

  std::vector<float> q = random_floats(size_t{kTokens} * kHeads * kHeadSize, 1);
  std::vector<float> k = random_floats(size_t{kTokens} * kKvHeads * kHeadSize, 2);
  std::vector<float> v = random_floats(size_t{kTokens} * kKvHeads * kHeadSize, 3);
  std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f}, sinks = {0.1f, -0.2f, 0.3f, 0.0f};
  std::vector<int32_t> query_start_loc = {0, 1, 4}, seq_lens = {21, 19}, table = {1, 2, 1, 3};
  std::vector<int64_t> slots = {2 * kPageSize + 4, 3 * kPageSize, 3 * kPageSize + 1, 3 * kPageSize + 2};

  folio_attention_spec spec = {kPageSize, kKvHeads, kHeadSize, FOLIO_DTYPE_FLOAT32};
  folio_engine_config engine = FOLIO_ENGINE_CONFIG_INIT;
  folio_layer_config layer = FOLIO_LAYER_CONFIG_INIT;
  folio_step_batch batch = FOLIO_STEP_BATCH_INIT;

  Step() {
    engine.dtype = layer.model_dtype = FOLIO_DTYPE_FLOAT32;
    engine.num_attention_heads = layer.num_heads = kHeads;
    engine.num_kv_heads = layer.num_kv_heads = kKvHeads;
    layer.head_size = kHeadSize;
    layer.scale = 0.125f;
    layer.sliding_window = 17;
    layer.logits_soft_cap = 5.0f;
    layer.alibi_slopes = slopes.data();
    layer.sinks = const_packed(sinks.data(), FOLIO_DTYPE_FLOAT32, {kHeads});
    batch.num_reqs = 2;
    batch.num_actual_tokens = kTokens;
    batch.max_query_len = 3;
    batch.max_seq_len = 21;
    batch.query_start_loc = query_start_loc.data();
    batch.seq_lens = seq_lens.data();
    batch.block_table = {table.data(), 2, 2, 2};
    batch.slot_mapping = slots.data();
    batch.num_slots = kTokens;
  }

  folio::backends::EngineConfig cpp_engine() const {
    folio::backends::EngineConfig config;
    config.model.dtype = folio::DType::kFloat32;
    config.model.num_attention_heads = kHeads;
    config.model.num_kv_heads = kKvHeads;
    return config;
  }
  template <typename LayerConfig>
  LayerConfig cpp_layer() const {
    LayerConfig config;
    config.num_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_size = kHeadSize;
    config.scale = 0.125f;
    config.model_dtype = folio::DType::kFloat32;
    config.sliding_window = 17;
    config.logits_soft_cap = 5.0f;
    config.alibi_slopes = slopes;
    config.sinks = {sinks.data(), folio::DType::kFloat32, {kHeads}};
    return config;
  }
  folio::backends::AttentionSpec cpp_spec() const { return {kPageSize, kKvHeads, kHeadSize, folio::DType::kFloat32}; }
  folio::backends::CommonAttentionMetadata cpp_batch() const {
    folio::backends::CommonAttentionMetadata step;
    step.query_start_loc = query_start_loc;
    step.seq_lens = seq_lens;
    step.num_reqs = 2;
    step.num_actual_tokens = kTokens;
    step.max_query_len = 3;
    step.max_seq_len = 21;
    step.block_table = {table.data(), 2, 2, 2};
    step.slot_mapping = slots;
    return step;
  }

  static std::vector<float> cache_memory() {
    return random_floats(size_t{kNumPages} * 2 * kPageSize * kKvHeads * kHeadSize, 4);
  }
  folio_forward_args forward_args(std::vector<float>& out, const folio_tensor_view& kv_cache) const {
    folio_forward_args args = FOLIO_FORWARD_ARGS_INIT;
    args.query = const_packed(q.data(), FOLIO_DTYPE_FLOAT32, {kTokens, kHeads, kHeadSize});
    args.key = const_packed(k.data(), FOLIO_DTYPE_FLOAT32, {kTokens, kKvHeads, kHeadSize});
    args.value = const_packed(v.data(), FOLIO_DTYPE_FLOAT32, {kTokens, kKvHeads, kHeadSize});
    args.kv_cache = kv_cache;
    out.assign(q.size(), -7.0f);
    args.output = packed(out.data(), FOLIO_DTYPE_FLOAT32, {kTokens, kHeads, kHeadSize});
    return args;
  }
  folio::ConstTensorView cpp_query() const { return {q.data(), folio::DType::kFloat32, {kTokens, kHeads, kHeadSize}}; }
  folio::ConstTensorView cpp_key() const { return {k.data(), folio::DType::kFloat32, {kTokens, kKvHeads, kHeadSize}}; }
  folio::ConstTensorView cpp_value() const {
    return {v.data(), folio::DType::kFloat32, {kTokens, kKvHeads, kHeadSize}};
  }
};

}  // namespace folio_c_test
