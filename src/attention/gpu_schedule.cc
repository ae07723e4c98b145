#include "attention/gpu_schedule.hpp"

#include <cstring>

#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr uint64_t kMagic = 0x3155504745534f46;  // "FOSEGPU1"

constexpr size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

ScheduleLayout lay_out_schedule(std::span<const size_t> image_bytes) {
  ScheduleLayout layout;
  layout.bytes = ScheduleLayout::kHeaderBytes;
  for (size_t i = 0; i < image_bytes.size(); ++i) {
    layout.images[i] = round_up(layout.bytes, planner::kPlanImageAlignment);
    layout.bytes = layout.images[i] + image_bytes[i];
  }
  layout.bytes = round_up(layout.bytes, sizeof(uint64_t));
  return layout;
}

void fill_schedule(std::span<const planner::PlanView* const> plans, const ScheduleLayout& layout, std::byte* stage,
                   const std::byte* memory) {
  const uint64_t front[] = {kMagic, layout.bytes / sizeof(int32_t)};
  std::memset(stage, 0, ScheduleLayout::kHeaderBytes);
  std::memcpy(stage, front, sizeof(front));
  for (size_t i = 0; i < plans.size(); ++i) {
    const size_t begin = layout.images[i];
    planner::pack_plan(*plans[i], stage + begin, layout.bytes - begin, memory + begin);
  }
}

planner::SealRecord make_record(size_t num_plans, const ScheduleLayout& layout, const std::byte* stage,
                                std::byte* memory, const int32_t* no_work) {
  planner::SealRecord record;
  record.num_words = layout.bytes / sizeof(uint64_t);
  for (uint64_t i = 0; i < record.num_words; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, stage + i * sizeof(word), sizeof(word));
    record.checksum += planner::seal_share(word, i);
  }
  record.num_images = static_cast<int32_t>(num_plans);
  for (size_t i = 0; i < num_plans; ++i) {
    record.images[i] = reinterpret_cast<planner::PlanImageHeader*>(memory + layout.images[i]);
    planner::PlanImageHeader& emptied = record.emptied[i];
    std::memcpy(&emptied, stage + layout.images[i], sizeof(emptied));
    emptied.view.num_items = emptied.view.num_claims = emptied.view.num_merges = 0;
    if (emptied.view.worker_indptr != nullptr) emptied.view.worker_indptr = no_work;
  }
  return record;
}

void fail_changed() {
  core::fail(ErrorCode::kInvalidArgument,
             "an earlier schedule's checksum does not match; it was changed after it had been planned, and nothing was "
             "computed from it");
}

}  // namespace folio::inline v0::attention
