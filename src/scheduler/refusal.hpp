#pragma once

#include <cstdint>

#include "core/error.hpp"

/// Refusing a batch or a config: Error(kInvalidArgument) that names the request, segment or row at fault.
namespace folio::inline v0::scheduler {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... splits) {
  core::fail(ErrorCode::kInvalidArgument, splits...);
}

template <typename... Parts>
[[noreturn]] void refuse_request(int64_t request, const Parts&... splits) {
  refuse("request ", request, ": ", splits...);
}

template <typename... Parts>
[[noreturn]] void refuse_segment(int64_t segment, const Parts&... splits) {
  refuse("segment ", segment, ": ", splits...);
}

template <typename... Parts>
[[noreturn]] void refuse_row(int64_t segment, int64_t row, const Parts&... splits) {
  refuse("segment ", segment, ", row ", row, ": ", splits...);
}

}  // namespace folio::inline v0::scheduler
