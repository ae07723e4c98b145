#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/attention_test_util.hpp"
#include "folio/attention.hpp"
#include "folio/quantize.hpp"
#include "folio/types/error.hpp"

namespace folio::attention {
namespace {

using ::testing::HasSubstr;

constexpr float kGlobalScale = 40.0f;
constexpr int64_t kFirstRow = 126;  // the two tokens lie in different tiles of 128 rows
constexpr uint8_t kUnwritten = 0xee;

/// SmallDecode with an NVFP4 output.
struct Nvfp4Decode : SmallDecode {
  std::vector<uint8_t> codes = std::vector<uint8_t>(2 * 4 * 8, kUnwritten);
  std::vector<uint8_t> scales =
      std::vector<uint8_t>(static_cast<size_t>(nvfp4_scale_bytes(kFirstRow + 3, 4)), kUnwritten);

  Nvfp4Decode() {
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i % 13) * 0.25f - 1.5f;
    config.out = DType::kFloat4E2M1x2;
    args.out = TensorView(codes.data(), DType::kFloat4E2M1x2, {2, 4, 8});
    args.out_scale.value = kGlobalScale;
    args.out_block_scale = {scales.data(), kFirstRow + 1};
  }

  PlanSummary execute(int32_t num_workers = 0) {
    PrepareOptions options;
    options.num_workers = num_workers;
    const AttentionOp op = prepare(context, config, options);
    PlanBuffer buffer = make_plan_buffer(op);
    const AttentionPlan planned = plan(op, batch, buffer);
    const size_t bytes = workspace_size(planned);
    run(planned, args, workspace(bytes));
    return summary(planned);
  }

  std::vector<float> dequantized() const {
    std::vector<float> real(2 * 4 * 16);
    dequantize_nvfp4(context, ConstTensorView(codes.data(), DType::kFloat4E2M1x2, {2, 4, 8}), args.out_block_scale,
                     kGlobalScale, TensorView(real.data(), DType::kFloat32, {2, 4, 16}));
    return real;
  }
};

TEST(Nvfp4Output, IsTheFloat32OutputQuantised) {
  SmallDecode wide;
  Nvfp4Decode narrow;
  wide.q = narrow.q;
  const AttentionOp op = prepare(wide.context, wide.config);
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan planned = plan(op, wide.batch, buffer);
  run(planned, wide.args, wide.workspace(workspace_size(planned)));
  narrow.execute();

  // Half a step of e2m1 is at most 1 in units of the block's scale, which itself is within 1/16 of amax / 6.
  const std::vector<float> real = narrow.dequantized();
  for (size_t block = 0; block < real.size() / 16; ++block) {
    float largest = 0.0f;
    for (size_t i = block * 16; i < (block + 1) * 16; ++i) largest = std::max(largest, std::abs(wide.out[i]));
    for (size_t i = block * 16; i < (block + 1) * 16; ++i) {
      EXPECT_NEAR(real[i], wide.out[i], largest / 6.0f * (1.0f + 1.0f / 16.0f)) << i;
    }
  }
  EXPECT_EQ(narrow.lse, wide.lse) << "the LSE is not quantised";
  int64_t written = 0;
  for (const uint8_t scale : narrow.scales) written += scale != kUnwritten;
  EXPECT_EQ(written, 2 * 4) << "the factors of the two tokens' blocks and no others";
}

TEST(Nvfp4Output, MergedSplits_EqualTheWhole) {
  Nvfp4Decode whole, split;
  whole.config.determinism = split.config.determinism = Determinism::kNone;
  EXPECT_EQ(whole.execute(1).num_combine_tiles, 0);
  // Enough keys for the work to be cut.
  const auto lengthen = [](Nvfp4Decode& decode) {
    decode.kv_len = {1000, 2000};
    decode.indptr = {0, 125, 375};
    decode.indices.clear();
    for (int32_t i = 0; i < 375; ++i) decode.indices.push_back(i % 4);
    decode.segment_args[0].table = csr_table(decode.indices, decode.indptr);
  };
  lengthen(whole);
  lengthen(split);
  EXPECT_EQ(whole.execute(1).num_combine_tiles, 0);
  EXPECT_GT(split.execute(7).num_combine_tiles, 0) << "nothing was split";
  const std::vector<float> expected = whole.dequantized();
  const std::vector<float> got = split.dequantized();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 0.26f * std::abs(expected[i]) + 0.02f) << i;
}

TEST(Nvfp4Output, EmptyRequest_IsZeroWithScaleZero) {
  Nvfp4Decode decode;
  decode.kv_len[0] = 0;
  decode.execute();
  for (size_t i = 0; i < 4 * 8; ++i) EXPECT_EQ(decode.codes[i], 0);
  for (int64_t block = 0; block < 4; ++block) {
    EXPECT_EQ(decode.scales[static_cast<size_t>(nvfp4_scale_index(kFirstRow + 1, block, 4))], 0);
    EXPECT_NE(decode.scales[static_cast<size_t>(nvfp4_scale_index(kFirstRow + 2, block, 4))], 0);
  }
  EXPECT_EQ(decode.lse[0], -INFINITY);
}

TEST(Nvfp4Output, RefusesWhatDoesNotFit) {
  const auto message = [](const std::function<void(Nvfp4Decode&)>& change) -> std::string {
    Nvfp4Decode decode;
    change(decode);
    try {
      decode.execute();
    } catch (const Error& error) {
      EXPECT_EQ(decode.codes, std::vector<uint8_t>(decode.codes.size(), kUnwritten));
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message([](Nvfp4Decode& d) { d.args.out_block_scale.data = nullptr; }), HasSubstr("nvfp4_scale_bytes"));
  EXPECT_THAT(message([](Nvfp4Decode& d) { d.args.out_block_scale.first_row = -1; }), HasSubstr("first_row is -1"));
  EXPECT_THAT(message([](Nvfp4Decode& d) { d.args.out_scale.value = 0.0f; }), HasSubstr("out_scale.value is 0"));
  EXPECT_THAT(message([](Nvfp4Decode& d) { d.args.out.shape[2] = 16; }), HasSubstr("must be [2, 4, 8]"));
  EXPECT_THAT(message([](Nvfp4Decode& d) { d.config.head_dim_v = 24; }), HasSubstr("multiples of 16"));
}

}  // namespace
}  // namespace folio::attention
