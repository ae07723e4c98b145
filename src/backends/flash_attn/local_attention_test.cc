#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "backends/flash_attn/flash_attn_test_util.hpp"
#include "folio/backends/virtual_batches.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::BatchLengths;
using testing::FlashAttnFixture;
using testing::LayerSetup;

/// Compares the output with float64 attention of every query over the keys of its own chunk, up to itself: a custom
/// mask over the float32 keys and values that the cache holds.
std::string wrong_local_output(const FlashAttnFixture& fixture, int32_t chunk) {
  const LayerSetup& setup = fixture.setup;
  const int32_t group = setup.num_heads / setup.num_kv_heads;
  const auto at = [&](const std::vector<std::byte>& memory, int64_t index) {
    return static_cast<double>(load_as_float(memory.data(), setup.model_dtype, index));
  };
  const auto cache_index = [&](int32_t request, int32_t position, int32_t half, int32_t head) {
    const BlockTableView& table = fixture.batch.block_table;
    const int64_t page = table.data[request * table.row_stride + position / setup.page_size];
    const auto& strides = fixture.kv.strides;
    return half * strides[0] + page * strides[1] + position % setup.page_size * strides[2] + head * strides[3];
  };
  for (int32_t request = 0; request < fixture.batch.num_reqs; ++request) {
    const int32_t query_len = fixture.batch.query_len(request);
    for (int32_t j = 0; j < query_len; ++j) {
      const int32_t position = fixture.seq_lens[static_cast<size_t>(request)] - query_len + j;
      const int32_t token = fixture.query_start_loc[static_cast<size_t>(request)] + j;
      for (int32_t head = 0; head < setup.num_heads; ++head) {
        const int64_t row = (int64_t{token} * setup.num_heads + head) * setup.head_size;
        double sum = 0.0;
        std::vector<double> expected(static_cast<size_t>(setup.head_size));
        for (int32_t key = position / chunk * chunk; key <= position; ++key) {
          double logit = 0.0;
          for (int32_t d = 0; d < setup.head_size; ++d) {
            logit += at(fixture.q_memory, row + d) *
                     at(fixture.cache_memory, cache_index(request, key, 0, head / group) + d);
          }
          const double weight = std::exp(logit * fixture.layer.scale);
          sum += weight;
          for (int32_t d = 0; d < setup.head_size; ++d) {
            expected[static_cast<size_t>(d)] +=
                weight * at(fixture.cache_memory, cache_index(request, key, 1, head / group) + d);
          }
        }
        for (int32_t d = 0; d < setup.head_size; ++d) {
          const double wanted = expected[static_cast<size_t>(d)] / sum;
          // V is at most 2; exponentials and sums take some dozens of float32 roundings. In float16 the weights and the
          // result are rounded besides.
          const double rounding = setup.model_dtype == DType::kFloat32 ? 0x1p-24 * 64 : 0x1p-11 * 2;
          if (!(std::abs(at(fixture.out_memory, row + d) - wanted) <= 2.0 * rounding)) {
            return "request " + std::to_string(request) + ", query " + std::to_string(j) + ", head " +
                   std::to_string(head) + " is " + std::to_string(at(fixture.out_memory, row + d)) + " instead of " +
                   std::to_string(wanted);
          }
        }
      }
    }
  }
  return {};
}

TEST(FlashAttnLocalAttention, RunsVirtualBatches) {
  for (KvCacheLayout layout : {KvCacheLayout::kNhd, KvCacheLayout::kHnd}) {
    for (const int32_t chunk : {4, 8, 32}) {
      SCOPED_TRACE(std::string(to_string(layout)) + ", chunks of " + std::to_string(chunk));
      LayerSetup setup;
      setup.model_dtype = DType::kFloat32;
      setup.page_size = 4;
      setup.layout = layout;
      setup.padding_requests = 1;
      setup.padding_tokens = 2;
      FlashAttnFixture fixture(setup, {"chunked", {6, 17, 9, 33, 8, 5}, {4, 10, 5, 1, 8, 5}});
      VirtualBatchStorage storage;
      const CommonAttentionMetadata local =
          make_local_attention_virtual_batches(fixture.context, chunk, fixture.batch, setup.page_size, storage);
      const FlashAttentionImpl impl = fixture.make_impl();
      FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
      fixture.forward(impl, builder.build(0, local));
      EXPECT_EQ(fixture.wrong_cache(), "") << "the slots are the batch's";
      EXPECT_EQ(wrong_local_output(fixture, chunk), "");
    }
  }
}

