#include "folio/backends/kv_scales.hpp"

#include <cmath>

#include "core/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
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

Scale scale_of(const char* name, const ConstTensorView& x, float constant) {
  core::require(constant > 0.0f && std::isfinite(constant), name, "'s scale constant is ", constant,
                "; it must be positive");
  core::require(x.dtype == DType::kFloat32 || x.dtype == DType::kFloat16 || x.dtype == DType::kBFloat16, name, " is ",
                x.dtype, "; offered are float32, float16 and bfloat16");
  core::require(x.rank >= 0 && x.rank <= kMaxRank, name, " has rank ", x.rank);
  Scale scale;
  if (is_empty(x)) return scale;
  core::require(x.data != nullptr, name, " is null");
  const float largest = max_magnitude(x, 0, 0, 0.0f);
  if (largest != 0.0f) scale.value = largest / constant;
  return scale;
}

}  // namespace

AttentionLayerScales calculate_kv_scales(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                                         const KvScaleConstants& constants) {
  return {scale_of("q", q, constants.q), scale_of("k", k, constants.k), scale_of("v", v, constants.v)};
}

}  // namespace folio::inline v0::backends
