#include "folio/backends/kv_scales.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/golden_test.hpp"
#include "folio/types/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

ConstTensorView view(const std::vector<float>& values) {
  return {values.data(), DType::kFloat32, {static_cast<int64_t>(values.size()), 1, 1}};
}

TEST(CalculateKvScales, GoldenCases) {
  for (const folio::testing::GoldenCase& c : folio::testing::golden_cases("backends/kv_scales")) {
    SCOPED_TRACE(c.name);
    const auto q = c.at<std::vector<float>>("q");
    const auto k = c.at<std::vector<float>>("k");
    const auto v = c.at<std::vector<float>>("v");
    KvScaleConstants constants;
    if (c.data.contains("constants")) {
      const auto given = c.at<std::vector<float>>("constants");
      constants = {given[0], given[1], given[2]};
    }
    const AttentionLayerScales scales = calculate_kv_scales(view(q), view(k), view(v), constants);
    EXPECT_EQ((std::vector{scales.q.value, scales.k.value, scales.v.value}), c.at<std::vector<float>>("expected"));
    EXPECT_EQ(scales.k.data, nullptr);
  }
}

TEST(CalculateKvScales, ReadsWhatTheViewShowsInEveryDtype) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<float> memory(16);
    for (int64_t i = 0; i < 8; ++i)
      store_from_float(memory.data(), dtype, i, i % 2 == 1 ? 999.0f : static_cast<float>(-i));
    ConstTensorView x(memory.data(), dtype, {2, 2});
    x.strides = {4, 2};  // entries 0, 2, 4, 6: what lies between them is not the tensor's
    EXPECT_EQ(calculate_kv_scales(x, x, x, {1.0f, 1.0f, 1.0f}).v.value, 6.0f);
  }
}

TEST(CalculateKvScales, KeepsNaNVisible) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& values : {std::vector<float>{nan, 5.0f}, {5.0f, nan}, {nan}}) {
    EXPECT_TRUE(std::isnan(calculate_kv_scales(view({}), view(values), view({})).k.value));
  }
}

TEST(CalculateKvScales, Refuses) {
  const std::vector<float> one{1.0f};
  const ConstTensorView good = view(one);
  const auto refused = [](const ConstTensorView& q, const KvScaleConstants& constants = {}) {
    EXPECT_THROW(calculate_kv_scales(q, q, q, constants), Error);
  };
  refused(good, {0.0f, 1.0f, 1.0f});
  refused(good, {1.0f, -1.0f, 1.0f});
  refused(good, {1.0f, 1.0f, std::numeric_limits<float>::infinity()});
  ConstTensorView bad = good;
  bad.dtype = DType::kFloat8E4M3;
  refused(bad);
  bad = good;
  bad.data = nullptr;
  refused(bad);
  bad = good;
  bad.rank = 6;
  refused(bad);
}

}  // namespace
}  // namespace folio::inline v0::backends
