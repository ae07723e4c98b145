#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

/// The kernel of one element type of keys and values in shared memory and one head dimension, the same for keys and
/// values: class_<type>_<dimension>.cu.
using LaunchClass = void (*)(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_64(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_128(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_64(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_128(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_e4m3_64(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_e4m3_128(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_e5m2_64(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_e5m2_128(const AttentionParams& params, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm90
