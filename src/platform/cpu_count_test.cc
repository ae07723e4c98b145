#include "platform/cpu_count.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

namespace folio::platform {
namespace {

TEST(AvailableCpus, FollowsTheAffinityMask) {
  const int32_t before = available_cpus();
  EXPECT_GE(before, 1);
  // On a thread of its own: the mask ends with it.
  int32_t pinned = 0;
  std::vector<int32_t> own, mask;
  std::thread([&] {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &all)) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
      own = {cpu};
      break;
    }
    pinned = available_cpus();
    mask = affinity_mask();
  }).join();
  EXPECT_EQ(pinned, 1);
  EXPECT_EQ(mask, own);
  EXPECT_EQ(affinity_mask().size(), static_cast<size_t>(before));
  EXPECT_EQ(available_cpus(), before);
}

}  // namespace
}  // namespace folio::platform
