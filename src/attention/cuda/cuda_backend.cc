#include <algorithm>

#include "attention/cuda/plan_memory.hpp"
#include "attention/gpu_backend.hpp"
#include "core/error.hpp"
#include "platform/cuda/device.hpp"
#include "platform/cuda/peer.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::attention {
namespace {

namespace gpu = platform::cuda;

/// Launches with that device as the current one. A launch fails too where the device is dead; that is then said.
template <typename Launch>
void launch_on(int32_t device, const Launch& launch) {
  const gpu::DeviceScope scope(device);
  gpu::check_nothing_failed_before();
  try {
    launch();
  } catch (const Error&) {
    gpu::check_alive("launching a kernel");
    throw;
  }
}

/// Calls kernels' own functions with their device made the current one.
class CudaKernels : public GpuBackend {
 public:
  explicit CudaKernels(int32_t device) : device_(device) {}
  void enqueue(const kernels::cuda::WriteParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::GatherParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::PagesParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::RenumberParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::CombineParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::CleanLseParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ShiftLseParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::MaskRowsParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::WeighParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::PackParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::SumParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ArrangeParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ShardBatchParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::CompareHeadersParams& params, Stream stream) const final {
    on_device(params, stream);
  }
  void enqueue(const kernels::cuda::PeerQueriesParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::PeerCombineParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::QuantizeFp8Params& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::Nvfp4Params& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::MaxScaleParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::IndptrParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::LensParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ListParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::DenseParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ValidateParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::SlotParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ExpandParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ShardLensParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::TableRowsParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::ConcatParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const kernels::cuda::TableCheckParams& params, Stream stream) const final { on_device(params, stream); }

 private:
  template <typename Params>
  void on_device(const Params& params, Stream stream) const {
    launch_on(device_, [&] { kernels::cuda::enqueue(params, stream); });
  }

  int32_t device_;
};

class CudaBackend final : public CudaKernels {
 public:
  explicit CudaBackend(const gpu::DeviceInfo& info) : CudaKernels(info.index), info_(info) {}
  int32_t num_sms() const override { return info_.num_sms; }
  int32_t compute_capability() const override { return info_.compute_capability; }
  std::span<const kernels::cuda::AttentionKernel* const> kernels() const override {
    return kernels::cuda::attention_kernels();
  }
  std::unique_ptr<GpuPlanMemory> make_plan_memory(const scheduler::SchedulerConfig& config,
                                                  bool reports) const override {
    const gpu::DeviceScope scope(info_.index);  // around its members' construction too
    return std::make_unique<cuda::CudaPlanMemory>(info_.index, config, reports);
  }
  std::unique_ptr<GpuSideStream> make_side_stream() const override {
    const gpu::DeviceScope scope(info_.index);
    return std::make_unique<cuda::CudaSideStream>(info_.index);
  }
  std::unique_ptr<GpuSchedule> make_schedule(int32_t most_workers) const override {
    const gpu::DeviceScope scope(info_.index);
    return std::make_unique<cuda::CudaSchedule>(info_.index, most_workers);
  }
  void launch(const kernels::cuda::AttentionKernel& kernel, const kernels::cuda::AttentionParams& params,
              const kernels::cuda::LaunchShape& shape, Stream stream) const override {
    launch_on(info_.index, [&] { kernel.launch(params, shape, stream); });
  }
  void combine(const kernels::cuda::AttentionKernel& kernel, const kernels::cuda::AttentionParams& params,
               const kernels::cuda::LaunchShape& shape, Stream stream) const override {
    launch_on(info_.index, [&] { kernel.combine(params, shape, stream); });
  }
  std::shared_ptr<void> allocate(size_t bytes) const override {
    const gpu::DeviceScope scope(info_.index);
    const auto memory = std::make_shared<gpu::DeviceMemory>(bytes);
    return {memory, memory->data()};
  }
  std::shared_ptr<void> allocate_page_locked(size_t bytes) const override {
    const gpu::DeviceScope scope(info_.index);
    const auto memory = std::make_shared<gpu::PinnedMemory>(bytes);
    return {memory, memory->data()};
  }
  GpuIdentity identity() const override { return gpu::identity(info_.index); }
  bool reach(const GpuIdentity& other) const override { return gpu::reach(info_.index, other); }
  std::optional<GpuMemoryName> name_memory(void* data) const override {
    const gpu::DeviceScope scope(info_.index);
    return gpu::name_memory(data);
  }
  std::shared_ptr<void> open_memory(const GpuMemoryName& name) const override {
    const gpu::DeviceScope scope(info_.index);
    return gpu::open_memory(name);
  }
  void copy(void* to, const void* from, size_t bytes, Stream stream) const override {
    const gpu::DeviceScope scope(info_.index);
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, gpu::native(stream)), "copying on a GPU");
  }
  void upload(void* to, const void* from, size_t bytes, Stream stream) const override {
    const gpu::DeviceScope scope(info_.index);
    const gpu::RelaxedCapture relaxed;
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, gpu::native(stream)), "copying to the device");
  }
  void download(void* to, const void* from, size_t bytes, Stream stream) const override {
    const gpu::DeviceScope scope(info_.index);
    const gpu::RelaxedCapture relaxed;
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, gpu::native(stream)),
               "copying from the device");
    gpu::synchronize(stream);
  }
  void synchronize(Stream stream) const override {
    const gpu::DeviceScope scope(info_.index);
    gpu::synchronize(stream);
  }
  bool is_capturing(Stream stream) const override {
    const gpu::DeviceScope scope(info_.index);
    return gpu::is_capturing(stream);
  }
  void map_host_memory(void* data, size_t bytes) const override {
    const gpu::DeviceScope scope(info_.index);
    const gpu::RelaxedCapture relaxed;
    gpu::check(cudaHostRegister(data, bytes, cudaHostRegisterMapped), "mapping host memory");
  }
  void unmap_host_memory(void* data) const noexcept override {
    const gpu::RelaxedCapture relaxed;
    static_cast<void>(cudaHostUnregister(data));
  }

 private:
  gpu::DeviceInfo info_;
};

}  // namespace

std::shared_ptr<const GpuBackend> open_gpu(int32_t index) {
  const gpu::DeviceInfo info = gpu::device_info(index);
  int32_t oldest = INT32_MAX;
  for (const kernels::cuda::AttentionKernel* kernel : kernels::cuda::attention_kernels()) {
    const int32_t given = info.compute_capability;
    if (given >= kernel->min_compute_capability && given <= kernel->max_compute_capability) {
      const gpu::DeviceScope scope(index);
      gpu::check_alive("making a context of a CUDA device");
      return std::make_shared<CudaBackend>(info);
    }
    oldest = std::min(oldest, kernel->min_compute_capability);
  }
  core::fail(ErrorCode::kUnavailable, "CUDA device ", index, " has compute capability ", info.compute_capability / 10,
             ".", info.compute_capability % 10, "; kernels here need ", oldest / 10, ".", oldest % 10, " or newer");
}

}  // namespace folio::inline v0::attention
