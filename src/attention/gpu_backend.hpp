#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "kernels/cuda/common/cache/move.hpp"
#include "kernels/cuda/common/merge_states/merge_states.hpp"
#include "kernels/cuda/common/merge_states/ranks.hpp"
#include "kernels/cuda/common/merge_states/shard_batch.hpp"
#include "kernels/cuda/common/peer_memory/peer_memory.hpp"
#include "kernels/cuda/common/quantize/quantize.hpp"
#include "kernels/cuda/common/tables/table_check.hpp"
#include "kernels/cuda/common/tables/tables.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/plan_view.hpp"
#include "scheduler/scheduler.hpp"

/// What attention asks of a GPU: interfaces without a CUDA toolkit's types. attention/cuda implements them; builds
/// without a toolkit have no object of them.
namespace folio::inline v0::attention {

/// The kernels of one GPU besides attention's. Each call enqueues, on that GPU, what the parameters' comment says,
/// waits for nothing and may be captured.
class GpuKernels {
 public:
  virtual ~GpuKernels() = default;
  virtual void enqueue(const kernels::cuda::WriteParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::GatherParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::PagesParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::RenumberParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::CombineParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::CleanLseParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ShiftLseParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::MaskRowsParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::WeighParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::PackParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::SumParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ArrangeParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ShardBatchParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::CompareHeadersParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::PeerQueriesParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::PeerCombineParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::QuantizeFp8Params& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::Nvfp4Params& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::MaxScaleParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::IndptrParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::LensParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ListParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::DenseParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ValidateParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::SlotParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ExpandParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ShardLensParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::TableRowsParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::ConcatParams& params, Stream stream) const = 0;
  virtual void enqueue(const kernels::cuda::TableCheckParams& params, Stream stream) const = 0;
};

/// A plan's memory on a GPU: one image, which kernels read, and what it takes to fill it.
class GpuPlanMemory {
 public:
  virtual ~GpuPlanMemory() = default;
  /// Enqueues the copy of a host plan into the image. Waits only where every stage is still being copied from.
  virtual void upload(const scheduler::PlanView& plan, Stream stream) = 0;
  /// Enqueues the planning of a batch with device lengths.
  virtual void plan_on_device(const BatchView& batch, Stream stream) = 0;
  /// Throws kInvalidArgument if a plan made on the device since the last call met a request it could not plan, or if a
  /// check of tables in a captured graph found a fault.
  virtual void report() = 0;
  /// Where checks of tables report; see TableCheckParams::fault.
  virtual kernels::cuda::TableFault* table_fault() const = 0;
  virtual const scheduler::PlanImageHeader* image() const = 0;
  /// Where the image has the cu_q of the last plan that is in it.
  virtual const int32_t* cu_q() const = 0;
  /// See kernels::cuda::kTileCounters; null where the schedule is static. The address never changes.
  virtual uint32_t* tile_counters() const = 0;
  /// See AttentionParams::combine_counters; null where the schedule is dynamic. The address never changes.
  virtual uint32_t* combine_counters() const = 0;
};

/// Throws kInvalidArgument for a fault that a check of tables has written, and forgets it. `what` begins the message.
void report_tables(kernels::cuda::TableFault& fault, const char* what);

/// A stream beside the caller's, for work that needs nothing of what is enqueued there in the meantime.
class GpuSideStream {
 public:
  virtual ~GpuSideStream() = default;
  /// What is enqueued on the returned stream from here on waits for all that `stream` has. Under capture it belongs to
  /// the same graph.
  virtual Stream fork(Stream stream) = 0;
  /// What is enqueued on `stream` from here on waits for it.
  virtual void join(Stream stream) = 0;
};

/// A side stream while it is forked from the caller's. It is joined even where enqueueing throws: a capture that is
/// left with a fork could not be ended.
class Fork {
 public:
  Fork(GpuSideStream& side, Stream main) : side_(side), main_(main), stream_(side.fork(main)) {}
  ~Fork() {
    if (joined_) return;
    try {
      side_.join(main_);
    } catch (...) {  // whoever unwinds has an error to report already
    }
  }
  Fork(const Fork&) = delete;
  Fork& operator=(const Fork&) = delete;
  Stream stream() const noexcept { return stream_; }
  /// Leaves the join to the caller.
  void leave() noexcept { joined_ = true; }
  void join() {
    joined_ = true;
    side_.join(main_);
  }

 private:
  GpuSideStream& side_;
  Stream main_;
  Stream stream_;
  bool joined_ = false;
};

/// Where a GPU's schedule has the headers that kernels begin at, one for each pass. The places do not depend on the
/// plans' sizes, since graphs know them.
struct ScheduleLayout {
  static constexpr size_t kHeaderBytes = 256;

