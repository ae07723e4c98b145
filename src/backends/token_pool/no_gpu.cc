#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends::token_pool::gpu {

namespace {

[[noreturn]] void fail_unavailable(int32_t device) {
  core::fail(ErrorCode::kUnavailable, "CUDA device ", device,
             ": this build has no CUDA kernels; Context::cpu is offered");
}

}  // namespace

void build_lists(int32_t device, const ListsJob& /*job*/, Stream /*stream*/) {
  fail_unavailable(device);
}

void create_kv_indices(int32_t device, const KvIndicesJob& /*job*/, int32_t /*num_requests*/, ListReport* /*report*/,
                       Stream /*stream*/) {
  fail_unavailable(device);
}

std::shared_ptr<ListReport> make_report(int32_t device) {
  fail_unavailable(device);
}

}  // namespace folio::inline v0::backends::token_pool::gpu
