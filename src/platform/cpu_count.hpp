#pragma once

#include <cstdint>
#include <thread>
#include <vector>

/// Which CPUs there are for a process and its threads. Only here is the OS asked: other systems than Linux say how many
/// there are, and pin nothing.
namespace folio::inline v0::platform {

/// CPUs that the calling thread may run on (its affinity mask); at least 1.
int32_t available_cpus() noexcept;

/// The same by number, ascending; empty where the OS does not say.
std::vector<int32_t> affinity_mask();

/// The CPU that the calling thread runs on now; -1 where the OS does not say.
int32_t current_cpu() noexcept;

/// Keeps the thread on one CPU; false if the OS does not.
bool pin(std::thread& thread, int32_t cpu) noexcept;

}  // namespace folio::inline v0::platform
