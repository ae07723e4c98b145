#pragma once

#include <cstdint>
#include <span>

#include "folio/backends/attention_metadata.hpp"
#include "folio/backends/engine_config.hpp"
#include "folio/backends/flash_attn/impl.hpp"
#include "folio/context.hpp"
#include "folio/types/device.hpp"
#include "folio/types/export.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// One layer of a batch whose requests share their first keys. R requests.
struct CascadeAttentionArgs {
  std::span<const int32_t> cu_query_lens;   ///< [R + 1]
  std::span<const int32_t> suffix_kv_lens;  ///< [R], keys behind the prefix, the new ones included
  BlockTableView block_table;               ///< the requests' tables from position 0 on; the prefix is read off
                                            ///< the first row that has queries
  int32_t common_prefix_len = 0;            ///< a multiple of the page size, at least one page
  float softmax_scale = 0.0f;               ///< finite and above 0
  std::span<const float> alibi_slopes;      ///< [num_heads]; empty = none
  SlidingWindow sliding_window;
  float logits_soft_cap = 0.0f;  ///< 0 = none
  Scale q_descale;               ///< fp8 queries only
  Scale k_descale;
  Scale v_descale;
  std::span<const float> s_aux;                      ///< sinks, [num_heads]; empty = none. Each counts once
  BackendProfile profile = BackendProfile::kNative;  ///< vLLM's refuse ALiBi and windows
};

/// Attention of one layer with the prefix read once for all requests: for tests and tools. Engines build metadata
/// instead, once for all layers: this prepares, plans and allocates every time. On a GPU the lengths, slopes and sinks
/// are host memory, everything else the device's, and the call waits until the output is there; it cannot be captured.
/// query [T, num_heads, head_size], output likewise, T >= cu_query_lens[R]. Queries are the last ones of their
/// requests; causal. Throws kInvalidArgument.
FOLIO_API void cascade_attention(const Context& context, const TensorView& output, const ConstTensorView& query,
                                 const KvCacheView& kv_cache, const CascadeAttentionArgs& args, Stream stream = {});

}  // namespace folio::inline v0::backends
