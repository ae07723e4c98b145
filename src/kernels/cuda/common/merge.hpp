#pragma once

#include "kernels/cuda/attention_kernel.hpp"

namespace folio::inline v0::kernels::cuda {

/// Enqueues the fold of the plan's partial results and the output of their rows, over `num_workers` thread blocks; how
/// many merges there are is read on the device. Head dimensions up to 512. Throws Error(kDeviceError).
void launch_merge(const AttentionParams& params, int32_t num_workers, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
