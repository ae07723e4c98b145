#include "folio/quantize.hpp"
#include "core/error_test_util.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/types/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

TEST(QuantizeNvfp4, GivesTheGoldenBytes) {
  const json document = folio::testing::golden("nvfp4/cases");
  const Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  for (const json& golden : document.at("cases")) {
    SCOPED_TRACE(golden.at("name").get<std::string>());
    const auto values = golden.at("values").get<std::vector<float>>();
    const auto codes = golden.at("codes").get<std::vector<uint8_t>>();
    const auto rows = golden.at("rows").get<int64_t>();
    const auto columns = golden.at("columns").get<int64_t>();
    const auto global_scale = golden.at("global_scale").get<float>();
    ASSERT_EQ(nvfp4_scale_bytes(golden.at("total_rows").get<int64_t>(), columns / 16),
              golden.at("scale_bytes").get<int64_t>());
    for (const int64_t heads : {int64_t{1}, columns / 16}) {  // a row is its heads side by side, however many
      const int64_t dim = columns / heads;
      std::vector<uint8_t> out(codes.size(), 0xee);
      std::vector<uint8_t> scales(golden.at("scale_bytes").get<size_t>(), 0xee);
      const BlockScaleArgs block_scale{scales.data(), golden.at("first_row").get<int64_t>()};
      quantize_nvfp4(context, ConstTensorView(values.data(), DType::kFloat32, {rows, heads, dim}),
                     TensorView(out.data(), DType::kFloat4E2M1x2, {rows, heads, dim / 2}), block_scale, global_scale);
      EXPECT_EQ(out, codes);
      std::vector<uint8_t> expected(scales.size(), 0xee);
      for (const json& entry : golden.at("scales")) expected[entry[0].get<size_t>()] = entry[1].get<uint8_t>();
      EXPECT_EQ(scales, expected) << "padding and other rows stay as they were";

      std::vector<float> back(values.size());
      dequantize_nvfp4(context, ConstTensorView(out.data(), DType::kFloat4E2M1x2, {rows, heads, dim / 2}), block_scale,
                       global_scale, TensorView(back.data(), DType::kFloat32, {rows, heads, dim}));
      std::vector<uint8_t> again(codes.size());
      std::vector<uint8_t> again_scales(scales.size(), 0xee);
      quantize_nvfp4(context, ConstTensorView(back.data(), DType::kFloat32, {rows, heads, dim}),
                     TensorView(again.data(), DType::kFloat4E2M1x2, {rows, heads, dim / 2}),
                     {again_scales.data(), block_scale.first_row}, global_scale);
      for (size_t i = 0; i < 2 * codes.size(); ++i) {
        EXPECT_EQ(load_fp4_as_float(again.data(), static_cast<int64_t>(i)) == 0.0f, back[i] == 0.0f) << i;
      }
    }
  }
}

TEST(QuantizeNvfp4, TakesStridedSixteenBitInputs) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  std::vector<uint16_t> in(2 * 3 * 40);
  for (size_t i = 0; i < in.size(); ++i) in[i] = float_to_bfloat16(static_cast<float>(i % 23) - 11.0f);
  ConstTensorView view(in.data(), DType::kBFloat16, {2, 3, 32});
  view.strides = {120, 40, 1};
  std::vector<float> packed;
  for (int64_t row = 0; row < 6; ++row) {
    for (int64_t d = 0; d < 32; ++d) packed.push_back(load_as_float(in.data(), DType::kBFloat16, row * 40 + d));
  }
  std::vector<uint8_t> out(6 * 16), packed_out(6 * 16), scales(512 * 2), packed_scales(512 * 2);
  quantize_nvfp4(context, view, TensorView(out.data(), DType::kFloat4E2M1x2, {2, 3, 16}), {scales.data(), 0}, 9.0f);
  quantize_nvfp4(context, ConstTensorView(packed.data(), DType::kFloat32, {2, 3, 32}),
                 TensorView(packed_out.data(), DType::kFloat4E2M1x2, {2, 3, 16}), {packed_scales.data(), 0}, 9.0f);
  EXPECT_EQ(out, packed_out);
  EXPECT_EQ(scales, packed_scales);
}

