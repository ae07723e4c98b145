#include "folio/distributed/process_group.hpp"

#include "core/error.hpp"

namespace folio::inline v0::distributed {

ProcessGroup::~ProcessGroup() = default;

void ProcessGroup::all_gather_host(const void* send, void* recv, size_t bytes) {
  if (device().type != DeviceType::kCpu) {
    core::fail(ErrorCode::kUnsupported,
               "the group's buffers lie in a GPU's memory, and it has no operation on the host's");
  }
  all_gather(send, recv, bytes, {});
}

}  // namespace folio::inline v0::distributed
