#include "testing/reference_attention.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "folio/types/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Inputs below are small dyadic numbers; what remains is the rounding of exp and log in float64.
constexpr double kClose = 1e-14;

/// One request, one head, head_dim 1, float32, ragged: logits are q * k * sm_scale, so that results can be worked out
/// by hand. sm_scale is 1.
struct Tiny {
  AttentionConfig config;
  std::vector<int32_t> cu_q{0, 1};
  std::vector<int32_t> kv_len;
  std::vector<int32_t> first_pos;
  std::vector<int32_t> indptr;
  std::vector<int32_t> q_first_pos;
  std::vector<float> q{1.0f};
  std::vector<float> k, v;
  std::vector<KvSegment> segments{1};
  std::vector<SegmentArgs> segment_args{1};
  BatchView batch;
  AttentionArgs args;

  Tiny(std::vector<float> keys, std::vector<float> values) : k(std::move(keys)), v(std::move(values)) {
    config.num_q_heads = config.num_kv_heads = config.head_dim_qk = config.head_dim_v = 1;
    config.q = config.kv = config.ragged_kv = config.out = DType::kFloat32;
    config.mask = MaskKind::kNone;
    kv_len.assign(1, static_cast<int32_t>(k.size()));
    indptr = {0, kv_len[0]};
    args.sm_scale = 1.0f;
  }

  double row(double* lse, int32_t token = 0) {
    const auto keys = static_cast<int64_t>(k.size());
    segments[0].source = KvSource::kRagged;
    segments[0].kv_len = kv_len.data();
    segments[0].first_pos = first_pos.empty() ? nullptr : first_pos.data();
    segment_args[0].ragged.k = ConstTensorView(k.data(), DType::kFloat32, {keys, 1, 1});
    segment_args[0].ragged.v = ConstTensorView(v.data(), DType::kFloat32, {keys, 1, 1});
    segment_args[0].ragged.indptr = indptr.data();
    batch.num_requests = static_cast<int32_t>(cu_q.size()) - 1;
    batch.num_tokens = cu_q.back();
    batch.cu_q = cu_q.data();
    batch.q_first_pos = q_first_pos.empty() ? nullptr : q_first_pos.data();
    batch.segments = segments;
    args.q = ConstTensorView(q.data(), DType::kFloat32, {static_cast<int64_t>(q.size()), 1, 1});
    args.segments = segment_args;
    double out = kNan;
    *lse = reference_row(config, batch, args, token, 0, {&out, 1});
    return out;
  }
};

TEST(ReferenceAttention, EqualLogitsGiveTheMean) {
  Tiny tiny({0, 0, 0, 0}, {1, 2, 3, 6});
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse), 3.0, kClose);
  EXPECT_NEAR(lse, std::log(4.0), kClose);
}

TEST(ReferenceAttention, LogitsAreScaledDots) {
  Tiny tiny({3, 1}, {5, -7});
  tiny.q = {2.0f};
  tiny.args.sm_scale = 0.25f;  // logits 1.5 and 0.5
  double lse = 0;
  const double e = std::exp(1.0);
  EXPECT_NEAR(tiny.row(&lse), (5 * e - 7) / (e + 1), kClose);
  EXPECT_NEAR(lse, 0.5 + std::log(e + 1), kClose);
}

TEST(ReferenceAttention, ScaleZeroMeansOneOverTheRootOfTheDimension) {
  Tiny tiny({2, 0}, {1, 0});  // head_dim 1: the scale is 1
  tiny.args.sm_scale = 0.0f;
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse), std::exp(2.0) / (std::exp(2.0) + 1), kClose);
}

TEST(ReferenceAttention, SoftCapComesBeforeAlibi) {
  Tiny tiny({8, 0}, {1, 0});
  tiny.args.logits_soft_cap = 2.0f;
  const float slope = 0.5f;
  tiny.args.alibi_slopes = &slope;  // the query stands at 1, the keys at 0 and 1
  double lse = 0;
  const double logit = 2 * std::tanh(8.0 / 2) - 0.5;
  EXPECT_NEAR(tiny.row(&lse), std::exp(logit) / (std::exp(logit) + 1), kClose);
}

TEST(ReferenceAttention, AlibiCountsDistanceOnBothSides) {
  Tiny tiny({0, 0, 0}, {1, 0, 0});
  tiny.q_first_pos = {1};
  const float slope = 1.0f;
  tiny.args.alibi_slopes = &slope;
  double lse = 0;
  tiny.row(&lse);
  EXPECT_NEAR(lse, std::log(1 + 2 * std::exp(-1.0)), kClose);
}

