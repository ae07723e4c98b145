#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "attention/cascade_test_util.hpp"

namespace {

std::atomic<bool> counting = false;
std::atomic<int64_t> allocations = 0;

}  // namespace

// noinline: otherwise gcc sees malloc and operator delete as a mismatched pair.
__attribute__((noinline)) void* operator new(size_t bytes) {
  if (counting) ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

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
  allocations = 0;
  counting = true;
  const int32_t levels = planner.discover(batch).num_levels();
  planner.discover(smaller);
  planner.share(smaller, 16);
  finder.order(batch.table, pages, order);
  counting = false;
  EXPECT_EQ(levels, 2);
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace folio::inline v0::attention
