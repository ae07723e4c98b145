#include "kernels/cuda/sm80/attention/sm80_kernel.hpp"

#include <algorithm>
#include <iterator>

#include "core/error.hpp"
#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm80/attention/launch.hpp"
#include "kernels/cuda/sm80/attention/shape.hpp"
#include "kernels/cuda/sm80/attention/takes.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

namespace {

/// Whether a segment's keys and values are e4m3 and can be copied 16 codes at a time.
bool has_codes(const SegmentParams& segment) {
  const auto whole = [](const void* data, const KvStrides& strides) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides.page % 16 == 0 && strides.token % 16 == 0 &&
           strides.head % 16 == 0;
  };
  return segment.dtype == DType::kFloat8E4M3 && whole(segment.k, segment.k_strides) &&
         whole(segment.v, segment.v_strides);
}

/// Whether the kernels of codes take the batch. Above kRunToRun a request's bits must not depend on which segments
/// other requests of the batch have, so that kernels are chosen by the configuration alone.
bool takes_codes(const AttentionParams& params) {
  if (params.determinism > Determinism::kRunToRun) return false;
  return std::all_of(std::begin(params.segments), std::end(params.segments),
                     [](const SegmentParams& segment) { return segment.dtype == DType::kUnset || has_codes(segment); });
}

}  // namespace

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  static constexpr LaunchClass kFloat16[] = {launch_float16_0, launch_float16_1, launch_float16_2, launch_float16_3,
                                             launch_float16_4};
  static constexpr LaunchClass kBFloat16[] = {launch_bfloat16_0, launch_bfloat16_1, launch_bfloat16_2,
                                              launch_bfloat16_3, launch_bfloat16_4};
  static constexpr LaunchClass kCodes[] = {launch_codes_0, launch_codes_1, launch_codes_2, launch_codes_3};
  const int32_t index = dim_class(params.head_dim_qk, params.head_dim_v);
  const DType type = compute_type(shape.q, shape.kv, shape.ragged_kv);
  const auto* const classes =
      index != kLargeClass && takes_codes(params) ? kCodes : (type == DType::kFloat16 ? kFloat16 : kBFloat16);
  classes[index](params, shape.num_workers, stream);
  if (shape.combine) launch_merge(params, shape.num_workers, stream);
}

const AttentionKernel kSm80Kernel{.name = "cuda-sm80",
                                  .min_compute_capability = 80,
                                  .refusal = refusal,
                                  .tile = tile,
                                  .p_dtype = p_dtype,
                                  .workers_per_sm = 2,
                                  .tile_cost = 96,
                                  .row_cost = 1,
                                  .start_row_cost = 8,
                                  .start_free_rows = kNarrowRows,
                                  .combines_in_kernel = true,
                                  .launch = launch};

}  // namespace folio::inline v0::kernels::cuda::sm80
