#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// What there is between products and weights but a scale and ranges of visible tokens.
enum class Variant : int32_t {
  kPlain,  ///< nothing
  kCap,    ///< a soft cap of kLargestCap or less
  kAlibi,  ///< ALiBi
  kAny,    ///< a custom mask, with or without these; both of them; or a larger cap
};
/// Weights of bfloat16 have the range for logits between such a cap and its negative: see has_fixed_top.
constexpr float kLargestCap = 50.0f;

/// The kernels of one element type of keys and values and its head dimensions: class_<type>_<keys>_<values>.cu. Those
/// of fp8 take any queries.
using LaunchClass = void (*)(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_bfloat16_64_64(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_float16_64_64(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_bfloat16_96_96(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_float16_96_96(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_bfloat16_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_float16_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_bfloat16_192_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_float16_192_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_bfloat16_256_256(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_float16_256_256(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_e4m3_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
void launch_e5m2_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);
/// Products of codes as they are: e4m3 queries, keys and values; kPlain alone.
void launch_native_e4m3_128_128(const AttentionParams& params, Variant variant, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
