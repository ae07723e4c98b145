// Rows whose logits grow from tile to tile, beside rows whose logits do not. Lazy rescaling keeps row_max of the tiles
// before where it can, and a tile that one row sees whole may be masked for another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "folio/types/float_convert.hpp"
#include "one_request.hpp"

namespace folio {
namespace {

constexpr int32_t kDim = 128;
constexpr int32_t kGroup = 4;
constexpr int32_t kTile = 128;
constexpr int32_t kTiles = 4;
constexpr int32_t kTokens = kTile * kTiles;

/// Inputs, and by how much p errs.
struct Kind {
  const char* name;
  DType dtype;
  float sm_scale;
  double tolerance;
  /// Sizes of logits, of tiles from the first to the last, which is the first that is computed: they grow little,
  /// within what row_max allows, a little and far beyond it, so far that p by the old row_max would be infinite; up and
  /// down.
  std::vector<std::vector<float>> sizes;
};
const Kind kKinds[] = {{"bfloat16",
                        DType::kBFloat16,
                        0.0f,
                        0.01,
                        {{12.0f, 8.0f, 4.0f, 0.0f},
                         {40.0f, 40.0f, 0.0f, 0.0f},
                         {200.0f, 80.0f, 60.0f, 0.0f},
                         {4000.0f, 1000.0f, 300.0f, 8.0f},
                         {8.0f, 2000.0f, 0.0f, 1000.0f},
                         {0.0f, -90.0f, 30.0f, -4.0f}}},
                       {"fp8_mma",
                        DType::kFloat8E4M3,
                        1.0f,
                        0.08,
                        {{1.25f, 0.75f, 0.375f, 0.0f},
                         {4.0f, 4.0f, 0.0f, 0.0f},
                         {20.0f, 8.0f, 6.0f, 0.0f},
                         {448.0f, 104.0f, 30.0f, 0.75f},
                         {0.75f, 208.0f, 0.0f, 104.0f},
                         {0.0f, -9.0f, 3.0f, -0.5f}}}};

class Values {
 public:
  explicit Values(DType dtype) : dtype_(dtype) {}
  [[nodiscard]] float rounded(float x) const {
    float stored{};
    store_from_float(&stored, dtype_, 0, x);
    return load_as_float(&stored, dtype_, 0);
  }
  /// Tiles have logits of one size, `sizes` times what the query says, but for a few that are smaller.
  [[nodiscard]] float key(const std::vector<float>& sizes, int32_t token, int32_t component) const {
    if (component != 0) return rounded(static_cast<float>((token * 5 + component) % 9 - 4) * 0.125f);
    return rounded(sizes[static_cast<size_t>(token / kTile)] * (1.0f - static_cast<float>(token % 7) * 0.0625f));
  }
  [[nodiscard]] float value(int32_t token, int32_t component) const {
    return rounded(static_cast<float>((token * 3 + component) % 11 - 5) * 0.25f);
  }
  [[nodiscard]] float query(int32_t token, int32_t head, int32_t component) const {
    if (component != 0) return rounded(static_cast<float>((token + head + component) % 5 - 2) * 0.125f);
    return static_cast<float>((token + 2 * head) % 5 - 2);  // also 0, and negative: of these logits shrink
  }