// The made requests begin with their chunk, so what they share are the chunk's first pages: of the third request a
// chunk further on than of the others, and so nothing.
TEST(FlashAttnLocalAttention, VirtualBatchesShareTheirChunksPages) {
  constexpr int32_t kChunk = 128;
  LayerSetup setup;
  setup.model_dtype = DType::kFloat32;
  setup.shared_prefix = 96;
  FlashAttnFixture fixture(setup, {"chunked", {110, 100, 140, 125, 120, 128}, {1, 2, 3, 1, 20, 4}});
  fixture.options.cascade = CascadeMode::kAuto;
  VirtualBatchStorage storage;
  const CommonAttentionMetadata local =
      make_local_attention_virtual_batches(fixture.context, kChunk, fixture.batch, setup.page_size, storage);
  const FlashAttentionImpl impl = fixture.make_impl();
  FlashAttentionMetadataBuilder builder = fixture.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, local);
  EXPECT_EQ(metadata.cascade.num_levels, 1);
  fixture.forward(impl, metadata);
  EXPECT_EQ(fixture.wrong_cache(), "");
  EXPECT_EQ(wrong_local_output(fixture, kChunk), "");
}

// The layers behind the last that writes KV compute the tokens whose logits are wanted only.
TEST(FlashAttnFastPrefill, ComputesTheWantedTokens) {
  LayerSetup setup;
  setup.share_kv = true;
  FlashAttnFixture whole(setup, {"whole", {41, 31, 40}, {15, 5, 8}});
  whole.step();
  ASSERT_EQ(whole.wrong_output(), "");

  const std::vector<int32_t> wanted{14, 18, 19, 27};
  FlashAttnFixture fast(setup, {"whole", {41, 31, 40}, {15, 5, 8}});
  fast.batch.logits_indices_padded = wanted;
  fast.batch.num_logits_indices = 4;
  VirtualBatchStorage storage;
  const CommonAttentionMetadata batch =
      make_kv_sharing_fast_prefill_common_attn_metadata(fast.context, fast.batch, wanted, storage);
  const auto row_bytes = static_cast<size_t>(setup.num_heads * setup.head_size) * 2;
  const std::vector<std::byte> queries = fast.q_memory;
  for (size_t i = 0; i < wanted.size(); ++i) {
    std::copy_n(queries.data() + static_cast<size_t>(wanted[i]) * row_bytes, row_bytes,
                fast.q_memory.data() + i * row_bytes);
  }
  const FlashAttentionImpl impl = fast.make_impl();
  FlashAttentionMetadataBuilder builder = fast.make_builder({&impl});
  const FlashAttentionMetadata metadata = builder.build(0, batch);
  impl.forward({}, fast.query, {}, {}, fast.kv, &metadata, fast.output);
  for (size_t i = 0; i < wanted.size(); ++i) {
    for (size_t k = 0; k < row_bytes / 2; ++k) {
      const auto computed =
          load_as_float(fast.out_memory.data(), DType::kBFloat16, static_cast<int64_t>(i * row_bytes / 2 + k));
      const auto expected = load_as_float(whole.out_memory.data(), DType::kBFloat16,
                                          static_cast<int64_t>(static_cast<size_t>(wanted[i]) * row_bytes / 2 + k));
      // Both are within a rounding of float64; see BatchFixture::wrong_output.
      ASSERT_NEAR(computed, expected, 4.0 * 0x1p-8 * std::max(1.0f, std::abs(expected))) << i;
    }
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
