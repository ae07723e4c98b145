// The numbers of a merge, against the rule in double precision and against attention that was not split.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <ostream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/merge_test_util.hpp"
#include "core/golden_test.hpp"
#include "core/instrumented_test_util.hpp"
#include "folio/merge.hpp"

namespace folio::merge_test {
namespace {

struct Sweep {
  int64_t tokens;
  int64_t heads;
  int64_t dim;
  DType in;
  DType out;
};

void PrintTo(const Sweep& s, std::ostream* os) {
  *os << s.tokens << "x" << s.heads << "x" << s.dim << " " << to_string(s.in) << "->" << to_string(s.out);
}

class MergeSweep : public ::testing::TestWithParam<Sweep> {};

/// Random states; about one LSE in ten is infinite, in either sign; LSEs are [heads, tokens], in different bases.
TEST_P(MergeSweep, AgreesWithDoublePrecision) {
  const Sweep& p = GetParam();
  std::mt19937 random(41);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  const float scale = is_fp8(p.out) ? 0.05f : 1.0f;
  std::array<Tensor, 2> in = {Tensor(p.in, {p.tokens, p.heads, p.dim}), Tensor(p.in, {p.tokens, p.heads, p.dim})};
  std::array<std::vector<float>, 2> lse;
  for (size_t s = 0; s < 2; ++s) {
    for (int64_t i = 0; i < in[s].size(); ++i) in[s].set(i, normal(random));
    lse[s].resize(static_cast<size_t>(p.tokens * p.heads));
    for (float& value : lse[s]) {
      value = 5 * normal(random);
      if (uniform(random) < 0.1f) value = uniform(random) < 0.5f ? kInf : -kInf;
    }
  }
  // Whatever an empty state holds, it must not show.
  for (size_t s = 0; s < 2; ++s) {
    for (int64_t row = 0; row < p.tokens * p.heads; ++row) {
      if (!std::isinf(lse[s][static_cast<size_t>(row % p.heads * p.tokens + row / p.heads)])) continue;
      for (int64_t d = 0; d < p.dim; ++d) in[s].set(row * p.dim + d, d % 2 == 0 ? kNan : kInf);
    }
  }
  Tensor out(p.out, {p.tokens, p.heads, p.dim});
  std::vector<float> out_lse(lse[0].size(), -7.0f);
  Scale out_scale;
  out_scale.value = scale;
  merge_state(context(), {in[0].view(), lse[0].data(), 1, p.tokens, LseBase::kE},
              {in[1].view(), lse[1].data(), 1, p.tokens, LseBase::k2}, out.view(),
              {out_lse.data(), 1, p.tokens, LseBase::k2}, out_scale);

  for (int64_t token = 0; token < p.tokens; ++token) {
    for (int64_t head = 0; head < p.heads; ++head) {
      const auto at = static_cast<size_t>(head * p.tokens + token);
      const int64_t first = (token * p.heads + head) * p.dim;
      std::vector<std::vector<double>> values(2, std::vector<double>(static_cast<size_t>(p.dim)));
      double largest = 0;
      for (size_t s = 0; s < 2; ++s) {
        for (int64_t d = 0; d < p.dim; ++d) {
          const double value = in[s].get(first + d);
          values[s][static_cast<size_t>(d)] = value;
          if (!std::isinf(lse[s][at])) largest = std::max(largest, std::fabs(value));
        }
      }
      const Row expected =
          merge_in_double(values, {lse[0][at], lse[1][at] * std::numbers::ln2}, static_cast<size_t>(p.dim));
      for (int64_t d = 0; d < p.dim; ++d) {
        const double stored = expected.out[static_cast<size_t>(d)] / static_cast<double>(scale);
        const double inside = float_error(2, largest) / static_cast<double>(scale);
        const double error = std::fabs(static_cast<double>(out.get(first + d)) - stored);
        ASSERT_LE(error, inside + rounding(p.out, std::fabs(stored) + inside))
            << "token " << token << ", head " << head << ", component " << d;
      }
      const double expected_lse = expected.lse * std::numbers::log2e;
      if (std::isinf(expected_lse)) {
        ASSERT_EQ(out_lse[at], expected_lse);
      } else {
        // One float32 logarithm of a sum of two weights, one rounding of the whole.
        ASSERT_NEAR(out_lse[at], expected_lse, 4 * kEps32 + rounding(DType::kFloat32, expected_lse));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, MergeSweep,
                         ::testing::Values(Sweep{1, 1, 1, DType::kFloat32, DType::kFloat32},
                                           Sweep{39, 4, 32, DType::kFloat32, DType::kFloat32},
                                           Sweep{256, 4, 48, DType::kFloat16, DType::kFloat16},
                                           Sweep{613, 8, 64, DType::kBFloat16, DType::kBFloat16},
                                           Sweep{64, 16, 96, DType::kFloat16, DType::kFloat8E4M3},
                                           Sweep{64, 32, 128, DType::kBFloat16, DType::kFloat8E4M3},
                                           Sweep{33, 8, 256, DType::kFloat32, DType::kFloat8E5M2},
                                           Sweep{17, 3, 576, DType::kBFloat16, DType::kFloat32}));

/// A dtype by the name that to_string gives it.
DType dtype_named(const std::string& name) {
  for (int32_t value = 0; value < 16; ++value) {
    if (to_string(static_cast<DType>(value)) == name) return static_cast<DType>(value);
  }
  throw std::runtime_error("no dtype is called " + name);
}

std::vector<Sweep> golden_sweep() {
  std::vector<Sweep> sweep;
  for (const folio::testing::GoldenCase& c : folio::testing::golden_cases("attention/merge_sweep")) {
    const auto tokens = c.at<int64_t>("tokens");
    sweep.push_back({folio::testing::kInstrumented ? std::min<int64_t>(tokens, 40) : tokens, c.at<int64_t>("heads"),
                     c.at<int64_t>("head_dim"), dtype_named(c.at<std::string>("in")),
                     dtype_named(c.at<std::string>("out"))});
  }
  return sweep;
}
INSTANTIATE_TEST_SUITE_P(Golden, MergeSweep, ::testing::ValuesIn(golden_sweep()));

struct StatesSweep {
  int64_t tokens, states, heads, dim;
  DType in, out;
  bool heads_outermost;  ///< lse lies [heads, states, tokens] instead of [tokens, states, heads]
};

class MergeStatesSweep : public ::testing::TestWithParam<StatesSweep> {};

TEST_P(MergeStatesSweep, AgreesWithDoublePrecision) {
  const StatesSweep& p = GetParam();
  std::mt19937 random(97);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  Tensor in(p.in, {p.tokens, p.states, p.heads, p.dim});
  for (int64_t i = 0; i < in.size(); ++i) in.set(i, normal(random));
  std::vector<float> lse(static_cast<size_t>(p.tokens * p.states * p.heads));
  for (float& value : lse) value = uniform(random) < 0.1f ? -kInf : 4 * normal(random);
  AttentionStatesView view{in.view(), lse.data(), p.states * p.heads, p.heads, 1, LseBase::kE};
  if (p.heads_outermost) {
    view.lse_token_stride = 1;
    view.lse_state_stride = p.tokens;
    view.lse_head_stride = p.tokens * p.states;
  }
  Tensor out(p.out, {p.tokens, p.heads, p.dim});
  std::vector<float> out_lse(static_cast<size_t>(p.tokens * p.heads));
  merge_states(context(), view, out.view(), {out_lse.data(), p.heads, 1, LseBase::kE});

  const auto dim = static_cast<size_t>(p.dim);
  const auto count = static_cast<size_t>(p.states);
  for (int64_t row = 0; row < p.tokens * p.heads; ++row) {
    const int64_t token = row / p.heads;
    const int64_t head = row % p.heads;
    std::vector<std::vector<double>> values(count, std::vector<double>(dim));
    std::vector<double> lses(count);
    double largest = 0;
    for (size_t s = 0; s < count; ++s) {
      const auto state = static_cast<int64_t>(s);
      lses[s] = lse[static_cast<size_t>(token * view.lse_token_stride + state * view.lse_state_stride +
                                        head * view.lse_head_stride)];
      for (size_t d = 0; d < dim; ++d) {
        values[s][d] = in.get(((token * p.states + state) * p.heads + head) * p.dim + static_cast<int64_t>(d));
        largest = std::max(largest, std::fabs(values[s][d]));
      }
    }
    const Row expected = merge_in_double(values, lses, dim);
    const double inside = float_error(count, largest);
    for (size_t d = 0; d < dim; ++d) {
      const double error =
          std::fabs(static_cast<double>(out.get(row * p.dim + static_cast<int64_t>(d))) - expected.out[d]);
      ASSERT_LE(error, inside + rounding(p.out, std::fabs(expected.out[d]) + inside)) << "row " << row;
    }
    const double tolerance = (static_cast<double>(count) + 3) * kEps32 + rounding(DType::kFloat32, expected.lse);
    ASSERT_NEAR(out_lse[static_cast<size_t>(row)], expected.lse, tolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, MergeStatesSweep,
                         ::testing::Values(StatesSweep{7, 3, 2, 64, DType::kFloat32, DType::kFloat32, false},
                                           StatesSweep{7, 3, 2, 64, DType::kFloat32, DType::kFloat32, true},
                                           StatesSweep{64, 9, 4, 128, DType::kBFloat16, DType::kFloat16, true},
                                           StatesSweep{1, 40, 5, 8, DType::kFloat16, DType::kFloat32, false}));

/// Attention of one query row over keys [begin, end), in double, stored as float32.
struct Part {
  std::vector<float> out;
  float lse;
};
Part attend(const std::vector<double>& logits, const std::vector<std::vector<double>>& values, size_t begin,
            size_t end) {
  const size_t dim = values[0].size();
  std::vector<double> out(dim, 0.0);
  double sum = 0;
  for (size_t k = begin; k < end; ++k) {
    sum += std::exp(logits[k]);
    for (size_t d = 0; d < dim; ++d) out[d] += std::exp(logits[k]) * values[k][d];
  }
  Part part{std::vector<float>(dim), static_cast<float>(std::log(sum))};
  for (size_t d = 0; d < dim; ++d) part.out[d] = static_cast<float>(sum == 0 ? 0.0 : out[d] / sum);
  return part;
}

TEST(Merge, AnySplit_EqualsTheWhole) {
  constexpr int64_t kDim = 64;
  constexpr size_t kKeys = 50;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  std::vector<double> logits(kKeys);
  std::vector<std::vector<double>> values(kKeys, std::vector<double>(kDim));
  double largest = 0;
  for (size_t k = 0; k < kKeys; ++k) {
    logits[k] = 3 * normal(random);
    for (double& v : values[k]) largest = std::max(largest, std::fabs(v = normal(random)));
  }
  const Part whole = attend(logits, values, 0, kKeys);
  // An empty split (17..17) among them.
  const std::vector<size_t> cuts = {0, 1, 17, 17, 31, kKeys};
  const auto parts = static_cast<int64_t>(cuts.size()) - 1;
  Tensor states(DType::kFloat32, {1, parts, 1, kDim});
  std::vector<float> lses;
  for (int64_t s = 0; s < parts; ++s) {
    const Part part = attend(logits, values, cuts[static_cast<size_t>(s)], cuts[static_cast<size_t>(s + 1)]);
    for (int64_t d = 0; d < kDim; ++d) states.set(s * kDim + d, part.out[static_cast<size_t>(d)]);
    lses.push_back(part.lse);
  }
  // Every stage loses a float_error, and the LSEs that it starts from are rounded: |lse| < 16 loses at most 16 * eps
  // / 2.
  const double tolerance = static_cast<double>(parts) * (float_error(2, largest) + 16 * kEps32 * largest);
  const auto expect_whole = [&](const Tensor& out, float lse, const char* how) {
    for (int64_t d = 0; d < kDim; ++d) EXPECT_NEAR(out.get(d), whole.out[static_cast<size_t>(d)], tolerance) << how;
    EXPECT_NEAR(lse, whole.lse, static_cast<double>(parts) * 16 * kEps32) << how;
  };
  Tensor out(DType::kFloat32, {1, 1, kDim});
  float lse = 0;
  merge_states(context(), {states.view(), lses.data(), parts, 1, 1, LseBase::kE}, out.view(), {&lse, 1, 1});
  expect_whole(out, lse, "at once");

  const auto part_view = [&](int64_t s) {
    ConstTensorView view(states.memory.data() + s * kDim * 4, DType::kFloat32, {1, 1, kDim});
    return AttentionStateView{view, &lses[static_cast<size_t>(s)], 1, 1, LseBase::kE};
  };
  for (const bool forwards : {true, false}) {
    for (int64_t d = 0; d < kDim; ++d) out.set(d, kNan);
    lse = -kInf;  // the empty state
    for (int64_t i = 0; i < parts; ++i) {
      merge_state_in_place(context(), out.view(), {&lse, 1, 1}, part_view(forwards ? i : parts - 1 - i));
    }
    expect_whole(out, lse, forwards ? "left to right" : "right to left");
  }
}

}  // namespace
}  // namespace folio::merge_test