 private:
  DType dtype_;
};

/// Of the tokens [first, end) of a prompt of kTokens, each of which sees `window` + 1 keys; of all where it is -1.
std::vector<float> run_with(const Kind& kind, const std::vector<float>& sizes, int32_t first, int32_t end,
                            int32_t window) {
  const int32_t rows = end - first;
  AttentionConfig config;
  config.num_q_heads = kGroup;
  config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = kDim;
  config.page_size = kTile;
  config.mask = window < 0 ? MaskKind::kNone : MaskKind::kCausal;
  config.window_left = window;
  config.q = config.kv = config.ragged_kv = kind.dtype;
  config.out = DType::kFloat32;
  config.determinism = Determinism::kScheduleInvariant;
  PrepareOptions options;
  options.force_kernel = "cuda-sm90-prefill";
  options.allow_fp8_mma = true;
  const AttentionOp op = prepare(Context::cuda(0), config, options);
  EXPECT_EQ(op.fp8_mma(), kind.dtype == DType::kFloat8E4M3);
  const Values values(kind.dtype);
  const auto element = static_cast<size_t>(size_of(kind.dtype));
  std::vector<uint8_t> q(element * static_cast<size_t>(rows * kGroup * kDim));
  std::vector<uint8_t> k(element * kTokens * kDim);
  std::vector<uint8_t> v(k.size());
  for (int32_t i = 0; i < rows * kGroup * kDim; ++i) {
    const float x = values.query(first + i / kDim / kGroup, i / kDim % kGroup, i % kDim);
    store_from_float(q.data(), kind.dtype, i, x);
  }
  for (int32_t i = 0; i < kTokens * kDim; ++i) {
    store_from_float(k.data(), kind.dtype, i, values.key(sizes, i / kDim, i % kDim));
    store_from_float(v.data(), kind.dtype, i, values.value(i / kDim, i % kDim));
  }
  return run_one_request(op, rows, q.data(), k.data(), v.data(), end, kTiles, 0.0f, kind.sm_scale);
}

/// One row over all keys, in float64.
std::vector<double> exact(const Kind& kind, const std::vector<float>& sizes, int32_t token, int32_t head) {
  const Values values(kind.dtype);
  const double scale = kind.sm_scale == 0.0f ? 1.0 / std::sqrt(double{kDim}) : double{kind.sm_scale};
  std::vector<double> logits;
  for (int32_t t = 0; t < kTokens; ++t) {
    double sum = 0.0;
    for (int32_t i = 0; i < kDim; ++i) sum += double{values.query(token, head, i)} * double{values.key(sizes, t, i)};
    logits.push_back(sum * scale);
  }
  const double max = *std::max_element(logits.begin(), logits.end());
  double all = 0.0;
  std::vector<double> out(kDim);
  for (int32_t t = 0; t < kTokens; ++t) {
    const double weight = std::exp(logits[static_cast<size_t>(t)] - max);
    all += weight;
    for (int32_t i = 0; i < kDim; ++i) out[static_cast<size_t>(i)] += weight * double{values.value(t, i)};
  }
  for (double& x : out) x /= all;
  return out;
}

class PrefillLazyRescaling : public ::testing::TestWithParam<Kind> {};

TEST_P(PrefillLazyRescaling, FollowsLogitsThatGrow) {
  constexpr int32_t kRows = 33;  // the second work tile has four rows
  for (const std::vector<float>& sizes : GetParam().sizes) {
    const std::vector<float> got = run_with(GetParam(), sizes, kTokens - kRows, kTokens, -1);
    for (int32_t row = 0; row < kRows * kGroup; ++row) {
      const std::vector<double> want = exact(GetParam(), sizes, kTokens - kRows + row / kGroup, row % kGroup);
      for (int32_t i = 0; i < kDim; ++i) {
        ASSERT_NEAR(got[static_cast<size_t>(row * kDim + i)], want[static_cast<size_t>(i)], GetParam().tolerance)
            << "first tile " << sizes[0] << ", row " << row;
      }
    }
  }
}

/// The last of 32 tokens begin to see a tile in its middle, which the first sees whole: alone, that has it unmasked.
TEST_P(PrefillLazyRescaling, GivesTheSameBitsWithAndWithoutMasks) {
  constexpr int32_t kFirst = kTokens - 32;
  constexpr int32_t kWindow = kFirst - kTile + 30;
  for (const std::vector<float>& sizes : GetParam().sizes) {
    const std::vector<float> beside = run_with(GetParam(), sizes, kFirst, kTokens, kWindow);
    const std::vector<float> alone = run_with(GetParam(), sizes, kFirst, kFirst + 1, kWindow);
    ASSERT_EQ(std::memcmp(beside.data(), alone.data(), sizeof(float) * alone.size()), 0) << "first tile " << sizes[0];
  }
}

INSTANTIATE_TEST_SUITE_P(Of, PrefillLazyRescaling, ::testing::ValuesIn(kKinds),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace folio
