#include "platform/cpu_count.hpp"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace folio::inline v0::platform {

#if defined(__linux__)
namespace {

/// Calls use(mask, bytes of the mask) with the calling thread's affinity mask; returns whether there was one.
template <typename Use>
bool read_mask(const Use& use) {
  // The kernel refuses masks shorter than its own, so grow until one is taken: 2^16 CPUs are beyond any Linux build.
  for (size_t max_cpus = CPU_SETSIZE; max_cpus <= (size_t{1} << 16); max_cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(max_cpus);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(max_cpus);
    const bool read = sched_getaffinity(0, bytes, set) == 0 && CPU_COUNT_S(bytes, set) > 0;
    if (read) use(set, bytes);
    CPU_FREE(set);
    if (read) return true;
  }
  return false;
}

}  // namespace

int32_t available_cpus() noexcept {
  int32_t count = 0;
  if (read_mask([&count](const cpu_set_t* set, size_t bytes) { count = CPU_COUNT_S(bytes, set); })) return count;
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

std::vector<int32_t> affinity_mask() {
  std::vector<int32_t> cpus(static_cast<size_t>(available_cpus()));
  size_t found = 0;
  read_mask([&](const cpu_set_t* set, size_t bytes) {
    for (size_t cpu = 0; cpu < bytes * 8 && found < cpus.size(); ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus[found++] = static_cast<int32_t>(cpu);
    }
  });
  cpus.resize(found);
  return cpus;
}

int32_t current_cpu() noexcept {
  return sched_getcpu();
}

bool pin(std::thread& thread, int32_t cpu) noexcept {
  const auto num_cpus = static_cast<size_t>(cpu) + 1;
  cpu_set_t* set = CPU_ALLOC(num_cpus);
  if (set == nullptr) return false;
  const size_t bytes = CPU_ALLOC_SIZE(num_cpus);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
  const bool pinned = pthread_setaffinity_np(thread.native_handle(), bytes, set) == 0;
  CPU_FREE(set);
  return pinned;
}

#else

int32_t available_cpus() noexcept {
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

std::vector<int32_t> affinity_mask() {
  return {};
}

int32_t current_cpu() noexcept {
  return -1;
}

bool pin(std::thread& /*thread*/, int32_t /*cpu*/) noexcept {
  return false;
}

#endif

}  // namespace folio::inline v0::platform
