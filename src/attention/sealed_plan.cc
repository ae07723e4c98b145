#include "attention/sealed_plan.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "core/error.hpp"
#include "planner/plan_image.hpp"

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
static_assert(sizeof(SealHeader) <= kHeaderBytes && kHeaderBytes % planner::kPlanImageAlignment == 0);

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

size_t sealed_bytes(const planner::PlanView& view) {
  const size_t image = planner::plan_image_bytes(view);
  return kHeaderBytes + (image + sizeof(int32_t) - 1) / sizeof(int32_t) * sizeof(int32_t);
}

}  // namespace

SealedPlan::SealedPlan(const AttentionOp& op) {
  if (op.state().gpu() != nullptr) {
    core::fail(ErrorCode::kUnsupported, "a GPU's plans lie in device memory; only a CPU's can be sealed");
  }
  state_.op = op.shared_state();
  state_.sealed = true;
}

int64_t SealedPlan::size(const AttentionPlan& plan) {
  return static_cast<int64_t>(sealed_bytes(detail::checked(plan).view) / sizeof(int32_t));
}

int64_t SealedPlan::max_size(const AttentionOp& op) {
  const size_t image = planner::plan_image_bytes(op.state().planner);
  return static_cast<int64_t>((kHeaderBytes + image + sizeof(int32_t) - 1) / sizeof(int32_t));
}

void SealedPlan::invalidate() noexcept {
  ++state_.generation;
  state_.planned = false;
}

std::span<const int32_t> SealedPlan::seal(const AttentionPlan& plan, std::span<int32_t> memory) {
  const detail::PlanBufferState& planned = detail::checked(plan);
  core::require(planned.op.get() == state_.op.get(), "the plan was made by another op than the seal is for");
  core::require(reinterpret_cast<uintptr_t>(memory.data()) % kSealAlignment == 0,
                "the schedule's memory must begin at ", "a multiple of ", kSealAlignment, " bytes");
  const size_t bytes = sealed_bytes(planned.view);
  core::require(memory.size_bytes() >= bytes, "the schedule takes ", bytes / sizeof(int32_t),
                " integers; its memory has ", memory.size());
  invalidate();
  auto* begin = reinterpret_cast<std::byte*>(memory.data());
  std::byte* image = begin + kHeaderBytes;
  planner::pack_plan(planned.view, image, bytes - kHeaderBytes, image);
  SealHeader header{kMagic, static_cast<int64_t>(bytes / sizeof(int32_t)), state_.generation, 0};
  header.checksum = checksum(header, image, bytes - kHeaderBytes);
  std::memcpy(begin, &header, sizeof(header));
  state_.view = reinterpret_cast<const planner::PlanImageHeader*>(image)->view;
  state_.num_tokens = planned.num_tokens;
  state_.planned = true;
  return memory.first(bytes / sizeof(int32_t));
}

void check_sealed(const AttentionPlan& plan, std::span<const int32_t> handed) {
  const detail::PlanBufferState& state = detail::checked(plan);
  core::require(state.sealed, "the plan was not sealed");
  SealHeader header{};
  core::require(handed.size_bytes() >= kHeaderBytes, "the schedule has ", handed.size(),
                " integers; it is truncated: ", kHeaderBytes / sizeof(int32_t), " stand before its work alone");
  std::memcpy(&header, handed.data(), sizeof(header));
  core::require(header.magic == kMagic, "the schedule does not begin as one; it is corrupted");
  core::require(header.ints == static_cast<int64_t>(handed.size()), "the schedule has ", handed.size(),
                " integers, but was made with ", header.ints, "; it is truncated or padded");
  const auto* image = reinterpret_cast<const std::byte*>(handed.data()) + kHeaderBytes;
  const auto* items = reinterpret_cast<const std::byte*>(state.view.items);
  const bool is_this_plan = items >= image && items <= image + handed.size_bytes() - kHeaderBytes;
  core::require(is_this_plan && header.generation == plan.generation(),
                "the schedule is not the one that this step was planned into");
  core::require(header.checksum == checksum(header, image, handed.size_bytes() - kHeaderBytes),
                "the schedule's checksum does not match; it was changed after it had been planned");
}

}  // namespace folio::inline v0::attention
