#include "platform/cpu_count.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace folio::inline v0::platform {

int32_t available_cpus() noexcept {
  // The kernel refuses masks shorter than its own, so grow until one is taken: 2^16 CPUs are beyond any Linux build.
  for (size_t max_cpus = CPU_SETSIZE; max_cpus <= (size_t{1} << 16); max_cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(max_cpus);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(max_cpus);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace folio::inline v0::platform
