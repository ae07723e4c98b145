#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/attention_metadata.hpp"
#include "folio/context.hpp"
#include "folio/kv_cache.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

/// A 16-bit copy of the pages of an fp8 cache that some requests use, for kernels that cannot mix 16-bit queries with
/// fp8 keys. (Folio's own can; engines that want the original's numbers, or kernels of their own behind the copy, use
/// it.)
namespace folio::inline v0::backends {

using folio::num_dequantized_pages;

/// dequantize_pages (folio/kv_cache.hpp) under the original's name, with an engine's table: block_tables is [>= R,
/// columns], mock_kv_cache the copy, mock_block_table [R * columns] its table. Page 0 of kv_cache is a page like any
/// other here. Throws kInvalidArgument naming the argument or the request.
FOLIO_API void trtllm_prefill_attn_kvfp8_dequant(const Context& context, const KvCacheView& kv_cache,
                                                 const BlockTableView& block_tables, std::span<const int32_t> seq_lens,
                                                 float k_scale, float v_scale, const KvCacheView& mock_kv_cache,
                                                 std::span<int32_t> mock_block_table, Stream stream = {},
                                                 int32_t* status = nullptr);

}  // namespace folio::inline v0::backends
