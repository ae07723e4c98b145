#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "folio/attention.hpp"

namespace folio::inline v0 {

namespace attention {
class GpuSchedule;
}

/// A host plan written out as integers, for engines that hold the schedule in a buffer of their own (as
/// FlashAttention-3's scheduler_metadata). Once sealed, that memory is what `run` executes: work tiles, combine tiles
/// and lengths are read from there. A checksum over all of it tells whether it still is what was planned. The memory
/// must outlive the plan and begin at a multiple of kSealAlignment bytes; on a GPU it is device memory. Not safe for
/// simultaneous use by several threads.
class FOLIO_API SealedPlan {
 public:
  static constexpr size_t kSealAlignment = 256;

  explicit SealedPlan(const AttentionOp& op);
  SealedPlan(SealedPlan&&) noexcept;
  ~SealedPlan();

  /// Integers that this plan takes sealed. Throws kStalePlan.
  static int64_t size(const AttentionPlan& plan);
  /// Integers that suffice for any plan of the op, which must have bounds (kInvalidArgument otherwise).
  static int64_t max_size(const AttentionOp& op);

  /// Writes a plan of the op to `memory` and returns the part that was used. The plan's own buffer is free afterwards;
  /// on a GPU, where the writing is enqueued, only once the sealed plan is stale. Allocates nothing once warm. Throws
  /// kInvalidArgument where it does not fit, and where a GPU has found an earlier schedule changed; kStalePlan.
  std::span<const int32_t> seal(const AttentionPlan& plan, std::span<int32_t> memory, Stream stream = {});

  /// Throws kInvalidArgument if a GPU has found a schedule changed since it was last asked, by this or by `seal`.
  void report() const;

  /// Makes the plan stale without sealing another.
  void invalidate() noexcept;

  /// What was sealed last, as `run` takes it. It goes stale with the next seal.
  AttentionPlan plan() const;

 private:
  std::span<const int32_t> seal_on_gpu(const detail::PlanBufferState& planned, std::span<int32_t> memory,
                                       Stream stream);

  std::unique_ptr<detail::PlanBufferState> owned_;
  detail::PlanBufferState& state_;
  std::unique_ptr<attention::GpuSchedule> schedule_;  ///< null on a CPU
};

/// Whether the plan is a SealedPlan's.
FOLIO_API bool is_sealed(const AttentionPlan& plan);

/// Throws kInvalidArgument unless `handed` is the memory that the plan was sealed into, whole and as it was then;
/// kStalePlan. O(size). On a GPU, whether it is as it was is found out there, by what is enqueued: runs behind it
/// compute nothing from a schedule that was changed, and the next `seal` throws.
FOLIO_API void check_sealed(const AttentionPlan& plan, std::span<const int32_t> handed, Stream stream = {});

}  // namespace folio::inline v0
