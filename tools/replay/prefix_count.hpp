#pragma once

#include <cstdint>

#include "replay/workload.hpp"

namespace folio::replay {

/// What serving a workload one request after the other would find in an unlimited cache.
struct PrefixCount {
  int64_t input_tokens = 0;
  int64_t hit_tokens = 0;  ///< in full pages; at least one token of every request is computed
  int64_t computed_tokens = 0;
  int64_t pages = 0;         ///< size of the pool that never evicts
  int64_t leaked_pages = 0;  ///< held at the end; 0 unless there is a bug
};

/// Runs the scheduler and the page manager without any attention. Throws kInvalidArgument for a bad page size or a pool
/// of more than 2^31 - 1 pages.
PrefixCount count_prefix_hits(const Workload& workload, int32_t page_size);

}  // namespace folio::replay
