#include "folio/backends/flashinfer/kv_dequant.hpp"

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;

/// What dequantize_pages checks too, under the names of these arguments.
void check_caches(const KvCacheView& kv_cache, const KvCacheView& mock) {
  require(kv_cache.format == KvFormat::kStrided && mock.format == KvFormat::kStrided,
          "kv_cache and mock_kv_cache must be strided");
  require(is_fp8(kv_cache.dtype), "kv_cache is ", kv_cache.dtype, "; it must be fp8_e4m3 or fp8_e5m2");
  require(mock.dtype == DType::kFloat16 || mock.dtype == DType::kBFloat16, "mock_kv_cache is ", mock.dtype,
          "; it must be float16 or bfloat16");
  require(mock.page_size == kv_cache.page_size && mock.num_kv_heads == kv_cache.num_kv_heads &&
              mock.head_dim_qk == kv_cache.head_dim_qk && mock.head_dim_v == kv_cache.head_dim_v,
          "mock_kv_cache's pages are not like kv_cache's");
}

}  // namespace

void trtllm_prefill_attn_kvfp8_dequant(const Context& context, const KvCacheView& kv_cache,
                                       const BlockTableView& block_tables, std::span<const int32_t> seq_lens,
                                       float k_scale, float v_scale, const KvCacheView& mock_kv_cache,
                                       std::span<int32_t> mock_block_table, Stream stream, int32_t* status) {
  check_caches(kv_cache, mock_kv_cache);
  const auto num_requests = core::checked_cast<int32_t>(seq_lens.size());
  const int32_t columns = block_tables.num_columns;
  require(block_tables.num_rows >= num_requests, "block_tables has ", block_tables.num_rows, " rows; seq_lens has ",
          num_requests, " entries");
  require(static_cast<int64_t>(mock_block_table.size()) == int64_t{num_requests} * columns, "mock_block_table has ",
          mock_block_table.size(), " entries; ", num_requests, " rows of ", columns, " are needed");
  if (context.device().type == DeviceType::kCpu) {  // a GPU's lengths lie on the GPU
    const int64_t num_pages = num_dequantized_pages(seq_lens, kv_cache.page_size);
    require(mock_kv_cache.num_pages >= num_pages, "mock_kv_cache has ", mock_kv_cache.num_pages, " pages; ", num_pages,
            " are needed");
  }
  dequantize_pages(context, kv_cache, to_page_table(block_tables, num_requests), columns, seq_lens, k_scale, v_scale,
                   mock_kv_cache, mock_block_table, stream, status);
}

}  // namespace folio::inline v0::backends
