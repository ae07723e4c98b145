#include "kernels/cpu/common/attention/worker.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "folio/types/nvfp4.hpp"
#include "kernels/cpu/common/attention/bind.hpp"
#include "kernels/cpu/common/attention/scratch.hpp"
#include "kernels/cpu/generic/combine/nvfp4.hpp"
#include "kernels/cpu/generic/combine/row_convert.hpp"

namespace folio::inline v0::kernels::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.693147180559945309417;

/// Stores a finished row as the config's dtype.
void quantize_row(const AttentionParams& params, int64_t token, int64_t q_head, const float* acc, void* out) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const float out_scale = args.out_scale.data == nullptr ? args.out_scale.value : args.out_scale.data[0];
  if (config.out != DType::kFloat4E2M1x2) {
    generic::store_row(acc, out_scale, config.out, config.head_dim_v, out);
    return;
  }
  const int64_t blocks_per_head = config.head_dim_v / kNvfp4BlockSize;
  generic::store_nvfp4(acc, out_scale, config.head_dim_v, static_cast<uint8_t*>(out),
                       {static_cast<uint8_t*>(args.out_block_scale.data), args.out_block_scale.first_row + token,
                        q_head * blocks_per_head, config.num_q_heads * blocks_per_head});
}

/// Writes one row: the sink joins the denominator, the sum divides, the LSE gets its base. `acc` is overwritten.
void write_row(const Arithmetic& arithmetic, const AttentionParams& params, int32_t kv_head, int32_t packed_row,
               float max, float sum, float* acc) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const int32_t token = packed_row / params.group_size;
  const int32_t q_head = kv_head * params.group_size + packed_row % params.group_size;
  float factor = 1.0f;
  if (args.sinks != nullptr) {
    // Where both are -infinity the row is empty, and factor and sum, then NaN, are not read.
    const float sink = args.sinks[q_head] * kLog2E;
    const float most = max < sink ? sink : max;  // a NaN maximum stays
    factor = std::exp2(max - most);
    sum = sum * factor + std::exp2(sink - most);
    max = most;
  }
  const bool empty = max == kNothing;
  auto* const out = static_cast<unsigned char*>(args.out.data) +
                    (token * args.out.strides[0] + q_head * args.out.strides[1]) * size_of(config.out);
  const bool stored = !empty && arithmetic.store_row != nullptr &&
                      arithmetic.store_row(acc, factor / sum, config.out, config.head_dim_v, out);
  if (!stored) {
    for (int32_t d = 0; d < config.head_dim_v; ++d) {
      acc[d] = empty ? 0.0f : acc[d] * factor / sum + 0.0f;  // + 0: no -0, which masked tiles would turn into 0
    }
    quantize_row(params, token, q_head, acc, out);
  }
  if (args.lse.data == nullptr) return;
  const double lse2 = empty ? static_cast<double>(max) : static_cast<double>(max) + std::log2(static_cast<double>(sum));
  args.lse.data[token * args.lse.token_stride + q_head * args.lse.head_stride] =
      static_cast<float>(args.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2);
}

void clear(const RowStates& states, int32_t rows, int32_t stride) {
  std::fill_n(states.max, rows, kNothing);
  std::fill_n(states.sum, rows, 0.0f);
  std::fill_n(states.acc, int64_t{rows} * stride, 0.0f);
}

void finish(const Arithmetic& arithmetic, const AttentionParams& params, const scheduler::WorkTile& item,
            const RowStates& states, int32_t stride) {
  const int32_t dim = params.config->head_dim_v;
  for (int32_t r = 0; r < item.row_end - item.row_begin; ++r) {
    float* const acc = states.acc + int64_t{r} * stride;
    if (item.partial < 0) {
      write_row(arithmetic, params, item.kv_head, item.row_begin + r, states.max[r], states.sum[r], acc);
      continue;
    }
    const int64_t partial = int64_t{item.partial} + r;
    params.partial_row_max[partial] = states.max[r];
    params.partial_row_sum[partial] = states.sum[r];
    std::memcpy(params.partial_acc + partial * dim, acc, static_cast<size_t>(dim) * sizeof(float));
  }
}

}  // namespace

