// Merges and quantisation: the C functions have the C++ functions' bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "c_handles.hpp"
#include "folio/c/folio.h"
#include "folio/context.hpp"
#include "folio/merge.hpp"
#include "folio/quantize.hpp"

namespace folio_c_test {
namespace {

constexpr int64_t kStateTokens = 5, kStateHeads = 3, kStateDim = 16;
constexpr size_t kStateRows = kStateTokens * kStateHeads, kStateElements = kStateRows * kStateDim;

/// Two partial results, each [kStateTokens, kStateHeads, kStateDim], and their LSEs.
struct States {
  std::vector<float> out[2] = {random_floats(kStateElements, 1), random_floats(kStateElements, 2)};
  std::vector<float> lse[2] = {random_floats(kStateRows, 3), random_floats(kStateRows, 4)};

  States() { lse[1][4] = -std::numeric_limits<float>::infinity(); }
  folio_attention_state c(size_t i) const {
    return {const_packed(out[i].data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim}), lse[i].data(),
            kStateHeads, 1, FOLIO_LSE_BASE_2};
  }
  folio::AttentionStateView cpp(size_t i) const {
    return {{out[i].data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim}},
            lse[i].data(),
            kStateHeads,
            1,
            folio::LseBase::k2};
  }
};

TEST(CMerge, TwoStates) {
  const auto context = make_context();
  const States states;
  const folio_attention_state a = states.c(0), b = states.c(1);
  std::vector<uint8_t> out(kStateElements), expected(kStateElements);
  std::vector<float> lse(kStateRows), expected_lse(kStateRows);
  const folio_tensor_view out_view =
      packed(out.data(), FOLIO_DTYPE_FLOAT8_E4M3, {kStateTokens, kStateHeads, kStateDim});
  const folio_lse_view lse_view = {lse.data(), kStateHeads, 1, FOLIO_LSE_BASE_E};
  folio_scale scale = FOLIO_SCALE_INIT;
  scale.value = 0.25f;
  ASSERT_EQ(folio_merge_state(context.get(), &a, &b, &out_view, &lse_view, &scale, nullptr), FOLIO_OK)
      << folio_last_error();
  folio::Scale cpp_scale;
  cpp_scale.value = 0.25f;
  folio::merge_state(folio::Context::cpu(), states.cpp(0), states.cpp(1),
                     {expected.data(), folio::DType::kFloat8E4M3, {kStateTokens, kStateHeads, kStateDim}},
                     {expected_lse.data(), kStateHeads, 1, folio::LseBase::kE}, cpp_scale);
  expect_same(out, expected);
  expect_same(lse, expected_lse);
}

TEST(CMerge, InPlaceWhereTheMaskSays) {
  const auto context = make_context();
  States states, twin;
  const folio_attention_state b = states.c(1);
  const std::vector<uint8_t> mask = {1, 0, 1, 1, 0};
  const folio_tensor_view a_out =
      packed(states.out[0].data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  const folio_lse_view a_lse = {states.lse[0].data(), kStateHeads, 1, FOLIO_LSE_BASE_2};
  ASSERT_EQ(folio_merge_state_in_place(context.get(), &a_out, &a_lse, &b, mask.data(), nullptr), FOLIO_OK)
      << folio_last_error();
  folio::merge_state_in_place(folio::Context::cpu(),
                              {twin.out[0].data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim}},
                              {twin.lse[0].data(), kStateHeads, 1, folio::LseBase::k2}, twin.cpp(1), mask.data());
  expect_same(states.out[0], twin.out[0]);
  expect_same(states.lse[0], twin.lse[0]);
  EXPECT_NE(states.out[0], States().out[0]);
}

TEST(CMerge, ManyStates) {
  const auto context = make_context();
  constexpr int64_t kStateStates = 4;
  const std::vector<float> partial = random_floats(kStateElements * kStateStates, 5),
                           partial_lse = random_floats(kStateRows * kStateStates, 6);
  std::vector<float> out(kStateElements), expected(kStateElements);
  const folio_attention_states states = {
      const_packed(partial.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateStates, kStateHeads, kStateDim}),
      partial_lse.data(),
      kStateStates * kStateHeads,
      kStateHeads,
      1,
      FOLIO_LSE_BASE_E};
  const folio_tensor_view out_view = packed(out.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  ASSERT_EQ(folio_merge_states(context.get(), &states, &out_view, nullptr, nullptr, nullptr), FOLIO_OK)
      << folio_last_error();
  folio::merge_states(folio::Context::cpu(),
                      {{partial.data(), folio::DType::kFloat32, {kStateTokens, kStateStates, kStateHeads, kStateDim}},
                       partial_lse.data(),
                       kStateStates * kStateHeads,
                       kStateHeads,
                       1,
                       folio::LseBase::kE},
                      {expected.data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim}}, {});
  expect_same(out, expected);
}

