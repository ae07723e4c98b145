#include "attention/gpu_backend.hpp"
#include "core/error.hpp"

namespace folio::inline v0::attention {

std::shared_ptr<const GpuBackend> open_gpu(int32_t index) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", index,
             ": this build has no CUDA kernels; Context::cpu is offered");
}

}  // namespace folio::inline v0::attention
