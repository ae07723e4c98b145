#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

/// Enqueues the fold of the plan's partial results and the output of their rows; how many merges there are is read on
/// the device. Head dimensions up to 512. `overlaps`: the kernel before it calls ptx::griddep_launch_dependents, and
/// this one's start is hidden behind its end. `blocks_per_worker`: CTAs, for kernels whose merges have many rows; one
/// is as many as can wait beside the kernel before. Throws Error(kDeviceError).
void launch_combine(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps = false,
                    int32_t blocks_per_worker = 1);

}  // namespace folio::inline v0::kernels::cuda
