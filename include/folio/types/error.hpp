#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "folio/types/export.hpp"

namespace folio::inline v0 {

/// Why a call failed. The values are those of the C API (`folio_status`) and never change.
enum class ErrorCode : int32_t {
  kOk = 0,                 ///< no error (C API only; never thrown)
  kInvalidArgument = 1,    ///< a value, shape, dtype, device or index that no configuration accepts
  kUnsupported = 2,        ///< well-formed, but no kernel or backend here offers it; the message says what is offered
  kUnavailable = 3,        ///< offered in general, absent here: no GPU, a CPU feature that the OS does not grant
  kOutOfMemory = 4,        ///< host or device memory could not be had; see Error for std::bad_alloc
  kWorkspaceTooSmall = 5,  ///< the workspace is smaller than the plan needs; the message has both sizes
  kStalePlan = 6,          ///< the plan's buffer has been planned into again since
  kDeviceError = 7,        ///< the device runtime reported an error
  kInternal = 8,           ///< a bug in Folio
};

/// What every throwing function of Folio throws. `what()` says what was given and what is offered.
///
/// Memory has one more rule. Device memory, threads and large host blocks (plans, caches, tables) that cannot be had
/// are Error(kOutOfMemory), whose message has the size. A small block of a standard container is std::bad_alloc, from
/// any function that is not noexcept: catch both. After either, nothing was written and every object is as usable as
/// after any other error. The C API returns FOLIO_OUT_OF_MEMORY for both.
class FOLIO_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace folio::inline v0
