#include "attention/sealed_plan.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "attention/workspace.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "scheduler/plan_image.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr uint64_t kMagic = 0x31304c4145534f46;  // "FOSEAL01"

/// What stands before the image.
struct SealHeader {
  uint64_t magic;
  int64_t ints;  ///< of header and image
  uint64_t generation;
  uint64_t checksum;  ///< of the image and the fields above
};
constexpr size_t kHeaderBytes = SealedPlan::kSealAlignment;
static_assert(sizeof(SealHeader) <= kHeaderBytes && kHeaderBytes % scheduler::kPlanImageAlignment == 0);

/// Every multiplication is a bijection, so that no change of a single word goes unseen; four lanes, because one would
/// wait for its own products.
uint64_t checksum(const SealHeader& header, const std::byte* data, size_t bytes) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  std::array<uint64_t, 4> lanes{header.magic, static_cast<uint64_t>(header.ints), header.generation, ~header.magic};
  const auto mix = [](uint64_t lane, uint64_t word) { return std::rotl((lane ^ word) * kOdd, 29); };
  size_t at = 0;
  for (; at + sizeof(lanes) <= bytes; at += sizeof(lanes)) {
    std::array<uint64_t, 4> words;
    std::memcpy(words.data(), data + at, sizeof(words));
    for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  std::array<uint64_t, 4> tail{};
  std::memcpy(tail.data(), data + at, bytes - at);
  uint64_t sum = bytes;
  for (size_t i = 0; i < lanes.size(); ++i) sum = mix(sum, mix(lanes[i], tail[i]));
  return sum;
}

/// `Plan`: a PlanView, or a SchedulerConfig for the most that its plans take.
template <typename Plan>
size_t sealed_bytes(const Plan& plan) {
  return kHeaderBytes + core::checked_round_up(scheduler::plan_image_bytes(plan), sizeof(int32_t));
}

/// The image of a plan that lies in a schedule; counters are those of the plan's own buffer.
class SealedImage final : public GpuPlanMemory {
 public:
  void set(const std::byte* image, const GpuPlanMemory& own) {
    image_ = reinterpret_cast<const scheduler::PlanImageHeader*>(image);
    claim_counters_ = own.tile_counters();
    merge_counters_ = own.combine_counters();
  }
  void upload(const scheduler::PlanView&, Stream) override { fail_planned(); }
  void plan_on_device(const BatchView&, Stream) override { fail_planned(); }
  void report() override {}
  const scheduler::PlanImageHeader* image() const override { return image_; }
  uint32_t* tile_counters() const override { return claim_counters_; }
  uint32_t* combine_counters() const override { return merge_counters_; }

 private:
  [[noreturn]] static void fail_planned() {
    core::fail(ErrorCode::kInternal, "a schedule's image is sealed into, not planned into");
  }

  const scheduler::PlanImageHeader* image_ = nullptr;
  uint32_t* claim_counters_ = nullptr;
  uint32_t* merge_counters_ = nullptr;
};

/// Of a pair of kernels both plans; `few_rows` is null otherwise.
template <typename Plan>
ScheduleLayout layout_of(const Plan& plan, const Plan* few_rows) {
  std::array<size_t, 2> images{scheduler::plan_image_bytes(plan)};
  if (few_rows != nullptr) images[1] = scheduler::plan_image_bytes(*few_rows);
  return lay_out_schedule(std::span(images).first(few_rows != nullptr ? 2 : 1));
}

ScheduleLayout layout_of(const detail::PlanBufferState& planned) {
  return layout_of(planned.view, planned.few_rows != nullptr ? &planned.few_rows->view : nullptr);
}

}  // namespace

SealedPlan::SealedPlan(const AttentionOp& op) {
  state_.op = op.shared_state();
  state_.sealed = true;
  const GpuBackend* const gpu = op.state().gpu();
  if (gpu == nullptr) return;
  int32_t most_workers = op.state().scheduler.num_workers;
  state_.gpu = std::make_unique<SealedImage>();
  if (op.state().few_rows) {
    most_workers = std::max(most_workers, op.state().few_rows->num_workers);
    state_.few_rows = std::make_unique<detail::FewRowsPlan>();
    state_.few_rows->gpu = std::make_unique<SealedImage>();
    state_.few_rows->stream = gpu->make_side_stream();
  }
  schedule_ = gpu->make_schedule(most_workers);
  state_.schedule = schedule_.get();
}

SealedPlan::SealedPlan(SealedPlan&&) noexcept = default;
SealedPlan::~SealedPlan() = default;

int64_t SealedPlan::size(const AttentionPlan& plan) {
  const detail::PlanBufferState& planned = detail::checked(plan);
  const size_t bytes = planned.gpu != nullptr ? layout_of(planned).bytes : sealed_bytes(planned.view);
  return static_cast<int64_t>(bytes / sizeof(int32_t));
}

int64_t SealedPlan::max_size(const AttentionOp& op) {
  const detail::OpState& state = op.state();
  const scheduler::SchedulerConfig* const few_rows = state.few_rows ? &*state.few_rows : nullptr;
  const size_t bytes =
      state.gpu() != nullptr ? layout_of(state.scheduler, few_rows).bytes : sealed_bytes(state.scheduler);
  return static_cast<int64_t>(bytes / sizeof(int32_t));
}