  std::array<size_t, scheduler::ChecksumRecord::kMaxImages> images{};
  size_t bytes = 0;  ///< a multiple of 8
};

/// Memory of a GPU that holds a schedule, in the engine's hands once it is made: written by `seal`, compared by
/// `check`.
class GpuSchedule {
 public:
  virtual ~GpuSchedule() = default;
  /// Enqueues the writing of those plans to `memory`, aligned to 256 bytes, and of what `check` compares it with.
  virtual void seal(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* memory,
                    Stream stream) = 0;
  /// Enqueues the comparison: a schedule that was changed loses its work.
  virtual void check(Stream stream) const = 0;
  /// Throws kInvalidArgument if a comparison since the last call has found a change.
  virtual void report() = 0;
};

/// `image_bytes`: of each pass's image.
ScheduleLayout lay_out_schedule(std::span<const size_t> image_bytes);

/// For implementations of GpuSchedule. Writes a schedule to `stage`, as it is to lie at `memory`.
void fill_schedule(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* stage,
                   const std::byte* memory);

/// What is kept of the schedule in `stage`. `no_work`: as many zeros as any worker_indptr has entries, for kernels.
scheduler::ChecksumRecord make_record(size_t num_plans, const ScheduleLayout& layout, const std::byte* stage,
                                      std::byte* memory, const int32_t* no_work);

[[noreturn]] void fail_changed();

/// Which GPU it is, the same in every process.
using GpuIdentity = std::array<std::byte, 16>;
/// Names memory of a GPU in other processes of the host.
using GpuMemoryName = std::array<std::byte, 64>;

/// One GPU.
class GpuBackend : public GpuKernels {
 public:
  virtual int32_t num_sms() const = 0;
  virtual int32_t compute_capability() const = 0;
  virtual std::span<const kernels::cuda::AttentionKernel* const> kernels() const = 0;
  /// `reports`: whether `report` is to hear of requests that could not be planned.
  virtual std::unique_ptr<GpuPlanMemory> make_plan_memory(const scheduler::SchedulerConfig& config,
                                                          bool reports) const = 0;
  virtual std::unique_ptr<GpuSideStream> make_side_stream() const = 0;
  /// `most_workers`: of the plans that will be sealed.
  virtual std::unique_ptr<GpuSchedule> make_schedule(int32_t most_workers) const = 0;
  virtual void launch(const kernels::cuda::AttentionKernel& kernel, const kernels::cuda::AttentionParams& params,
                      const kernels::cuda::LaunchShape& shape, Stream stream) const = 0;
  virtual void combine(const kernels::cuda::AttentionKernel& kernel, const kernels::cuda::AttentionParams& params,
                       const kernels::cuda::LaunchShape& shape, Stream stream) const = 0;
  virtual void synchronize(Stream stream) const = 0;
  virtual bool is_capturing(Stream stream) const = 0;
  /// Device memory, aligned to 256 bytes. Freeing it waits for what is enqueued. Throws kOutOfMemory.
  virtual std::shared_ptr<void> allocate(size_t bytes) const = 0;
  /// Page-locked host memory, which the GPU writes at the host's address. Throws kOutOfMemory.
  virtual std::shared_ptr<void> allocate_page_locked(size_t bytes) const = 0;
  virtual GpuIdentity identity() const = 0;
  /// Lets this GPU's kernels use the memory of another one of this process. False: it cannot.
  virtual bool reach(const GpuIdentity& other) const = 0;
  /// The name of memory that `allocate` gave; none where other processes cannot have it.
  virtual std::optional<GpuMemoryName> name_memory(void* data) const = 0;
  /// Memory of another process, at an address of this one's. Null: it cannot be had.
  virtual std::shared_ptr<void> open_memory(const GpuMemoryName& name) const = 0;
  /// Enqueues a copy within this GPU's memory.
  virtual void copy(void* to, const void* from, size_t bytes, Stream stream) const = 0;
  /// Enqueues a copy from the host. On return `from` may be changed, if it is ordinary memory and not page-locked.
  virtual void upload(void* to, const void* from, size_t bytes, Stream stream) const = 0;
  /// Copies to the host and waits for it.
  virtual void download(void* to, const void* from, size_t bytes, Stream stream) const = 0;
  /// Lets the GPU use host memory at its own address, and takes that back. For tests: such memory is slow.
  virtual void map_host_memory(void* data, size_t bytes) const = 0;
  virtual void unmap_host_memory(void* data) const noexcept = 0;
};

/// Throws kUnavailable: no CUDA kernels in this build, no driver, no such device, or one too old for any kernel.
std::shared_ptr<const GpuBackend> open_gpu(int32_t index);

}  // namespace folio::inline v0::attention
