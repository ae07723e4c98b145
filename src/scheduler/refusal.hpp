#pragma once

#include <cstdint>

#include "core/error.hpp"

/// Refusing a batch or a config: Error(kInvalidArgument) that names the request, segment or row at fault.
namespace folio::inline v0::scheduler {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  core::fail(ErrorCode::kInvalidArgument, parts...);
}

template <typename... Parts>
[[noreturn]] void refuse_request(int64_t request, const Parts&... parts) {
  refuse("request ", request, ": ", parts...);
}

template <typename... Parts>
[[noreturn]] void refuse_segment(int64_t segment, const Parts&... parts) {
  refuse("segment ", segment, ": ", parts...);
}

template <typename... Parts>
[[noreturn]] void refuse_row(int64_t segment, int64_t row, const Parts&... parts) {
  refuse("segment ", segment, ", row ", row, ": ", parts...);
}

}  // namespace folio::inline v0::scheduler