size_t own_bytes(const Arithmetic& arithmetic, const AttentionConfig& config, const scheduler::TileShape& tile) {
  if (arithmetic.own_bytes == nullptr) return 0;
  return arithmetic.own_bytes(tile.rows, config.head_dim_qk, config.head_dim_v);
}

void run_worker(const Arithmetic& arithmetic, const AttentionParams& params, int32_t worker) noexcept {
  const AttentionConfig& config = *params.config;
  const scheduler::PlanView& plan = params.plan;
  const int32_t begin = plan.worker_indptr[worker];
  const int32_t end = plan.worker_indptr[worker + 1];
  if (begin == end) return;
  const WorkerScratch scratch =
      carve_scratch(config, params.tile, params.scratch + static_cast<size_t>(worker) * params.scratch_stride,
                    own_bytes(arithmetic, config, params.tile));
  ItemCall call;
  call.tile_rows = params.tile.rows;
  call.rows = scratch.rows;
  call.head_dim_qk = config.head_dim_qk;
  call.head_dim_v = config.head_dim_v;
  call.qk_stride = padded(config.head_dim_qk, kDimPadding);
  call.v_stride = padded(config.head_dim_v, kDimPadding);
  call.q_dtype = config.q;
  call.soft_cap = params.args->logits_soft_cap;
  call.alibi = params.args->alibi_slopes != nullptr;
  call.scratch = scratch.item;
  if (scratch.item.rope != nullptr) set_rope(params.args->rope, config.head_dim_qk, scratch.item.rope);
  call.rope = scratch.item.rope;
  for (int32_t i = begin; i < end; ++i) {
    const scheduler::WorkTile& item = plan.work_tiles[i];
    const bool start = (item.flags & scheduler::kStart) != 0;
    const bool split = (item.flags & scheduler::kFold) != 0 && !start;  // folding into nothing is accumulating in place
    call.keys = bind_keys(params, item);
    call.num_rows = item.row_end - item.row_begin;
    bind_rows(params, item, scratch.rows);
    if (start) {
      arithmetic.load_queries(call);
      clear(scratch.running, call.num_rows, call.v_stride);
    }
    if (item.kv_begin < item.kv_end) {
      call.states = split ? scratch.split : scratch.running;
      if (split) clear(scratch.split, call.num_rows, call.v_stride);
      arithmetic.accumulate(call);
      for (int32_t r = 0; split && r < call.num_rows; ++r) {
        arithmetic.fold(scratch.running.max + r, scratch.running.sum + r, scratch.running.acc + r * call.v_stride,
                        scratch.split.max[r], scratch.split.sum[r], scratch.split.acc + r * call.v_stride,
                        config.head_dim_v);
      }
    }
    if ((item.flags & scheduler::kFinish) != 0) finish(arithmetic, params, item, scratch.running, call.v_stride);
  }
}

void run_merge(const Arithmetic& arithmetic, const AttentionParams& params, int32_t merge) noexcept {
  const scheduler::CombineTile& item = params.plan.combine_tiles[merge];
  const int32_t dim = params.config->head_dim_v;
  alignas(64) float acc[kMaxHeadDimV];
  for (int32_t row = item.row_begin; row < item.row_end; ++row) {
    float max = kNothing;
    float sum = 0.0f;
    std::fill_n(acc, dim, 0.0f);
    for (int32_t i = item.source_begin; i < item.source_end; ++i) {
      const int64_t partial = int64_t{params.plan.combine_sources[i]} + row - item.row_begin;
      arithmetic.fold(&max, &sum, acc, params.partial_row_max[partial], params.partial_row_sum[partial],
                      params.partial_acc + partial * dim, dim);
    }
    write_row(arithmetic, params, item.kv_head, row, max, sum, acc);
  }
}

}  // namespace folio::inline v0::kernels::cpu
