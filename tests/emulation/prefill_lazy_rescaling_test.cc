// Rows whose logits grow from tile to tile, beside rows whose logits do not. Lazy rescaling keeps row_max of the tiles
// before where it can, and a tile that one row sees whole may be masked for another.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
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

float rounded(float x) {
  return bfloat16_to_float(float_to_bfloat16(x));
}
/// Tiles have logits of one size, `sizes` times what the query says, but for a few that are smaller.
float key(const std::vector<float>& sizes, int32_t token, int32_t component) {
  if (component != 0) return rounded(static_cast<float>((token * 5 + component) % 9 - 4) * 0.125f);
  return rounded(sizes[static_cast<size_t>(token / kTile)] * (1.0f - static_cast<float>(token % 7) * 0.0625f));
}
float value(int32_t token, int32_t component) {
  return rounded(static_cast<float>((token * 3 + component) % 11 - 5) * 0.25f);
}
float query(int32_t token, int32_t head, int32_t component) {
  if (component != 0) return rounded(static_cast<float>((token + head + component) % 5 - 2) * 0.125f);
  return static_cast<float>((token + 2 * head) % 5 - 2);  // also 0, and negative: of these logits shrink
}

/// Of the tokens [first, end) of a prompt of kTokens, each of which sees `window` + 1 keys; of all where it is -1.
std::vector<float> run_with(const std::vector<float>& sizes, int32_t first, int32_t end, int32_t window) {
  const int32_t rows = end - first;
  AttentionConfig config;
  config.num_q_heads = kGroup;
  config.num_kv_heads = 1;
  config.head_dim_qk = config.head_dim_v = kDim;
  config.page_size = kTile;
  config.mask = window < 0 ? MaskKind::kNone : MaskKind::kCausal;
  config.window_left = window;
  config.out = DType::kFloat32;
  config.determinism = Determinism::kScheduleInvariant;
  PrepareOptions options;
  options.force_kernel = "cuda-sm90-prefill";
  const AttentionOp op = prepare(Context::cuda(0), config, options);
  std::vector<uint16_t> q, k, v;
  for (int32_t i = 0; i < rows * kGroup * kDim; ++i) {
    q.push_back(float_to_bfloat16(query(first + i / kDim / kGroup, i / kDim % kGroup, i % kDim)));
  }
  for (int32_t i = 0; i < kTokens * kDim; ++i) {
    k.push_back(float_to_bfloat16(key(sizes, i / kDim, i % kDim)));
    v.push_back(float_to_bfloat16(value(i / kDim, i % kDim)));
  }
  return run_one_request(op, q, k.data(), v.data(), end, kTiles);
}

/// One row over all keys, in float64.
std::vector<double> exact(const std::vector<float>& sizes, int32_t token, int32_t head) {
  std::vector<double> logits;
  for (int32_t t = 0; t < kTokens; ++t) {
    double sum = 0.0;
    for (int32_t i = 0; i < kDim; ++i) sum += double{query(token, head, i)} * double{key(sizes, t, i)};
    logits.push_back(sum / std::sqrt(double{kDim}));
  }
  const double max = *std::max_element(logits.begin(), logits.end());
  double all = 0.0;
  std::vector<double> out(kDim);
  for (int32_t t = 0; t < kTokens; ++t) {
    const double weight = std::exp(logits[static_cast<size_t>(t)] - max);
    all += weight;
    for (int32_t i = 0; i < kDim; ++i) out[static_cast<size_t>(i)] += weight * double{value(t, i)};
  }
  for (double& x : out) x /= all;
  return out;
}

/// From the last tile to the first: little, within what tops allow, a little and far beyond it, so far that weights by
/// the old maximum would be infinite; up and down.
const std::vector<float> kSizes[] = {{12.0f, 8.0f, 4.0f, 0.0f},      {40.0f, 40.0f, 0.0f, 0.0f},
                                     {200.0f, 80.0f, 60.0f, 0.0f},   {4000.0f, 1000.0f, 300.0f, 8.0f},
                                     {8.0f, 2000.0f, 0.0f, 1000.0f}, {0.0f, -90.0f, 30.0f, -4.0f}};

TEST(PrefillLazyRescaling, FollowsLogitsThatGrow) {
  constexpr int32_t kRows = 33;  // the second work tile has four rows
  for (const std::vector<float>& sizes : kSizes) {
    const std::vector<float> got = run_with(sizes, kTokens - kRows, kTokens, -1);
    for (int32_t row = 0; row < kRows * kGroup; ++row) {
      const std::vector<double> want = exact(sizes, kTokens - kRows + row / kGroup, row % kGroup);
      for (int32_t i = 0; i < kDim; ++i) {
        ASSERT_NEAR(got[static_cast<size_t>(row * kDim + i)], want[static_cast<size_t>(i)], 0.01)
            << "first tile " << sizes[0] << ", row " << row;
      }
    }
  }
}

/// The last of 32 tokens begin to see a tile in its middle, which the first sees whole: alone, that has it unmasked.
TEST(PrefillLazyRescaling, GivesTheSameBitsWithAndWithoutMasks) {
  constexpr int32_t kFirst = kTokens - 32;
  constexpr int32_t kWindow = kFirst - kTile + 30;
  for (const std::vector<float>& sizes : kSizes) {
    const std::vector<float> beside = run_with(sizes, kFirst, kTokens, kWindow);
    const std::vector<float> alone = run_with(sizes, kFirst, kFirst + 1, kWindow);
    ASSERT_EQ(std::memcmp(beside.data(), alone.data(), sizeof(float) * alone.size()), 0) << "first tile " << sizes[0];
  }
}

}  // namespace
}  // namespace folio
