#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/common/compute_type.hpp"
#include "kernels/cuda/sm80/config.hpp"
#include "kernels/cuda/sm80/sm80_kernel.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {
namespace {

using Launcher = void (*)(const AttentionParams& params, int32_t num_workers, Stream stream);

/// A row of the dispatch table: one type's launchers, by the index of kHeadDims.
template <DType Type, size_t... Index>
constexpr std::array<Launcher, sizeof...(Index)> launchers(std::index_sequence<Index...>) {
  return {launch_attention<Type, kHeadDims[Index].qk, kHeadDims[Index].v>...};
}

/// The entry of one type and head dimensions.
template <DType Type>
Launcher launcher_of(int32_t index) {
  static constexpr auto kLaunchers = launchers<Type>(std::make_index_sequence<std::size(kHeadDims)>());
  if constexpr (Type != DType::kFloat8E4M3) {
    if (index == kLargeHeadIndex) return launch_attention<Type, kLargeHeadDims.qk, kLargeHeadDims.v>;
  }
  return kLaunchers[static_cast<size_t>(index)];
}

/// Whether a segment's keys and values are e4m3 in rows of whole 16-byte chunks.
bool is_aligned_e4m3(const SegmentParams& segment) {
  const auto whole = [](const void* data, const KvStrides& strides) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides.page % 16 == 0 && strides.token % 16 == 0 &&
           strides.head % 16 == 0;
  };
  return segment.dtype == DType::kFloat8E4M3 && whole(segment.k, segment.k_strides) &&
         whole(segment.v, segment.v_strides);
}

/// Whether K and V may stay fp8 in shared memory. Not above kRunToRun: there a request's bits must not depend on the
/// segments of other requests, so the configuration alone chooses the instantiation.
bool takes_fp8(const AttentionParams& params) {
  if (params.determinism > Determinism::kRunToRun) return false;
  return std::all_of(std::begin(params.segments), std::end(params.segments), [](const SegmentParams& segment) {
    return segment.dtype == DType::kUnset || is_aligned_e4m3(segment);
  });
}

Launcher select_launcher(const AttentionParams& params, const LaunchShape& shape) {
  const int32_t index = head_dims_index(params.head_dim_qk, params.head_dim_v);
  if (index != kLargeHeadIndex && takes_fp8(params)) return launcher_of<DType::kFloat8E4M3>(index);
  if (compute_type(shape.q, shape.kv, shape.ragged_kv) == DType::kFloat16) return launcher_of<DType::kFloat16>(index);
  return launcher_of<DType::kBFloat16>(index);
}

void launch(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  select_launcher(params, shape)(params, shape.num_workers, stream);
}

void combine(const AttentionParams& params, const LaunchShape& shape, Stream stream) {
  launch_combine(params, shape.num_workers, stream);
}

}  // namespace

const AttentionKernel kSm80Kernel{.name = "cuda-sm80",
                                  .min_compute_capability = 80,
                                  .refusal = refusal,
                                  .tile = tile,
                                  .p_dtype = p_dtype,
                                  .workers_per_sm = 2,
                                  .tile_cost = 96,
                                  .row_cost = 1,
                                  .start_row_cost = 8,
                                  .start_free_rows = kDecodeRows,
                                  .combines_in_kernel = true,
                                  .launch = launch,
                                  .combine = combine};

}  // namespace folio::inline v0::kernels::cuda::sm80
