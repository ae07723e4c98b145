#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "backends/flashinfer/batch_test_util.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::BatchFixture;
using testing::BatchLengths;
using testing::LayerSetup;

const char* const kCacheDtypes[] = {"auto", "fp8_e4m3", "fp8_e5m2"};

void run_and_compare(const LayerSetup& setup, const BatchLengths& lengths) {
  BatchFixture fixture(setup, lengths);
  fixture.run();
  EXPECT_EQ(fixture.wrong_output(), "");
  EXPECT_EQ(fixture.wrong_cache(), "");
}

TEST(FlashInferForward, TakesPagesOfAnySize) {
  for (int32_t page_size : {1, 8, 48}) {
    LayerSetup setup;
    setup.page_size = page_size;
    run_and_compare(setup, backend_batch("mixed_small"));
  }
}

TEST(FlashInferForward, IsExactToFloat32InFloat32) {
  LayerSetup setup;
  setup.model_dtype = DType::kFloat32;
  run_and_compare(setup, backend_batch("mixed_small"));
}

// Engines pad tokens for graphs: rows beyond the batch, some of them counted in with slot -1, and empty requests.
TEST(FlashInferForward, ReturnsThePaddedOutputAndLeavesThePaddingAlone) {
  for (const char* name : {"small_decode", "mixed_small"}) {
    LayerSetup setup;
    setup.padding_tokens = 5;
    setup.padding_slots = 2;
    setup.padding_requests = 2;
    BatchFixture fixture(setup, backend_batch(name));
    const TensorView returned = fixture.run();
    EXPECT_EQ(returned.data, fixture.output.data);
    EXPECT_EQ(returned.shape[0], fixture.padded_rows()) << "what was given, not the rows that count";
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
  }
}

TEST(FlashInferForward, FillsTheOutputWithZerosWithoutMetadata) {
  BatchFixture fixture({}, backend_batch("small_decode"));
  fixture.output.shape[2] = 24;  // with gaps between heads
  const std::vector<std::byte> cache = fixture.cache_memory;
  const FlashInferImpl impl(fixture.context, fixture.layer_config());
  impl.forward({}, {}, {}, {}, {}, nullptr, fixture.output);
  folio::testing::wait_for_device();
  for (size_t i = 0; i < fixture.out_memory.size(); ++i) {
    const bool in_gap = i / 2 % 32 >= 24;
    ASSERT_EQ(fixture.out_memory[i], in_gap ? testing::kUnwritten : std::byte{0}) << i;
  }
  EXPECT_EQ(fixture.cache_memory, cache);
}

// A layer that shares an earlier one's cache reads fp8 bytes as fp8 too, though it writes none of them itself.
TEST(FlashInferForward, ReadsASharedCacheWithoutWriting) {
  for (const char* cache_dtype : kCacheDtypes) {
    LayerSetup setup;
    setup.cache_dtype = cache_dtype;
    setup.share_kv = true;
    BatchFixture fixture(setup, backend_batch("mixed_small"));
    ASSERT_EQ(fixture.kv_cache.dtype, DType::kUnset) << "the cache is handed over as bytes";
    fixture.run();
    EXPECT_EQ(fixture.wrong_output(), "");
    EXPECT_EQ(fixture.wrong_cache(), "");
  }
}

// vLLM's bmm1 of its XQA tests: scale 0.5, q scale 2, k scale 3.
TEST(FlashInferScales, CombineOnceAndWithTheQueryScaleForFp8QueriesOnly) {
  LayerSetup setup;
  setup.scale = 0.5f;
  setup.cache_dtype = "fp8";
  BatchFixture fixture(setup, backend_batch("small_decode"));
  const FlashInferImpl impl(fixture.context, fixture.layer_config());
  AttentionLayerScales scales;
  scales.q.value = 2.0f;
  scales.k.value = 3.0f;
  scales.v.value = 7.0f;
  EXPECT_EQ(impl.bmm1_scale(scales, DType::kBFloat16), 1.5f);
  EXPECT_EQ(impl.bmm1_scale(scales, DType::kFloat8E4M3), 3.0f);
  EXPECT_EQ(impl.bmm2_scale(scales), 7.0f);
  const float per_head[] = {1.0f, 2.0f};
  scales.k = {1.0f, per_head, ScaleGranularity::kPerHead, 0};
  EXPECT_THROW(impl.bmm1_scale(scales, DType::kBFloat16), Error);
}

TEST(FlashInferScales, AreAppliedOnceInDecodesAndPrefills) {
  for (const char* cache_dtype : {"fp8_e4m3", "fp8_e5m2"}) {
    LayerSetup setup;
    setup.cache_dtype = cache_dtype;
    setup.q_scale = 3.0f;  // of a checkpoint with quantised queries; these are not
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
    run_and_compare(setup, backend_batch("mixed_small"));
  }
}

TEST(FlashInferScales, ApplyToFp8Queries) {
  for (DType model_dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    LayerSetup setup;
    setup.model_dtype = model_dtype;
    setup.cache_dtype = "fp8_e4m3";
    setup.quantize_query = true;
    setup.q_scale = 0.5f;
    setup.k_scale = 2.0f;
    setup.v_scale = 0.25f;
    run_and_compare(setup, backend_batch("mixed_small"));
  }
}

TEST(FlashInferScales, AreRefusedForCachesThatAreNotFp8) {
  LayerSetup setup;
  BatchFixture fixture(setup, backend_batch("small_decode"));
  fixture.setup.k_scale = 0.5f;
  EXPECT_THROW(fixture.run(), Error);
  fixture.setup.k_scale = 1.0f;
  fixture.setup.v_scale = 0.5f;
  EXPECT_THROW(fixture.run(), Error);
}

// Queries, keys, values and outputs may be slices of larger tensors, such as one fused QKV projection.
TEST(FlashInferForward, TakesStridedInputs) {
  BatchFixture fixture({}, backend_batch("mixed_small"));
  const auto make_wide = [](std::vector<std::byte>& memory, auto& view) {
    const auto row_bytes = static_cast<size_t>(view.strides[0] * size_of(view.dtype));
    std::vector<std::byte> wide(memory.size() * 2, testing::kUnwritten);
    for (size_t at = 0; at < memory.size(); at += row_bytes) {
      std::copy_n(memory.begin() + static_cast<std::ptrdiff_t>(at), row_bytes,
                  wide.begin() + static_cast<std::ptrdiff_t>(2 * at));
    }
    memory.swap(wide);
    view.data = memory.data();
    view.strides[0] *= 2;
  };
  make_wide(fixture.q_memory, fixture.query);
  make_wide(fixture.k_memory, fixture.key);
  make_wide(fixture.v_memory, fixture.value);
  make_wide(fixture.out_memory, fixture.output);
  fixture.run();
  // Back to packed rows for the comparison.
  const auto row_bytes = static_cast<size_t>(fixture.output.strides[0]);  // half a row's stride in 2-byte elements
  for (size_t row = 0; 2 * row * row_bytes < fixture.out_memory.size(); ++row) {
    for (auto* memory : {&fixture.out_memory, &fixture.q_memory}) {
      std::copy_n(memory->begin() + static_cast<std::ptrdiff_t>(2 * row * row_bytes), row_bytes,
                  memory->begin() + static_cast<std::ptrdiff_t>(row * row_bytes));
    }
  }
  fixture.out_memory.resize(fixture.out_memory.size() / 2);
  EXPECT_EQ(fixture.wrong_output(), "");
  EXPECT_EQ(fixture.wrong_cache(), "");
}

}  // namespace
}  // namespace folio::inline v0::backends
