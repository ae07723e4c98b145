#include "kernels/cpu/common/kernel.hpp"
#include "scheduler/mask_bounds.hpp"

namespace folio::inline v0::kernels::cpu {
namespace {

float scale_of(const Scale& scale, int32_t request, int32_t kv_head) {
  if (scale.data == nullptr) return scale.value;
  switch (scale.granularity) {
    case ScaleGranularity::kPerTensor: return scale.data[0];
    case ScaleGranularity::kPerHead: return scale.data[kv_head];
    case ScaleGranularity::kPerRequest: return scale.data[request];
    case ScaleGranularity::kPerRequestAndHead: return scale.data[request * scale.request_stride + kv_head];
  }
  return scale.value;
}

const unsigned char* bytes_at(const void* data, int64_t element, DType dtype) {
  return static_cast<const unsigned char*>(data) + element * size_of(dtype);
}

/// The part of the work tile's segment row that is visible to query `index` of `request`, and the scales that apply.
void bind_row_to_kv(const AttentionParams& params, const scheduler::WorkTile& tile, int32_t request, int32_t index,
                    int32_t q_head, QueryRow& row) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const scheduler::PlanView& plan = params.plan;
  const scheduler::SegmentLengths& lengths = plan.segments[tile.segment];
  const SegmentArgs& segment = args.segments[static_cast<size_t>(tile.segment)];
  const scheduler::TokenRange range =
      scheduler::visible_to_token({lengths.first_pos[tile.kv_row], lengths.kv_len[tile.kv_row], lengths.shard},
                                  scheduler::mask_bounds(scheduler::mask_rules(config), lengths.mask),
                                  plan.visible_positions, plan.cu_q[request] + index, row.position);
  row.visible_begin = static_cast<int32_t>(range.begin);
  row.visible_end = static_cast<int32_t>(range.end);
  row.logit_scale =
      scale_of(args.q_scale, request, tile.kv_head) * scale_of(segment.k_scale, request, tile.kv_head) * args.sm_scale;
  row.value_scale = scale_of(segment.v_scale, request, tile.kv_head);
  if (args.alibi_slopes != nullptr) row.alibi_slope = args.alibi_slopes[q_head];
  if (config.mask == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig) {
    row.mask = args.custom_mask + plan.mask_byte_indptr[request];
    row.mask_begin = int64_t{plan.mask_first_column[request]} - lengths.key_offset[request];
    row.mask_bit = int64_t{index} * plan.mask_columns[request] - row.mask_begin;
  }
}

/// The K and V of the work tile: where they lie, and which tokens are its own.
KvOperand bind_kv(const AttentionParams& params, const scheduler::WorkTile& tile) {
  KvOperand kv;
  kv.kv_begin = tile.kv_begin;
  kv.kv_end = tile.kv_end;
  if (tile.kv_begin >= tile.kv_end) return kv;
  const scheduler::SegmentLengths& lengths = params.plan.segments[tile.segment];
  const SegmentArgs& args = params.args->segments[static_cast<size_t>(tile.segment)];
  kv.first_pos = lengths.first_pos[tile.kv_row];
  kv.shard_world = lengths.shard.world;
  kv.shard_rank = lengths.shard.rank;
  kv.shard_interleave = lengths.shard.interleave;
  if (lengths.source == KvSource::kRagged) {
    const ConstTensorView& k = args.ragged.k;
    const ConstTensorView& v = args.ragged.v;
    const int64_t token = args.ragged.indptr[tile.kv_row];
    kv.dtype = k.dtype;
    kv.k = bytes_at(k.data, token * k.strides[0] + tile.kv_head * k.strides[1], k.dtype);
    kv.v = bytes_at(v.data, token * v.strides[0] + tile.kv_head * v.strides[1], v.dtype);
    kv.k_token = k.strides[0] * size_of(k.dtype);
    kv.v_token = v.strides[0] * size_of(v.dtype);
    return kv;
  }
  const KvCacheView& cache = args.cache;
  const PageTableView& table = args.table;
  const int64_t element = size_of(cache.dtype);
  const int64_t row = tile.kv_row;
  kv.dtype = cache.dtype;
  kv.packed_v = cache.format == KvFormat::kCpuPacked;
  kv.k = bytes_at(cache.k, tile.kv_head * cache.k_strides.head, cache.dtype);
  kv.v = bytes_at(cache.v, tile.kv_head * cache.v_strides.head, cache.dtype);
  kv.page_size = cache.page_size;
  kv.pages = table.indices +
             (table.kind == PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride + table.first_column);
  kv.k_page = cache.k_strides.page * element;
  kv.k_token = cache.k_strides.token * element;
  kv.v_page = cache.v_strides.page * element;
  kv.v_token = cache.v_strides.token * element;
  return kv;
}

/// rows[i] = packed row tile.row_begin + i, with its visible range in the work tile's segment. A work tile without KV
/// sets the queries alone.
void bind_rows(const AttentionParams& params, const scheduler::WorkTile& tile, QueryRow* rows) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const scheduler::PlanView& plan = params.plan;
  const bool has_kv = tile.kv_begin < tile.kv_end;
  int32_t request = tile.request;
  for (int32_t r = tile.row_begin; r < tile.row_end; ++r) {
    const int32_t token = r / params.group_size;
    const int32_t q_head = tile.kv_head * params.group_size + r % params.group_size;
    while (plan.cu_q[request + 1] <= token) ++request;
    const int32_t index = token - plan.cu_q[request];
    QueryRow row;
    row.position = int64_t{plan.q_first_pos[request]} + index;
    row.q = bytes_at(args.q.data, token * args.q.strides[0] + q_head * args.q.strides[1], config.q);
    if (has_kv) bind_row_to_kv(params, tile, request, index, q_head, row);
    rows[r - tile.row_begin] = row;
  }
}

