// What device code finds without an include comes before it.
#include "warp_emulator.hpp"

// The code:
#include "kernels/cuda/common/combine.hpp"
#include "kernels/cuda/common/epilogue.cuh"
#include "kernels/cuda/sm90/common/tensor_map.hpp"

/// What the kernels of Hopper need of others, on the host: the combine kernel and the driver's tensor maps.
namespace folio::inline v0::kernels::cuda {

sm90::TensorMapEncoder sm90::tensor_map_encoder() {
  return emulation::encode_map;
}

namespace {

/// `first_partial`: the plan's first partial row.
void combine_plan(const AttentionParams& params, const scheduler::PlanView& plan, int64_t first_partial) {
  const int32_t group_size = params.num_q_heads / params.num_kv_heads;
  for (int32_t m = 0; m < plan.num_combine_tiles; ++m) {
    const scheduler::CombineTile& item = plan.combine_tiles[m];
    for (int32_t row = item.row_begin; row < item.row_end; ++row) {
      for (int32_t d = 0; d < params.head_dim_v; ++d) {
        float max = -INFINITY;
        float sum = 0.0f;
        float acc = 0.0f;
        for (int32_t s = item.source_begin; s < item.source_end; ++s) {
          const int64_t partial = first_partial + plan.combine_sources[s] + row - item.row_begin;
          const float other = params.partial_acc[partial * params.head_dim_v + d];
          const Fold f = fold_factors(max, sum, params.partial_row_max[partial], params.partial_row_sum[partial]);
          sum = fold(f, sum, params.partial_row_sum[partial]);
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

}  // namespace

void launch_combine(const AttentionParams& params, int32_t, Stream, bool, int32_t) {
  combine_plan(params, params.plan->view, 0);
  if (params.other_plan != nullptr) combine_plan(params, params.other_plan->view, params.other_partials);
}

}  // namespace folio::inline v0::kernels::cuda
