#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"
#include "folio/merge.hpp"

namespace folio {
namespace {

/// A valid two-state merge of [2, 3, 8], to be spoilt one field at a time.
struct Call {
  std::array<float, 96> a_memory{}, b_memory{}, out_memory{};
  std::array<float, 12> a_lse{}, b_lse{}, out_lse{};
  AttentionStateView a{ConstTensorView(a_memory.data(), DType::kFloat32, {2, 3, 8}), a_lse.data(), 3, 1, LseBase::kE};
  AttentionStateView b{ConstTensorView(b_memory.data(), DType::kFloat32, {2, 3, 8}), b_lse.data(), 3, 1, LseBase::kE};
  TensorView out{out_memory.data(), DType::kFloat32, {2, 3, 8}};
  LseView lse{out_lse.data(), 3, 1, LseBase::kE};
  Scale scale;
  Stream stream;
  void run() { merge_state(Context::cpu(), a, b, out, lse, scale, stream); }
};

struct Refusal {
  const char* message;
  std::function<void(Call&)> spoil;
};

TEST(MergeState, RefusesAndWritesNothing) {
  static float scale_data = -1.0f;
  const std::vector<Refusal> refusals = {
      {"a.out has 2 dimensions; 3", [](Call& c) { c.a.out.rank = 2; }},
      {"a.out is fp8_e4m3", [](Call& c) { c.a.out.dtype = DType::kFloat8E4M3; }},
      {"a.out is unset", [](Call& c) { c.a.out.dtype = DType::kUnset; }},
      {"a.out has a negative size: [-2, 3, 8]", [](Call& c) { c.a.out.shape[0] = -2; }},
      {"a.out has shape [2, 0, 8]; at least one head", [](Call& c) { c.a.out.shape[1] = 0; }},
      {"b.out has shape [2, 3, 4]; the other state has [2, 3, 8]", [](Call& c) { c.b.out.shape[2] = 4; }},
      {"b.out has shape [1, 3, 8]", [](Call& c) { c.b.out.shape[0] = 1; }},
      {"b.out has shape [2, 2, 8]", [](Call& c) { c.b.out.shape[1] = 2; }},
      {"b.out has stride 2 in its last dimension", [](Call& c) { c.b.out.strides[2] = 2; }},
      {"b.out has a negative stride in dimension 0", [](Call& c) { c.b.out.strides[0] = -24; }},
      {"b.out has no memory", [](Call& c) { c.b.out.data = nullptr; }},
      {"b.out is not aligned", [](Call& c) { c.b.out.data = reinterpret_cast<const char*>(c.b_memory.data()) + 1; }},
      {"a.lse is null", [](Call& c) { c.a.lse = nullptr; }},
      {"b.lse is null", [](Call& c) { c.b.lse = nullptr; }},
      {"b.lse has the negative stride -3", [](Call& c) { c.b.lse_token_stride = -3; }},
      {"a.lse has base 7", [](Call& c) { c.a.base = static_cast<LseBase>(7); }},
      {"out has shape [2, 3, 16]", [](Call& c) { c.out.shape[2] = 16; }},
      {"out is fp4_e2m1x2", [](Call& c) { c.out.dtype = DType::kFloat4E2M1x2; }},
      {"out has strides (4, 8)", [](Call& c) { c.out.strides[0] = 4; }},
      {"out has strides (24, 0)", [](Call& c) { c.out.strides[1] = 0; }},
      {"lse has strides (0, 1)", [](Call& c) { c.lse.token_stride = 0; }},
      {"lse has strides (2, 1)", [](Call& c) { c.lse.token_stride = 2; }},
      {"lse has base -1", [](Call& c) { c.lse.base = static_cast<LseBase>(-1); }},
      {"out_scale is given, but only fp8", [](Call& c) { c.scale.value = 2.0f; }},
      {"out_scale is 0; positive", [](Call& c) { c.out.dtype = DType::kFloat8E4M3, c.scale.value = 0.0f; }},
      {"out_scale is nan",
       [](Call& c) {
         c.out.dtype = DType::kFloat8E5M2;
         c.scale.value = std::numeric_limits<float>::quiet_NaN();
       }},
      {"out_scale is -1", [](Call& c) { c.out.dtype = DType::kFloat8E4M3, c.scale.data = &scale_data; }},
      {"out_scale has data and the value 2",
       [](Call& c) { c.out.dtype = DType::kFloat8E4M3, c.scale.data = &scale_data, c.scale.value = 2.0f; }},
      {"out_scale is not per tensor",
       [](Call& c) { c.out.dtype = DType::kFloat8E4M3, c.scale.granularity = ScaleGranularity::kPerHead; }},
      {"out starts where an input does",
       [](Call& c) {
         c.out = TensorView(c.a_memory.data(), DType::kBFloat16, {2, 3, 8});
       }},
      {"out starts where an input does",
       [](Call& c) {
         c.out.data = c.b_memory.data(), c.out.strides = {8, 16, 1};
       }},
      {"default stream only", [](Call& c) { c.stream.handle = &c; }},
  };
  for (const Refusal& refusal : refusals) {
    Call call;
    call.a_memory.fill(1.0f);
    call.out_memory.fill(-7.0f);
    call.out_lse.fill(-7.0f);
    refusal.spoil(call);
    try {
      call.run();
      ADD_FAILURE() << "did not throw: " << refusal.message;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(std::string(refusal.message)));
    }
    EXPECT_THAT(call.out_memory, ::testing::Each(-7.0f)) << refusal.message;
    EXPECT_THAT(call.out_lse, ::testing::Each(-7.0f)) << refusal.message;
    EXPECT_THAT(call.a_memory, ::testing::Each(1.0f)) << refusal.message;
  }
  Call valid;
  EXPECT_NO_THROW(valid.run());
}

TEST(MergeStateInPlace, Refuses) {
  const Context context = Context::cpu();
  Call c;
  const LseView lse{c.out_lse.data(), 3, 1};
  folio::testing::expect_refused("merge_state_in_place: a_lse is null",
                                 [&] { merge_state_in_place(context, c.out, {}, c.b); });
  c.out.dtype = DType::kFloat8E4M3;
  folio::testing::expect_refused("a_out is fp8_e4m3", [&] { merge_state_in_place(context, c.out, lse, c.b); });
  c.out.dtype = DType::kFloat32;
  c.out.strides[0] = 0;
  folio::testing::expect_refused("a_out has strides (0, 8)", [&] { merge_state_in_place(context, c.out, lse, c.b); });
}

TEST(MergeStates, Refuses) {
  const Context context = Context::cpu();
  Call c;
  AttentionStatesView states{ConstTensorView(c.a_memory.data(), DType::kFloat32, {2, 2, 3, 8}), c.a_lse.data(), 6, 3,
                             1};
  EXPECT_NO_THROW(merge_states(context, states, c.out, c.lse));
  folio::testing::expect_refused("out has shape [2, 2, 8]; the states have [2, 3, 8]", [&] {
    merge_states(context, states, TensorView(c.out_memory.data(), DType::kFloat32, {2, 2, 8}), {});
  });
  AttentionStatesView spoilt = states;
  spoilt.out.rank = 3;
  folio::testing::expect_refused("merge_states: states.out has 3 dimensions; 4",
                                 [&] { merge_states(context, spoilt, c.out, c.lse); });
  spoilt = states;
  spoilt.lse_state_stride = -1;
  folio::testing::expect_refused("states.lse has the negative stride -1",
                                 [&] { merge_states(context, spoilt, c.out, c.lse); });
  spoilt = states;
  spoilt.lse = nullptr;
  folio::testing::expect_refused("states.lse is null", [&] { merge_states(context, spoilt, c.out, c.lse); });
  // More states than a 64-bit count of elements: refused, not wrapped.
  spoilt = states;
  spoilt.out.shape[1] = int64_t{1} << 61;
  spoilt.out.strides[1] = 0;
  folio::testing::expect_refused("overflows", [&] { merge_states(context, spoilt, c.out, c.lse); });
}

}  // namespace
}  // namespace folio
