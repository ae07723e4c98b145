#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backends/flashinfer/group_test_util.hpp"
#include "folio/quantize.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::backend_batch;
using testing::Group;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

/// Of the float32 results that are compared with; on a GPU they are in float16.
const double kRoundingOfWide = folio::testing::on_gpu() ? 0x1p-6 : 0x1p-10;

/// A batch whose output is quantised in the kernel, beside the same in the model's float32.
struct Quantised {
  explicit Quantised(bool forced, BackendProfile profile = BackendProfile::kNative)
      : group(setup_of(profile), backend_batch("mixed_small")) {
    if (profile == BackendProfile::kNative) group.config.use_block_table_kernels = forced;
    builder.emplace(group.make());
    group.fixture.run(group.impls.front(), *builder);
    EXPECT_EQ(group.fixture.wrong_output(), "");
    tokens = group.fixture.num_tokens();
    heads = group.fixture.setup.num_heads;
    dim = group.fixture.setup.head_size;
    for (int64_t i = 0; i < tokens * heads * dim; ++i) {
      wide.push_back(load_as_float(group.fixture.out_memory.data(), group.fixture.output.dtype, i));
    }
  }
  static LayerSetup setup_of(BackendProfile profile) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    setup.model_dtype = profile == BackendProfile::kNative ? DType::kFloat32 : DType::kBFloat16;
    return setup;
  }
  void forward(const TensorView& output, const OutputQuantization& quantization) {
    const auto& fixture = group.fixture;
    const FlashInferMetadata metadata = builder->build(0, fixture.batch);
    group.impls.front().forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache,
                                &metadata, output, quantization);
  }

  Group group;
  std::optional<FlashInferMetadataBuilder> builder;
  int64_t tokens = 0, heads = 0, dim = 0;
  std::vector<float> wide;
};

TEST(OutputQuantisation, ToFp8HappensInTheKernel) {
  for (const bool forced : {false, true}) {
    Quantised quantised(forced);
    std::vector<uint8_t> stored(quantised.wide.size(), 0xee);
    for (const float scale : {0.02f, 0.004f}) {  // the second saturates; scales are read at every call
      quantised.forward(
          TensorView(stored.data(), DType::kFloat8E4M3, {quantised.tokens, quantised.heads, quantised.dim}),
          {&scale, {}});
      for (size_t i = 0; i < stored.size(); ++i) {
        const double exact = std::clamp(double{quantised.wide[i]} / double{scale}, -448.0, 448.0);
        ASSERT_NEAR(double{fp8_e4m3_to_float(stored[i])}, exact,
                    std::max(std::abs(exact) * 0x1p-4, 0x1p-10) * (1.0 + kRoundingOfWide));
      }
    }
  }
}

TEST(OutputQuantisation, ToNvfp4PutsEverySectionsScalesAtItsRows) {
  for (const bool forced : {false, true}) {
    Quantised quantised(forced);
    const int64_t blocks = quantised.heads * quantised.dim / 16;
    std::vector<uint8_t> codes(quantised.wide.size() / 2);
    std::vector<uint8_t> scales(static_cast<size_t>(nvfp4_scale_bytes(quantised.tokens, blocks)));
    const float global_scale = 300.0f;
    OutputQuantization quantization;
    quantization.scale = &global_scale;
    quantization.block_scale = TensorView(scales.data(), DType::kFloat8E4M3, {128, blocks});
    quantised.forward(TensorView(codes.data(), DType::kUnset, {quantised.tokens, quantised.heads, quantised.dim / 2}),
                      quantization);
    std::vector<float> real(quantised.wide.size());
    dequantize_nvfp4(
        quantised.group.fixture.context,
        ConstTensorView(codes.data(), DType::kFloat4E2M1x2, {quantised.tokens, quantised.heads, quantised.dim / 2}),
        {scales.data(), 0}, global_scale,
        TensorView(real.data(), DType::kFloat32, {quantised.tokens, quantised.heads, quantised.dim}));
    for (size_t block = 0; block < real.size() / 16; ++block) {
      double largest = 0.0;
      for (size_t i = block * 16; i < block * 16 + 16; ++i)
        largest = std::max(largest, std::abs(double{quantised.wide[i]}));
      for (size_t i = block * 16; i < block * 16 + 16; ++i) {
        ASSERT_NEAR(real[i], quantised.wide[i], largest / 6.0 * (1.0 + 0x1p-4 + kRoundingOfWide)) << i;
      }
    }
  }
}

TEST(OutputQuantisation, IsRefusedInTheOriginalsWords) {
  const float scale = 1.0f;
  std::vector<uint8_t> memory(12 * 4 * 64 * 4);
  const TensorView fp8(memory.data(), DType::kFloat8E4M3, {12, 4, 64});
  const TensorView fp4(memory.data(), DType::kFloat4E2M1x2, {12, 4, 32});
  const TensorView factors(memory.data(), DType::kFloat8E4M3, {128, 16});
  const auto refused = [&](Quantised& quantised, const TensorView& output, const OutputQuantization& quantization,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    const std::vector<std::byte> cache = quantised.group.fixture.cache_memory;
    std::string message = message_of([&] { quantised.forward(output, quantization); }, code);
    EXPECT_TRUE(cache == quantised.group.fixture.cache_memory);
    return message;
  };
  Quantised native(false);
  EXPECT_EQ(refused(native, fp8, {nullptr, factors}),
            "output_block_scale is not supported when fusion has not happened");
  EXPECT_EQ(refused(native, fp8, {&scale, factors}), "output_block_scale should not be provided for fp8 output");
  EXPECT_EQ(refused(native, fp4, {&scale, {}}), "output_block_scale is required for nvfp4 output");
  EXPECT_EQ(refused(native, TensorView(memory.data(), DType::kFloat16, {12, 4, 64}), {&scale, {}}),
            "Unsupported output dtype: float16");
  TensorView few = factors;
  few.shape[0] = 64;
  EXPECT_THAT(refused(native, fp4, {&scale, few}), HasSubstr("at least [128, 16]"));
  const float zero = 0.0f;
  EXPECT_THAT(refused(native, fp8, {&zero, {}}), HasSubstr("output_scale is 0"));
  Quantised december(false, BackendProfile::kVllm2025_12);
  EXPECT_EQ(refused(december, fp8, {&scale, {}}), "Query must be FP8 when attn+quant fusion happened.");
}

}  // namespace
}  // namespace folio::inline v0::backends
