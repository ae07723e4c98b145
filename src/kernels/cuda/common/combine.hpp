#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

/// Enqueues the split-KV combine: folds the plan's partial results, and those of the other pass's plan, and writes
/// their rows. The device reads how many output tiles there are. Head dimensions up to 512. `overlaps`: PDL; the kernel
/// before it calls ptx::griddep_launch_dependents. `blocks_per_worker`: CTAs, for kernels whose output tiles have many
/// rows; one for each worker is as many as fit beside the kernel before. Throws Error(kDeviceError).
void launch_combine(const AttentionParams& params, int32_t num_workers, Stream stream, bool overlaps = false,
                    int32_t blocks_per_worker = 1);

}  // namespace folio::inline v0::kernels::cuda
