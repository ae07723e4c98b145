#include "replay/prefix_count.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "folio/types/error.hpp"
#include "replay/scheduler.hpp"

namespace folio::replay {

PrefixCount count_prefix_hits(const Workload& workload, int32_t page_size) {
  if (page_size < 1) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("page size is {}; expected 1 or more", page_size));
  }
  PrefixCount count;
  count.pages = std::max<int64_t>(1, workload.pages_for_all(page_size));
  if (count.pages > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} pages of {} tokens are more than the page manager numbers; use larger pages",
                            count.pages, page_size));
  }
  PageManager pages(static_cast<int32_t>(count.pages), true);
  SchedulerOptions options;
  options.token_budget = std::numeric_limits<int32_t>::max();
  options.max_running = 1;
  options.page_size = page_size;
  Scheduler scheduler(workload, pages, options);
  while (!scheduler.done()) {
    scheduler.next_step(std::numeric_limits<double>::infinity());
    scheduler.finish_step();
  }
  pages.drop_cache();
  count.input_tokens = workload.input_tokens();
  count.hit_tokens = scheduler.counters().hit_tokens;
  count.computed_tokens = scheduler.counters().computed_tokens;
  count.leaked_pages = pages.held();
  return count;
}

}  // namespace folio::replay
