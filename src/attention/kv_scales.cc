#include <algorithm>
#include <array>
#include <cmath>

#include "attention/cache_args.hpp"
#include "attention/op_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/quantize.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0 {
namespace {

/// The largest magnitude from `offset` on in the dimensions from `dimension` on; NaN if there is one.
float max_magnitude(const ConstTensorView& x, int32_t dimension, int64_t offset, float so_far) {
  if (dimension == x.rank) {
    const float value = std::fabs(load_as_float(x.data, x.dtype, offset));
    return value > so_far || std::isnan(value) ? value : so_far;
  }
  const auto d = static_cast<size_t>(dimension);
  for (int64_t i = 0; i < x.shape[d] && !std::isnan(so_far); ++i) {
    so_far = max_magnitude(x, dimension + 1, offset + i * x.strides[d], so_far);
  }
  return so_far;
}

bool is_empty(const ConstTensorView& x) {
  bool empty = x.rank == 0;
  for (int32_t d = 0; d < x.rank; ++d) empty |= x.shape[static_cast<size_t>(d)] == 0;
  return empty;
}

void check_tensor(const char* name, const ConstTensorView& x, float constant) {
  core::require(constant > 0.0f && std::isfinite(constant), name, "'s scale constant is ", constant,
                "; it must be positive");
  core::require(x.dtype == DType::kFloat32 || x.dtype == DType::kFloat16 || x.dtype == DType::kBFloat16, name, " is ",
                x.dtype, "; offered are float32, float16 and bfloat16");
  core::require(x.rank >= 0 && x.rank <= kMaxRank, name, " has rank ", x.rank);
  core::require(x.data != nullptr || is_empty(x), name, " is null");
}

float scale_of(const char* name, const ConstTensorView& x, float constant) {
  check_tensor(name, x, constant);
  float scale = 1.0f;
  if (is_empty(x)) return scale;
  const float largest = max_magnitude(x, 0, 0, 0.0f);
  if (largest != 0.0f) scale = largest / constant;
  return scale;
}

kernels::cuda::MaxScaleTensor gpu_tensor(const char* name, const ConstTensorView& x, float constant) {
  check_tensor(name, x, constant);
  attention::check_gpu_aligned(name, x.data, size_of(x.dtype));
  kernels::cuda::MaxScaleTensor params;
  params.data = static_cast<const std::byte*>(x.data);
  params.dtype = x.dtype;
  params.rank = x.rank;
  params.num_elements = is_empty(x) ? 0 : 1;
  for (int32_t d = 0; d < x.rank; ++d) {
    const auto k = static_cast<size_t>(d);
    params.shape[k] = x.shape[k];
    params.strides[k] = x.strides[k];
    params.num_elements = core::checked_mul(params.num_elements, x.shape[k]);
  }
  params.constant = constant;
  return params;
}

}  // namespace

void calculate_kv_scales(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& v, std::span<float> scales, const KvScaleConstants& constants,
                         Stream stream) {
  core::require(scales.size() == 3 && scales.data() != nullptr, "scales has ", scales.size(),
                " entries; it must have 3, for q, k and v");
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) {
    attention::check_device("calculate_kv_scales", context, stream);
    const std::array<float, 3> made{scale_of("q", q, constants.q), scale_of("k", k, constants.k),
                                    scale_of("v", v, constants.v)};
    std::ranges::copy(made, scales.begin());
    return;
  }
  attention::check_gpu_aligned("scales", scales.data(), sizeof(float));
  kernels::cuda::MaxScaleParams params;
  params.tensors[0] = gpu_tensor("q", q, constants.q);
  params.tensors[1] = gpu_tensor("k", k, constants.k);
  params.tensors[2] = gpu_tensor("v", v, constants.v);
  params.out = scales.data();
  gpu->enqueue(params, stream);
}

}  // namespace folio::inline v0
