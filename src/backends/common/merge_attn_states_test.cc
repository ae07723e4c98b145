#include "folio/backends/merge_attn_states.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/golden_test.hpp"

namespace folio::backends {
namespace {

// The numbers of merges are tested with merge_state; here, which rows are merged at all.
TEST(MergeAttnStates, TokensWithoutContextAreTheSuffix) {
  const Context context = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  const auto with_context =
      folio::testing::golden("attention/merge_sweep").at("prefill_tokens_with_context").get<int64_t>();
  const int64_t tokens = with_context + 5, heads = 3, dim = 8;
  const auto size = static_cast<size_t>(tokens * heads * dim);
  std::vector<float> prefix(size, 2.0f), suffix(size), out(size, -1.0f);
  for (size_t i = 0; i < size; ++i) suffix[i] = 0.01f * static_cast<float>(i);
  std::vector<float> prefix_lse(size / static_cast<size_t>(dim), 1.0f), suffix_lse(prefix_lse.size(), 1.0f);
  std::vector<float> lse(prefix_lse.size(), -1.0f);
  for (int64_t t = with_context; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const auto row = static_cast<size_t>(t * heads + h);
      std::fill_n(prefix.begin() + static_cast<std::ptrdiff_t>(row * static_cast<size_t>(dim)), dim, NAN);
      prefix_lse[static_cast<size_t>(h * tokens + t)] = NAN;
    }
  }
  const TensorView out_view(out.data(), DType::kFloat32, {tokens, heads, dim});
  const ConstTensorView p(prefix.data(), DType::kFloat32, {tokens, heads, dim});
  const ConstTensorView s(suffix.data(), DType::kFloat32, {tokens, heads, dim});
  merge_attn_states(context, out_view, p, prefix_lse.data(), s, suffix_lse.data(), lse.data(), with_context);
  for (size_t i = 0; i < size; ++i) {
    const bool merged = static_cast<int64_t>(i) / (heads * dim) < with_context;
    EXPECT_EQ(out[i], merged ? 0.5f * (2.0f + suffix[i]) : suffix[i]) << i;
  }
  for (size_t i = 0; i < lse.size(); ++i) {
    const bool merged = static_cast<int64_t>(i) % tokens < with_context;
    EXPECT_FLOAT_EQ(lse[i], merged ? 1.0f + std::log(2.0f) : 1.0f) << i;
  }
  merge_attn_states(context, out_view, p, prefix_lse.data(), s, suffix_lse.data(), nullptr, 0);
  EXPECT_EQ(out, suffix);
  EXPECT_THROW(merge_attn_states(context, out_view, p, prefix_lse.data(), s, suffix_lse.data(), nullptr, tokens + 1),
               Error);
}

}  // namespace
}  // namespace folio::backends
