#include "emulated_gpu.hpp"

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "attention/gpu_backend.hpp"
#include "core/error.hpp"
#include "emulated_kernels.hpp"

// A GPU of compute capability 9.0 and three SMs in software, for attention with a kernel of Hopper: the
// kernel's device code through the whole API, where there is no GPU.
namespace folio::inline v0::attention {
namespace {

namespace cuda = kernels::cuda;

class EmulatedPlanMemory final : public GpuPlanMemory {
 public:
  explicit EmulatedPlanMemory(const scheduler::SchedulerConfig& config) : config_(config) {}
  void upload(const scheduler::PlanView& plan, Stream) override { header_.view = plan; }
  void plan_on_device(const BatchView& batch, Stream) override {
    BatchView host = batch;
    host.where = Where::kHost;
    header_.view = scheduler::make_plan(config_, host, storage_);
  }
  void report() override { report_tables(fault_, "an earlier run of a captured graph: "); }
  cuda::TableFault* table_fault() const override { return &fault_; }
  const scheduler::PlanImageHeader* image() const override { return &header_; }
  const int32_t* cu_q() const override { return header_.view.cu_q; }
  uint32_t* tile_counters() const override { return counters_.get(); }
  uint32_t* combine_counters() const override { return nullptr; }

 private:
  scheduler::SchedulerConfig config_;
  scheduler::PlanStorage storage_;
  scheduler::PlanImageHeader header_{};
  mutable cuda::TableFault fault_;
  std::unique_ptr<uint32_t[]> counters_ = std::make_unique<uint32_t[]>(cuda::kTileCounters);
};

class EmulatedSchedule final : public GpuSchedule {
 public:
  explicit EmulatedSchedule(int32_t most_workers) : no_work_(static_cast<size_t>(most_workers) + 1) {}
  void seal(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* memory,
            Stream) override {
    fill_schedule(plans, layout, memory, memory);
    record_ = make_record(plans.size(), layout, memory, memory, no_work_.data());
    memory_ = memory;
  }
  void check(Stream) const override {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < record_.num_words; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, memory_ + i * sizeof(word), sizeof(word));
      sum += scheduler::checksum_term(word, i);
    }
    if (sum == record_.checksum) return;
    for (int32_t i = 0; i < record_.num_images; ++i) {
      *record_.images[static_cast<size_t>(i)] = record_.emptied[static_cast<size_t>(i)];
    }
    changed_ = true;
  }
  void report() override {
    if (std::exchange(changed_, false)) fail_changed();
  }

 private:
  std::vector<int32_t> no_work_;
  scheduler::ChecksumRecord record_;
  const std::byte* memory_ = nullptr;
  mutable bool changed_ = false;
};

class EmulatedSideStream final : public GpuSideStream {
 public:
  Stream fork(Stream stream) override { return stream; }
  void join(Stream) override {}
};

class EmulatedGpu final : public GpuBackend {
 public:
  int32_t num_sms() const override { return 3; }
  int32_t compute_capability() const override { return 90; }
  std::span<const cuda::AttentionKernel* const> kernels() const override { return emulation::kernels(); }
  std::unique_ptr<GpuPlanMemory> make_plan_memory(const scheduler::SchedulerConfig& config, bool) const override {
    return std::make_unique<EmulatedPlanMemory>(config);
  }
  std::unique_ptr<GpuSideStream> make_side_stream() const override { return std::make_unique<EmulatedSideStream>(); }
  std::unique_ptr<GpuSchedule> make_schedule(int32_t most_workers) const override {
    return std::make_unique<EmulatedSchedule>(most_workers);
  }
  void launch(const cuda::AttentionKernel& kernel, const cuda::AttentionParams& params, const cuda::LaunchShape& shape,
              Stream stream) const override {
    kernel.launch(params, shape, stream);
  }
  void combine(const cuda::AttentionKernel& kernel, const cuda::AttentionParams& params, const cuda::LaunchShape& shape,
               Stream stream) const override {
    kernel.combine(params, shape, stream);
  }
  void synchronize(Stream) const override {}
  bool is_capturing(Stream) const override { return false; }
  std::shared_ptr<void> allocate(size_t bytes) const override {
    return std::shared_ptr<std::byte[]>(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(256))),
                                        [](std::byte* data) { ::operator delete[](data, std::align_val_t(256)); });
  }
  std::shared_ptr<void> allocate_page_locked(size_t bytes) const override { return allocate(bytes); }
  GpuIdentity identity() const override { return {}; }
  bool reach(const GpuIdentity&) const override { return false; }
  std::optional<GpuMemoryName> name_memory(void*) const override { return std::nullopt; }
  std::shared_ptr<void> open_memory(const GpuMemoryName&) const override { return nullptr; }
  void copy(void* to, const void* from, size_t bytes, Stream) const override { std::memcpy(to, from, bytes); }
  void upload(void* to, const void* from, size_t bytes, Stream) const override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes, Stream) const override { std::memcpy(to, from, bytes); }
  void map_host_memory(void*, size_t) const override {}
  void unmap_host_memory(void*) const noexcept override {}

  void enqueue(const cuda::WriteParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::GatherParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::PagesParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::MaskRowsParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::RenumberParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::CombineParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::CleanLseParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ShiftLseParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::WeighParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::PackParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ArrangeParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ShardBatchParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::CompareHeadersParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::PeerQueriesParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::PeerCombineParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::SumParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::QuantizeFp8Params&, Stream) const override { refuse(); }
  void enqueue(const cuda::Nvfp4Params&, Stream) const override { refuse(); }
  void enqueue(const cuda::MaxScaleParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::IndptrParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::LensParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ListParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::DenseParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::SlotParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ExpandParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ShardLensParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::TableRowsParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ValidateParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::ConcatParams&, Stream) const override { refuse(); }
  void enqueue(const cuda::TableCheckParams& params, Stream) const override {
    const cuda::TableFault fault = cuda::check_tiles(params.segments, params.plan->view, 0, 1, 0, 1);
    if (params.fault->problem == cuda::TableProblem::kNone) *params.fault = fault;
  }

 private:
  [[noreturn]] static void refuse() { core::fail(ErrorCode::kUnsupported, "the emulated GPU computes attention only"); }
};

}  // namespace

std::vector<const cuda::AttentionKernel*>& emulation::kernels() {
  static const auto offered = cuda::emulated_kernels();
  static std::vector<const cuda::AttentionKernel*> all(offered.begin(), offered.end());
  return all;
}

std::shared_ptr<const GpuBackend> open_gpu(int32_t index) {
  if (index != 0) core::fail(ErrorCode::kUnavailable, "there is one emulated GPU, number 0");
  return std::make_shared<EmulatedGpu>();
}

}  // namespace folio::inline v0::attention
