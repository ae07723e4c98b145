#include "backends/token_pool/list_report.hpp"

#include <atomic>
#include <string>

#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"
#include "folio/backends/token_pool/device_faults.hpp"

namespace folio::inline v0::backends {
namespace token_pool {

std::string describe(const ListReport& report) {
  const auto of_request = [&](const auto&... text) { return core::message("request ", report.request, text...); };
  switch (report.fault) {
    case KvRangeFault::kRow:
      return of_request(" has row ", report.row, "; req_to_token has rows 0 to ", report.bound - 1);
    case KvRangeFault::kLength: return of_request(" has a negative length, or ", report.value, " tokens");
    case KvRangeFault::kStart: return of_request(" starts at position ", report.value);
    case KvRangeFault::kAlignment:
      return of_request(" starts at position ", report.value, "; pages of ", report.bound,
                        " tokens start at its multiples");
    case KvRangeFault::kEnd:
      return of_request(" reads positions up to ", report.value, " of row ", report.row, ", which has ", report.bound);
    case KvRangeFault::kOffset:
      return of_request(" has ", report.value, " entries by kv_indptr, and ", report.bound, " by its length");
    case KvRangeFault::kCapacity:
      return of_request(" has entries up to ", report.value, " of kv_indices, which has ", report.bound);
    case KvRangeFault::kSlot:
      return of_request(" has slot ", report.bound, ", or one behind it in its page, at position ", report.value,
                        " of row ", report.row, "; the pool has no such slot");
    case KvRangeFault::kPage:
      return of_request(" has slot ", report.bound, " at position ", report.value, " of row ", report.row,
                        "; it is not the begin of a page of slots");
    case KvRangeFault::kHostLengths:
      return of_request(" has ", report.value, " tokens to read by the device's lengths and ", report.bound,
                        " by the host's; seq_lens and seq_lens_cpu, or other lengths, differ");
    case KvRangeFault::kSum:
      return core::message("seq_lens_sum is ", report.bound, "; seq_lens, padding included, add up to ", report.value);
    case KvRangeFault::kWriteStart:
      return of_request(" writes from position ", report.value, " of row ", report.row, " on; it must not be negative");
    case KvRangeFault::kWriteEnd:
      return of_request(" writes positions up to ", report.value, " of row ", report.row, ", which has ", report.bound);
    case KvRangeFault::kWriteSlots:
      return of_request(" takes slots up to the ", report.value, "th; ", report.bound, " are given");
    case KvRangeFault::kWriteSlot:
      return of_request(" has slot ", report.bound, " for position ", report.value, " of row ", report.row,
                        "; slots have 32 bits");
    case KvRangeFault::kScore: return of_request(" has a NaN as the score of candidate ", report.row);
    case KvRangeFault::kCandidate: return of_request(" selects candidate ", report.value, "; there are ", report.bound);
    case KvRangeFault::kOrder:
      return of_request(" selects candidate ", report.value, " after ", report.bound, "; they must ascend");
    case KvRangeFault::kLostParent:
      return of_request(" selects candidate ", report.value, " as node ", report.row, ", but not its parent before it");
    case KvRangeFault::kRoot: return of_request(" has a root with parent ", report.value, "; it must be -1");
    case KvRangeFault::kParent:
      return of_request(": node ", report.row, " has parent ", report.value, "; it must be a node before it");
    case KvRangeFault::kMaskBytes:
      return of_request(" has bytes up to ", report.value, " of the mask, which has ", report.bound);
    case KvRangeFault::kNone: break;
  }
  return "nothing";
}

void throw_fault(ListReport& report) {
  // Kernels write beside the host: the fault last, and the claim is given back last.
  const std::atomic_ref<KvRangeFault> fault(report.fault);
  if (fault.load(std::memory_order_acquire) == KvRangeFault::kNone) [[likely]] {
    return;
  }
  const ListReport found = report;
  fault.store(KvRangeFault::kNone, std::memory_order_release);
  std::atomic_ref(report.claimed).store(0, std::memory_order_release);
  core::fail(ErrorCode::kInvalidArgument, "an earlier call, on the device: ", describe(found));
}

}  // namespace token_pool

DeviceFaults::DeviceFaults(const Context& context) : device_(context.device()) {
  if (device_.type != DeviceType::kCpu) report_ = token_pool::gpu::make_report(device_.index);
}

void DeviceFaults::check() {
  if (report_ != nullptr) token_pool::throw_fault(*report_);
}

}  // namespace folio::inline v0::backends
