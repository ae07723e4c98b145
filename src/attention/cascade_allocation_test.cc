#include <gtest/gtest.h>

#include "attention/cascade_test_util.hpp"
#include "core/allocation_test_util.hpp"

namespace folio::inline v0::attention {
namespace {

/// Once a step: after the largest batch nothing may be allocated, whatever is shared.
TEST(Cascade, AllocatesNothingWhenWarm) {
  CascadeScene scene({});
  CascadePlanner planner(scene.eager_costs());
  const CascadeBatch batch = scene.batch();
  CascadeBatch smaller = batch;
  smaller.num_requests = 5;
  SharedPrefixFinder finder;
  const std::vector<int32_t> pages{14, 14, 14, 0, 12, 12, 12, 9, 4};
  std::vector<int32_t> order{8, 7, 6, 5, 4, 3, 2, 1, 0};
  finder.order(batch.table, pages, order);
  planner.discover(batch);
  planner.share(smaller, 16);
  const int64_t before = folio::testing::num_allocations();
  const int32_t levels = planner.discover(batch).num_levels();
  planner.discover(smaller);
  planner.share(smaller, 16);
  finder.order(batch.table, pages, order);
  EXPECT_EQ(folio::testing::num_allocations(), before);
  EXPECT_EQ(levels, 2);
}

}  // namespace
}  // namespace folio::inline v0::attention
