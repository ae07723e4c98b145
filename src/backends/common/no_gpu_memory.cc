#include "backends/common/gpu_memory.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::gpu {
namespace {

[[noreturn]] void refuse(int32_t device) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", device,
             ": this build has no CUDA kernels; Context::cpu is offered");
}

}  // namespace

std::shared_ptr<void> allocate(int32_t device, size_t /*bytes*/) {
  refuse(device);
}
void copy_to_device(int32_t device, void* /*to*/, const void* /*from*/, size_t /*bytes*/) {
  refuse(device);
}
void upload(int32_t device, void* /*to*/, const void* /*from*/, size_t /*bytes*/, Stream /*stream*/) {
  refuse(device);
}
void copy(int32_t device, void* /*to*/, const void* /*from*/, size_t /*bytes*/, Stream /*stream*/) {
  refuse(device);
}
void zero_rows(int32_t device, void* /*data*/, int64_t /*stride_bytes*/, int64_t /*row_bytes*/, int64_t /*rows*/,
               Stream /*stream*/) {
  refuse(device);
}

}  // namespace folio::inline v0::backends::gpu