void SealedPlan::invalidate() noexcept {
  ++state_.generation;
  state_.planned = false;
}

/// What the host reads of the plan stays in its buffer.
std::span<const int32_t> SealedPlan::seal_on_gpu(const detail::PlanBufferState& planned, std::span<int32_t> memory,
                                                 Stream stream) {
  schedule_->report();
  if (planned.planned_on_device) {
    core::fail(ErrorCode::kUnsupported, "the plan was made on the device; plans of host lengths can be sealed");
  }
  const ScheduleLayout layout = layout_of(planned);
  auto* const begin = reinterpret_cast<std::byte*>(memory.data());
  std::array<const scheduler::PlanView*, scheduler::ChecksumRecord::kMaxImages> plans{&planned.view};
  if (planned.few_rows != nullptr) plans[1] = &planned.few_rows->view;
  const size_t count = planned.few_rows != nullptr ? 2 : 1;
  schedule_->seal(std::span(plans).first(count), layout, begin, stream);
  static_cast<SealedImage&>(*state_.gpu).set(begin + layout.images[0], *planned.gpu);
  if (planned.few_rows != nullptr) {
    static_cast<SealedImage&>(*state_.few_rows->gpu).set(begin + layout.images[1], *planned.few_rows->gpu);
    state_.few_rows->view = planned.few_rows->view;
    state_.few_rows->most_item_rows = planned.few_rows->most_item_rows;
  }
  state_.view = planned.view;
  state_.most_item_rows = planned.most_item_rows;
  state_.num_tokens = planned.num_tokens;
  state_.sealed_into = memory.first(layout.bytes / sizeof(int32_t));
  state_.planned = true;
  return state_.sealed_into;
}

std::span<const int32_t> SealedPlan::seal(const AttentionPlan& plan, std::span<int32_t> memory, Stream stream) {
  const detail::PlanBufferState& planned = detail::checked(plan);
  check_stream(*state_.op, stream);
  core::require(planned.op.get() == state_.op.get(), "the plan was made by another op than the seal is for");
  core::require(reinterpret_cast<uintptr_t>(memory.data()) % kSealAlignment == 0,
                "the schedule's memory must begin at ", "a multiple of ", kSealAlignment, " bytes");
  const size_t bytes = schedule_ != nullptr ? layout_of(planned).bytes : sealed_bytes(planned.view);
  core::require(memory.size_bytes() >= bytes, "the schedule takes ", bytes / sizeof(int32_t),
                " integers; its memory has ", memory.size());
  invalidate();
  if (schedule_ != nullptr) return seal_on_gpu(planned, memory, stream);
  auto* begin = reinterpret_cast<std::byte*>(memory.data());
  std::byte* image = begin + kHeaderBytes;
  scheduler::pack_plan(planned.view, image, bytes - kHeaderBytes, image);
  SealHeader header{kMagic, static_cast<int64_t>(bytes / sizeof(int32_t)), state_.generation, 0};
  header.checksum = checksum(header, image, bytes - kHeaderBytes);
  std::memcpy(begin, &header, sizeof(header));
  state_.view = reinterpret_cast<const scheduler::PlanImageHeader*>(image)->view;
  state_.num_tokens = planned.num_tokens;
  state_.planned = true;
  return memory.first(bytes / sizeof(int32_t));
}

void check_sealed(const AttentionPlan& plan, std::span<const int32_t> handed, Stream stream) {
  const detail::PlanBufferState& state = detail::checked(plan);
  core::require(state.sealed, "the plan was not sealed");
  if (state.schedule != nullptr) {
    const std::span<const int32_t> made = state.sealed_into;
    core::require(handed.empty() || handed.data() == made.data(),
                  "the schedule is not the one that this step was planned into");
    core::require(handed.size() == made.size(), "the schedule has ", handed.size(), " integers, but was made with ",
                  made.size(), "; it is truncated or padded");
    state.schedule->check(stream);
    return;
  }
  SealHeader header{};
  core::require(handed.size_bytes() >= kHeaderBytes, "the schedule has ", handed.size(),
                " integers; it is truncated: ", kHeaderBytes / sizeof(int32_t), " stand before its work alone");
  std::memcpy(&header, handed.data(), sizeof(header));
  core::require(header.magic == kMagic, "the schedule does not begin as one; it is corrupted");
  core::require(header.ints == static_cast<int64_t>(handed.size()), "the schedule has ", handed.size(),
                " integers, but was made with ", header.ints, "; it is truncated or padded");
  const auto* image = reinterpret_cast<const std::byte*>(handed.data()) + kHeaderBytes;
  const auto* items = reinterpret_cast<const std::byte*>(state.view.work_tiles);
  const bool is_this_plan = items >= image && items <= image + handed.size_bytes() - kHeaderBytes;
  core::require(is_this_plan && header.generation == plan.generation(),
                "the schedule is not the one that this step was planned into");
  core::require(header.checksum == checksum(header, image, handed.size_bytes() - kHeaderBytes),
                "the schedule's checksum does not match; it was changed after it had been planned");
}

}  // namespace folio::inline v0::attention
