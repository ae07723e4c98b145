#include "kernels/cuda/common/tables/table_check.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "attention/run_args.hpp"
#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

namespace cuda = kernels::cuda;

std::string describe(const cuda::TableFault& fault) {
  const std::string where = core::message("segment ", fault.segment, ", request ", fault.request, ": ");
  switch (fault.problem) {
    case cuda::TableProblem::kNone: return {};
    case cuda::TableProblem::kRow:
      return core::message(where, "row ", fault.row, " is needed of a table that has ", fault.bound, " rows");
    case cuda::TableProblem::kRowEnds:
      return core::message(where, "row ", fault.row, " is [", fault.column, ", ", fault.value,
                           "); it must ascend within [0, ", fault.bound, "]");
    case cuda::TableProblem::kShortRow:
      return core::message(where, "row ", fault.row, " has ", fault.value, " entries; its keys need ", fault.bound);
    case cuda::TableProblem::kPage:
      return core::message(where, "column ", fault.column, " of row ", fault.row, " of the table is page ", fault.value,
                           "; the cache has ", fault.bound, " pages");
  }
  return "unknown problem";
}

cuda::CheckedSegment checked_segment(const SegmentArgs& args, bool paged) {
  cuda::CheckedSegment segment;
  segment.paged = paged;
  segment.table = args.table;
  segment.page_size = args.cache.page_size;
  segment.num_pages = args.cache.num_pages;
  segment.indptr = args.ragged.indptr;
  segment.num_tokens = paged ? 0 : args.ragged.k.shape[0];
  return segment;
}

/// A replay may have more requests and pages than the batch that was captured, in arrays that hold them.
void forget_sizes(cuda::CheckedSegment& segment) {
  segment.table.num_rows = std::numeric_limits<int32_t>::max();
  segment.table.num_indices = std::numeric_limits<int64_t>::max();
  segment.num_tokens = std::numeric_limits<int64_t>::max();
}

bool is_paged(const detail::PlanBufferState& plan, size_t segment) {
  return plan.view().segments[segment].source == KvSource::kPaged;
}

void check_on_host(const detail::PlanBufferState& plan, const AttentionArgs& args) {
  std::vector<cuda::CheckedSegment> segments;
  for (size_t i = 0; i < args.segments.size(); ++i) {
    segments.push_back(checked_segment(args.segments[i], is_paged(plan, i)));
  }
  const cuda::TableFault fault = cuda::check_tiles(segments.data(), plan.view(), 0, 1, 0, 1);
  if (fault.problem == cuda::TableProblem::kNone) return;
  core::fail(ErrorCode::kInvalidArgument, describe(fault));
}

}  // namespace

void report_tables(kernels::cuda::TableFault& fault, const char* what) {
  const std::atomic_ref problem(fault.problem);
  if (problem.load(std::memory_order_acquire) == cuda::TableProblem::kNone) [[likely]] {
    return;
  }
  const cuda::TableFault found = fault;  // the device writes it again only once it is forgotten
  problem.store(cuda::TableProblem::kNone, std::memory_order_release);
  core::fail(ErrorCode::kInvalidArgument, what, describe(found));
}

void check_tables(const detail::PlanBufferState& plan, const AttentionArgs& args, Stream stream) {
  const GpuBackend* const gpu = plan.op->gpu();
  if (gpu == nullptr) return check_on_host(plan, args);
  const bool captured = gpu->is_capturing(stream);
  cuda::TableFault& fault = *plan.passes.front().gpu->table_fault();
  cuda::TableCheckParams params;
  params.fault = &fault;
  for (size_t i = 0; i < std::min<size_t>(args.segments.size(), cuda::kMaxSegments); ++i) {
    params.segments[i] = checked_segment(args.segments[i], is_paged(plan, i));
    if (captured) forget_sizes(params.segments[i]);
  }
  for (size_t pass = 0; pass < plan.passes.size(); ++pass) {
    if (!is_launched(plan, pass)) continue;
    params.plan = plan.passes[pass].gpu->image();
    gpu->enqueue(params, stream);
  }
  if (captured) return;
  gpu->synchronize(stream);
  report_tables(fault, "");
}

}  // namespace folio::inline v0::attention
