// The FlashAttention backend's step in C has the C++ step's bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "c_step.hpp"
#include "folio/backends/flash_attn.hpp"
#include "folio/c/backends.h"

namespace folio_c_test {
namespace {

using folio::backends::FlashAttentionBackend;
using folio::backends::FlashAttentionImpl;
using folio::backends::FlashAttentionMetadataBuilder;

/// Handles of a model of one layer.
struct FlashAttnModel {
  explicit FlashAttnModel(const Step& step, const folio_flash_attn_options* options = nullptr) {
    layer = make_backend<folio_flash_attn_layer>(
        [&](auto made) { return folio_create_flash_attn_layer(context.get(), &step.layer, made); });
    const folio_flash_attn_layer* const layers[] = {layer.get()};
    builder = make_backend<folio_flash_attn_builder>([&](auto made) {
      return folio_create_flash_attn_builder(context.get(), &step.spec, layers, nullptr, 1, &step.engine, options,
                                             made);
    });
    metadata = make_backend<folio_flash_attn_metadata>(folio_create_flash_attn_metadata);
  }

  Owned<folio_context> context = make_context();
  std::unique_ptr<folio_flash_attn_layer, FreeBackend> layer;
  std::unique_ptr<folio_flash_attn_builder, FreeBackend> builder;
  std::unique_ptr<folio_flash_attn_metadata, FreeBackend> metadata;
};

/// The same in C++, with the step's output and cache.
struct CppFlashAttn {
  explicit CppFlashAttn(const Step& step, int32_t prefix) {
    const folio::Context context = make_cpp_context();
    const FlashAttentionImpl impl(context, step.cpp_layer<folio::backends::FlashAttentionLayerConfig>());
    const std::vector<folio::backends::AttentionLayer<FlashAttentionImpl>> layers{{"0", &impl}};
    folio::backends::EngineConfig engine = step.cpp_engine();
    engine.cache.layout = folio::backends::KvCacheLayout::kHnd;
    FlashAttentionMetadataBuilder builder(context, step.cpp_spec(), layers, engine);
    const folio::TensorView cache = FlashAttentionBackend::kv_cache_tensor(
        memory.data(), folio::DType::kFloat32,
        FlashAttentionBackend::get_kv_cache_shape(Step::kNumPages, Step::kPageSize, Step::kKvHeads, Step::kHeadSize),
        folio::backends::KvCacheLayout::kHnd);
    const auto metadata = builder.build(prefix, step.cpp_batch());
    impl.do_kv_cache_update({}, step.cpp_key(), step.cpp_value(), cache, step.slots);
    impl.forward({}, step.cpp_query(), step.cpp_key(), step.cpp_value(), cache, &metadata,
                 {out.data(), folio::DType::kFloat32, {Step::kTokens, Step::kHeads, Step::kHeadSize}});
    kernel_name = builder.kernel_name();
  }

