#include "folio/merge.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "folio/types/float_convert.hpp"

namespace folio {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kEps32 = std::numeric_limits<float>::epsilon();  // 2^-23: twice the rounding error of one operation

const Context& context() {
  static const Context shared = [] {
    ContextOptions options;
    options.num_threads = 3;
    return Context::cpu(options);
  }();
  return shared;
}

/// A packed tensor with its memory.
class Tensor {
 public:
  Tensor(DType type, std::vector<int64_t> dims) : dtype(type), shape(std::move(dims)) {
    int64_t count = 1;
    for (const int64_t dim : shape) count *= dim;
    memory.assign(static_cast<size_t>(count * size_of(type)), 0xcd);
  }
  int64_t size() const { return static_cast<int64_t>(memory.size()) / size_of(dtype); }
  void set(int64_t i, float value) { store_from_float(memory.data(), dtype, i, value); }
  float get(int64_t i) const { return load_as_float(memory.data(), dtype, i); }
  TensorView view() {
    TensorView v;
    v.data = memory.data();
    v.dtype = dtype;
    v.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t k = shape.size(); k-- > 0; stride *= shape[k]) {
      v.shape[k] = shape[k];
      v.strides[k] = stride;
    }
    return v;
  }

  DType dtype;
  std::vector<int64_t> shape;
  std::vector<unsigned char> memory;
};

struct Row {
  std::vector<double> out;
  double lse;
};

/// The merge rule in double precision, from its definition: natural logarithms, states with an infinite LSE left out.
Row merge_in_double(const std::vector<std::vector<double>>& outs, const std::vector<double>& lses, size_t dim) {
  Row row{std::vector<double>(dim, 0.0), -std::numeric_limits<double>::infinity()};
  double top = row.lse;
  for (const double lse : lses) {
    if (!std::isinf(lse)) top = std::max(top, lse);
  }
  if (std::isinf(top)) return row;
  double sum = 0;
  for (size_t s = 0; s < lses.size(); ++s) {
    if (std::isinf(lses[s])) continue;
    const double weight = std::exp(lses[s] - top);
    sum += weight;
    for (size_t d = 0; d < dim; ++d) row.out[d] += weight * outs[s][d];
  }
  for (double& value : row.out) value /= sum;
  row.lse = top + std::log(sum);
  return row;
}

/// Half the distance between neighbouring values of `dtype` around `value`: the error of one rounding.
double rounding(DType dtype, double value) {
  int mantissa = 23, smallest = -126;
  switch (dtype) {
    case DType::kFloat16: mantissa = 10, smallest = -14; break;
    case DType::kBFloat16: mantissa = 7; break;
    case DType::kFloat8E4M3: mantissa = 3, smallest = -6; break;
    case DType::kFloat8E5M2: mantissa = 2, smallest = -14; break;
    default: break;
  }
  const int exponent = value == 0 ? smallest : std::max(smallest, std::ilogb(value));
  return std::ldexp(0.5, exponent - mantissa);
}

/// What float32 arithmetic may lose on a merged value. Each weight is an exponential (argument rounded once, at most
/// ~90 in size before the weight vanishes: error weight * |argument| * eps / 2 <= eps / 5 of the total), a sum, a
/// quotient; each product and sum of `states` terms rounds once more. `largest` bounds |values|.
double float_error(size_t states, double largest) {
  return (static_cast<double>(states) + 6) * kEps32 * largest;
}

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

class MergeSweep : public testing::TestWithParam<Sweep> {};

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
                         testing::Values(Sweep{1, 1, 1, DType::kFloat32, DType::kFloat32},
                                         Sweep{39, 4, 32, DType::kFloat32, DType::kFloat32},
                                         Sweep{256, 4, 48, DType::kFloat16, DType::kFloat16},
                                         Sweep{613, 8, 64, DType::kBFloat16, DType::kBFloat16},
                                         Sweep{64, 16, 96, DType::kFloat16, DType::kFloat8E4M3},
                                         Sweep{64, 32, 128, DType::kBFloat16, DType::kFloat8E4M3},
                                         Sweep{33, 8, 256, DType::kFloat32, DType::kFloat8E5M2},
                                         Sweep{17, 3, 576, DType::kBFloat16, DType::kFloat32}));

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

TEST(Merge, SplitAttentionIsWholeAttentionHoweverItIsSplit) {
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

TEST(Merge, OutputMayBeAnInputAndTheLseMayBeLeftOut) {
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

TEST(Merge, NoStatesAreAllEmpty) {
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
}  // namespace folio
