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
/// Of P, relative to the largest output: on a GPU two computations round it to float16, each by 2^-11.
const double kRoundingOfP = folio::testing::on_gpu() ? 0x1p-10 : 0.0;

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

/// Requests that begin with the same 64 tokens, with scales per head where asked for.
Group sharing_group(bool scales_per_head, CascadeMode mode) {
  LayerSetup setup;
  setup.head_size = 64;
  setup.model_dtype = DType::kFloat32;
  setup.shared_prefix = 64;
  setup.cache_dtype = "fp8";
  setup.k_scale = 0.5f;
  setup.v_scale = 2.0f;
  setup.scales_per_head = scales_per_head;
  Group group(setup, {"shared", {130, 65, 81, 70}, {1, 1, 9, 6}});
  group.options.cascade = mode;
  return group;
}

/// The group's output in the model's dtype, which the oracle has confirmed.
std::vector<float> confirmed_output(Group& group) {
  FlashInferMetadataBuilder builder = group.make();
  group.fixture.run(group.impls.front(), builder);
  EXPECT_EQ(group.fixture.wrong_output(), "");
  const auto& fixture = group.fixture;
  std::vector<float> wide(static_cast<size_t>(fixture.num_tokens()) * 4 * 64);
  for (size_t i = 0; i < wide.size(); ++i) {
    wide[i] = load_as_float(fixture.out_memory.data(), fixture.output.dtype, static_cast<int64_t>(i));
  }
  return wide;
}

/// `unit`: of the wide values' own rounding, relative to the largest of them.
void expect_stored(const std::vector<uint8_t>& stored, const std::vector<float>& wide, float scale, double unit) {
  double largest = 0.0;
  for (const float value : wide) largest = std::max(largest, std::abs(double{value}));
  for (size_t i = 0; i < stored.size(); ++i) {
    const double exact = double{wide[i]} / double{scale};
    ASSERT_NEAR(double{fp8_e4m3_to_float(stored[i])}, exact,
                std::max(std::abs(exact) * 0x1p-4, 0x1p-10) * (1.0 + kRoundingOfWide) + unit * largest / double{scale})
        << i;
  }
}

struct Stored {
  explicit Stored(const testing::BatchFixture& fixture)
      : bytes(static_cast<size_t>(fixture.num_tokens()) * 4 * 64, 0xee),
        output(bytes.data(), DType::kFloat8E4M3, {fixture.num_tokens(), 4, 64}) {}
  std::vector<uint8_t> bytes;
  TensorView output;
};

void forward(Group& group, const FlashInferMetadata& metadata, const TensorView& output,
             const OutputQuantization& quantization) {
  const auto& fixture = group.fixture;
  group.impls.front().forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv_cache, &metadata,
                              output, quantization);
}

TEST(OutputQuantisation, OutputDtype_WithSharedPrefixesAndScalesPerHead_IsPlanned) {
  for (const CascadeMode mode : {CascadeMode::kHeuristic, CascadeMode::kAuto}) {
    for (const bool per_head : {false, true}) {
      Group group = sharing_group(per_head, mode);
      const std::vector<float> wide = confirmed_output(group);
      group.options.output_dtype = DType::kFloat8E4M3;
      FlashInferMetadataBuilder builder = group.make();
      const FlashInferMetadata metadata = builder.build(64, group.fixture.batch);
      EXPECT_EQ(metadata.output_data_type, DType::kFloat8E4M3);
      EXPECT_TRUE(mode != CascadeMode::kHeuristic || metadata.use_cascade);
      Stored stored(group.fixture);
      const float scale = 0.02f;
      forward(group, metadata, stored.output, {&scale, {}});
      expect_stored(stored.bytes, wide, scale, kRoundingOfP);
      EXPECT_EQ(metadata.block_table_workspace->num_plans(), 0) << "by the step's plan";
      EXPECT_EQ(message_of([&] { forward(group, metadata, stored.output, {}); }),
                "the output is fp8_e4m3; output_quantization.scale must be given");

      group.options.output_dtype = DType::kFloat4E2M1x2;
      FlashInferMetadataBuilder to_nvfp4 = group.make();
      const FlashInferMetadata step = to_nvfp4.build(64, group.fixture.batch);
      const int64_t tokens = group.fixture.num_tokens();
      std::vector<uint8_t> codes(wide.size() / 2), scales(static_cast<size_t>(nvfp4_scale_bytes(tokens, 16)));
      const float global_scale = 300.0f;
      OutputQuantization nvfp4;
      nvfp4.scale = &global_scale;
      nvfp4.block_scale = TensorView(scales.data(), DType::kUnset, {128, 16});
      forward(group, step, TensorView(codes.data(), DType::kUnset, {tokens, 4, 32}), nvfp4);
      std::vector<float> real(wide.size());
      dequantize_nvfp4(group.fixture.context, ConstTensorView(codes.data(), DType::kFloat4E2M1x2, {tokens, 4, 32}),
                       {scales.data(), 0}, global_scale, TensorView(real.data(), DType::kFloat32, {tokens, 4, 64}));
      for (size_t block = 0; block < real.size() / 16; ++block) {
        double largest = 0.0;
        for (size_t i = block * 16; i < block * 16 + 16; ++i) largest = std::max(largest, std::abs(double{wide[i]}));
        for (size_t i = block * 16; i < block * 16 + 16; ++i) {
          ASSERT_NEAR(real[i], wide[i], largest / 6.0 * (1.0 + 0x1p-4 + kRoundingOfWide)) << i;
        }
      }
    }
  }
}