  std::vector<float> memory = Step::cache_memory();
  std::vector<float> out = std::vector<float>(size_t{Step::kTokens} * Step::kHeads * Step::kHeadSize, -7.0f);
  std::string kernel_name;
};

TEST(CFlashAttn, AStepHasTheCppStepsBits) {
  for (const int32_t prefix : {0, 16}) {
    Step step;
    step.engine.layout = FOLIO_LAYOUT_HND;
    const FlashAttnModel model(step);
    std::vector<float> memory = Step::cache_memory(), out;
    folio_tensor_view kv_cache;
    ASSERT_EQ(folio_flash_attn_kv_cache(memory.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_HND, &kv_cache),
              FOLIO_OK)
        << folio_last_error();
    const folio_forward_args args = step.forward_args(out, kv_cache);
    ASSERT_EQ(folio_flash_attn_build(model.builder.get(), prefix, &step.batch, 0, nullptr, model.metadata.get()),
              FOLIO_OK)
        << folio_last_error();
    ASSERT_EQ(folio_flash_attn_write(model.layer.get(), &args, step.slots.data(), Step::kTokens, nullptr), FOLIO_OK)
        << folio_last_error();
    ASSERT_EQ(folio_flash_attn_forward(model.layer.get(), model.metadata.get(), &args, nullptr), FOLIO_OK)
        << folio_last_error();
    const CppFlashAttn cpp(step, prefix);
    expect_same(out, cpp.out);
    expect_same(memory, cpp.memory);
    const char* name = nullptr;
    ASSERT_EQ(folio_flash_attn_kernel_name(model.builder.get(), &name), FOLIO_OK);
    EXPECT_EQ(name, cpp.kernel_name);
  }
}

TEST(CFlashAttn, AnotherGroupsTable) {
  Step step;
  const FlashAttnModel model(step);
  std::vector<float> memory = Step::cache_memory(), moved = memory, out, moved_out;
  // The other group's pages lie elsewhere: page p of this one is page 5 - p of that.
  const size_t page = size_t{Step::kPageSize} * Step::kKvHeads * Step::kHeadSize;
  for (size_t half = 0; half < 2; ++half) {
    for (size_t p = 0; p < Step::kNumPages; ++p) {
      const size_t to = (half * Step::kNumPages + Step::kNumPages - 1 - p) * page;
      std::memcpy(&moved[to], &memory[(half * Step::kNumPages + p) * page], page * sizeof(float));
    }
  }
  folio_tensor_view kv_cache, moved_cache;
  ASSERT_EQ(folio_flash_attn_kv_cache(memory.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_NHD, &kv_cache),
            FOLIO_OK);
  ASSERT_EQ(folio_flash_attn_kv_cache(moved.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_NHD, &moved_cache),
            FOLIO_OK);
  const folio_forward_args args = step.forward_args(out, kv_cache);
  const folio_forward_args moved_args = step.forward_args(moved_out, moved_cache);
  ASSERT_EQ(folio_flash_attn_build(model.builder.get(), 0, &step.batch, 1, nullptr, model.metadata.get()), FOLIO_OK);
  ASSERT_EQ(folio_flash_attn_forward(model.layer.get(), model.metadata.get(), &args, nullptr), FOLIO_OK);
  const std::vector<int32_t> table = {4, 3, 4, 2};
  const folio_block_table other = {table.data(), 2, 2, 2};
  ASSERT_EQ(folio_flash_attn_update_block_table(model.builder.get(), model.metadata.get(), &other, step.slots.data(),
                                                Step::kTokens, model.metadata.get()),
            FOLIO_OK)
      << folio_last_error();
  ASSERT_EQ(folio_flash_attn_forward(model.layer.get(), model.metadata.get(), &moved_args, nullptr), FOLIO_OK)
      << folio_last_error();
  expect_same(moved_out, out);
}

TEST(CFlashAttn, StepsInFlight) {
  Step step;
  folio_flash_attn_options options = FOLIO_FLASH_ATTN_OPTIONS_INIT;
  options.steps_in_flight = 1;
  const FlashAttnModel model(step, &options);
  std::vector<float> memory = Step::cache_memory(), out;
  folio_tensor_view kv_cache;
  ASSERT_EQ(folio_flash_attn_kv_cache(memory.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_NHD, &kv_cache),
            FOLIO_OK);
  const folio_forward_args args = step.forward_args(out, kv_cache);
  const auto later = make_backend<folio_flash_attn_metadata>(folio_create_flash_attn_metadata);
  ASSERT_EQ(folio_flash_attn_build(model.builder.get(), 0, &step.batch, 0, nullptr, model.metadata.get()), FOLIO_OK);
  ASSERT_EQ(folio_flash_attn_build(model.builder.get(), 0, &step.batch, 0, nullptr, later.get()), FOLIO_OK);
  EXPECT_EQ(folio_flash_attn_forward(model.layer.get(), model.metadata.get(), &args, nullptr), FOLIO_STALE_PLAN);
  EXPECT_EQ(folio_flash_attn_forward(model.layer.get(), later.get(), &args, nullptr), FOLIO_OK) << folio_last_error();
}

}  // namespace
}  // namespace folio_c_test
