#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "folio/types/nvfp4.hpp"
#include "kernels/cpu/common/kernel.hpp"
#include "kernels/cpu/generic/combine/row_convert.hpp"

namespace folio::inline v0::kernels::cpu {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0.693147180559945309417;

/// Stores a normalized row as the config's dtype.
void store_row(const AttentionParams& params, int64_t token, int64_t q_head, const float* acc, void* out) {
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

/// Stores one row's output and LSE: adds the sink to row_sum, divides by it, and converts the LSE to its base.
/// Overwrites `acc`.
void write_row(const Collective& collective, const AttentionParams& params, int32_t kv_head, int32_t packed_row,
               float row_max, float row_sum, float* acc) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const int32_t token = packed_row / params.group_size;
  const int32_t q_head = kv_head * params.group_size + packed_row % params.group_size;
  float factor = 1.0f;
  if (args.sinks != nullptr) {
    // Where both are -infinity the row is empty: factor and row_sum are NaN, and nobody reads them.
    const float sink = args.sinks[q_head] * kLog2E;
    const float new_max = row_max < sink ? sink : row_max;  // a NaN maximum stays
    factor = std::exp2(row_max - new_max);
    row_sum = row_sum * factor + std::exp2(sink - new_max);
    row_max = new_max;
  }
  const bool empty = row_max == kNegInf;
  auto* const out = static_cast<unsigned char*>(args.out.data) +
                    (token * args.out.strides[0] + q_head * args.out.strides[1]) * size_of(config.out);
  const bool stored = !empty && collective.store_row != nullptr &&
                      collective.store_row(acc, factor / row_sum, config.out, config.head_dim_v, out);
  if (!stored) {
    for (int32_t d = 0; d < config.head_dim_v; ++d) {
      acc[d] = empty ? 0.0f : acc[d] * factor / row_sum + 0.0f;  // + 0: no -0, which masked tiles would turn into 0
    }
    store_row(params, token, q_head, acc, out);
  }
  if (args.lse.data == nullptr) return;
  const double lse2 =
      empty ? static_cast<double>(row_max) : static_cast<double>(row_max) + std::log2(static_cast<double>(row_sum));
  args.lse.data[token * args.lse.token_stride + q_head * args.lse.head_stride] =
      static_cast<float>(args.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2);
}

}  // namespace

void clear(const SoftmaxState& state, int32_t rows, int32_t padding, int32_t v_stride) {
  std::fill_n(state.row_max, padded(rows, padding), kNegInf);
  std::fill_n(state.row_sum, padded(rows, padding), 0.0f);
  std::fill_n(state.acc, int64_t{rows} * v_stride, 0.0f);
}

void run_epilogue(const Collective& collective, const AttentionParams& params, const scheduler::WorkTile& tile,
                  const SoftmaxState& state, int32_t v_stride) {
  const int32_t dim = params.config->head_dim_v;
  for (int32_t r = 0; r < tile.row_end - tile.row_begin; ++r) {
    float* const acc = state.acc + int64_t{r} * v_stride;
    if (tile.partial < 0) {
      write_row(collective, params, tile.kv_head, tile.row_begin + r, state.row_max[r], state.row_sum[r], acc);
      continue;
    }
    const int64_t partial = int64_t{tile.partial} + r;
    params.partial_row_max[partial] = state.row_max[r];
    params.partial_row_sum[partial] = state.row_sum[r];
    std::memcpy(params.partial_acc + partial * dim, acc, static_cast<size_t>(dim) * sizeof(float));
  }
}

void run_combine(const Collective& collective, const AttentionParams& params, int32_t combine_tile) noexcept {
  const scheduler::CombineTile& tile = params.plan.combine_tiles[combine_tile];
  const int32_t dim = params.config->head_dim_v;
  alignas(64) float acc[kMaxHeadDimV];
  for (int32_t row = tile.row_begin; row < tile.row_end; ++row) {
    float row_max = kNegInf;
    float row_sum = 0.0f;
    std::fill_n(acc, dim, 0.0f);
    for (int32_t i = tile.source_begin; i < tile.source_end; ++i) {
      const int64_t partial = int64_t{params.plan.combine_sources[i]} + row - tile.row_begin;
      collective.combine_states(&row_max, &row_sum, acc, params.partial_row_max[partial],
                                params.partial_row_sum[partial], params.partial_acc + partial * dim, dim);
    }
    write_row(collective, params, tile.kv_head, row, row_max, row_sum, acc);
  }
}

}  // namespace folio::inline v0::kernels::cpu
