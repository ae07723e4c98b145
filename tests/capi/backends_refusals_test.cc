// Every pointer, structure size, enumeration and count of vLLM's backends is checked before it is used.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "c_step.hpp"
#include "folio/c/backends.h"

namespace folio_c_test {
namespace {

/// What an init function writes into memory of any content is what its macro has.
template <typename Struct>
void expect_init(const Struct& defaults, folio_status (*init)(Struct*, size_t) noexcept) {
  Struct filled;
  std::memset(static_cast<void*>(&filled), 0xee, sizeof(filled));
  ASSERT_EQ(init(&filled, sizeof(filled)), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(std::memcmp(&filled, &defaults, sizeof(filled)), 0);
  EXPECT_EQ(init(nullptr, sizeof(filled)), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(init(&filled, sizeof(filled) - 8), FOLIO_INVALID_ARGUMENT);
}

TEST(CBackendsInit, FunctionsWriteWhatTheMacrosHave) {
  // Static, so that padding is 0.
  static const folio_engine_config engine = FOLIO_ENGINE_CONFIG_INIT;
  static const folio_layer_config layer = FOLIO_LAYER_CONFIG_INIT;
  static const folio_step_batch batch = FOLIO_STEP_BATCH_INIT;
  static const folio_forward_args args = FOLIO_FORWARD_ARGS_INIT;
  static const folio_flashinfer_options flashinfer = FOLIO_FLASHINFER_OPTIONS_INIT;
  static const folio_flash_attn_options flash_attn = FOLIO_FLASH_ATTN_OPTIONS_INIT;
  static const folio_token_pool_config token_pool = FOLIO_TOKEN_POOL_CONFIG_INIT;
  static const folio_radix_attention radix = FOLIO_RADIX_ATTENTION_INIT;
  static const folio_forward_batch forward = FOLIO_FORWARD_BATCH_INIT;
  expect_init(engine, folio_engine_config_init);
  expect_init(layer, folio_layer_config_init);
  expect_init(batch, folio_step_batch_init);
  expect_init(args, folio_forward_args_init);
  expect_init(flashinfer, folio_flashinfer_options_init);
  expect_init(flash_attn, folio_flash_attn_options_init);
  expect_init(token_pool, folio_token_pool_config_init);
  expect_init(radix, folio_radix_attention_init);
  expect_init(forward, folio_forward_batch_init);
}

TEST(CBackendsRefusals, ZerosWithASizeAreTheDefaultsOrRefused) {
  Step step;
  const auto context = make_context();
  folio_flashinfer_layer* none = nullptr;
  folio_layer_config zeros;
  std::memset(&zeros, 0, sizeof(zeros));
  expect_refusal(folio_create_flashinfer_layer(context.get(), &zeros, &none), FOLIO_INVALID_ARGUMENT,
                 "folio_layer_config_init");
  zeros.struct_size = sizeof(zeros);
  zeros.num_heads = zeros.num_kv_heads = 2;
  zeros.head_size = 64;
  zeros.scale = 1.0f;
  expect_refusal(folio_create_flashinfer_layer(context.get(), &zeros, &none), FOLIO_INVALID_ARGUMENT,
                 "config.model_dtype is unset");
  zeros.model_dtype = FOLIO_DTYPE_FLOAT32;
  EXPECT_EQ(folio_create_flashinfer_layer(context.get(), &zeros, &none), FOLIO_OK) << folio_last_error();
  folio_free_flashinfer_layer(none);
}

TEST(CBackendsRefusals, Layers) {
  Step step;
  const auto context = make_context();
  folio_flashinfer_layer* layer = nullptr;
  folio_flash_attn_layer* other = nullptr;
  expect_null_refused(folio_create_flashinfer_layer(nullptr, &step.layer, &layer), "context");
  expect_null_refused(folio_create_flashinfer_layer(context.get(), nullptr, &layer), "config");
  expect_null_refused(folio_create_flashinfer_layer(context.get(), &step.layer, nullptr), "layer");
  expect_null_refused(folio_create_flash_attn_layer(nullptr, &step.layer, &other), "context");
  step.layer.update_kv_cache_in_forward = 1;
  expect_refusal(folio_create_flashinfer_layer(context.get(), &step.layer, &layer), FOLIO_INVALID_ARGUMENT,
                 "update_kv_cache_in_forward is 1");
  step.layer.update_kv_cache_in_forward = 0;
  step.layer.attn_type = FOLIO_ATTENTION_ENCODER;
  EXPECT_EQ(folio_create_flashinfer_layer(context.get(), &step.layer, &layer), FOLIO_UNSUPPORTED);
  step.layer.attn_type = 4;
  expect_refusal(folio_create_flash_attn_layer(context.get(), &step.layer, &other), FOLIO_INVALID_ARGUMENT,
                 "config.attn_type is 4");
  step.layer.attn_type = FOLIO_ATTENTION_DECODER;
  step.layer.kv_cache_dtype = "float31";
  EXPECT_EQ(folio_create_flash_attn_layer(context.get(), &step.layer, &other), FOLIO_INVALID_ARGUMENT);
  step.layer.kv_cache_dtype = nullptr;
  step.layer.num_heads = -4;
  expect_refusal(folio_create_flash_attn_layer(context.get(), &step.layer, &other), FOLIO_INVALID_ARGUMENT,
                 "config.alibi_slopes has -4 elements");
  EXPECT_EQ(layer, nullptr);
  EXPECT_EQ(other, nullptr);
}

TEST(CBackendsRefusals, Builders) {
  Step step;
  const auto context = make_context();
  const auto layer = make_backend<folio_flash_attn_layer>(
      [&](auto made) { return folio_create_flash_attn_layer(context.get(), &step.layer, made); });
  folio_flash_attn_builder* none = nullptr;
  const folio_flash_attn_layer* layers[] = {layer.get(), nullptr};
  const char* const names[] = {"a", nullptr};
  const auto create = [&](int32_t num_layers, const char* const* given_names, const folio_flash_attn_options* options) {
    return folio_create_flash_attn_builder(context.get(), &step.spec, layers, given_names, num_layers, &step.engine,
                                           options, &none);
  };
  expect_refusal(create(2, nullptr, nullptr), FOLIO_INVALID_ARGUMENT, "layers[1] is null");
  expect_refusal(create(-1, nullptr, nullptr), FOLIO_INVALID_ARGUMENT, "layers has -1 elements");
  layers[1] = layer.get();
  expect_refusal(create(2, names, nullptr), FOLIO_INVALID_ARGUMENT, "names[1] is null");
  EXPECT_EQ(create(0, nullptr, nullptr), FOLIO_INVALID_ARGUMENT);
  folio_flash_attn_options options = FOLIO_FLASH_ATTN_OPTIONS_INIT;
  options.cascade = 3;
  expect_refusal(create(1, nullptr, &options), FOLIO_INVALID_ARGUMENT, "options.cascade is 3");
  options.cascade = FOLIO_CASCADE_AUTO;
  options.steps_in_flight = -1;
  EXPECT_EQ(create(1, nullptr, &options), FOLIO_INVALID_ARGUMENT);
  const struct {
    int32_t* field;
    const char* text;
  } cases[] = {{&step.engine.dtype, "config.dtype is"},
               {&step.engine.layout, "config.layout is"},
               {&step.engine.determinism, "config.determinism is"},
               {&step.spec.dtype, "spec.dtype is"}};
  for (const auto& wrong : cases) {
    const int32_t right = *wrong.field;
    *wrong.field = 99;
    expect_refusal(create(1, nullptr, nullptr), FOLIO_INVALID_ARGUMENT, wrong.text);
    *wrong.field = right;
  }
  EXPECT_EQ(none, nullptr);
  ASSERT_EQ(create(1, nullptr, nullptr), FOLIO_OK) << folio_last_error();
  folio_free_flash_attn_builder(none);
}

TEST(CBackendsRefusals, BatchesAndForwards) {
  Step step;
  const auto context = make_context();
  const auto layer = make_backend<folio_flash_attn_layer>(
      [&](auto made) { return folio_create_flash_attn_layer(context.get(), &step.layer, made); });
  const folio_flash_attn_layer* const layers[] = {layer.get()};
  const auto builder = make_backend<folio_flash_attn_builder>([&](auto made) {
    return folio_create_flash_attn_builder(context.get(), &step.spec, layers, nullptr, 1, &step.engine, nullptr, made);
  });
  const auto metadata = make_backend<folio_flash_attn_metadata>(folio_create_flash_attn_metadata);
  const auto build = [&](const folio_step_batch& batch) {
    return folio_flash_attn_build(builder.get(), 0, &batch, 0, nullptr, metadata.get());
  };
  const auto refused = [&](const std::function<void(folio_step_batch&)>& spoil, const char* text) {
    folio_step_batch batch = step.batch;
    spoil(batch);
    expect_refusal(build(batch), FOLIO_INVALID_ARGUMENT, text);
  };
  refused([](auto& b) { b.num_reqs = -1; }, "batch.num_reqs is -1");
  refused([](auto& b) { b.where = 2; }, "batch.where is 2");
  refused([](auto& b) { b.query_start_loc = nullptr; }, "batch.query_start_loc is null");
  refused([](auto& b) { b.seq_lens = nullptr; }, "batch.seq_lens is null");
  refused([](auto& b) { b.slot_mapping = nullptr; }, "batch.slot_mapping is null");
  refused([](auto& b) { b.num_slots = -1; }, "batch.slot_mapping has -1 elements");
  refused([](auto& b) { b.num_bidirectional_ranges = 1; }, "batch.bidirectional_ranges is null");
  refused([](auto& b) { b.struct_size = 8; }, "folio_step_batch_init");
  expect_null_refused(folio_flash_attn_build(nullptr, 0, &step.batch, 0, nullptr, metadata.get()), "builder");
  expect_null_refused(folio_flash_attn_build(builder.get(), 0, nullptr, 0, nullptr, metadata.get()), "batch");
  expect_null_refused(folio_flash_attn_build(builder.get(), 0, &step.batch, 0, nullptr, nullptr), "metadata");
  ASSERT_EQ(build(step.batch), FOLIO_OK) << folio_last_error();

  std::vector<float> memory = Step::cache_memory(), out;
  folio_tensor_view kv_cache;
  ASSERT_EQ(folio_flash_attn_kv_cache(memory.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_NHD, &kv_cache),
            FOLIO_OK);
  folio_forward_args args = step.forward_args(out, kv_cache);
  expect_null_refused(folio_flash_attn_forward(nullptr, metadata.get(), &args, nullptr), "layer");
  expect_null_refused(folio_flash_attn_forward(layer.get(), metadata.get(), nullptr, nullptr), "args");
  expect_null_refused(folio_flash_attn_write(layer.get(), &args, nullptr, 1, nullptr), "slot_mapping");
  expect_null_refused(folio_flash_attn_kv_cache(memory.data(), 1, nullptr, 0, &kv_cache), "spec");
  expect_null_refused(folio_flash_attn_kv_cache(memory.data(), 1, &step.spec, 0, nullptr), "kv_cache");
  expect_refusal(folio_flash_attn_kv_cache(memory.data(), 1, &step.spec, 2, &kv_cache), FOLIO_INVALID_ARGUMENT,
                 "layout is 2");
  for (const int64_t pages : {int64_t{-1}, INT64_MAX}) {
    EXPECT_EQ(folio_flash_attn_kv_cache(memory.data(), pages, &step.spec, 0, &kv_cache), FOLIO_INVALID_ARGUMENT);
  }
  for (int32_t* field : {&args.query.dtype, &args.key.dtype, &args.value.dtype, &args.kv_cache.dtype,
                         &args.output.dtype, &args.q_scale.granularity, &args.k_scale.granularity,
                         &args.v_scale.granularity, &args.output_scale_where, &args.output_block_scale.dtype}) {
    const int32_t right = *field;
    *field = 99;
    expect_refusal(folio_flash_attn_forward(layer.get(), metadata.get(), &args, nullptr), FOLIO_INVALID_ARGUMENT,
                   "is 99");
    *field = right;
  }
  args.query.shape[1] = 3;
  EXPECT_EQ(folio_flash_attn_forward(layer.get(), metadata.get(), &args, nullptr), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(out[0], -7.0f);
  folio_free_flash_attn_layer(nullptr);
  folio_free_flash_attn_builder(nullptr);
  folio_free_flash_attn_metadata(nullptr);
  folio_free_flashinfer_layer(nullptr);
  folio_free_flashinfer_builder(nullptr);
  folio_free_flashinfer_metadata(nullptr);
  folio_free_token_pool_backend(nullptr);
}

}  // namespace
}  // namespace folio_c_test
