#include <gtest/gtest.h>

#include "backends/token_pool/pool_fixture.hpp"

namespace folio::inline v0::backends {
namespace {

using testing::PoolFixture;
using testing::PoolLengths;
using testing::PoolSetup;

TEST(TokenPoolForward, Decodes) {
  PoolFixture fixture({}, {.mode = ForwardMode::kDecode, .prefix = {14, 15, 0, 16}, .fresh = {1, 1, 1, 1}});
  EXPECT_EQ(fixture.wrong_step(), "");
}

TEST(TokenPoolForward, Extends) {
  for (const ExtendPath path : {ExtendPath::kAuto, ExtendPath::kRagged, ExtendPath::kPaged}) {
    PoolSetup setup;
    setup.extend_path = path;
    PoolFixture fixture(setup, {.mode = ForwardMode::kExtend, .prefix = {2, 4, 0}, .fresh = {3, 1, 5}});
    EXPECT_EQ(fixture.wrong_step(), "") << static_cast<int>(path);
  }
}

}  // namespace
}  // namespace folio::inline v0::backends