TEST(ReferenceAttention, ASinkCountsInTheDenominatorAlone) {
  Tiny tiny({0}, {4});
  const float sink = 0.0f;
  tiny.args.sinks = &sink;
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse), 2.0, kClose);
  EXPECT_NEAR(lse, std::log(2.0), kClose);
}

TEST(ReferenceAttention, NoKeyGivesZeroAndTheSink) {
  Tiny tiny({}, {});
  double lse = 0;
  EXPECT_EQ(tiny.row(&lse), 0.0);
  EXPECT_EQ(lse, -kInfinity);
  const float sink = -3.5f;
  tiny.args.sinks = &sink;
  EXPECT_EQ(tiny.row(&lse), 0.0);
  EXPECT_EQ(lse, -3.5);
}

TEST(ReferenceAttention, CausalQueriesEndAtTheLastKey) {
  Tiny tiny({0, 0, 0}, {1, 10, 100});
  tiny.config.mask = MaskKind::kCausal;
  tiny.cu_q = {0, 2};
  tiny.q = {1, 1};
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse, 0), 11.0 / 2, kClose);  // at position 1
  EXPECT_NEAR(tiny.row(&lse, 1), 111.0 / 3, kClose);
}

TEST(ReferenceAttention, MoreQueriesThanKeysLeaveTheFirstRowsEmpty) {
  Tiny tiny({0}, {5});
  tiny.config.mask = MaskKind::kCausal;
  tiny.cu_q = {0, 3};
  tiny.q = {1, 1, 1};
  double lse = 0;
  EXPECT_EQ(tiny.row(&lse, 1), 0.0);
  EXPECT_EQ(lse, -kInfinity);
  EXPECT_EQ(tiny.row(&lse, 2), 5.0);
}

TEST(ReferenceAttention, WindowLeftKeepsOneMoreThanItsSize) {
  Tiny tiny({0, 0, 0, 0}, {1000, 100, 10, 1});
  tiny.config.mask = MaskKind::kCausal;
  tiny.config.window_left = 1;
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse), 11.0 / 2, kClose);
}

TEST(ReferenceAttention, PositionsStartAtTheSegmentsFirst) {
  Tiny tiny({0, 0, 0}, {100, 10, 1});
  tiny.first_pos = {7};
  tiny.q_first_pos = {8};
  tiny.config.mask = MaskKind::kCausal;
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse), 110.0 / 2, kClose);
}

TEST(ReferenceAttention, ShardTokensStandInStripes) {
  // Rank 1 of 2, interleave 2: local tokens 0..3 stand at 2, 3, 6, 7.
  Tiny tiny({0, 0, 0, 0}, {1000, 100, 10, 1});
  tiny.segments[0].shard = {.world = 2, .rank = 1, .interleave = 2};
  tiny.config.mask = MaskKind::kCausal;
  tiny.q_first_pos = {6};
  double lse = 0;
  EXPECT_NEAR(tiny.row(&lse), 1110.0 / 3, kClose);
}

TEST(ReferenceAttention, InvisibleMemoryIsNotRead) {
  Tiny tiny({kNan, 0, kNan}, {kNan, 3, kNan});
  tiny.config.mask = MaskKind::kCausal;
  tiny.config.window_left = 0;
  tiny.q_first_pos = {1};
  double lse = 0;
  EXPECT_EQ(tiny.row(&lse), 3.0);
  EXPECT_EQ(lse, 0.0);
}

TEST(ReferenceAttention, AVisibleNanStaysVisible) {
  Tiny tiny({0, kNan, 0}, {1, 1, 1});
  double lse = 0;
  EXPECT_TRUE(std::isnan(tiny.row(&lse)));
  EXPECT_TRUE(std::isnan(lse));
}

TEST(ReferenceAttention, PackedPagesInterleaveTokenPairs) {
  // Two pages of two tokens, the second first in the table; head_dim 1, so V's pair is [token 0, token 1].
  Tiny tiny({0, 0, 0}, {0, 0, 0});
  const std::vector<uint16_t> k(4, 0);
  std::vector<uint16_t> v;
  for (const float value : {100.0f, kNan, 1.0f, 10.0f}) v.push_back(float_to_bfloat16(value));
  const std::vector<int32_t> indices{1, 0};
  const std::vector<int32_t> indptr{0, 2};
  double lse = 0;
  tiny.row(&lse);
  tiny.segments[0].source = KvSource::kPaged;
  SegmentArgs& args = tiny.segment_args[0];
  args = {};
  args.cache.format = KvFormat::kCpuPacked;
  args.cache.dtype = DType::kBFloat16;
  args.cache.k = const_cast<uint16_t*>(k.data());
  args.cache.v = v.data();
  args.cache.num_pages = 2;
  args.cache.page_size = 2;
  args.cache.k_strides = {.page = 2, .token = 1, .head = 2};
  args.cache.v_strides = {.page = 2, .token = 2, .head = 2};
  args.table.indices = indices.data();
  args.table.indptr = indptr.data();
  double out = 0;
  reference_row(tiny.config, tiny.batch, tiny.args, 0, 0, {&out, 1});
  EXPECT_NEAR(out, 111.0 / 3, kClose);
}

TEST(ReferenceAttention, RefusesATokenWithoutARequest) {
  Tiny tiny({0}, {0});
  double lse = 0;
  EXPECT_THROW(tiny.row(&lse, 1), Error);
}

TEST(PlainAttention, DiffersFromTheOracleByFloatRounding) {
  Tiny tiny({1, 2, 3}, {1, 5, -2});
  double lse = 0;
  const double want = tiny.row(&lse);
  float got = 0;
  float got_lse = 0;
  plain_attention(tiny.config, tiny.batch, tiny.args, {&got, 1}, {&got_lse, 1});
  EXPECT_NE(static_cast<double>(got), want);
  EXPECT_NEAR(static_cast<double>(got), want, 16 * 0x1p-24);  // a handful of operations on values of about 1
  EXPECT_NEAR(static_cast<double>(got_lse), lse, 16 * 0x1p-24 * 3);
}

/// Ten keys at positions 0 to 9 with equal logits, whose values are their positions, and one query at position p.
struct Ruled : Tiny {
  std::vector<int32_t> kv_start, spans;
  std::vector<uint8_t> causal;

  explicit Ruled(int32_t p) : Tiny(std::vector<float>(10, 0.0f), {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) {
    config.mask = MaskKind::kCausal;
    q_first_pos = {p};
  }

  /// The first and last visible position, as keys that are neighbours have this mean and this number.
  void expect(int32_t first, int32_t last) {
    batch.kv_start = kv_start.empty() ? nullptr : kv_start.data();
    batch.spans = spans.empty() ? nullptr : spans.data();
    batch.causal = causal.empty() ? nullptr : causal.data();
    double lse = 0;
    EXPECT_NEAR(row(&lse), 0.5 * (first + last), kClose);
    EXPECT_NEAR(lse, std::log(static_cast<double>(last - first + 1)), kClose);
  }
};

TEST(ReferenceAttention, AChunkHidesTheOthers) {
  Ruled ruled(6);
  ruled.config.attention_chunk = 4;
  ruled.expect(4, 6);
  ruled.config.mask = MaskKind::kNone;
  ruled.expect(4, 7);
  ruled.kv_start = {1};  // chunks of 1-4, 5-8
  ruled.expect(5, 8);
  ruled.config.window_right = 1;
  ruled.expect(5, 7);
}

TEST(ReferenceAttention, KeysBelowTheStartAreHidden) {
  Ruled ruled(6);
  ruled.kv_start = {3};
  ruled.expect(3, 6);
  ruled.config.window_left = 1;
  ruled.expect(5, 6);
  ruled.kv_start = {7};
  double lse = 0;
  EXPECT_EQ(ruled.row(&lse), 0.0);
  EXPECT_EQ(lse, -kInfinity);
}

TEST(ReferenceAttention, ARequestMayBeNotCausal) {
  Ruled ruled(6);
  ruled.causal = {0};
  ruled.expect(0, 9);
  ruled.config.window_left = 2;
  ruled.config.window_right = 1;
  ruled.expect(4, 7);
  ruled.causal = {1};
  ruled.expect(4, 6);
}

TEST(ReferenceAttention, ASpanIsSeenInBothDirections) {
  Ruled ruled(5);
  ruled.spans = {3, 9};
  ruled.expect(0, 8);
  ruled.config.window_left = 1;  // clamps it
  ruled.expect(4, 8);
  ruled.config.window_right = 2;
  ruled.expect(4, 7);
  ruled.config.span_window_left = -1;  // the whole span
  ruled.expect(3, 7);
  ruled.config.window_right = -1;
  ruled.config.attention_chunk = 4;  // 4-7
  ruled.expect(4, 7);
  ruled.spans = {9, 3};
  ruled.expect(4, 5);
}

TEST(ReferenceAttention, AnAllVisibleSegmentHasNoRules) {
  Ruled ruled(5);
  ruled.segments[0].mask = SegmentMask::kAllVisible;
  ruled.kv_start = {3};
  ruled.spans = {4, 6};
  ruled.config.attention_chunk = 2;
  ruled.expect(0, 9);
}

}  // namespace
}  // namespace folio::inline v0::verify
