#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool::gpu {
namespace {

[[noreturn]] void refuse(int32_t device) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", device,
             ": this build has no CUDA kernels; Context::cpu is offered");
}

}  // namespace

std::shared_ptr<void> allocate(int32_t device, size_t /*bytes*/) {
  refuse(device);
}
void zero_rows(int32_t device, void* /*data*/, int64_t /*stride_bytes*/, int64_t /*row_bytes*/, int64_t /*rows*/,
               Stream /*stream*/) {
  refuse(device);
}
void build_lists(int32_t device, const ListsJob& /*job*/, Stream /*stream*/) {
  refuse(device);
}

}  // namespace folio::inline v0::backends::token_pool::gpu
