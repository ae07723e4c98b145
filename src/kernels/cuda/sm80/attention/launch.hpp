#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

/// AttentionKernel::launch of "cuda-sm80".
void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream);

/// The kernel of one element type (float16, bfloat16, or codes of 8 bits) and one of kDimClasses, or kLargeClass:
/// class_<type>_<index>.cu.
using LaunchClass = void (*)(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_0(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_1(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_2(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_3(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_float16_4(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_0(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_1(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_2(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_3(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_bfloat16_4(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_codes_0(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_codes_1(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_codes_2(const AttentionParams& params, int32_t num_workers, Stream stream);
void launch_codes_3(const AttentionParams& params, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm80
