#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

/// Enqueues the fold of the plan's partial results and the output of their rows, over `num_workers` thread blocks; how
/// many merges there are is read on the device. Head dimensions up to 512. `overlaps`: the kernel before it calls
/// ptx::let_next_kernel_begin, and this one's start is hidden behind its end. Throws Error(kDeviceError).
void launch_merge(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps = false);

}  // namespace folio::inline v0::kernels::cuda
