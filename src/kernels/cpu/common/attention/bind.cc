#include "kernels/cpu/common/attention/bind.hpp"

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

/// What the query `index` of `request` sees of the item's segment row, and the factors that apply there.
void bind_row_to_keys(const AttentionParams& params, const scheduler::WorkTile& item, int32_t request, int32_t index,
                      int32_t q_head, ItemRow& row) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const scheduler::PlanView& plan = params.plan;
  const scheduler::SegmentLengths& lengths = plan.segments[item.segment];
  const SegmentArgs& segment = args.segments[static_cast<size_t>(item.segment)];
  const scheduler::TokenRange range = scheduler::visible_range(
      {lengths.first_pos[item.kv_row], lengths.kv_len[item.kv_row], lengths.shard},
      scheduler::mask_bounds(config.mask, lengths.mask, config.window_left, config.window_right), row.position);
  row.visible_begin = static_cast<int32_t>(range.begin);
  row.visible_end = static_cast<int32_t>(range.end);
  row.logit_scale =
      scale_of(args.q_scale, request, item.kv_head) * scale_of(segment.k_scale, request, item.kv_head) * args.sm_scale;
  row.value_scale = scale_of(segment.v_scale, request, item.kv_head);
  if (args.alibi_slopes != nullptr) row.alibi_slope = args.alibi_slopes[q_head];
  if (config.mask == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig) {
    row.mask = args.custom_mask + plan.mask_byte_indptr[request];
    row.mask_begin = int64_t{plan.mask_first_column[request]} - lengths.key_offset[request];
    row.mask_bit = int64_t{index} * plan.mask_columns[request] - row.mask_begin;
  }
}

}  // namespace

ItemKeys bind_keys(const AttentionParams& params, const scheduler::WorkTile& item) {
  ItemKeys keys;
  keys.kv_begin = item.kv_begin;
  keys.kv_end = item.kv_end;
  if (item.kv_begin >= item.kv_end) return keys;
  const scheduler::SegmentLengths& lengths = params.plan.segments[item.segment];
  const SegmentArgs& args = params.args->segments[static_cast<size_t>(item.segment)];
  keys.first_pos = lengths.first_pos[item.kv_row];
  keys.shard_world = lengths.shard.world;
  keys.shard_rank = lengths.shard.rank;
  keys.shard_interleave = lengths.shard.interleave;
  if (lengths.source == KvSource::kRagged) {
    const ConstTensorView& k = args.ragged.k;
    const ConstTensorView& v = args.ragged.v;
    const int64_t token = args.ragged.indptr[item.kv_row];
    keys.dtype = k.dtype;
    keys.k = bytes_at(k.data, token * k.strides[0] + item.kv_head * k.strides[1], k.dtype);
    keys.v = bytes_at(v.data, token * v.strides[0] + item.kv_head * v.strides[1], v.dtype);
    keys.k_token = k.strides[0] * size_of(k.dtype);
    keys.v_token = v.strides[0] * size_of(v.dtype);
    return keys;
  }
  const KvCacheView& cache = args.cache;
  const PageTableView& table = args.table;
  const int64_t element = size_of(cache.dtype);
  const int64_t row = item.kv_row;
  keys.dtype = cache.dtype;
  keys.packed_v = cache.format == KvFormat::kCpuPacked;
  keys.k = bytes_at(cache.k, item.kv_head * cache.k_strides.head, cache.dtype);
  keys.v = bytes_at(cache.v, item.kv_head * cache.v_strides.head, cache.dtype);
  keys.page_size = cache.page_size;
  keys.pages = table.indices +
               (table.kind == PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride + table.first_column);
  keys.k_page = cache.k_strides.page * element;
  keys.k_token = cache.k_strides.token * element;
  keys.v_page = cache.v_strides.page * element;
  keys.v_token = cache.v_strides.token * element;
  return keys;
}

void bind_rows(const AttentionParams& params, const scheduler::WorkTile& item, ItemRow* rows) {
  const AttentionConfig& config = *params.config;
  const AttentionArgs& args = *params.args;
  const scheduler::PlanView& plan = params.plan;
  const bool has_keys = item.kv_begin < item.kv_end;
  int32_t request = item.request;
  for (int32_t r = item.row_begin; r < item.row_end; ++r) {
    const int32_t token = r / params.group_size;
    const int32_t q_head = item.kv_head * params.group_size + r % params.group_size;
    while (plan.cu_q[request + 1] <= token) ++request;
    const int32_t index = token - plan.cu_q[request];
    ItemRow row;
    row.position = int64_t{plan.q_first_pos[request]} + index;
    row.q = bytes_at(args.q.data, token * args.q.strides[0] + q_head * args.q.strides[1], config.q);
    if (has_keys) bind_row_to_keys(params, item, request, index, q_head, row);
    rows[r - item.row_begin] = row;
  }
}

}  // namespace folio::inline v0::kernels::cpu
