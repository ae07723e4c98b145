// What one query sees and another does not, infinities and NaN among it, on the emulated GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "folio/types/float_convert.hpp"
#include "one_request.hpp"

namespace folio {
namespace {

constexpr const char* kKernel = FOLIO_EMULATED_KERNEL;
constexpr bool kMla = std::string_view(kKernel) == "cuda-sm90-mla";
constexpr int32_t kHeadDim = kMla ? 576 : 128;  ///< of queries and keys
constexpr int32_t kHeadDimV = kMla ? 512 : 128;
constexpr int32_t kKvLen = 40;
constexpr int32_t kPageSize = 16;
constexpr int32_t kPages = 3;
constexpr int32_t kGroup = 4;
constexpr int32_t kQLen = 2;
constexpr size_t kQueryRow = size_t{kGroup} * kHeadDim;
constexpr size_t kRow = size_t{kGroup} * kHeadDimV;

struct Output {
  std::vector<float> first;   ///< of the earlier token, which does not see the last key
  std::vector<float> second;  ///< of the later one, which does
};

/// Two query tokens, causal; of the last key's value, component 5 is `value`. Keys and values are of type `kv`.
Output run_with(float value, DType kv, float soft_cap = 0.0f) {
  const Context context = Context::cuda(0);
  AttentionConfig config;
  config.num_q_heads = kGroup;
  config.num_kv_heads = 1;
  config.head_dim_qk = kHeadDim;
  config.head_dim_v = kHeadDimV;
  config.page_size = kPageSize;
  config.kv = config.ragged_kv = kv;
  config.out = DType::kFloat32;
  if (soft_cap != 0.0f) config.features = Feature::kSoftCap;
  const AttentionOp op = prepare(context, config);
  EXPECT_EQ(op.kernel_name(), kKernel);
  const size_t element = static_cast<size_t>(size_of(kv));
  std::vector<uint8_t> k(element * kPages * kPageSize * kHeadDim), v(element * kPages * kPageSize * kHeadDimV);
  const auto set = [&](std::vector<uint8_t>& to, size_t at, float x) {
    if (element == 1) {
      constexpr uint8_t kInfinity = 0x7c;  // of e5m2: conversions to it saturate
      to[at] = kv == DType::kFloat8E4M3 ? float_to_fp8_e4m3(x) : (std::isinf(x) ? kInfinity : float_to_fp8_e5m2(x));
      return;
    }
    const uint16_t bits = float_to_bfloat16(x);
    std::memcpy(&to[2 * at], &bits, 2);
  };
  for (size_t i = 0; i < size_t{kPages} * kPageSize * kHeadDim; ++i) {
    set(k, i, static_cast<float>(i % 7) * 0.25f - 0.75f);
  }
  for (size_t i = 0; i < size_t{kPages} * kPageSize * kHeadDimV; ++i) {
    set(v, i, static_cast<float>(i % 5) * 0.5f - 1.0f);
  }
  set(v, size_t{kKvLen - 1} * kHeadDimV + 5, value);
  std::vector<uint16_t> q(kQLen * kQueryRow);
  for (size_t i = 0; i < q.size(); ++i) q[i] = float_to_bfloat16(static_cast<float>(i % 3) * 0.5f - 0.5f);
  const std::vector<float> out = run_one_request(op, kQLen, q.data(), k.data(), v.data(), kKvLen, kPages, soft_cap);
  return {{out.begin(), out.begin() + kRow}, {out.begin() + kRow, out.end()}};
}

class EmulatedSpecialValues : public ::testing::TestWithParam<DType> {};

TEST_P(EmulatedSpecialValues, ReachThoseWhoSeeThemAndNobodyElse) {
  const Output usual = run_with(1.0f, GetParam());
  std::vector<float> specials{std::numeric_limits<float>::quiet_NaN()};
  if (GetParam() != DType::kFloat8E4M3) specials.push_back(std::numeric_limits<float>::infinity());
  for (const float special : specials) {
    const Output got = run_with(special, GetParam());
    EXPECT_EQ(got.first, usual.first);
    for (size_t i = 0; i < got.second.size(); ++i) {
      if (i % kHeadDimV != 5) {
        EXPECT_EQ(got.second[i], usual.second[i]) << i;
      } else if (std::isnan(special)) {
        EXPECT_TRUE(std::isnan(got.second[i])) << i;
      } else {
        EXPECT_FALSE(std::isfinite(got.second[i])) << i;
      }
    }
  }
}

/// Large caps may go another way than small ones.
TEST(EmulatedCaps, OfAnySizeAreTaken) {
  const Output usual = run_with(1.0f, DType::kBFloat16, 50.0f);
  for (const float cap : {50.01f, 51.0f, 1e6f}) {
    const Output got = run_with(1.0f, DType::kBFloat16, cap);
    for (size_t i = 0; i < got.second.size(); ++i) {
      EXPECT_NEAR(got.first[i], usual.first[i], 0.01f) << cap;
      EXPECT_NEAR(got.second[i], usual.second[i], 0.01f) << cap;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, EmulatedSpecialValues,
                         ::testing::Values(DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2),
                         [](const auto& type) {
                           return std::string(type.param == DType::kBFloat16
                                                  ? "bfloat16"
                                                  : (type.param == DType::kFloat8E4M3 ? "e4m3" : "e5m2"));
                         });

}  // namespace
}  // namespace folio
