#include "kernels/cpu/common/costs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/attention_kernel.hpp"

namespace folio::inline v0::kernels::cpu {
namespace {

AttentionConfig config_of(DType kv, KvFormat format, int32_t page_size = 16) {
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = 128;
  config.kv = config.ragged_kv = kv;
  if (kv == DType::kFloat16) config.q = kv;
  config.out = config.q;
  config.kv_format = format;
  config.page_size = page_size;
  return config;
}

constexpr CostLine kLines[] = {
    {DType::kBFloat16, KvFormat::kStrided, 1, true, {100, 100, 100, 100, 100, 100, 100}},
    {DType::kBFloat16, KvFormat::kStrided, 1, false, {10, 40, 40, 60, 120, 200, 800}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 32, false, {5, 5, 5, 5, 5, 5, 5}},
    {DType::kBFloat16, KvFormat::kCpuPacked, 1, false, {20, 40, 50, 55, 60, 70, 80}},
    {DType::kFloat32, KvFormat::kStrided, 1, false, {3, 3, 3, 3, 3, 3, 3}},
};

TEST(Costs, MeasuredRows_AreTheirFigures) {
  const AttentionConfig config = config_of(DType::kBFloat16, KvFormat::kStrided);
  for (size_t i = 0; i < kCostRows.size(); ++i) {
    EXPECT_DOUBLE_EQ(cost(kLines, config, kCostRows[i]), kLines[1].nanoseconds[i]) << kCostRows[i];
  }
}

TEST(Costs, RowsBetween_LieOnALineOfLogarithms) {
  const AttentionConfig config = config_of(DType::kBFloat16, KvFormat::kStrided);
  EXPECT_NEAR(cost(kLines, config, 2), 20.0, 1e-9);
  EXPECT_NEAR(cost(kLines, config, 6), 40.0, 1e-9);
  EXPECT_NEAR(cost(kLines, config, 128), 400.0, 1e-9);
}

TEST(Costs, MoreRowsThanMeasured_CostInProportion) {
  EXPECT_NEAR(cost(kLines, config_of(DType::kBFloat16, KvFormat::kStrided), 512), 1600.0, 1e-9);
}

TEST(Costs, HeadDims_ScaleThem) {
  AttentionConfig config = config_of(DType::kBFloat16, KvFormat::kStrided);
  config.head_dim_v = 64;
  EXPECT_NEAR(cost(kLines, config, 1), 7.5, 1e-9);
  config.head_dim_qk = config.head_dim_v = 256;
  EXPECT_NEAR(cost(kLines, config, 1), 20.0, 1e-9);
}

TEST(Costs, FirstLineThatHolds_IsTaken) {
  AttentionConfig mla = config_of(DType::kBFloat16, KvFormat::kStrided);
  mla.head_dim_qk = 576;
  mla.head_dim_v = 512;
  EXPECT_NEAR(cost(kLines, mla, 1), 425.0, 1e-9);
  EXPECT_EQ(cost(kLines, config_of(DType::kBFloat16, KvFormat::kCpuPacked, 64), 4), 5.0);
  EXPECT_EQ(cost(kLines, config_of(DType::kBFloat16, KvFormat::kCpuPacked, 48), 4), 40.0);
  EXPECT_EQ(cost(kLines, config_of(DType::kFloat8E4M3, KvFormat::kFp8DsMla), 4), 3.0);
}

TEST(Costs, NeverMeasured_IsInfinite) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(cost(kLines, config_of(DType::kInt8, KvFormat::kStrided), 4), infinity);
  EXPECT_EQ(cost(kLines, config_of(DType::kFloat32, KvFormat::kCpuPacked), 4), infinity);
}

TEST(Costs, LeastRows_AreTheFirstOfThoseThatStayFaster) {
  const CostLine few[] = {{DType::kBFloat16, KvFormat::kStrided, 1, false, {10, 20, 30, 40, 50, 60, 70}}};
  const auto least = [&](std::array<double, kCostRows.size()> many) {
    const CostLine lines[] = {{DType::kBFloat16, KvFormat::kStrided, 1, false, many}};
    return least_rows(few, lines, config_of(DType::kBFloat16, KvFormat::kStrided));
  };
  EXPECT_EQ(least({10, 20, 30, 40, 50, 60, 70}), 0);
  EXPECT_EQ(least({10, 21, 30, 40, 50, 60, 70}), 8);
  EXPECT_EQ(least({1, 1, 1, 41, 1, 1, 1}), 32);
  EXPECT_EQ(least({1, 1, 1, 1, 1, 1, 71}), std::numeric_limits<int32_t>::max());
  EXPECT_EQ(least_rows(few, kLines, config_of(DType::kFloat32, KvFormat::kStrided)), 0);
}

TEST(Costs, EveryKernel_HasThemForWhatItTakes) {
  const platform::CpuFeatures features;
  for (const AttentionKernel* kernel : cpu_attention_kernels()) {
    for (const DType kv :
         {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8, DType::kFloat32}) {
      for (const KvFormat format : {KvFormat::kStrided, KvFormat::kCpuPacked}) {
        const AttentionConfig config = config_of(kv, format);
        if (!kernel->refusal(config).empty()) continue;
        for (const double rows : {1, 3, 8, 200, 1000}) {
          const double nanoseconds = kernel->cost(features, config, rows);
          EXPECT_GT(nanoseconds, 0.0);
          EXPECT_TRUE(std::isfinite(nanoseconds)) << kernel->name << " " << to_string(kv) << " " << to_string(format);
        }
      }
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels::cpu
