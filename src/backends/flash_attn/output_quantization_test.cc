#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "folio/quantize.hpp"
#include "folio/types/float_convert.hpp"
#include "folio/types/nvfp4.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchLengths;
using testing::FlashAttnFixture;
using ::testing::HasSubstr;
using testing::LayerSetup;
using testing::message_of;

constexpr float kGlobalScale = 300.0f;

/// A step whose output is quantised in the kernel, beside the same in float32, which is compared with the oracle.
struct QuantisedStep {
  explicit QuantisedStep(const LayerSetup& setup, const BatchLengths& lengths = testing::backend_batch("mixed_small"),
                         int32_t common_prefix_len = 0, AttentionType type = AttentionType::kDecoder)
      : fixture(in_float32(setup), lengths), prefix(common_prefix_len) {
    fixture.layer.attn_type = type;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    fixture.forward(impl, builder.build(prefix, fixture.batch));
    EXPECT_EQ(fixture.wrong_output(), "");
    wide = fixture.out_memory;
    shape = {fixture.num_tokens(), setup.num_heads, setup.head_size};
    blocks = shape[1] * shape[2] / kNvfp4BlockSize;
  }
  /// On a GPU the fixture makes float16 of it.
  static LayerSetup in_float32(LayerSetup setup) {
    setup.model_dtype = DType::kFloat32;
    return setup;
  }

  ConstTensorView wide_view() const { return {wide.data(), fixture.output.dtype, {shape[0], shape[1], shape[2]}}; }
  TensorView packed(std::vector<uint8_t>& memory, DType dtype) const {
    return {memory.data(), dtype, {shape[0], shape[1], shape[2]}};
  }

  void forward(DType dtype, const TensorView& output, const OutputQuantization& quantization) {
    fixture.options.output_dtype = dtype;
    const FlashAttentionImpl impl = fixture.make_impl();
    FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
    const FlashAttentionMetadata metadata = builder.build(prefix, fixture.batch);
    EXPECT_EQ(metadata.use_cascade, prefix > 0);
    impl.forward(fixture.scales(), fixture.query, fixture.key, fixture.value, fixture.kv, &metadata, output,
                 quantization);
  }

  /// NVFP4 of the kernel and of the stand-alone function: codes, then scale factors.
  std::vector<uint8_t> codes_and_scales(bool in_kernel) {
    const size_t num_codes = static_cast<size_t>(fixture.padded_rows() * shape[1] * shape[2] / 2);
    std::vector<uint8_t> bytes(num_codes + static_cast<size_t>(nvfp4_scale_bytes(shape[0], blocks)), 0xee);
    uint8_t* const scales = bytes.data() + num_codes;
    TensorView codes(bytes.data(), DType::kUnset, {fixture.padded_rows(), shape[1], shape[2] / 2});
    if (in_kernel) {
      OutputQuantization quantization;
      quantization.scale = &kGlobalScale;
      quantization.block_scale =
          TensorView(scales, DType::kUnset, {(shape[0] + 127) / 128 * 128, (blocks + 3) / 4 * 4});
      forward(DType::kFloat4E2M1x2, codes, quantization);
    } else {
      codes.dtype = DType::kFloat4E2M1x2;
      codes.shape[0] = shape[0];
      quantize_nvfp4(fixture.context, wide_view(), codes, {scales, 0}, kGlobalScale);
    }
    return bytes;
  }

  /// Byte for byte what the stand-alone function makes of a float32 output. Of a float16 output, within its rounding:
  /// half a step of e2m1 is at most 1 in units of the block's scale, which itself is within 1/16 of amax / 6.
  void expect_nvfp4() {
    std::vector<uint8_t> got = codes_and_scales(true);
    const std::vector<uint8_t> expected = codes_and_scales(false);
    if (fixture.output.dtype == DType::kFloat32) {
      EXPECT_EQ(got, expected);
      return;
    }
    ASSERT_EQ(got.size(), expected.size());
    const auto values = static_cast<size_t>(shape[0] * shape[1] * shape[2]);
    const auto padded = static_cast<size_t>(fixture.padded_rows() * shape[1] * shape[2]);
    for (size_t i = values / 2; i < padded / 2; ++i) ASSERT_EQ(got[i], 0xee) << "behind the tokens, byte " << i;
    std::vector<float> real(values);
    dequantize_nvfp4(fixture.context,
                     ConstTensorView(got.data(), DType::kFloat4E2M1x2, {shape[0], shape[1], shape[2] / 2}),
                     {got.data() + padded / 2, 0}, kGlobalScale,
                     TensorView(real.data(), DType::kFloat32, {shape[0], shape[1], shape[2]}));
    for (size_t block = 0; block < values; block += kNvfp4BlockSize) {
      float largest = 0.0f;
      const auto of = [&](size_t i) {
        return load_as_float(wide.data(), fixture.output.dtype, static_cast<int64_t>(i));
      };
      for (size_t i = block; i < block + kNvfp4BlockSize; ++i) largest = std::max(largest, std::abs(of(i)));
      for (size_t i = block; i < block + kNvfp4BlockSize; ++i) {
        ASSERT_NEAR(real[i], of(i), largest / 6.0f * (1.0f + 0x1p-4f + 0x1p-6f)) << i;
      }
    }
  }

  FlashAttnFixture fixture;
  int32_t prefix;
  std::vector<std::byte> wide;
  std::array<int64_t, 3> shape{};
  int64_t blocks = 0;
};