TEST(QuantizeFp8, DividesAndSaturates) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  const std::vector<float> in{1.0f, -3.0f, 1000.0f, 0.0f};
  std::vector<uint8_t> out(4);
  Scale scale;
  scale.value = 0.05f;
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    quantize_fp8(context, ConstTensorView(in.data(), DType::kFloat32, {1, 1, 4}),
                 TensorView(out.data(), dtype, {1, 1, 4}), scale);
    for (size_t i = 0; i < 4; ++i) {
      const float real = in[i] / 0.05f;
      EXPECT_EQ(out[i], dtype == DType::kFloat8E4M3 ? float_to_fp8_e4m3(real) : float_to_fp8_e5m2(real));
    }
  }
}

TEST(Quantize, RefusesWhatDoesNotFit) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  std::vector<float> in(48);
  std::vector<uint8_t> out(48, 0xee), scales(512, 0xee);
  const auto nvfp4 = [&](const std::function<void(ConstTensorView&, TensorView&, BlockScaleArgs&, float&)>& change) {
    ConstTensorView wide(in.data(), DType::kFloat32, {1, 1, 32});
    TensorView codes(out.data(), DType::kFloat4E2M1x2, {1, 1, 16});
    BlockScaleArgs block_scale{scales.data(), 0};
    float global_scale = 1.0f;
    change(wide, codes, block_scale, global_scale);
    return folio::testing::message_of([&] { quantize_nvfp4(context, wide, codes, block_scale, global_scale); });
  };
  EXPECT_THAT(nvfp4([](auto& in_view, auto&, auto&, auto&) { in_view.shape[2] = 24; }), HasSubstr("multiples of 16"));
  EXPECT_THAT(nvfp4([](auto& in_view, auto&, auto&, auto&) { in_view.dtype = DType::kFloat8E4M3; }),
              HasSubstr("in is fp8_e4m3"));
  EXPECT_THAT(nvfp4([](auto&, auto& codes, auto&, auto&) { codes.dtype = DType::kFloat8E4M3; }),
              HasSubstr("out is fp8_e4m3; it must be fp4_e2m1x2"));
  EXPECT_THAT(nvfp4([](auto&, auto& codes, auto&, auto&) { codes.shape[2] = 32; }), HasSubstr("must be [1, 1, 16]"));
  EXPECT_THAT(nvfp4([](auto&, auto&, auto& scale, auto&) { scale.data = nullptr; }), HasSubstr("block_scale.data"));
  EXPECT_THAT(nvfp4([](auto&, auto&, auto& scale, auto&) { scale.first_row = -1; }), HasSubstr("first_row is -1"));
  EXPECT_THAT(nvfp4([](auto&, auto&, auto&, auto& scale) { scale = 0.0f; }), HasSubstr("global_scale is 0"));
  EXPECT_THAT(folio::testing::message_of([&] {
                Scale scale;
                scale.value = -1.0f;
                quantize_fp8(context, ConstTensorView(in.data(), DType::kFloat32, {1, 1, 4}),
                             TensorView(out.data(), DType::kFloat8E4M3, {1, 1, 4}), scale);
              }),
              HasSubstr("scale is -1"));
  EXPECT_THAT(folio::testing::message_of([&] {
                quantize_fp8(context, ConstTensorView(in.data(), DType::kFloat32, {1, 1, 4}),
                             TensorView(out.data(), DType::kFloat16, {1, 1, 4}), {});
              }),
              HasSubstr("must be fp8"));
  EXPECT_EQ(out, std::vector<uint8_t>(48, 0xee));
  EXPECT_EQ(scales, std::vector<uint8_t>(512, 0xee));
}

