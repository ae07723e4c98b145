#pragma once

#include <gtest/gtest.h>

#include <string>

#include "folio/types/error.hpp"

namespace folio::inline v0::backends::testing {

/// The message of the Error that `call` throws, which must have that code.
template <typename Call>
std::string refusal(Call&& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "nothing was refused";
}

}  // namespace folio::inline v0::backends::testing
