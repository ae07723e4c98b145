#include "kernels/cuda/plain/attention/plain_kernel.hpp"

#include "kernels/cuda/plain/attention/launch.hpp"
#include "kernels/cuda/plain/attention/takes.hpp"

namespace folio::inline v0::kernels::cuda::plain {

const AttentionKernel kPlainKernel{.name = "cuda-plain",
                                   .min_compute_capability = 80,
                                   .refusal = refusal,
                                   .tile = tile,
                                   .p_dtype = p_dtype,
                                   .workers_per_sm = 2,
                                   .tile_cost = 16,
                                   .row_cost = 1,
                                   .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::plain
