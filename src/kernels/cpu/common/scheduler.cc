#include <algorithm>
#include <atomic>

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

/// The part of the work tile's segment row that is visible to query `index` of `request`, and the scales that apply:
/// the same for all query heads.
void bind_token_to_kv(const AttentionParams& params, const scheduler::WorkTile& tile, int32_t request, int32_t index,
                      QueryRow& row) {
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
  if (config.mask == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig) {
    row.mask = args.custom_mask + plan.mask_byte_indptr[request];
    row.mask_begin = int64_t{plan.mask_first_column[request]} - lengths.key_offset[request];
    row.mask_bit = int64_t{index} * plan.mask_columns[request] - row.mask_begin;
  }
}

void bind_token_scales(const KvCacheView& cache, int32_t kv_head, KvOperand& kv) {
  const TokenScales& k = cache.k_token_scales;
  const TokenScales& v = cache.v_token_scales;
  kv.k_scales = k.data + kv_head * k.strides.head;
  kv.v_scales = v.data + kv_head * v.strides.head;
  kv.k_scale_page = k.strides.page;
  kv.k_scale_token = k.strides.token;
  kv.v_scale_page = v.strides.page;
  kv.v_scale_token = v.strides.token;
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
  kv.ds_mla = cache.format == KvFormat::kFp8DsMla;
  kv.k = bytes_at(cache.k, tile.kv_head * cache.k_strides.head, cache.dtype);
  kv.v = bytes_at(cache.v, tile.kv_head * cache.v_strides.head, cache.dtype);
  kv.page_size = cache.page_size;
  kv.pages = table.indices +
             (table.kind == PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride + table.first_column);
  kv.k_page = cache.k_strides.page * element;
  kv.k_token = cache.k_strides.token * element;
  kv.v_page = cache.v_strides.page * element;
  kv.v_token = cache.v_strides.token * element;
  if (cache.dtype == DType::kInt8) bind_token_scales(cache, tile.kv_head, kv);
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
  int32_t token = tile.row_begin / params.group_size;
  int32_t head_of_token = tile.row_begin % params.group_size;
  for (int32_t r = tile.row_begin; r < tile.row_end; ++token, head_of_token = 0) {
    while (plan.cu_q[request + 1] <= token) ++request;
    const int32_t index = token - plan.cu_q[request];
    QueryRow row;
    row.position = int64_t{plan.q_first_pos[request]} + index;
    if (has_kv) bind_token_to_kv(params, tile, request, index, row);
    for (; head_of_token < params.group_size && r < tile.row_end; ++head_of_token, ++r) {
      const int32_t q_head = tile.kv_head * params.group_size + head_of_token;
      row.q = bytes_at(args.q.data, token * args.q.strides[0] + q_head * args.q.strides[1], config.q);
      if (has_kv && args.alibi_slopes != nullptr) row.alibi_slope = args.alibi_slopes[q_head];
      rows[r - tile.row_begin] = row;
    }
  }
}

/// The state of rows from `row` on.
SoftmaxState rows_from(const SoftmaxState& state, int32_t row, int32_t v_stride) {
  return {.row_max = state.row_max + row, .row_sum = state.row_sum + row, .acc = state.acc + int64_t{row} * v_stride};
}

/// What one accumulation takes, from kStart to kFinish, for one or several KV heads: their work tiles differ in the
/// head alone.
struct Accumulation {
  const scheduler::WorkTile* work_tiles;  ///< the plan's
  int32_t first;                          ///< of the first head; those of the others are its neighbours
  int32_t tiles;                          ///< of each head
  int32_t heads;

  const scheduler::WorkTile& tile(int32_t head, int32_t i) const {
    const scheduler::WorkTile& begin = work_tiles[first + head];
    return i == 0 ? begin : work_tiles[begin.partial + i - 1];
  }
};

bool differ_in_head_alone(const scheduler::WorkTile& a, const scheduler::WorkTile& b, int32_t heads) {
  return b.kv_head == a.kv_head + heads && b.segment == a.segment && b.kv_row == a.kv_row && b.request == a.request &&
         b.row_begin == a.row_begin && b.row_end == a.row_end && b.kv_begin == a.kv_begin && b.kv_end == a.kv_end &&
         b.flags == a.flags;
}

/// Claims accumulations for one worker, from the first unclaimed work tile on.
class DynamicTileScheduler {
 public:
  explicit DynamicTileScheduler(const AttentionParams& params) : plan_(params.plan), next_(*params.next_work_tile) {}

