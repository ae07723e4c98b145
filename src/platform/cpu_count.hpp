#pragma once

#include <cstdint>

namespace folio::inline v0::platform {

/// CPUs that the calling thread may run on (its affinity mask); at least 1.
int32_t available_cpus() noexcept;

}  // namespace folio::inline v0::platform
