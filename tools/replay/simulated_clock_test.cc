#include "replay/simulated_clock.hpp"

#include <gtest/gtest.h>

namespace folio::replay {
namespace {

TEST(SimulatedClock, Fixed_EveryStepTakesTheSame) {
  SimulatedClock clock({.kind = ClockKind::kFixed, .step_ms = 10.0});
  clock.step_done(3.0);
  clock.step_done(0.001);
  EXPECT_EQ(clock.now_ms(), 20.0);
  clock.idle_until(50.0);
  EXPECT_EQ(clock.now_ms(), 50.0);
  clock.idle_until(40.0);
  EXPECT_EQ(clock.now_ms(), 50.0) << "time does not go back";
}

TEST(SimulatedClock, Measured_AStepTakesWhatItTook) {
  SimulatedClock clock({.kind = ClockKind::kMeasured, .step_ms = 10.0});
  clock.step_done(0.25);
  EXPECT_EQ(clock.now_ms(), 250.0);
  clock.idle_until(1000.0);
  clock.step_done(0.5);
  EXPECT_EQ(clock.now_ms(), 1500.0);
}

TEST(SimulatedClock, Wall_RunsByItself) {
  SimulatedClock clock({.kind = ClockKind::kWall, .time_scale = 1000.0});
  clock.idle_until(20.0);  // twenty microseconds
  EXPECT_GE(clock.now_ms(), 20.0);
}

}  // namespace
}  // namespace folio::replay