TEST(FlashAttnOutput, IsTheFp8OfTheStandAloneFunction) {
  FOLIO_CPU_ONLY("there is no float32 model to compare with");
  QuantisedStep step({});
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const float scale : {0.125f, 0.004f}) {  // the second saturates e4m3
      std::vector<uint8_t> stored(step.wide.size() / 4), expected = stored;
      const TensorView output = step.packed(stored, dtype);
      step.forward(dtype, output, {&scale, {}});
      Scale out_scale;
      out_scale.value = scale;
      quantize_fp8(step.fixture.context, step.wide_view(), step.packed(expected, dtype), out_scale);
      EXPECT_EQ(stored, expected);
    }
  }
}

TEST(FlashAttnOutput, Scale_InDeviceMemory_IsTheHostsOfTheSameValue) {
  QuantisedStep step({});
  const std::vector<float> scale{0.125f};
  std::vector<uint8_t> expected(static_cast<size_t>(step.shape[0] * step.shape[1] * step.shape[2]), 0xee);
  std::vector<uint8_t> stored = expected;
  step.forward(DType::kFloat8E4M3, step.packed(expected, DType::kFloat8E4M3), {scale.data(), {}});
  const auto forward = [&] {
    step.forward(DType::kFloat8E4M3, step.packed(stored, DType::kFloat8E4M3), {scale.data(), {}, Where::kDevice});
  };
  if (folio::testing::on_gpu()) {
    forward();
    EXPECT_EQ(stored, expected);
  } else {
    EXPECT_EQ(message_of(forward), "output_quantization.scale_where is kDevice; the context is a CPU's");
  }
}

// In decodes and prefills, and nothing behind the tokens.
TEST(FlashAttnOutput, IsTheNvfp4OfTheStandAloneFunction) {
  LayerSetup plain;
  LayerSetup all;
  all.sinks = all.alibi = true;
  all.sliding_window = 24;
  all.logits_soft_cap = 3.0f;
  all.padding_tokens = 3;
  all.padding_requests = 1;
  LayerSetup fp8 = plain;
  fp8.cache_dtype = "fp8";
  fp8.k_scale = 0.5f;
  fp8.v_scale = 2.0f;
  fp8.layout = KvCacheLayout::kHnd;
  for (const char* batch : {"small_decode", "mixed_small", "flashinfer_prefill"}) {
    for (const LayerSetup& setup : {plain, all, fp8}) {
      QuantisedStep step(setup, testing::backend_batch(batch));
      SCOPED_TRACE(batch);
      step.expect_nvfp4();
    }
  }
}

TEST(FlashAttnOutput, IsQuantisedOnceBehindASharedPrefixAndOfEncoders) {
  LayerSetup shared;
  shared.shared_prefix = 32;
  QuantisedStep cascade(shared, {"shared", {64, 50, 33, 80}, {4, 1, 1, 7}}, 32);
  cascade.expect_nvfp4();
  LayerSetup bidirectional;
  bidirectional.mask = MaskKind::kNone;
  QuantisedStep encoder(bidirectional, {"encoder", {40, 7}, {40, 7}}, 0, AttentionType::kEncoder);
  encoder.expect_nvfp4();
}

TEST(FlashAttnOutput, RefusesScalesThatDoNotFit) {
  QuantisedStep step({});
  step.fixture.layer.update_kv_cache_in_forward = true;
  std::vector<uint8_t> memory(16384);
  const TensorView fp8 = step.packed(memory, DType::kFloat8E4M3);
  const TensorView fp4(memory.data(), DType::kFloat4E2M1x2, {step.shape[0], step.shape[1], step.shape[2] / 2});
  const TensorView factors(memory.data(), DType::kFloat8E4M3, {128, 8});
  const std::vector<std::byte> cache(step.fixture.cache_memory.size(), std::byte{0});
  step.fixture.cache_memory = cache;
  step.fixture.kv.data = step.fixture.cache_memory.data();
  const auto refused = [&](DType dtype, const TensorView& output, const OutputQuantization& quantization) {
    std::string message = message_of([&] { step.forward(dtype, output, quantization); });
    EXPECT_EQ(step.fixture.cache_memory, cache) << "refused before the cache is written";
    return message;
  };
  const float one = 1.0f, zero = 0.0f;
  const DType k8 = DType::kFloat8E4M3, k4 = DType::kFloat4E2M1x2;
  EXPECT_THAT(refused(k8, fp8, {}), HasSubstr("output_quantization.scale must be given"));
  EXPECT_THAT(refused(k4, fp4, {nullptr, factors}), HasSubstr("output_quantization.scale must be given"));
  EXPECT_THAT(refused(k8, fp8, {&zero, {}}), HasSubstr("output_scale is 0; it must be finite and positive"));
  EXPECT_EQ(refused(k8, fp8, {&one, factors}), "output_block_scale should not be provided for fp8 output");
  EXPECT_EQ(refused(k4, fp4, {&one, {}}), "output_block_scale is required for nvfp4 output");
  EXPECT_THAT(refused(k4, fp8, {&one, factors}), HasSubstr("output has shape"));
  EXPECT_EQ(refused(k8, step.packed(memory, DType::kFloat16), {&one, {}}),
            "the output is float16; the metadata was built for fp8_e4m3");
  TensorView few = factors;
  few.shape[0] = 64;
  EXPECT_EQ(refused(k4, fp4, {&one, few}), "output_block_scale must be packed and at least [128, 8]");
}

}  // namespace
}  // namespace folio::inline v0::backends