TEST(OutputQuantisation, OfAStepPlannedForTheModelsDtype_IsRightAndUnsharedAndSaid) {
  for (const bool per_head : {false, true}) {
    Group group = sharing_group(per_head, CascadeMode::kHeuristic);
    std::vector<std::string> lines;
    group.options.log = OnceLog([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
    const std::vector<float> wide = confirmed_output(group);
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(64, group.fixture.batch);
    EXPECT_TRUE(metadata.use_cascade);
    Stored stored(group.fixture);
    const float scale = 0.02f;
    for (int layer = 0; layer < 2; ++layer) {
      forward(group, metadata, stored.output, {&scale, {}});
      expect_stored(stored.bytes, wide, scale, kRoundingOfP);
    }
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_THAT(lines.front(), HasSubstr("FlashInferOptions::quantize_query and output_dtype plan for them"));
  }
}

/// vLLM fuses a quantised output into attention with fp8 queries.
TEST(OutputQuantisation, OfTheVllmProfiles_IsComputed) {
  for (const BackendProfile profile : {BackendProfile::kVllm2025_12, BackendProfile::kVllm2026_03}) {
    LayerSetup setup;
    setup.profile = profile;
    setup.head_size = 64;
    setup.layout = KvCacheLayout::kHnd;
    setup.cache_dtype = "fp8";
    setup.quantize_query = true;
    setup.q_scale = 0.25f;
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
    Group group(setup);
    DispatchFacts facts;
    facts.profile = profile;
    facts.device = {Platform::kCuda, DeviceCapability{10, 0}};
    facts.has_flashinfer_cubin = true;
    group.options.quantize_query = false;
    group.layer.dispatch = group.options.dispatch = KernelDispatch(facts);
    const std::vector<float> wide = confirmed_output(group);
    FlashInferMetadataBuilder builder = group.make();
    const FlashInferMetadata metadata = builder.build(0, group.fixture.batch);
    Stored stored(group.fixture);
    const float scale = 0.02f;
    forward(group, metadata, stored.output, {&scale, {}});
    expect_stored(stored.bytes, wide, scale, 0x1p-8);
  }
}

TEST(FlashInferProfilingRun, OutputInAnEnginesBytes_IsZeroed) {
  Group group;
  group.add_layer();
  std::vector<uint8_t> bytes(2 * 4 * 16, 7), factors(512);
  const float scale = 1.0f;
  OutputQuantization nvfp4;
  nvfp4.scale = &scale;
  nvfp4.block_scale = TensorView(factors.data(), DType::kUnset, {128, 4});
  const TensorView output(bytes.data(), DType::kUnset, {2, 4, 16});
  group.impls.front().forward({}, {}, {}, {}, {}, nullptr, output, nvfp4);
  EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), 0));
}

}  // namespace
}  // namespace folio::inline v0::backends