TEST(Quantize, OutputsThatOverlap_AreRefused) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  std::vector<float> in(128);
  std::vector<uint8_t> out(128, 0xee), scales(1024, 0xee);
  const ConstTensorView wide(in.data(), DType::kFloat32, {2, 1, 32});
  const auto refused = folio::testing::message_of<std::function<void()>>;
  const auto fp8 = [&](void* data, int64_t token_stride) {
    TensorView view(data, DType::kFloat8E4M3, {2, 1, 32});
    view.strides[0] = token_stride;
    return refused([&, view] { quantize_fp8(context, wide, view, {}); }, ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(fp8(in.data() + 3, 32), HasSubstr("out overlaps in"));
  EXPECT_THAT(fp8(out.data(), 31), HasSubstr("out's rows overlap"));
  EXPECT_THAT(fp8(out.data(), 0), HasSubstr("out's rows overlap"));
  EXPECT_THAT(fp8(out.data(), std::numeric_limits<int64_t>::max()), HasSubstr("beyond the address space"));
  const auto nvfp4 = [&](void* codes, int64_t token_stride, void* scale_data) {
    TensorView view(codes, DType::kFloat4E2M1x2, {2, 1, 16});
    view.strides[0] = token_stride;
    return refused(
        [&, view] {
          quantize_nvfp4(context, wide, view, {scale_data, 0}, 1.0f);
        },
        ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(nvfp4(in.data(), 16, scales.data()), HasSubstr("out overlaps in"));
  EXPECT_THAT(nvfp4(out.data(), 15, scales.data()), HasSubstr("out's rows overlap"));
  EXPECT_THAT(nvfp4(scales.data() + 500, 16, scales.data()), HasSubstr("block_scale overlaps out"));
  EXPECT_THAT(nvfp4(out.data(), 16, in.data()), HasSubstr("block_scale overlaps in"));
  const auto back = [&](void* data, int64_t token_stride, void* scale_data) {
    TensorView view(data, DType::kFloat32, {2, 1, 32});
    view.strides[0] = token_stride;
    const ConstTensorView codes(out.data(), DType::kFloat4E2M1x2, {2, 1, 16});
    return refused(
        [&, view] {
          dequantize_nvfp4(context, codes, {scale_data, 0}, 1.0f, view);
        },
        ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(back(out.data() + 8, 32, scales.data()), HasSubstr("out overlaps in"));
  EXPECT_THAT(back(in.data(), 31, scales.data()), HasSubstr("out's rows overlap"));
  EXPECT_THAT(back(in.data(), 32, in.data()), HasSubstr("out overlaps block_scale"));
  EXPECT_EQ(in, std::vector<float>(128));
  EXPECT_EQ(out, std::vector<uint8_t>(128, 0xee));
  EXPECT_EQ(scales, std::vector<uint8_t>(1024, 0xee));
}

/// Input and output as columns of one buffer; rows from the last to the first.
TEST(Quantize, OutputsBetweenInputs_AreTaken) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  constexpr int64_t kRow = 24;  // floats: 16 of input, then 16 bytes of output, then a gap
  std::vector<float> buffer(3 * kRow);
  for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<float>(i % 7) - 3.0f;
  ConstTensorView in(buffer.data() + 2 * kRow, DType::kFloat32, {3, 1, 16});
  TensorView out(buffer.data() + 2 * kRow + 16, DType::kFloat8E4M3, {3, 1, 16});
  in.strides[0] = -kRow;
  out.strides[0] = -kRow * 4;
  quantize_fp8(context, in, out, {});
  for (size_t row = 0; row < 3; ++row) {
    const auto* stored = reinterpret_cast<const uint8_t*>(&buffer[row * kRow + 16]);
    for (size_t d = 0; d < 16; ++d) EXPECT_EQ(fp8_e4m3_to_float(stored[d]), buffer[row * kRow + d]) << row << ", " << d;
  }
}

}  // namespace
}  // namespace folio
