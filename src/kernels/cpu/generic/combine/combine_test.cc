#include "kernels/cpu/generic/combine/combine.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace folio::kernels::generic {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Rows of float32 states, [tokens, states, heads, dim], and a packed output. The merge rules themselves are tested
/// through the public functions (attention/merge_test.cc).
struct Case {
  Case(int32_t tokens, int32_t states, int32_t heads, int32_t dim) {
    values.resize(static_cast<size_t>(tokens * states * heads * dim));
    lse.resize(static_cast<size_t>(tokens * states * heads));
    out.assign(static_cast<size_t>(tokens * heads * dim), -7.0f);
    out_lse.assign(static_cast<size_t>(tokens * heads), -7.0f);
    source.out = values.data();
    source.dtype = DType::kFloat32;
    source.num_states = states;
    source.state_stride = heads * dim;
    source.token_stride = states * heads * dim;
    source.head_stride = dim;
    source.lse = lse.data();
    source.lse_state_stride = heads;
    source.lse_token_stride = states * heads;
    source.lse_head_stride = 1;
    params.num_heads = heads;
    params.head_dim = dim;
    params.out = out.data();
    params.out_dtype = DType::kFloat32;
    params.out_token_stride = heads * dim;
    params.out_head_stride = dim;
    params.lse = {out_lse.data(), heads, 1, LseBase::kE};
  }
  void run(int64_t begin, int64_t end) {
    params.sources = std::span(&source, 1);
    combine_rows(params, begin, end);
  }

  std::vector<float> values, lse, out, out_lse;
  CombineSource source;
  CombineParams params;
};

TEST(CombineRows, WritesOnlyItsRange) {
  Case c(2, 1, 2, 4);
  for (size_t i = 0; i < c.values.size(); ++i) c.values[i] = static_cast<float>(i);
  c.run(1, 3);
  for (size_t i = 0; i < c.out.size(); ++i) {
    const bool inside = i >= 4 && i < 12;
    EXPECT_EQ(c.out[i], inside ? c.values[i] : -7.0f) << i;
  }
  EXPECT_EQ(c.out_lse, (std::vector<float>{-7, 0, 0, -7}));
}

TEST(CombineRows, LongRowsGoChunkByChunk) {
  const int32_t dim = 576;
  Case c(1, 2, 1, dim);
  for (int32_t i = 0; i < dim; ++i) {
    c.values[static_cast<size_t>(i)] = static_cast<float>(i);
    c.values[static_cast<size_t>(dim + i)] = static_cast<float>(i + 2);
  }
  c.run(0, 1);
  for (int32_t i = 0; i < dim; ++i)
    EXPECT_EQ(c.out[static_cast<size_t>(i)], static_cast<float>(i + 1));  // equal weights
}

TEST(CombineRows, OneStateIsCopiedToTheBit) {
  Case c(1, 3, 1, 4);
  const std::array<float, 4> kept = {-0.0f, 1e-40f, 3.4e38f, 0.1f};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (size_t i = 0; i < 4; ++i) {
    c.values[i] = nan;
    c.values[4 + i] = kept[i];
    c.values[8 + i] = kInf;
  }
  c.lse = {-kInf, 12.25f, kInf};
  c.run(0, 1);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(c.out[i], kept[i]);
    EXPECT_EQ(std::signbit(c.out[i]), std::signbit(kept[i]));
  }
  EXPECT_EQ(c.out_lse[0], 12.25f);
}

TEST(CombineRows, LargeLsesLoseNothing) {
  // Naive e^lse overflows; a difference taken in float after a change of base would be off by 1e-2 here.
  Case c(1, 2, 1, 1);
  c.values = {0.0f, 1.0f};
  c.lse = {100000.0f, 100001.0f};
  c.source.base = LseBase::k2;
  c.params.lse.base = LseBase::k2;
  c.run(0, 1);
  // Two thirds: weights 1 and 2. The bound is a few roundings of a float32 exponential and quotient.
  EXPECT_NEAR(c.out[0], 2.0f / 3.0f, 4 * std::numeric_limits<float>::epsilon());
  EXPECT_EQ(c.out_lse[0], static_cast<float>(100001.0 + std::log2(1.5)));
}

TEST(CombineRows, NoStatesIsEmpty) {
  Case c(1, 1, 1, 2);
  c.source.num_states = 0;
  c.run(0, 1);
  EXPECT_EQ(c.out, (std::vector<float>{0, 0}));
  EXPECT_EQ(c.out_lse[0], -kInf);
}

}  // namespace
}  // namespace folio::kernels::generic
