#pragma once

#include "attention/gpu_backend.hpp"
#include "platform/cuda/device.hpp"

namespace folio::inline v0::attention::cuda {

namespace gpu_kernels = kernels::cuda;

/// Calls kernels' own functions with their device made the current one.
class CudaKernels : public GpuBackend {
 public:
  explicit CudaKernels(int32_t device) : device_(device) {}
  void enqueue(const gpu_kernels::WriteParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::GatherParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::PagesParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::RenumberParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::CombineParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::CleanLseParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ShiftLseParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::MaskRowsParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::WeighParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::PackParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::SumParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ArrangeParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::QuantizeFp8Params& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::Nvfp4Params& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::MaxScaleParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::IndptrParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::LensParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ListParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::DenseParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ValidateParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::SlotParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ExpandParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ShardLensParams& params, Stream stream) const final { on_device(params, stream); }
  void enqueue(const gpu_kernels::ConcatParams& params, Stream stream) const final { on_device(params, stream); }

 private:
  template <typename Params>
  void on_device(const Params& params, Stream stream) const {
    const platform::cuda::DeviceScope scope(device_);
    gpu_kernels::enqueue(params, stream);
  }

  int32_t device_;
};

}  // namespace folio::inline v0::attention::cuda
