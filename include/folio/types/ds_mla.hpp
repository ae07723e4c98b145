#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// A token's row in a cache of KvFormat::kFp8DsMla: the latent in fp8 with a scale for every 128 components, and the
/// RoPE part as it is. The layout is that of FlashMLA's fp8 KV cache and of vLLM's cache dtype fp8_ds_mla.
///
///     bytes    0 to 511   components 0 to 511: e4m3, real = stored * scale
///     bytes  512 to 527   four float32 scales: component d has scale d / 128
///     bytes  528 to 655   components 512 to 575: bfloat16
namespace folio::inline v0 {

inline constexpr int32_t kDsMlaLatentDim = 512;  ///< components of a value, and a key's first ones
inline constexpr int32_t kDsMlaRopeDim = 64;     ///< a key's last components
inline constexpr int32_t kDsMlaHeadDimQk = kDsMlaLatentDim + kDsMlaRopeDim;
inline constexpr int32_t kDsMlaBlockDim = 128;  ///< components that share a scale
inline constexpr int32_t kDsMlaBlocks = kDsMlaLatentDim / kDsMlaBlockDim;
inline constexpr int32_t kDsMlaScalesOffset = kDsMlaLatentDim;  ///< bytes
inline constexpr int32_t kDsMlaRopeOffset = kDsMlaScalesOffset + 4 * kDsMlaBlocks;
inline constexpr int32_t kDsMlaRowBytes = kDsMlaRopeOffset + 2 * kDsMlaRopeDim;
inline constexpr int32_t kDsMlaAlignment = 16;  ///< of a cache's address and strides, in bytes
static_assert(kDsMlaRowBytes == 656 && kDsMlaRowBytes % kDsMlaAlignment == 0);

}  // namespace folio::inline v0
