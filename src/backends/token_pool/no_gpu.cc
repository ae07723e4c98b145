#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool::gpu {

void build_lists(int32_t device, const ListsJob& /*job*/, Stream /*stream*/) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", device,
             ": this build has no CUDA kernels; Context::cpu is offered");
}

}  // namespace folio::inline v0::backends::token_pool::gpu
