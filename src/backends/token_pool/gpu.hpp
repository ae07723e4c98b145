#pragma once

#include <cstdint>
#include <memory>

#include "backends/token_pool/device/kv_lists_rule.hpp"
#include "folio/types/device.hpp"

/// What the backend asks of a GPU besides attention and memory. Implemented in cuda/; in builds without a toolkit every
/// call throws kUnavailable.
namespace folio::inline v0::backends::token_pool::gpu {

/// The lists of a wrapper; what it cannot list is in the job's report.
void build_lists(int32_t device, const ListsJob& job, Stream stream);

/// create_kv_indices of `num_requests`, from arrays on the device.
void create_kv_indices(int32_t device, const KvIndicesJob& job, int32_t num_requests, ListReport* report,
                       Stream stream);

/// A report that the host reads and kernels write.
std::shared_ptr<ListReport> make_report(int32_t device);

}  // namespace folio::inline v0::backends::token_pool::gpu
