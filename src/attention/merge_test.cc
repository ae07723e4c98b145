// The rules of a merge: golden cases, empty and NaN states, masks, layouts, memory that may be shared.
#include "folio/merge.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <vector>

#include "attention/merge_test_util.hpp"

namespace folio::merge_test {
namespace {

struct GoldenCase {
  const char* name;
  std::vector<std::vector<float>> outs;
  std::vector<float> lses;
  LseBase base;
  std::vector<float> out;
  float lse;
};

// Small cases from vLLM's tests of context-parallel LSE combination, and the rule for the all-empty row.
const std::vector<GoldenCase>& golden_cases() {
  static const std::vector<GoldenCase> cases = {
      {"equal", {{1, 2, 3, 4}, {5, 6, 7, 8}}, {0, 0}, LseBase::kE, {3, 4, 5, 6}, 0.6931472f},
      {"dominant", {{0, 0}, {1, 1}}, {-100, 0}, LseBase::kE, {1, 1}, 0.0f},
      {"exact", {{2, 4}, {6, 8}}, {1, 2}, LseBase::kE, {4.924234f, 6.924234f}, 2.313262f},
      {"base 2", {{1, 2}, {3, 4}}, {1, 2}, LseBase::k2, {2.333333f, 3.333333f}, 2.584963f},
      {"empty NaN shard", {{kNan}, {3}}, {-kInf, 0}, LseBase::kE, {3}, 0.0f},
      {"all empty", {{kNan}, {3}}, {-kInf, -kInf}, LseBase::kE, {0}, -kInf},
      {"all empty, either sign", {{1}, {kInf}}, {kInf, -kInf}, LseBase::k2, {0}, -kInf},
  };
  return cases;
}

TEST(Merge, GoldenCases) {
  for (const GoldenCase& golden : golden_cases()) {
    const auto dim = static_cast<int64_t>(golden.out.size());
    Tensor states(DType::kFloat32, {1, 2, 1, dim});
    for (int64_t s = 0; s < 2; ++s) {
      for (int64_t d = 0; d < dim; ++d) {
        states.set(s * dim + d, golden.outs[static_cast<size_t>(s)][static_cast<size_t>(d)]);
      }
    }
    Tensor out(DType::kFloat32, {1, 1, dim});
    float lse = -5;
    const auto expect_result = [&](const char* function) {
      for (int64_t d = 0; d < dim; ++d) {
        const float expected = golden.out[static_cast<size_t>(d)];
        EXPECT_NEAR(out.get(d), expected, 4 * kEps32 * std::fabs(expected)) << golden.name << ", " << function;
      }
      if (std::isinf(golden.lse)) {
        EXPECT_EQ(lse, golden.lse) << golden.name << ", " << function;
      } else {
        EXPECT_NEAR(lse, golden.lse, 4 * kEps32 * std::max(1.0f, std::fabs(golden.lse))) << golden.name;
      }
      lse = -5;
    };
    const LseView lse_view{&lse, 1, 1, golden.base};
    merge_states(context(), {states.view(), golden.lses.data(), 2, 1, 1, golden.base}, out.view(), lse_view);
    expect_result("merge_states");

    Tensor a(DType::kFloat32, {1, 1, dim});
    Tensor b(DType::kFloat32, {1, 1, dim});
    for (int64_t d = 0; d < dim; ++d) {
      a.set(d, states.get(d));
      b.set(d, states.get(dim + d));
    }
    const AttentionStateView b_state{b.view(), &golden.lses[1], 1, 1, golden.base};
    merge_state(context(), {a.view(), &golden.lses[0], 1, 1, golden.base}, b_state, out.view(), lse_view);
    expect_result("merge_state");

    out = a;
    lse = golden.lses[0];
    merge_state_in_place(context(), out.view(), lse_view, b_state);
    expect_result("merge_state_in_place");
  }
}

TEST(Merge, NanLsePropagates) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    Tensor states(DType::kFloat32, {3, 2, 1, 8});
    for (int64_t i = 0; i < states.size(); ++i) states.set(i, 1.0f);
    const std::array<float, 6> lses = {kNan, 0, 5, kNan, -kInf, kNan};
    Tensor out(dtype, {3, 1, 8});
    std::array<float, 3> lse{};
    merge_states(context(), {states.view(), lses.data(), 2, 1, 1, LseBase::kE}, out.view(), {lse.data(), 1, 1});
    for (const float value : lse) EXPECT_TRUE(std::isnan(value));
    for (int64_t i = 0; i < out.size(); ++i) EXPECT_TRUE(std::isnan(out.get(i))) << to_string(dtype);
  }
}

