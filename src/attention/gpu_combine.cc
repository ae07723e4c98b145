#include "attention/gpu_combine.hpp"

#include <cstddef>

namespace folio::inline v0::attention {
namespace {

kernels::cuda::CombineSource device_source(const kernels::generic::CombineSource& source) {
  kernels::cuda::CombineSource device;
  device.out = source.out;
  device.dtype = source.dtype;
  device.num_states = source.num_states;
  device.state_stride = source.state_stride;
  device.token_stride = source.token_stride;
  device.head_stride = source.head_stride;
  device.lse = source.lse;
  device.lse_state_stride = source.lse_state_stride;
  device.lse_token_stride = source.lse_token_stride;
  device.lse_head_stride = source.lse_head_stride;
  device.base = source.base;
  return device;
}

}  // namespace

void gpu_combine(const GpuKernels& gpu, const kernels::generic::CombineParams& params, int64_t num_tokens,
                 const Scale& out_scale, Stream stream) {
  kernels::cuda::CombineParams device;
  for (size_t i = 0; i < params.sources.size(); ++i) device.sources[i] = device_source(params.sources[i]);
  device.num_tokens = num_tokens;
  device.num_heads = params.num_heads;
  device.head_dim = params.head_dim;
  device.out = params.out;
  device.out_dtype = params.out_dtype;
  device.out_scale = out_scale;
  device.out_token_stride = params.out_token_stride;
  device.out_head_stride = params.out_head_stride;
  device.lse = params.lse;
  device.mask = params.mask;
  gpu.enqueue(device, stream);
}

}  // namespace folio::inline v0::attention