  /// False if there is none left. `max_heads(tile)`: KV heads of an accumulation that begins with the tile.
  template <typename MaxHeads>
  bool claim(Accumulation& claimed, const MaxHeads& max_heads) {
    int32_t at = next_.load(std::memory_order_relaxed);
    do {
      if (at >= plan_.num_dynamic_tiles) return false;
      claimed = accumulation_at(at);
      int32_t most = std::min(max_heads(claimed.tile(0, 0)), plan_.num_dynamic_tiles - at);
      if (most > 1) most = std::min(most, heads_of(claimed));
      while (claimed.heads < most && has_head(claimed, claimed.heads)) ++claimed.heads;
    } while (!next_.compare_exchange_weak(at, at + claimed.heads, std::memory_order_relaxed));
    return true;
  }

 private:
  Accumulation accumulation_at(int32_t at) const {
    Accumulation found{plan_.work_tiles, at, 1, 1};
    while ((found.tile(0, found.tiles - 1).flags & scheduler::kFinish) == 0) ++found.tiles;
    return found;
  }

  static bool has_head(const Accumulation& accumulation, int32_t head) {
    for (int32_t i = 0; i < accumulation.tiles; ++i) {
      if (!differ_in_head_alone(accumulation.tile(0, i), accumulation.tile(head, i), head)) return false;
    }
    return true;
  }

  /// KV heads of a claim, at most: those that the plan has splits for, or a share of what is left, so that late workers
  /// find something. It is a share of the keys too: a long request's splits for one head must not meet in one claim.
  int32_t heads_of(const Accumulation& claimed) {
    constexpr int32_t kClaimsEach = 2;  // of what is left, for every worker
    if (plan_.claimed_heads > 1) return plan_.claimed_heads;
    if (plan_.num_workers == 1) return kMaxHeads;
    const int64_t claims = int64_t{kClaimsEach} * plan_.num_workers;
    int64_t keys = 1;
    for (int32_t i = 0; i < claimed.tiles; ++i) keys += keys_of(claimed.tile(0, i));
    const int64_t heads = std::min((plan_.num_dynamic_tiles - claimed.first) / claims, keys_of_plan() / claims / keys);
    return static_cast<int32_t>(std::clamp<int64_t>(heads, 1, kMaxHeads));
  }

  static int64_t keys_of(const scheduler::WorkTile& tile) { return tile.kv_end - tile.kv_begin; }

  int64_t keys_of_plan() {
    if (keys_of_plan_ == 0) {
      for (int32_t i = 0; i < plan_.num_work_tiles; ++i) keys_of_plan_ += keys_of(plan_.work_tiles[i]);
    }
    return keys_of_plan_;
  }

  const scheduler::PlanView& plan_;
  std::atomic<int32_t>& next_;
  int64_t keys_of_plan_ = 0;  ///< of all work tiles, counted once where it is asked for
};

/// Computes accumulations by one collective.
class Worker {
 public:
  Worker(const Collective& collective, const AttentionParams& params, int32_t worker)
      : collective_(collective),
        params_(params),
        scratch_(carve_scratch(*params.config, params.tile,
                               params.scratch + static_cast<size_t>(worker) * params.scratch_stride,
                               collective_scratch_bytes(collective, *params.config, params.tile))) {
    const AttentionConfig& config = *params.config;
    WorkTileParams& work = heads_[0];
    work.tile_rows = params.tile.rows;
    work.head_dim_qk = config.head_dim_qk;
    work.head_dim_v = config.head_dim_v;
    work.qk_stride = padded(config.head_dim_qk, kDimPadding);
    work.v_stride = padded(config.head_dim_v, kDimPadding);
    work.q_dtype = config.q;
    work.soft_cap = params.args->logits_soft_cap;
    work.alibi = params.args->alibi_slopes != nullptr;
    work.scratch = scratch_.tile;
    if (scratch_.tile.rope != nullptr) {
      set_rope_frequencies(params.args->rope, config.head_dim_qk, scratch_.tile.rope);
    }
    work.rope = scratch_.tile.rope;
    for (WorkTileParams& head : heads_) head = work;
  }

  /// KV heads that may be walked together: their rows fit the scratch memory of one full work tile.
  int32_t max_heads(const scheduler::WorkTile& tile) const {
    const int32_t rows = tile.row_end - tile.row_begin;
    if (collective_.min_rows_of_heads == 0 || rows < collective_.min_rows_of_heads) return 1;
    if (rows > collective_.max_rows_of_heads) return 1;
    if (params_.config->kv_format == KvFormat::kCpuPacked && !collective_.takes_packed_heads) return 1;
    return std::clamp(params_.tile.rows / row_stride(tile), 1, kMaxHeads);
  }

