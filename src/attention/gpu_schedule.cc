#include "attention/gpu_schedule.hpp"

#include <cstring>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr uint64_t kMagic = 0x3155504745534f46;  // "FOSEGPU1"

/// Graphs know where an image's header lies, whatever the plans' sizes: headers have places of their own in front.
constexpr size_t kHeadBytes = 512;
constexpr size_t kFrontBytes = ScheduleLayout::kHeaderBytes + scheduler::ChecksumRecord::kMaxImages * kHeadBytes;
static_assert(sizeof(scheduler::PlanImageHeader) <= kHeadBytes && kFrontBytes % scheduler::kPlanImageAlignment == 0);

}  // namespace

ScheduleLayout lay_out_schedule(std::span<const size_t> image_bytes) {
  ScheduleLayout layout;
  layout.bytes = kFrontBytes;
  for (size_t i = 0; i < image_bytes.size(); ++i) {
    layout.images[i] = ScheduleLayout::kHeaderBytes + i * kHeadBytes;
    layout.bytes = core::checked_round_up(layout.bytes, scheduler::kPlanImageAlignment) + image_bytes[i];
  }
  layout.bytes = core::checked_round_up(layout.bytes, sizeof(uint64_t));
  return layout;
}

void fill_schedule(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* stage,
                   const std::byte* memory) {
  const uint64_t front[] = {kMagic, layout.bytes / sizeof(int32_t)};
  std::memset(stage, 0, kFrontBytes);
  std::memcpy(stage, front, sizeof(front));
  size_t begin = kFrontBytes;
  for (size_t i = 0; i < plans.size(); ++i) {
    begin = core::checked_round_up(begin, scheduler::kPlanImageAlignment);
    const size_t bytes = scheduler::pack_plan(*plans[i], stage + begin, layout.bytes - begin, memory + begin);
    std::memcpy(stage + layout.images[i], stage + begin, sizeof(scheduler::PlanImageHeader));
    begin += bytes;
  }
}

scheduler::ChecksumRecord make_record(size_t num_plans, const ScheduleLayout& layout, const std::byte* stage,
                                      std::byte* memory, const int32_t* no_work) {
  scheduler::ChecksumRecord record;
  record.num_words = layout.bytes / sizeof(uint64_t);
  for (uint64_t i = 0; i < record.num_words; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, stage + i * sizeof(word), sizeof(word));
    record.checksum += scheduler::checksum_term(word, i);
  }
  record.num_images = static_cast<int32_t>(num_plans);
  for (size_t i = 0; i < num_plans; ++i) {
    record.images[i] = reinterpret_cast<scheduler::PlanImageHeader*>(memory + layout.images[i]);
    scheduler::PlanImageHeader& emptied = record.emptied[i];
    std::memcpy(&emptied, stage + layout.images[i], sizeof(emptied));
    emptied.view.num_work_tiles = emptied.view.num_dynamic_tiles = emptied.view.num_combine_tiles = 0;
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
