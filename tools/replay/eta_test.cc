#include "replay/eta.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace folio::replay {
namespace {

TEST(Eta, WhatIsLeft_AtThePaceSoFar) {
  EXPECT_EQ(eta(0.5, 30.0), ", ETA 0:30");
  EXPECT_EQ(eta(0.25, 100.0), ", ETA 5:00");
  EXPECT_EQ(eta(0.1, 1000.0), ", ETA 2:30:00");
  EXPECT_EQ(eta(0.999, 60.0), ", ETA 0:01") << "rounded up: 0:00 would be over";
}

TEST(Eta, NothingIsSaid_WithoutGrounds) {
  EXPECT_EQ(eta(0.5, 0.5), "") << "the first second";
  EXPECT_EQ(eta(0.0, 10.0), "");
  EXPECT_EQ(eta(1.0, 10.0), "");
  EXPECT_EQ(eta(1e-12, 10.0), "") << "years";
  EXPECT_EQ(eta(std::numeric_limits<double>::quiet_NaN(), 10.0), "");
}

}  // namespace
}  // namespace folio::replay
