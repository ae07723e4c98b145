// The FlashInfer backend's step in C has the C++ step's bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "c_step.hpp"
#include "folio/backends/flashinfer.hpp"
#include "folio/c/backends.h"

namespace folio_c_test {
namespace {

using folio::backends::FlashInferBackend;
using folio::backends::FlashInferImpl;
using folio::backends::FlashInferMetadataBuilder;

/// Handles of a model of one layer.
struct FlashInferModel {
  explicit FlashInferModel(const Step& step, const folio_flashinfer_options* options = nullptr) {
    layer = make_backend<folio_flashinfer_layer>(
        [&](auto made) { return folio_create_flashinfer_layer(context.get(), &step.layer, made); });
    const folio_flashinfer_layer* const layers[] = {layer.get()};
    const char* const names[] = {"model.layers.0.attn"};
    builder = make_backend<folio_flashinfer_builder>([&](auto made) {
      return folio_create_flashinfer_builder(context.get(), &step.spec, layers, names, 1, &step.engine, options, made);
    });
    metadata = make_backend<folio_flashinfer_metadata>(folio_create_flashinfer_metadata);
  }

  Owned<folio_context> context = make_context();
  std::unique_ptr<folio_flashinfer_layer, FreeBackend> layer;
  std::unique_ptr<folio_flashinfer_builder, FreeBackend> builder;
  std::unique_ptr<folio_flashinfer_metadata, FreeBackend> metadata;
};

TEST(CFlashInfer, AStepHasTheCppStepsBits) {
  for (const int32_t prefix : {0, 16}) {
    Step step;
    FlashInferModel model(step);
    std::vector<float> memory = Step::cache_memory(), out;
    folio_tensor_view kv_cache;
    ASSERT_EQ(folio_flashinfer_kv_cache(memory.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_NHD, &kv_cache),
              FOLIO_OK)
        << folio_last_error();
    const folio_forward_args args = step.forward_args(out, kv_cache);
    ASSERT_EQ(folio_flashinfer_build(model.builder.get(), prefix, &step.batch, nullptr, model.metadata.get()), FOLIO_OK)
        << folio_last_error();
    ASSERT_EQ(folio_flashinfer_forward(model.layer.get(), model.metadata.get(), &args, nullptr), FOLIO_OK)
        << folio_last_error();

    const folio::Context context = make_cpp_context();
    const FlashInferImpl impl(context, step.cpp_layer<folio::backends::FlashInferLayerConfig>());
    const std::vector<folio::backends::AttentionLayer<FlashInferImpl>> layers{{"0", &impl}};
    FlashInferMetadataBuilder builder(context, step.cpp_spec(), layers, step.cpp_engine());
    std::vector<float> cpp_memory = Step::cache_memory(), expected(out.size(), -7.0f);
    const folio::TensorView cpp_cache = FlashInferBackend::kv_cache_tensor(
        cpp_memory.data(), folio::DType::kFloat32,
        FlashInferBackend::get_kv_cache_shape(Step::kNumPages, Step::kPageSize, Step::kKvHeads, Step::kHeadSize),
        folio::backends::KvCacheLayout::kNhd);
    const auto metadata = builder.build(prefix, step.cpp_batch());
    impl.forward({}, step.cpp_query(), step.cpp_key(), step.cpp_value(), cpp_cache, &metadata,
                 {expected.data(), folio::DType::kFloat32, {Step::kTokens, Step::kHeads, Step::kHeadSize}});
    expect_same(out, expected);
    expect_same(memory, cpp_memory);
    const char* name = nullptr;
    ASSERT_EQ(folio_flashinfer_kernel_name(model.builder.get(), &name), FOLIO_OK);
    EXPECT_EQ(name, builder.kernel_name());
  }
}

TEST(CFlashInfer, AProfilingRunWritesZeros) {
  Step step;
  const FlashInferModel model(step);
  std::vector<float> out;
  const folio_forward_args args = step.forward_args(out, {});
  ASSERT_EQ(folio_flashinfer_forward(model.layer.get(), nullptr, &args, nullptr), FOLIO_OK) << folio_last_error();
  EXPECT_EQ(out, std::vector<float>(out.size(), 0.0f));
}

TEST(CFlashInfer, ReorderSwapsDecodesToTheFront) {
  Step step;
  const FlashInferModel model(step);
  std::vector<std::pair<int32_t, int32_t>> swaps;
  const std::vector<int32_t> scheduled = {7, 1}, computed = {0, 9};
  int32_t swapped = -1;
  ASSERT_EQ(folio_flashinfer_reorder_batch(
                model.builder.get(), scheduled.data(), computed.data(), 2,
                [](void* self, int32_t i, int32_t j) noexcept {
                  static_cast<std::vector<std::pair<int32_t, int32_t>>*>(self)->emplace_back(i, j);
                },
                &swaps, &swapped),
            FOLIO_OK)
      << folio_last_error();
  EXPECT_EQ(swapped, 1);
  ASSERT_EQ(swaps.size(), 1u);
  EXPECT_EQ(swaps[0].first + swaps[0].second, 1);
}

TEST(CFlashInfer, StepsGoStaleAndFailedBuildsLeaveNone) {
  Step step;
  const FlashInferModel model(step);
  std::vector<float> memory = Step::cache_memory(), out;
  folio_tensor_view kv_cache;
  ASSERT_EQ(folio_flashinfer_kv_cache(memory.data(), Step::kNumPages, &step.spec, FOLIO_LAYOUT_NHD, &kv_cache),
            FOLIO_OK);
  const folio_forward_args args = step.forward_args(out, kv_cache);
  expect_refusal(folio_flashinfer_forward(model.layer.get(), model.metadata.get(), &args, nullptr),
                 FOLIO_INVALID_ARGUMENT, "metadata holds no step");
  ASSERT_EQ(folio_flashinfer_build(model.builder.get(), 0, &step.batch, nullptr, model.metadata.get()), FOLIO_OK);
  const auto later = make_backend<folio_flashinfer_metadata>(folio_create_flashinfer_metadata);
  ASSERT_EQ(folio_flashinfer_build(model.builder.get(), 0, &step.batch, nullptr, later.get()), FOLIO_OK);
  EXPECT_EQ(folio_flashinfer_forward(model.layer.get(), model.metadata.get(), &args, nullptr), FOLIO_STALE_PLAN);
  step.seq_lens[1] = 2;  // fewer than its queries
  EXPECT_EQ(folio_flashinfer_build(model.builder.get(), 0, &step.batch, nullptr, later.get()), FOLIO_INVALID_ARGUMENT);
  expect_refusal(folio_flashinfer_forward(model.layer.get(), later.get(), &args, nullptr), FOLIO_INVALID_ARGUMENT,
                 "metadata holds no step");
  EXPECT_EQ(out[0], -7.0f);
}

}  // namespace
}  // namespace folio_c_test