  void run(const Accumulation& accumulation) {
    const int32_t stride = row_stride(accumulation.tile(0, 0));
    const int32_t v_stride = heads_[0].v_stride;
    for (int32_t i = 0; i < accumulation.tiles; ++i) {
      for (int32_t h = 0; h < accumulation.heads; ++h) {
        const scheduler::WorkTile& tile = accumulation.tile(h, i);
        WorkTileParams& work = heads_[h];
        work.kv = bind_kv(params_, tile);
        work.num_rows = tile.row_end - tile.row_begin;
        work.rows = scratch_.rows + h * stride;
        work.scratch.q = scratch_.tile.q + h * stride * work.qk_stride;
        work.scratch.reordered_q = scratch_.tile.reordered_q + h * stride * scratch_.tile.reordered_stride;
        bind_rows(params_, tile, scratch_.rows + h * stride);
        if (i > 0) continue;
        collective_.load_q(work);
        clear(rows_from(scratch_.running, h * stride, v_stride), work.num_rows, collective_.row_padding, v_stride);
      }
      const scheduler::WorkTile& tile = accumulation.tile(0, i);
      const bool in_place = i == 0 || (tile.flags & scheduler::kFold) == 0;
      if (tile.kv_begin < tile.kv_end) accumulate(accumulation.heads, stride, in_place);
    }
    for (int32_t h = 0; h < accumulation.heads; ++h) {
      run_epilogue(collective_, params_, accumulation.tile(h, accumulation.tiles - 1),
                   rows_from(scratch_.running, h * stride, v_stride), v_stride);
    }
  }

 private:
  /// Rows of scratch memory from one head's to the next one's.
  int32_t row_stride(const scheduler::WorkTile& tile) const {
    return padded(tile.row_end - tile.row_begin, collective_.row_padding);
  }

  /// Adds the KV of the heads' work tiles to their running states. A fixed split is a state of its own, which is then
  /// combined into the running one; only the first accumulates in place. Long ranges are divided in the same way:
  /// float32 sums of more keys would drift.
  void accumulate(int32_t num_heads, int32_t stride, bool in_place) {
    const int32_t v_stride = heads_[0].v_stride;
    const int32_t end = heads_[0].kv.kv_end;
    for (int32_t begin = heads_[0].kv.kv_begin; begin < end; begin = heads_[0].kv.kv_end, in_place = false) {
      const int32_t first = begin / kMaxStateTokens * kMaxStateTokens;
      for (int32_t h = 0; h < num_heads; ++h) {
        WorkTileParams& work = heads_[h];
        work.kv.kv_begin = begin;
        work.kv.kv_end = end - first > kMaxStateTokens ? first + kMaxStateTokens : end;
        work.state = rows_from(in_place ? scratch_.running : scratch_.split, h * stride, v_stride);
        if (!in_place) clear(work.state, work.num_rows, collective_.row_padding, v_stride);
      }
      collective_.mainloop(heads_, num_heads);
      for (int32_t h = 0; !in_place && h < num_heads; ++h) combine_split(heads_[h], h * stride);
    }
  }

  /// Combines the split's state into the running one, of the rows of one head.
  void combine_split(const WorkTileParams& work, int32_t row) {
    const SoftmaxState running = rows_from(scratch_.running, row, work.v_stride);
    for (int32_t r = 0; r < work.num_rows; ++r) {
      collective_.combine_states(running.row_max + r, running.row_sum + r, running.acc + r * work.v_stride,
                                 work.state.row_max[r], work.state.row_sum[r], work.state.acc + r * work.v_stride,
                                 work.head_dim_v);
    }
  }

  const Collective& collective_;
  const AttentionParams& params_;
  const WorkerScratch scratch_;
  WorkTileParams heads_[kMaxHeads];
};

/// `worker_of(tile)`: the Worker that computes an accumulation which begins with the tile.
template <typename WorkerOf>
void run_claimed(const AttentionParams& params, const WorkerOf& worker_of) {
  DynamicTileScheduler tiles(params);
  Accumulation accumulation{};
  const auto max_heads = [&](const scheduler::WorkTile& tile) { return worker_of(tile).max_heads(tile); };
  while (tiles.claim(accumulation, max_heads)) worker_of(accumulation.tile(0, 0)).run(accumulation);
}

}  // namespace

void run_worker(const Collective& collective, const AttentionParams& params, int32_t worker) noexcept {
  Worker only(collective, params, worker);
  run_claimed(params, [&only](const scheduler::WorkTile&) -> Worker& { return only; });
}

void run_worker(const Collective& few, int32_t min_rows, const Collective& collective, const AttentionParams& params,
                int32_t worker) noexcept {
  Worker of_few(few, params, worker);
  Worker of_more(collective, params, worker);  // in the same scratch memory
  run_claimed(params, [&](const scheduler::WorkTile& tile) -> Worker& {
    return tile.row_end - tile.row_begin < min_rows ? of_few : of_more;
  });
}

}  // namespace folio::inline v0::kernels::cpu