TEST(Merge, MaskedTokensStayAsTheyAre) {
  Tensor a(DType::kFloat16, {3, 2, 4});
  Tensor b(DType::kFloat16, {3, 2, 4});
  for (int64_t i = 0; i < a.size(); ++i) {
    a.set(i, 1.0f);
    b.set(i, 3.0f);
  }
  std::vector<float> a_lse(6, 0.0f), b_lse(6, 0.0f);
  const std::array<uint8_t, 3> mask = {1, 0, 255};
  merge_state_in_place(context(), a.view(), {a_lse.data(), 2, 1}, {b.view(), b_lse.data(), 2, 1}, mask.data());
  for (int64_t i = 0; i < a.size(); ++i) EXPECT_EQ(a.get(i), i / 8 == 1 ? 1.0f : 2.0f) << i;
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(a_lse[i], i / 2 == 1 ? 0.0f : std::numbers::ln2_v<float>) << i;
}

TEST(Merge, InPlaceOrWithoutLse_SameResult) {
  Tensor a(DType::kBFloat16, {1, 1, 8});
  Tensor b(DType::kBFloat16, {1, 1, 8});
  for (int64_t i = 0; i < 8; ++i) {
    a.set(i, 2.0f);
    b.set(i, 4.0f);
  }
  const float zero = 0;
  const AttentionStateView a_state{a.view(), &zero, 1, 1};
  const AttentionStateView b_state{b.view(), &zero, 1, 1};
  merge_state(context(), a_state, b_state, b.view(), {});  // over b
  for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(b.get(i), 3.0f);
  merge_state(context(), a_state, b_state, a.view(), {});  // over a
  for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(a.get(i), 2.5f);
}

TEST(Merge, StridedAndBroadcastTensors) {
  // Two heads of 4 inside rows of 24; b is one token for all.
  std::vector<float> a(5 * 24, kNan), out(5 * 24, -7.0f);
  const std::array<float, 8> b = {0, 1, 2, 3, 4, 5, 6, 7};
  ConstTensorView a_view(a.data(), DType::kFloat32, {5, 2, 4});
  a_view.strides = {24, 10, 1};
  TensorView out_view(out.data(), DType::kFloat32, {5, 2, 4});
  out_view.strides = {24, 8, 1};
  ConstTensorView b_view(b.data(), DType::kFloat32, {5, 2, 4});
  b_view.strides = {0, 4, 1};
  for (size_t t = 0; t < 5; ++t) {
    for (size_t h = 0; h < 2; ++h) {
      for (size_t d = 0; d < 4; ++d) a[t * 24 + h * 10 + d] = static_cast<float>(t);
    }
  }
  const float zero = 0;
  merge_state(context(), {a_view, &zero, 0, 0}, {b_view, &zero, 0, 0}, out_view, {});
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t t = i / 24, h = i % 24 / 8, d = i % 24 % 8;
    const bool written = h < 2 && d < 4;
    const float expected = (static_cast<float>(t) + static_cast<float>(4 * h + d)) / 2;
    EXPECT_EQ(out[i], written ? expected : -7.0f) << i;
  }
}

TEST(Merge, ZeroTokensAreFine) {
  const ConstTensorView none(nullptr, DType::kFloat32, {0, 2, 8});
  const TensorView out(nullptr, DType::kBFloat16, {0, 2, 8});
  EXPECT_NO_THROW(merge_state(context(), {none, nullptr, 2, 1}, {none, nullptr, 2, 1}, out, {}));
  const TensorView in_place(nullptr, DType::kFloat32, {0, 2, 8});
  EXPECT_NO_THROW(merge_state_in_place(context(), in_place, {}, {none, nullptr, 2, 1}));
  const ConstTensorView no_states(nullptr, DType::kFloat32, {0, 3, 2, 8});
  EXPECT_NO_THROW(merge_states(context(), {no_states, nullptr, 6, 2, 1}, out, {}));
}

TEST(Merge, NoStates_GiveEmptyRows) {
  Tensor out(DType::kFloat16, {2, 1, 8});
  std::array<float, 2> lse = {1, 1};
  merge_states(context(), {ConstTensorView(nullptr, DType::kFloat16, {2, 0, 1, 8}), nullptr, 0, 0, 1}, out.view(),
               {lse.data(), 1, 1});
  for (int64_t i = 0; i < out.size(); ++i) EXPECT_EQ(out.get(i), 0.0f);
  for (const float value : lse) EXPECT_EQ(value, -kInf);
}

TEST(Merge, BitsDoNotDependOnTheThreads) {
  Tensor states(DType::kFloat32, {200, 3, 4, 64});
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < states.size(); ++i) states.set(i, normal(random));
  std::vector<float> lses(200 * 3 * 4);
  for (float& value : lses) value = normal(random);
  std::vector<std::vector<unsigned char>> results;
  for (const int32_t threads : {1, 2, 5}) {
    ContextOptions options;
    options.num_threads = threads;
    Tensor out(DType::kFloat32, {200, 4, 64});
    merge_states(Context::cpu(options), {states.view(), lses.data(), 12, 4, 1, LseBase::kE}, out.view(), {});
    results.push_back(out.memory);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

}  // namespace
}  // namespace folio::merge_test
