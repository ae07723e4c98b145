#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm90::mla {

/// The kernels of one element type: class_<type>.cu. `general`: there is a soft cap, ALiBi or a custom mask.
using LaunchClass = void (*)(const AttentionParams& params, bool general, int32_t num_workers, Stream stream);
void launch_bfloat16(const AttentionParams& params, bool general, int32_t num_workers, Stream stream);
void launch_float16(const AttentionParams& params, bool general, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
