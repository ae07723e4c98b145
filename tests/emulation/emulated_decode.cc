// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/common/merge.hpp"
#include "kernels/cuda/sm90/decode/launch.hpp"
#include "kernels/cuda/sm90/decode/tensor_map_encoder.hpp"
#include "kernels/cuda/sm90/decode/thread_block.cuh"

/// "cuda-sm90-decode" on the host: the launches of its .cu files, and the merge kernel's, run by the emulator.
namespace folio::inline v0::kernels::cuda {
namespace sm90 {

TensorMapEncoder tensor_map_encoder() {
  return emulation::encode_map;
}

namespace {

template <typename T, int32_t DimQk, int32_t DimV, Codes kCodes = Codes::kNone>
void emulate(const AttentionParams& attention, int32_t num_workers) {
  static uint64_t seed = 0;
  DecodeParams params{};
  params.attention = attention;
  describe_segments(params, {DimQk, DimV, element_bytes(kCodes)});
  emulation::run_grid(num_workers, threads({DimQk, DimV}), shared_bytes<DimQk, DimV, kCodes>(), ++seed,
                      [&] { run_thread_block<T, DimQk, DimV, kCodes>(params, emulation::shared_memory()); });
}

}  // namespace

void launch_bfloat16_64_64(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 64, 64>(params, num_workers);
}
void launch_float16_64_64(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 64, 64>(params, num_workers);
}
void launch_e4m3_64_64(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 64, 64, Codes::kE4M3>(params, num_workers);
}
void launch_e5m2_64_64(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 64, 64, Codes::kE5M2>(params, num_workers);
}
void launch_bfloat16_96_96(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 96, 96>(params, num_workers);
}
void launch_float16_96_96(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 96, 96>(params, num_workers);
}
void launch_bfloat16_128_128(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 128, 128>(params, num_workers);
}
void launch_float16_128_128(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 128, 128>(params, num_workers);
}
void launch_e4m3_128_128(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 128, 128, Codes::kE4M3>(params, num_workers);
}
void launch_e5m2_128_128(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 128, 128, Codes::kE5M2>(params, num_workers);
}
void launch_bfloat16_192_128(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 192, 128>(params, num_workers);
}
void launch_float16_192_128(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 192, 128>(params, num_workers);
}
void launch_bfloat16_256_256(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__nv_bfloat16, 256, 256>(params, num_workers);
}
void launch_float16_256_256(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 256, 256>(params, num_workers);
}
void launch_e4m3_256_256(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 256, 256, Codes::kE4M3>(params, num_workers);
}
void launch_e5m2_256_256(const AttentionParams& params, int32_t num_workers, Stream) {
  emulate<__half, 256, 256, Codes::kE5M2>(params, num_workers);
}

}  // namespace sm90

void launch_merge(const AttentionParams& params, int32_t, Stream, bool) {
  const planner::PlanView& plan = params.plan->view;
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  for (int32_t m = 0; m < plan.num_merges; ++m) {
    const planner::MergeItem& item = plan.merges[m];
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      for (int32_t d = 0; d < params.head_dim_v; ++d) {
        float max = -INFINITY;
        float sum = 0.0f;
        float acc = 0.0f;
        for (int32_t s = item.source_begin; s < item.source_end; ++s) {
          const int32_t partial = plan.merge_sources[s] + row - item.row_begin;
          const float other = params.partial_acc[int64_t{partial} * params.head_dim_v + d];
          const Fold f = fold_factors(max, sum, params.partial_max[partial], params.partial_sum[partial]);
          sum = fold(f, sum, params.partial_sum[partial]);
          max = f.max;
          acc = fold(f, acc, other);
        }
        const int32_t q_head = item.kv_head * group_size + row % group_size;
        const RowEnd end = end_row(params, q_head, max, sum);
        write_out(params, row / group_size, q_head, d, acc, end);
        if (d == 0) write_lse(params, row / group_size, q_head, end);
      }
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda
