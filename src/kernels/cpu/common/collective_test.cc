#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "folio/types/float_convert.hpp"
#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/generic/collective.hpp"
#if defined(__x86_64__)
#include "kernels/cpu/avx2/collective.hpp"
#include "kernels/cpu/avx512/collective.hpp"
#endif
#include "platform/cpu_features.hpp"
#include "testing/rotation.hpp"

/// The collective of each instruction set on its own: upcasts of every stored value, exp2, tanh, RoPE, combination of
/// states.
namespace folio::inline v0::kernels::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Named {
  const char* name;
  const Collective* collective;
  bool available;
  // What takes bfloat16 below 2^-126 for zero, as VDPBF16PS and BFMMLA do.
  bool flushes_keys = false;
  bool flushes_values = false;
};

std::vector<Named> every_collective() {
  std::vector<Named> all{{"base", &generic::kBaselineCollective, true}};
#if defined(__x86_64__)
  all.push_back({"v3", &generic::kV3Collective, platform::cpu_features().x86_64_v3()});
  all.push_back({"v4", &generic::kV4Collective, platform::cpu_features().x86_64_v4()});
  const bool vbmi = platform::cpu_features().x86_64_v4() && platform::cpu_features().avx512vbmi;
  all.push_back({"avx2", &avx2::kCollective, platform::cpu_features().x86_64_v3()});
  all.push_back({"avx512", &avx512::kCollective, vbmi});
  all.push_back({"avx512_bf16", &avx512::kBf16Collective, vbmi && platform::cpu_features().avx512_bf16, true, true});
#elif defined(__aarch64__)
  all.push_back({"neon_bf16", &generic::kBf16Collective, platform::cpu_features().bf16, true});
#endif
  return all;
}

class CollectiveTest : public ::testing::TestWithParam<Named> {
 protected:
  void SetUp() override {
    if (!GetParam().available) GTEST_SKIP() << "not on this CPU";
  }
  const Collective& collective() const { return *GetParam().collective; }
};

INSTANTIATE_TEST_SUITE_P(Isa, CollectiveTest, ::testing::ValuesIn(every_collective()),
                         [](const auto& one) { return std::string(one.param.name); });

/// One row against one key in memory of its own.
struct OneKey {
  AttentionConfig config;
  std::vector<unsigned char> memory;
  std::vector<unsigned char> q, k, v;
  WorkTileParams work;
  WorkerScratch scratch;
  int32_t page = 0;

  OneKey(int32_t dim, DType dtype, bool pairs) {
    config.head_dim_qk = config.head_dim_v = dim;
    const scheduler::TileShape tile{.rows = 1, .kv_tokens = kTileTokens};
    memory.resize(carve_scratch(config, tile, nullptr).bytes + 64);
    const size_t misaligned = reinterpret_cast<uintptr_t>(memory.data()) % 64;
    scratch = carve_scratch(config, tile, reinterpret_cast<std::byte*>(memory.data()) + (64 - misaligned) % 64);
    const size_t bytes = static_cast<size_t>(dim * size_of(dtype));
    q.assign(bytes, 0);
    k.assign(bytes, 0);
    v.assign(pairs ? 2 * bytes : bytes, 0);
    scratch.rows[0] = QueryRow{};
    scratch.rows[0].q = q.data();
    scratch.rows[0].visible_end = 1;
    work.rows = scratch.rows;
    work.num_rows = 1;
    work.head_dim_qk = work.head_dim_v = dim;
    work.qk_stride = work.v_stride = padded(dim, kDimPadding);
    work.q_dtype = dtype;
    work.scratch = scratch.tile;
    work.state = scratch.running;
    work.kv.dtype = dtype;
    work.kv.packed_v = pairs;
    work.kv.pages = &page;
    work.kv.page_size = 16;
    work.kv.kv_end = 1;
    work.kv.k = k.data();
    work.kv.v = v.data();
  }
  void run(const Collective& collective) {
    *work.state.row_max = -kInf;
    *work.state.row_sum = 0.0f;
    std::memset(work.state.acc, 0, static_cast<size_t>(work.v_stride) * sizeof(float));
    collective.load_q(work);
    collective.mainloop(&work, 1);
  }
};

void expect_same(float got, float want, uint32_t code) {
  if (std::isnan(want)) {
    ASSERT_TRUE(std::isnan(got)) << "code " << code << " gives " << got;
  } else {
    ASSERT_EQ(got, want) << "code " << code;
  }
}

/// Every stored value of the type as a component of Q, and of the V of an only token, whose p is 1.
void check_all_codes(const Named& named, DType dtype, bool pairs) {
  const Collective& collective = *named.collective;
  const int32_t dim = 256;
  const int32_t element = size_of(dtype);
  const uint32_t codes = element == 1 ? 256 : 65536;
  OneKey one(dim, dtype, pairs);
  for (uint32_t first = 0; first < codes; first += dim) {
    for (uint32_t d = 0; d < dim; ++d) {
      const uint32_t code = first + d;
      std::memcpy(one.v.data() + (pairs ? 2 * d : d) * static_cast<uint32_t>(element), &code,
                  static_cast<size_t>(element));
    }
    std::memset(one.q.data(), 0, one.q.size());
    one.run(collective);
    for (uint32_t d = 0; d < dim; ++d) {
      float want = load_as_float(one.v.data(), dtype, pairs ? 2 * d : d);
      if (named.flushes_values && dtype == DType::kBFloat16 && std::fabs(want) < 0x1p-126f) want = 0.0f;
      expect_same(one.work.state.acc[d], want, first + d);
    }
    for (uint32_t d = 0; d < dim; ++d) {
      const uint32_t code = first + d;
      std::memcpy(one.q.data() + d * static_cast<uint32_t>(element), &code, static_cast<size_t>(element));
    }
    collective.load_q(one.work);
    for (uint32_t d = 0; d < dim; ++d) {
      expect_same(one.scratch.tile.q[d], load_as_float(one.q.data(), dtype, d), first + d);
    }
  }
}

/// Queries rotated at near and far positions, whole registers and tails of them, against the definition in float64.
TEST_P(CollectiveTest, Rope_FarPositions_MatchesFloat64) {
  if (!collective().applies_rope) GTEST_SKIP() << "applies no rotary embedding";
  const RopeArgs rope{1e4f, 1.5f};
  for (const int32_t dim : {8, 40, 128, 256}) {
    OneKey one(dim, DType::kFloat32, false);
    std::vector<float> query(static_cast<size_t>(dim));
    for (size_t d = 0; d < query.size(); ++d) query[d] = 0.25f * static_cast<float>(d % 7) - 0.5f;
    std::memcpy(one.q.data(), query.data(), one.q.size());
    std::vector<double> frequencies(static_cast<size_t>(padded(dim / 2, kDimPadding)), 0.0);
    set_rope_frequencies(rope, dim, frequencies.data());
    one.work.rope = frequencies.data();
    verify::Rotation<double> rotation(rope, dim);
    for (const int64_t position : {0, 1, 3, 100, 65537, 1000003, 2147483647, -5}) {
      one.scratch.rows[0].position = position;
      collective().load_q(one.work);
      std::vector<double> want(query.begin(), query.end());
      rotation.rotate(position, want);
      for (size_t d = 0; d < want.size(); ++d) {
        EXPECT_NEAR(one.scratch.tile.q[d], want[d], 0x1p-21) << dim << ", " << position << ", " << d;
      }
    }
  }
}

TEST_P(CollectiveTest, Upcast_EveryStoredValue_IsExact) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const bool pairs : {false, true}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + (pairs ? " in pairs" : ""));
      check_all_codes(GetParam(), dtype, pairs);
    }
  }
}

/// A score of one product, 2^-127 times 2^127, says which instruction made it.
void check_subnormal_score(const Named& named, DType q, bool with_rope) {
  OneKey one(8, DType::kBFloat16, false);
  one.q.resize(8 * sizeof(float));
  one.scratch.rows[0].q = one.q.data();
  one.work.q_dtype = q;
  std::vector<double> frequencies(static_cast<size_t>(padded(4, kDimPadding)), 0.0);  // angles of 0
  if (with_rope) one.work.rope = frequencies.data();
  const uint16_t subnormal = 0x0040;
  const uint16_t large = 0x7f00;
  // As float32, 2^-127 is the bfloat16 with zeros below it.
  std::memcpy(one.q.data() + (q == DType::kFloat32 ? 2 : 0), &subnormal, sizeof(subnormal));
  std::memcpy(one.k.data(), &large, sizeof(large));
  one.run(*named.collective);
  const bool zero = named.flushes_keys && q == DType::kBFloat16 && !with_rope;
  EXPECT_FLOAT_EQ(*one.work.state.row_max, zero ? 0.0f : kLog2E) << to_string(q) << (with_rope ? ", rotated" : "");
}

TEST_P(CollectiveTest, Score_SubnormalBFloat16_IsZeroOnlyByProductsOfPairs) {
  for (const DType q : {DType::kBFloat16, DType::kFloat32}) {
    check_subnormal_score(GetParam(), q, false);
    if (collective().applies_rope) check_subnormal_score(GetParam(), q, true);
  }
}

/// 2^x, seen as the factor by which combine_states rescales the older state.
float exp2_of(const Collective& collective, float x) {
  float max = x;
  float sum = 1.0f;
  float acc[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  const float nothing[4] = {};
  collective.combine_states(&max, &sum, acc, 0.0f, 0.0f, nothing, 4);
  EXPECT_EQ(sum, acc[3]);
  return sum;
}

TEST_P(CollectiveTest, Exp2_WholeRange_WithinTwoUlp) {
  double worst = 0.0;
  for (float x = 0.0f; x > -125.0f; x -= 0.000997f) {
    const double want = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(exp2_of(collective(), x)) - want) / want);
  }
  EXPECT_LT(worst, std::exp2(-22.9));
  EXPECT_EQ(exp2_of(collective(), 0.0f), 1.0f);
  EXPECT_EQ(exp2_of(collective(), -3.0f), 0.125f);
  EXPECT_EQ(exp2_of(collective(), -127.0f), 0.0f);
  EXPECT_EQ(exp2_of(collective(), -1e30f), 0.0f);
  EXPECT_EQ(exp2_of(collective(), -std::numeric_limits<float>::max()), 0.0f);
}

TEST_P(CollectiveTest, SoftCapTanh_EverySize_IsAccurate) {
  // One key: the state's maximum is cap * tanh(q * k / cap) in base-2 units. cap = 1 / log2(e) would leave tanh alone;
  // 1 leaves one more rounding, by log2(e).
  OneKey one(8, DType::kFloat32, false);
  one.work.soft_cap = 1.0f;
  const float unit = 1.0f;
  std::memcpy(one.k.data(), &unit, sizeof(unit));
  double worst = 0.0;
  for (float x = 1e-6f; x < 30.0f; x *= 1.0007f) {
    for (const float signed_x : {x, -x}) {
      std::memcpy(one.q.data(), &signed_x, sizeof(signed_x));
      one.run(collective());
      const double want = std::tanh(static_cast<double>(signed_x)) * std::log2(std::exp(1.0));
      worst = std::max(worst, std::abs((static_cast<double>(*one.work.state.row_max) - want) / want));
    }
  }
  EXPECT_LT(worst, 0x1p-21 + 0x1p-23);
}

TEST_P(CollectiveTest, CombineStates_EmptyState_ChangesNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float max = 1.5f;
  float sum = 2.0f;
  float acc[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const float other[8] = {nan, nan, nan, nan, nan, nan, nan, nan};
  collective().combine_states(&max, &sum, acc, -kInf, nan, other, 8);  // empty: whatever its values
  EXPECT_EQ(max, 1.5f);
  EXPECT_EQ(sum, 2.0f);
  EXPECT_EQ(acc[7], 8.0f);
  float empty_max = -kInf;
  float empty_sum = 0.0f;
  float empty_acc[8] = {};
  collective().combine_states(&empty_max, &empty_sum, empty_acc, max, sum, acc, 8);
  EXPECT_EQ(empty_max, 1.5f);
  EXPECT_EQ(empty_sum, 2.0f);
  EXPECT_EQ(std::memcmp(empty_acc, acc, sizeof(acc)), 0);
}

TEST_P(CollectiveTest, CombineStates_TwoStates_RescalesByRowMax) {
  float max = 3.0f;
  float sum = 2.0f;
  float acc[4] = {8, 16, 0, -4};
  const float other[4] = {1, 1, 1, 1};
  collective().combine_states(&max, &sum, acc, 5.0f, 1.0f, other, 4);  // the first state is rescaled by 2^-2
  EXPECT_EQ(max, 5.0f);
  EXPECT_EQ(sum, 1.5f);
  EXPECT_EQ(acc[0], 3.0f);
  EXPECT_EQ(acc[1], 5.0f);
  EXPECT_EQ(acc[2], 1.0f);
  EXPECT_EQ(acc[3], 0.0f);
}

}  // namespace
}  // namespace folio::inline v0::kernels::cpu
