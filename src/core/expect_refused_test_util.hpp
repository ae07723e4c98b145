#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/error_test_util.hpp"

namespace folio::testing {

/// That `call` throws an Error with this code and this text in its message.
template <typename Call>
void expect_refused(const std::string& text, Call call, ErrorCode code = ErrorCode::kInvalidArgument) {
  EXPECT_THAT(message_of(call, code), ::testing::HasSubstr(text));
}

}  // namespace folio::testing
