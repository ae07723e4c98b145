#pragma once

#include <stdexcept>
#include <string>

#include "folio/types/error.hpp"

namespace folio::testing {

/// The message of the Error that `call` throws. Throws std::logic_error, which fails a test, if it does not throw one
/// with that code.
template <typename Call>
std::string message_of(Call&& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == code) return error.what();
    throw std::logic_error("an error with another code: " + std::string(error.what()));
  }
  throw std::logic_error("nothing was thrown");
}

}  // namespace folio::testing
