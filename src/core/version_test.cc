#include "folio/version.hpp"

#include <gtest/gtest.h>

#include <string>

namespace folio {
namespace {

TEST(Version, MatchesTheHeader) {
  const std::string numbers = std::to_string(FOLIO_VERSION_MAJOR) + "." + std::to_string(FOLIO_VERSION_MINOR) + "." +
                              std::to_string(FOLIO_VERSION_PATCH);
  EXPECT_STREQ(version(), FOLIO_VERSION_STRING);
  EXPECT_EQ(version(), numbers);
}

}  // namespace
}  // namespace folio
