#include "scheduler/plan_image.hpp"

#include <cstring>
#include <new>

#include "core/error.hpp"
#include "scheduler/plan_layout.hpp"

namespace folio::inline v0::scheduler {
namespace {

/// Copies arrays into an image's bytes and knows the addresses they will have.
class Packer {
 public:
  Packer(void* stage, const void* image)
      : stage_(static_cast<std::byte*>(stage)), image_(static_cast<const std::byte*>(image)) {}

  /// Where `offset` will lie on the device.
  template <typename T>
  const T* address(int64_t offset) const {
    return reinterpret_cast<const T*>(image_ + offset);
  }

  template <typename T>
  const T* copy(int64_t offset, const T* from, int64_t count) {
    if (count > 0) std::memcpy(stage_ + offset, from, static_cast<size_t>(count) * sizeof(T));
    return address<T>(offset);
  }

  /// One of the arrays of lengths, which lie side by side from `next` on. Null stays null.
  const int32_t* copy_lengths(int64_t& next, const int32_t* from, int64_t count) {
    if (from == nullptr) return nullptr;
    const int32_t* there = copy(next, from, count);
    next += count * int64_t{sizeof(int32_t)};
    return there;
  }

 private:
  std::byte* stage_;
  const std::byte* image_;
};

}  // namespace

std::string describe(const PlanStatus& status) {
  switch (status.problem) {
    case PlanProblem::kNone: return {};
    case PlanProblem::kIndptr:
      return core::message("request ", status.request,
                           ": cu_q does not ascend from 0 to at max num_tokens; it ends at ", status.value);
    case PlanProblem::kQueries:
      return core::message("request ", status.request, ": q_len is ", status.value,
                           ", more than the op was prepared for");
    case PlanProblem::kKeys:
      if (status.segment >= 0) {
        return core::message("request ", status.request, ", segment ", status.segment, ": kv_len is ", status.value,
                             "; it is 0 or more");
      }
      return core::message("request ", status.request, ": it has ", status.value,
                           " keys, more than the op was prepared for");
    case PlanProblem::kPositions:
      return core::message("request ", status.request, ": from position ", status.value, " on, its ",
                           status.segment >= 0 ? "keys" : "queries", " do not fit in 32-bit positions");
  }
  return "unknown problem";
}

size_t plan_image_bytes(const SchedulerConfig& config) {
  return static_cast<size_t>(carve_plan_image(counts_within_bounds(config)).total);
}

size_t plan_image_bytes(const PlanView& plan) {
  return static_cast<size_t>(carve_plan_image(counts_of(plan)).total);
}

size_t pack_plan(const PlanView& plan, void* stage, size_t stage_bytes, const void* image) {
  const PlanImageCounts counts = counts_of(plan);
  const PlanImageLayout layout = carve_plan_image(counts);
  const auto bytes = static_cast<size_t>(layout.total);
  if (bytes > stage_bytes) {
    core::fail(ErrorCode::kInvalidArgument, "the batch's plan takes ", bytes, " bytes, but its image has ", stage_bytes,
               ": the image of an op with bounds has room for ", kMaxImageSegments,
               " segments of requests, and for no more groups than requests");
  }
  Packer packer(stage, image);
  auto* header = new (stage) PlanImageHeader{plan, PlanStatus{}, static_cast<int32_t>(counts.combine_sources)};
  PlanView& view = header->view;
  int64_t next = layout.lengths;
  view.cu_q = packer.copy_lengths(next, plan.cu_q, int64_t{plan.num_requests} + 1);
  view.q_first_pos = packer.copy_lengths(next, plan.q_first_pos, plan.num_requests);
  auto* segments = reinterpret_cast<SegmentLengths*>(static_cast<std::byte*>(stage) + layout.segments);
  for (int32_t s = 0; s < plan.num_segments; ++s) {
    SegmentLengths* segment = new (segments + s) SegmentLengths(plan.segments[s]);
    segment->kv_len = packer.copy_lengths(next, segment->kv_len, segment->num_rows);
    segment->first_pos = packer.copy_lengths(next, segment->first_pos, segment->num_rows);
    segment->row_of_request = packer.copy_lengths(next, segment->row_of_request, plan.num_requests);
    segment->key_offset = packer.copy_lengths(next, segment->key_offset, plan.num_requests);
  }
  view.segments = packer.address<SegmentLengths>(layout.segments);
  view.mask_columns = packer.copy_lengths(next, plan.mask_columns, plan.num_requests);
  view.mask_first_column = packer.copy_lengths(next, plan.mask_first_column, plan.num_requests);
  if (plan.mask_byte_indptr != nullptr) {
    view.mask_byte_indptr = packer.copy(layout.mask_byte_indptr, plan.mask_byte_indptr, counts.mask_blocks);
  }
  if (plan.worker_indptr != nullptr) {
    view.worker_indptr = packer.copy(layout.worker_indptr, plan.worker_indptr, counts.workers + 1);
  }
  view.combine_tiles = packer.copy(layout.combine_tiles, plan.combine_tiles, counts.combine_tiles);
  view.combine_sources = packer.copy(layout.combine_sources, plan.combine_sources, counts.combine_sources);
  view.work_tiles = packer.copy(layout.work_tiles, plan.work_tiles, counts.work_tiles);
  return bytes;
}

}  // namespace folio::inline v0::scheduler
