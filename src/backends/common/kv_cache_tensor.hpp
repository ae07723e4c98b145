#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "folio/backends/engine_config.hpp"
#include "folio/types/dtype.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// Head sizes that Folio's kernels take: multiples of 8 up to 256. vLLM's FlashAttention backend takes the same.
constexpr std::array<int32_t, 32> multiples_of_8_up_to_256() {
  std::array<int32_t, 32> sizes{};
  for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = static_cast<int32_t>(8 * (i + 1));
  return sizes;
}
inline constexpr std::array<int32_t, 32> kNativeHeadSizes = multiples_of_8_up_to_256();

/// A packed tensor of logical shape `shape` whose logical dimension order[k] stands at physical position k.
TensorView permuted_tensor(void* data, DType dtype, const std::array<int64_t, 5>& shape,
                           const std::array<int32_t, 5>& order);

/// The core's view of a cache whose K and V are entries 0 and 1 of dimension `kv_dim` of a tensor of rank 5; the other
/// dimensions are, in order, pages, tokens, KV heads and components. `shape_text` is what messages call that shape.
/// Throws kInvalidArgument naming what does not fit.
KvCacheView view_of_cache_tensor(const TensorView& kv_cache, DType dtype, int32_t kv_dim, const char* shape_text);

/// Throws kInvalidArgument where a cache of rank 5, whose last dimensions are tokens, heads and components, lies
/// otherwise than the engine's configuration says.
void require_configured_layout(const TensorView& kv_cache, KvCacheLayout layout);

/// Throws kInvalidArgument for a value that is no layout.
void require_layout(KvCacheLayout layout);

}  // namespace folio::inline v0::backends
