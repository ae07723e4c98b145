#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/attention_metadata.hpp"
#include "folio/context.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

/// A 16-bit copy of the pages of an fp8 cache that some requests use, for kernels that cannot mix 16-bit queries with
/// fp8 keys. (Folio's own can; engines that want the original's numbers, or kernels of their own behind the copy, use
/// it.)
namespace folio::inline v0::backends {

/// Pages that such a copy needs: one for every page in use, and page 0, which stays unwritten and which no table names
/// but beyond a request's pages. O(R).
FOLIO_API int64_t num_dequantized_pages(std::span<const int32_t> seq_lens, int32_t page_size);

/// Copies every token in use: mock = stored * scale, rounded to the mock cache's dtype. The scales are then part of the
/// keys and values and must not be applied again: attention over the copy has k and v scales of 1.
/// - kv_cache: fp8, any strides. block_tables: [>= R, columns]; seq_lens: [R]. Page ids are checked against the cache,
///   entries beyond a request's length are not looked at. Page 0 is a page like any other here.
/// - mock_kv_cache: float16 or bfloat16, the same sizes but for num_pages >= num_dequantized_pages.
/// - mock_block_table: [R * columns], row-major: pages numbered from 1, request after request; 0 beyond their pages.
/// Tokens beyond a request's length are neither read nor written. O(tokens in use). Throws kInvalidArgument naming the
/// request, before anything is written.
/// On a GPU everything, lengths and tables included, lies in device memory, the call is enqueued on `stream` and may be
/// captured. Pages are looked at when the kernel runs: one that the cache does not have is not copied, one that finds
/// no room in the mock cache is 0 in the table, a length beyond the columns ends with them; each makes `status`, if
/// given, 1, and nothing sets it back.
FOLIO_API void trtllm_prefill_attn_kvfp8_dequant(const Context& context, const KvCacheView& kv_cache,
                                                 const BlockTableView& block_tables, std::span<const int32_t> seq_lens,
                                                 float k_scale, float v_scale, const KvCacheView& mock_kv_cache,
                                                 std::span<int32_t> mock_block_table, Stream stream = {},
                                                 int32_t* status = nullptr);

}  // namespace folio::inline v0::backends