TEST(CMerge, LsesOfAlibi) {
  const auto context = make_context();
  std::vector<float> lse = random_floats(kStateRows, 7), expected = lse;
  const std::vector<int32_t> cu_q = {0, 2, 5}, first_pos = {10, 3};
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f};
  ASSERT_EQ(
      folio_shift_alibi_lse(context.get(), lse.data(), cu_q.data(), first_pos.data(), 2, slopes.data(), 3, nullptr),
      FOLIO_OK)
      << folio_last_error();
  folio::shift_alibi_lse(folio::Context::cpu(), expected.data(), cu_q, first_pos, slopes);
  expect_same(lse, expected);
}

TEST(CMerge, BadArguments) {
  const auto owned = make_context();
  const folio_context* context = owned.get();
  const States states;
  folio_attention_state a = states.c(0), b = states.c(1);
  std::vector<float> out(kStateElements, -7.0f);
  const folio_tensor_view view = packed(out.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  const folio_lse_view lse = {out.data(), kStateHeads, 1, FOLIO_LSE_BASE_E};
  expect_null_refused(folio_merge_state(nullptr, &a, &b, &view, nullptr, nullptr, nullptr), "context");
  expect_null_refused(folio_merge_state(context, nullptr, &b, &view, nullptr, nullptr, nullptr), "a");
  expect_null_refused(folio_merge_state(context, &a, nullptr, &view, nullptr, nullptr, nullptr), "b");
  expect_null_refused(folio_merge_state(context, &a, &b, nullptr, nullptr, nullptr, nullptr), "out");
  expect_null_refused(folio_merge_state_in_place(context, nullptr, &lse, &b, nullptr, nullptr), "a_out");
  expect_null_refused(folio_merge_state_in_place(context, &view, nullptr, &b, nullptr, nullptr), "a_lse");
  expect_null_refused(folio_merge_states(context, nullptr, &view, nullptr, nullptr, nullptr), "states");
  const int32_t zero = 0;
  expect_null_refused(folio_shift_alibi_lse(context, nullptr, &zero, nullptr, 0, nullptr, 0, nullptr), "lse");
  expect_null_refused(folio_shift_alibi_lse(context, out.data(), nullptr, nullptr, 0, nullptr, 0, nullptr), "cu_q");
  expect_refusal(folio_shift_alibi_lse(context, out.data(), &zero, nullptr, -1, nullptr, 0, nullptr),
                 FOLIO_INVALID_ARGUMENT, "first_pos has -1 elements");
  a.base = 2;
  expect_refusal(folio_merge_state(context, &a, &b, &view, nullptr, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                 "base is 2");
  a = states.c(0);
  a.out.dtype = 99;
  expect_refusal(folio_merge_state(context, &a, &b, &view, nullptr, nullptr, nullptr), FOLIO_INVALID_ARGUMENT,
                 "out.dtype is 99");
  a = states.c(0);
  a.out.shape[0] = 4;
  EXPECT_EQ(folio_merge_state(context, &a, &b, &view, nullptr, nullptr, nullptr), FOLIO_INVALID_ARGUMENT);
  EXPECT_EQ(out[0], -7.0f);
}

TEST(CQuantize, Fp8) {
  const auto context = make_context();
  const std::vector<float> in = random_floats(kStateElements, 8);
  for (const float scale_value : {1.0f, 0.0625f}) {
    std::vector<uint8_t> out(kStateElements), expected(kStateElements);
    const folio_const_tensor_view in_view =
        const_packed(in.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
    const folio_tensor_view out_view =
        packed(out.data(), FOLIO_DTYPE_FLOAT8_E5M2, {kStateTokens, kStateHeads, kStateDim});
    folio_scale scale = FOLIO_SCALE_INIT;
    scale.value = scale_value;
    ASSERT_EQ(folio_quantize_fp8(context.get(), &in_view, &out_view, scale_value == 1.0f ? nullptr : &scale, nullptr),
              FOLIO_OK)
        << folio_last_error();
    folio::Scale cpp_scale;
    cpp_scale.value = scale_value;
    folio::quantize_fp8(
        folio::Context::cpu(), {in.data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim}},
        {expected.data(), folio::DType::kFloat8E5M2, {kStateTokens, kStateHeads, kStateDim}}, cpp_scale);
    expect_same(out, expected);
  }
}

TEST(CQuantize, Nvfp4ThereAndBack) {
  const auto context = make_context();
  const std::vector<float> in = random_floats(kStateElements, 9);
  int64_t bytes = 0;
  ASSERT_EQ(folio_nvfp4_scale_bytes(kStateTokens + 2, kStateHeads * kStateDim / 16, &bytes), FOLIO_OK);
  ASSERT_EQ(bytes, folio::nvfp4_scale_bytes(kStateTokens + 2, kStateHeads * kStateDim / 16));
  std::vector<uint8_t> out(kStateElements / 2), expected(kStateElements / 2);
  std::vector<uint8_t> factors(static_cast<size_t>(bytes)), expected_factors(factors);
  const folio_const_tensor_view in_view =
      const_packed(in.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  const folio_tensor_view out_view =
      packed(out.data(), FOLIO_DTYPE_FLOAT4_E2M1X2, {kStateTokens, kStateHeads, kStateDim / 2});
  ASSERT_EQ(folio_quantize_nvfp4(context.get(), &in_view, &out_view, factors.data(), 2, 8.0f, nullptr), FOLIO_OK)
      << folio_last_error();
  folio::quantize_nvfp4(folio::Context::cpu(),
                        {in.data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim}},
                        {expected.data(), folio::DType::kFloat4E2M1x2, {kStateTokens, kStateHeads, kStateDim / 2}},
                        {expected_factors.data(), 2}, 8.0f);
  expect_same(out, expected);
  expect_same(factors, expected_factors);

  std::vector<float> back(kStateElements), expected_back(kStateElements);
  const folio_const_tensor_view stored =
      const_packed(out.data(), FOLIO_DTYPE_FLOAT4_E2M1X2, {kStateTokens, kStateHeads, kStateDim / 2});
  const folio_tensor_view back_view = packed(back.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  ASSERT_EQ(folio_dequantize_nvfp4(context.get(), &stored, factors.data(), 2, 8.0f, &back_view, nullptr), FOLIO_OK)
      << folio_last_error();
  folio::dequantize_nvfp4(folio::Context::cpu(),
                          {expected.data(), folio::DType::kFloat4E2M1x2, {kStateTokens, kStateHeads, kStateDim / 2}},
                          {expected_factors.data(), 2}, 8.0f,
                          {expected_back.data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim}});
  expect_same(back, expected_back);
}

TEST(CQuantize, ScalesOfAFirstBatch) {
  const auto context = make_context();
  const std::vector<float> values = random_floats(kStateElements, 10);
  const folio_const_tensor_view view =
      const_packed(values.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  const folio::ConstTensorView cpp(values.data(), folio::DType::kFloat32, {kStateTokens, kStateHeads, kStateDim});
  std::vector<float> scales(3), expected(3);
  ASSERT_EQ(folio_calculate_kv_scales(context.get(), &view, &view, &view, nullptr, scales.data(), nullptr), FOLIO_OK)
      << folio_last_error();
  folio::calculate_kv_scales(folio::Context::cpu(), cpp, cpp, cpp, expected);
  expect_same(scales, expected);
  const folio_kv_scale_constants constants = {0.0f, 50.0f, 0.0f};  // zeros: the defaults
  ASSERT_EQ(folio_calculate_kv_scales(context.get(), &view, &view, &view, &constants, scales.data(), nullptr),
            FOLIO_OK);
  EXPECT_EQ(scales[0], expected[0]);
  EXPECT_EQ(scales[1], expected[1] * 4);
  EXPECT_EQ(scales[2], expected[2]);
}

TEST(CQuantize, BadArguments) {
  const auto owned = make_context();
  const folio_context* context = owned.get();
  std::vector<float> values(kStateElements);
  const folio_const_tensor_view in =
      const_packed(values.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  const folio_tensor_view out = packed(values.data(), FOLIO_DTYPE_FLOAT32, {kStateTokens, kStateHeads, kStateDim});
  int64_t bytes = -1;
  expect_null_refused(folio_nvfp4_scale_bytes(1, 1, nullptr), "bytes");
  expect_refusal(folio_nvfp4_scale_bytes(-1, 1, &bytes), FOLIO_INVALID_ARGUMENT, "rows is -1");
  expect_refusal(folio_nvfp4_scale_bytes(1, INT64_MAX, &bytes), FOLIO_INVALID_ARGUMENT, "blocks_per_row is");
  EXPECT_EQ(bytes, -1);
  expect_null_refused(folio_quantize_fp8(nullptr, &in, &out, nullptr, nullptr), "context");
  expect_null_refused(folio_quantize_fp8(context, nullptr, &out, nullptr, nullptr), "in");
  expect_null_refused(folio_quantize_fp8(context, &in, nullptr, nullptr, nullptr), "out");
  expect_null_refused(folio_quantize_nvfp4(context, &in, &out, nullptr, 0, 1.0f, nullptr), "block_scale");
  expect_null_refused(folio_dequantize_nvfp4(context, &in, nullptr, 0, 1.0f, &out, nullptr), "block_scale");
  expect_null_refused(folio_calculate_kv_scales(context, nullptr, &in, &in, nullptr, values.data(), nullptr), "q");
  expect_null_refused(folio_calculate_kv_scales(context, &in, &in, &in, nullptr, nullptr, nullptr), "scales");
}

TEST(CStatus, NamesOfCodesAndTypes) {
  EXPECT_STREQ(folio_status_name(FOLIO_OK), "ok");
  EXPECT_STREQ(folio_status_name(FOLIO_STALE_PLAN), "stale plan");
  for (folio_status status = FOLIO_OK; status <= FOLIO_INTERNAL; ++status) {
    EXPECT_STRNE(folio_status_name(status), "unknown status") << status;
  }
  for (const folio_status status : {-1, FOLIO_INTERNAL + 1, INT32_MAX}) {
    EXPECT_STREQ(folio_status_name(status), "unknown status");
  }
  EXPECT_STREQ(folio_dtype_name(FOLIO_DTYPE_BFLOAT16), "bfloat16");
  EXPECT_STREQ(folio_dtype_name(99), "invalid");
  EXPECT_EQ(folio_dtype_size(FOLIO_DTYPE_FLOAT16), 2);
  EXPECT_EQ(folio_dtype_size(-1), 0);
}

TEST(CStatus, ALibraryOverThisOneSetsTheMessage) {
  std::string text = "the engine's words";
  folio_set_last_error(text.c_str());
  text.assign("changed");
  EXPECT_STREQ(folio_last_error(), "the engine's words");
  folio_set_last_error(nullptr);
  EXPECT_STREQ(folio_last_error(), "");
}

TEST(CViews, PackedTensors) {
  const folio_tensor_view view = packed(nullptr, FOLIO_DTYPE_FLOAT16, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(view.shape[3], 0);
  folio_tensor_view same = view;
  const int64_t shape[] = {2, -1, INT64_MAX, 4, 1, 1};
  expect_refusal(folio_make_tensor_view(nullptr, FOLIO_DTYPE_UNSET, 1, shape, &same), FOLIO_INVALID_ARGUMENT,
                 "dtype is 0");
  expect_refusal(folio_make_tensor_view(nullptr, FOLIO_DTYPE_INT8, 6, shape, &same), FOLIO_INVALID_ARGUMENT,
                 "rank is 6");
  expect_refusal(folio_make_tensor_view(nullptr, FOLIO_DTYPE_INT8, 2, shape, &same), FOLIO_INVALID_ARGUMENT,
                 "shape[1] is -1");
  expect_refusal(folio_make_tensor_view(nullptr, FOLIO_DTYPE_INT8, 2, shape + 2, &same), FOLIO_INVALID_ARGUMENT,
                 "shape has more than");
  expect_null_refused(folio_make_tensor_view(nullptr, FOLIO_DTYPE_INT8, 1, nullptr, &same), "shape");
  expect_null_refused(folio_make_const_tensor_view(nullptr, FOLIO_DTYPE_INT8, 1, shape, nullptr), "view");
  EXPECT_EQ(same.strides[0], 12);
}

}  // namespace
}  // namespace folio_c_test
