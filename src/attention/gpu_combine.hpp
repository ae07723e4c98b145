#pragma once

#include "attention/gpu_kernels.hpp"
#include "kernels/cpu/generic/combine/combine.hpp"

namespace folio::inline v0::attention {

/// A merge of one or two sources on a GPU, arguments checked before. `out_scale` stands for the params' own, and is
/// read on the device where it is an array.
void gpu_combine(const GpuKernels& gpu, const kernels::generic::CombineParams& params, int64_t num_tokens,
                 const Scale& out_scale, Stream stream);

}  // namespace folio::inline v0::attention
