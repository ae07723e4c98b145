#include "folio/sealed_plan.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "attention/op_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "scheduler/plan_image.hpp"

namespace folio::inline v0::attention {
namespace {

constexpr uint64_t kMagic = 0x31304c4145534f46;     // "FOSEAL01"
constexpr uint64_t kGpuMagic = 0x3155504745534f46;  // "FOSEGPU1"

/// Graphs know where an image's header lies, whatever the plans' sizes: headers have places of their own in front.
constexpr size_t kHeadBytes = 512;
constexpr size_t kFrontBytes = ScheduleLayout::kHeaderBytes + scheduler::ChecksumRecord::kMaxImages * kHeadBytes;
static_assert(sizeof(scheduler::PlanImageHeader) <= kHeadBytes && kFrontBytes % scheduler::kPlanImageAlignment == 0);

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
/// wait for its own multiplications.
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

static_assert(kernels::cuda::kMaxPasses <= scheduler::ChecksumRecord::kMaxImages);

/// The image of a plan that lies in a schedule; counters are those of the plan's own buffer.
class SealedImage final : public GpuPlanMemory {
 public:
  void set(const std::byte* image, const GpuPlanMemory& own) {
    image_ = reinterpret_cast<const scheduler::PlanImageHeader*>(image);
    tile_counters_ = own.tile_counters();
    combine_counters_ = own.combine_counters();
    table_fault_ = own.table_fault();
  }
  void upload(const scheduler::PlanView&, Stream) override { fail_planned(); }
  void plan_on_device(const BatchView&, Stream) override { fail_planned(); }
  void report() override {}
  kernels::cuda::TableFault* table_fault() const override { return table_fault_; }
  const scheduler::PlanImageHeader* image() const override { return image_; }
  const int32_t* cu_q() const override { fail_planned(); }
  uint32_t* tile_counters() const override { return tile_counters_; }
  uint32_t* combine_counters() const override { return combine_counters_; }

 private:
  [[noreturn]] static void fail_planned() {
    core::fail(ErrorCode::kInternal, "a schedule's image is sealed into, not planned into");
  }

  const scheduler::PlanImageHeader* image_ = nullptr;
  uint32_t* tile_counters_ = nullptr;
  uint32_t* combine_counters_ = nullptr;
  kernels::cuda::TableFault* table_fault_ = nullptr;
};

/// `passes`: an op's, or a plan's. `plan_of`: what scheduler::plan_image_bytes takes of one.
template <typename Passes, typename PlanOf>
ScheduleLayout layout_of(const Passes& passes, const PlanOf& plan_of) {
  std::array<size_t, scheduler::ChecksumRecord::kMaxImages> images{};
  for (size_t i = 0; i < passes.size(); ++i) images[i] = scheduler::plan_image_bytes(plan_of(passes[i]));
  return lay_out_schedule(std::span(images).first(passes.size()));
}

ScheduleLayout layout_of(const detail::PlanBufferState& planned) {
  return layout_of(
      planned.passes, [](const detail::PassPlan& pass) -> const auto& { return pass.view; });
}

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
  const uint64_t front[] = {kGpuMagic, layout.bytes / sizeof(int32_t)};
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

namespace folio::inline v0 {

using namespace attention;  // what stands above, and the modules' own

SealedPlan::SealedPlan(const AttentionOp& op) : owned_(std::make_unique<detail::PlanBufferState>()), state_(*owned_) {
  state_.op = op.shared_state();
  state_.sealed = true;
  const GpuBackend* const gpu = op.state().gpu();
  int32_t most_workers = 0;
  for (const detail::Pass& pass : op.state().passes) {
    detail::PassPlan& sealed = state_.passes.emplace_back();
    if (gpu == nullptr) continue;
    most_workers = std::max(most_workers, pass.scheduler.num_workers);
    sealed.gpu = std::make_unique<SealedImage>();
  }
  if (gpu == nullptr) return;
  schedule_ = gpu->make_schedule(most_workers);
  state_.schedule = schedule_.get();
}

SealedPlan::SealedPlan(SealedPlan&&) noexcept = default;
SealedPlan::~SealedPlan() = default;

void SealedPlan::report() const {
  if (schedule_ != nullptr) schedule_->report();
}

AttentionPlan SealedPlan::plan() const {
  return AttentionPlan(&state_, state_.generation);
}

bool is_sealed(const AttentionPlan& plan) {
  return plan.buffer().sealed;
}

int64_t SealedPlan::size(const AttentionPlan& plan) {
  const detail::PlanBufferState& planned = detail::checked(plan);
  const size_t bytes = planned.op->gpu() != nullptr ? layout_of(planned).bytes : sealed_bytes(planned.view());
  return static_cast<int64_t>(bytes / sizeof(int32_t));
}

int64_t SealedPlan::max_size(const AttentionOp& op) {
  const detail::OpState& state = op.state();
  const auto scheduler_of = [](const detail::Pass& pass) -> const auto& {
    return pass.scheduler;
  };
  const size_t bytes = state.gpu() != nullptr ? layout_of(state.passes, scheduler_of).bytes
                                              : sealed_bytes(state.passes.front().scheduler);
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
  std::array<const scheduler::PlanView*, scheduler::ChecksumRecord::kMaxImages> plans{};
  for (size_t i = 0; i < planned.passes.size(); ++i) plans[i] = &planned.passes[i].view;
  schedule_->seal(std::span(plans).first(planned.passes.size()), layout, begin, stream);
  for (size_t i = 0; i < planned.passes.size(); ++i) {
    detail::PassPlan& sealed = state_.passes[i];
    static_cast<SealedImage&>(*sealed.gpu).set(begin + layout.images[i], *planned.passes[i].gpu);
    sealed.view = planned.passes[i].view;
    sealed.most_tile_rows = planned.passes[i].most_tile_rows;
  }
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
  const size_t bytes = schedule_ != nullptr ? layout_of(planned).bytes : sealed_bytes(planned.view());
  core::require(memory.size_bytes() >= bytes, "the schedule takes ", bytes / sizeof(int32_t),
                " integers; its memory has ", memory.size());
  invalidate();
  if (schedule_ != nullptr) return seal_on_gpu(planned, memory, stream);
  auto* begin = reinterpret_cast<std::byte*>(memory.data());
  std::byte* image = begin + kHeaderBytes;
  scheduler::pack_plan(planned.view(), image, bytes - kHeaderBytes, image);
  SealHeader header{kMagic, static_cast<int64_t>(bytes / sizeof(int32_t)), state_.generation, 0};
  header.checksum = checksum(header, image, bytes - kHeaderBytes);
  std::memcpy(begin, &header, sizeof(header));
  state_.passes.front().view = reinterpret_cast<const scheduler::PlanImageHeader*>(image)->view;
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
  const auto* tiles = reinterpret_cast<const std::byte*>(state.view().work_tiles);
  const bool is_this_plan = tiles >= image && tiles <= image + handed.size_bytes() - kHeaderBytes;
  core::require(is_this_plan && header.generation == plan.generation(),
                "the schedule is not the one that this step was planned into");
  core::require(header.checksum == checksum(header, image, handed.size_bytes() - kHeaderBytes),
                "the schedule's checksum does not match; it was changed after it had been planned");
}

}  // namespace folio::inline v0
