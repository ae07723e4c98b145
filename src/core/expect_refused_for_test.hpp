#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "folio/types/error.hpp"

namespace folio::testing {

/// That `call` throws an Error with this text in its message.
template <typename Call>
void expect_refused(const std::string& text, Call call, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
    ADD_FAILURE() << "did not throw: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text));
  }
}

}  // namespace folio::testing