/// Adds the work tile's KV to the running state. A fixed split is a state of its own, which is then combined into the
/// running one; only the first accumulates in place. Long ranges are divided in the same way: float32 sums of more keys
/// would drift.
void accumulate(const Collective& collective, const WorkerScratch& scratch, bool in_place, WorkTileParams& work) {
  const int32_t end = work.kv.kv_end;
  for (int32_t begin = work.kv.kv_begin; begin < end; begin = work.kv.kv_end, in_place = false) {
    const int32_t first = begin / kMaxStateTokens * kMaxStateTokens;
    work.kv.kv_begin = begin;
    work.kv.kv_end = end - first > kMaxStateTokens ? first + kMaxStateTokens : end;
    work.state = in_place ? scratch.running : scratch.split;
    if (!in_place) clear(scratch.split, work.num_rows, work.v_stride);
    collective.mainloop(work);
    for (int32_t r = 0; !in_place && r < work.num_rows; ++r) {
      collective.combine_states(scratch.running.row_max + r, scratch.running.row_sum + r,
                                scratch.running.acc + r * work.v_stride, scratch.split.row_max[r],
                                scratch.split.row_sum[r], scratch.split.acc + r * work.v_stride, work.head_dim_v);
    }
  }
}

}  // namespace

void run_worker(const Collective& collective, const AttentionParams& params, int32_t worker) noexcept {
  const AttentionConfig& config = *params.config;
  const scheduler::PlanView& plan = params.plan;
  const int32_t begin = plan.worker_indptr[worker];
  const int32_t end = plan.worker_indptr[worker + 1];
  if (begin == end) return;
  const WorkerScratch scratch =
      carve_scratch(config, params.tile, params.scratch + static_cast<size_t>(worker) * params.scratch_stride,
                    collective_scratch_bytes(collective, config, params.tile));
  WorkTileParams work;
  work.tile_rows = params.tile.rows;
  work.rows = scratch.rows;
  work.head_dim_qk = config.head_dim_qk;
  work.head_dim_v = config.head_dim_v;
  work.qk_stride = padded(config.head_dim_qk, kDimPadding);
  work.v_stride = padded(config.head_dim_v, kDimPadding);
  work.q_dtype = config.q;
  work.soft_cap = params.args->logits_soft_cap;
  work.alibi = params.args->alibi_slopes != nullptr;
  work.scratch = scratch.tile;
  if (scratch.tile.rope != nullptr) set_rope_frequencies(params.args->rope, config.head_dim_qk, scratch.tile.rope);
  work.rope = scratch.tile.rope;
  for (int32_t i = begin; i < end; ++i) {
    const scheduler::WorkTile& tile = plan.work_tiles[i];
    const bool start = (tile.flags & scheduler::kStart) != 0;
    const bool fold = (tile.flags & scheduler::kFold) != 0;
    work.kv = bind_kv(params, tile);
    work.num_rows = tile.row_end - tile.row_begin;
    bind_rows(params, tile, scratch.rows);
    if (start) {
      collective.load_q(work);
      clear(scratch.running, work.num_rows, work.v_stride);
    }
    if (tile.kv_begin < tile.kv_end) accumulate(collective, scratch, start || !fold, work);
    if ((tile.flags & scheduler::kFinish) != 0) run_epilogue(collective, params, tile, scratch.running, work.v_stride);
  }
}

}  // namespace folio::inline v0::kernels::cpu
