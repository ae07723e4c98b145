#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::decode {

/// The kernel of one element type of keys and values in shared memory and its head dimensions:
/// class_<type>_<keys>_<values>.cu.
using LaunchClass = void (*)(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_bfloat16_64_64(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_float16_64_64(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_e4m3_64_64(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_e5m2_64_64(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_bfloat16_96_96(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_float16_96_96(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_bfloat16_128_128(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_float16_128_128(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_e4m3_128_128(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_e5m2_128_128(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_bfloat16_192_128(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_float16_192_128(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_bfloat16_256_256(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_float16_256_256(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_e4m3_256_256(const AttentionParams& params, const LaunchShape& shape, Stream stream);
void launch_e5m2_256_256(const AttentionParams& params, const LaunchShape& shape, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
