#include "replay/step_series.hpp"

#include <gtest/gtest.h>

namespace folio::replay {
namespace {

StepPoint step(int64_t number) {
  StepPoint point;
  point.step = number;
  point.start_ms = 10.0 * static_cast<double>(number);
  point.end_ms = point.start_ms + 10.0;
  point.times.seconds[static_cast<size_t>(Phase::kRun)] = 0.5;
  point.decoding = static_cast<double>(number);
  point.query_tokens = 3;
  point.pages_held = static_cast<int32_t>(100 - number);
  return point;
}

StepSeries series_of(int64_t steps, size_t most_points) {
  StepSeries series(most_points);
  for (int64_t i = 0; i < steps; ++i) series.add(step(i));
  return series;
}

TEST(StepSeries, KeepsEveryStep_WhileThereIsRoom) {
  const StepSeries series = series_of(4, 4);
  ASSERT_EQ(series.points().size(), 4u);
  EXPECT_EQ(series.steps_per_point(), 1);
  EXPECT_EQ(series.points()[3].step, 3);
}

TEST(StepSeries, NeighboursBecomeOne_WhereItIsFull) {
  const StepSeries series = series_of(12, 4);  // of 2 steps each after the fifth, of 4 after the ninth
  EXPECT_EQ(series.steps_per_point(), 4);
  ASSERT_EQ(series.points().size(), 3u);
  const StepPoint& second = series.points()[1];
  EXPECT_EQ(second.step, 4);
  EXPECT_EQ(second.steps, 4);
  EXPECT_EQ(second.start_ms, 40.0);
  EXPECT_EQ(second.end_ms, 80.0);
  EXPECT_EQ(second.decoding, 5.5) << "the mean of 4, 5, 6 and 7";
  EXPECT_EQ(second.query_tokens, 12);
  EXPECT_EQ(second.pages_held, 96) << "the most";
  EXPECT_EQ(second.times[Phase::kRun], 2.0);
  EXPECT_EQ(series.points()[2].steps, 4);
  EXPECT_EQ(series.points()[2].decoding, 9.5) << "steps that came one by one weigh as much";
}

TEST(StepSeries, LosesNoStep_AndStaysSmall) {
  for (const int64_t steps : {1, 7, 64, 1000, 12345}) {
    const StepSeries series = series_of(steps, 16);
    EXPECT_LE(series.points().size(), 16u);
    int64_t next = 0;
    for (const StepPoint& point : series.points()) {
      EXPECT_EQ(point.step, next);
      next += point.steps;
    }
    EXPECT_EQ(next, steps);
  }
}

}  // namespace
}  // namespace folio::replay
