#pragma once

#include <cstdint>
#include <vector>

namespace folio::inline v0::platform {

/// CPUs that the calling thread may run on (its affinity mask); at least 1.
int32_t available_cpus() noexcept;

/// The same by number, ascending; empty where the OS does not say.
std::vector<int32_t> affinity_mask();

}  // namespace folio::inline v0::platform
