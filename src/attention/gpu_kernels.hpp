#pragma once

#include "folio/types/device.hpp"
#include "kernels/cuda/common/cache/move.hpp"
#include "kernels/cuda/common/merge_states/merge_states.hpp"
#include "kernels/cuda/common/merge_states/ranks.hpp"
#include "kernels/cuda/common/quantize/quantize.hpp"
#include "kernels/cuda/common/tables/tables.hpp"

namespace folio::inline v0::attention {

/// The kernels of one GPU besides attention's. Each call enqueues, on that GPU, what the parameters' comment says,
/// waits for nothing and may be captured. Implemented in attention/cuda; builds without a toolkit have no object of it.
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
  virtual void enqueue(const kernels::cuda::ConcatParams& params, Stream stream) const = 0;
};

}  // namespace folio::inline v0::attention
