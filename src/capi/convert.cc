#include "capi/convert.hpp"

#include <bit>

namespace folio::inline v0::capi {

namespace {

RopeArgs to_rope(float theta, float scale) {
  const RopeArgs defaults;
  return {theta == 0.0f ? defaults.theta : theta, scale == 0.0f ? defaults.scale : scale};
}

}  // namespace

ContextOptions to_options(const folio_context_options* options) {
  ContextOptions converted;
  if (options == nullptr) return converted;
  const folio_context_options given = read_struct(options, "options");
  converted.num_threads = given.num_threads;
  converted.force_kernel = to_string(given.force_kernel);
  converted.allow_fp8_mma = given.allow_fp8_mma != 0;
  converted.validate_tables = given.validate_tables != 0;
  converted.pinning = to_enum(given.pinning, ThreadPinning::kUnpinned, "options.pinning");
  core::require(given.reserved == 0, "options.reserved is ", given.reserved, "; it is 0");
  converted.executor.self = given.executor.self;
  converted.executor.parallel_for = given.executor.parallel_for;
  const bool none = given.executor.parallel_for == nullptr && given.executor.concurrency == 0;
  converted.executor.concurrency = none ? Executor{}.concurrency : given.executor.concurrency;
  return converted;
}

AttentionConfig to_config(const folio_attention_config* config, const char* name) {
  const folio_attention_config given = read_struct(config, name);
  AttentionConfig converted;
  converted.num_q_heads = given.num_q_heads;
  converted.num_kv_heads = given.num_kv_heads;
  converted.head_dim_qk = given.head_dim_qk;
  converted.head_dim_v = given.head_dim_v;
  converted.q = to_dtype(given.q, "config.q");
  converted.kv = to_dtype(given.kv, "config.kv");
  converted.ragged_kv = to_dtype(given.ragged_kv, "config.ragged_kv");
  converted.out = to_dtype(given.out, "config.out");
  converted.kv_format = to_enum(given.kv_format, KvFormat::kFp8DsMla, "config.kv_format");
  converted.page_size = given.page_size;
  converted.mask = to_enum(given.mask, MaskKind::kCustom, "config.mask");
  core::require(given.window_left != 0 || given.window_right != 0,
                "config.window_left and window_right are both 0, as in memory of zeros; -1 is unbounded "
                "(folio_attention_config_init sets it), and a window of the query's own key is FOLIO_MASK_CAUSAL with "
                "window_left 0 and window_right -1");
  converted.window_left = given.window_left;
  converted.window_right = given.window_right;
  constexpr uint32_t kKnown = FOLIO_FEATURE_SOFT_CAP | FOLIO_FEATURE_ALIBI | FOLIO_FEATURE_SINKS |
                              FOLIO_FEATURE_ROPE_LLAMA | FOLIO_FEATURE_SPANS | FOLIO_FEATURE_REQUEST_CAUSAL |
                              FOLIO_FEATURE_KV_START;
  core::require((given.features & ~kKnown) == 0, "config.features is ", given.features, "; the bits of ", kKnown,
                " are known");
  converted.features.bits = given.features;
  converted.determinism = to_enum(given.determinism, Determinism::kScheduleInvariant, "config.determinism");
  converted.attention_chunk = given.attention_chunk;
  converted.span_window_left = given.span_window_left;
  return converted;
}

WorkloadMix to_mix(const folio_workload_mix& mix) {
  return {.decode_tokens = mix.decode_tokens, .prefill_tokens = mix.prefill_tokens};
}

PrepareOptions to_options(const folio_prepare_options* options) {
  PrepareOptions converted;
  if (options == nullptr) return converted;
  const folio_prepare_options given = read_struct(options, "options");
  converted.num_workers = given.num_workers;
  converted.force_kernel = to_string(given.force_kernel);
  converted.allow_fp8_mma = given.allow_fp8_mma != 0;
  converted.mix = to_mix(given.mix);
  converted.max_kv_splits = given.max_kv_splits;
  core::require(given.reserved == 0, "options.reserved is ", given.reserved, "; it is 0");
  if (given.has_bounds != 0) {
    converted.bounds =
        GraphBounds{given.max_requests, given.max_tokens, given.max_q_len, given.max_kv_len, given.max_shared_levels};
  } else {
    core::require(given.max_requests == 0 && given.max_tokens == 0 && given.max_q_len == 0 && given.max_kv_len == 0 &&
                      given.max_shared_levels == 0,
                  "options has bounds, but has_bounds is 0");
  }
  return converted;
}

KvSegment to_segment(const folio_kv_segment& segment) {
  KvSegment converted;
  converted.source = to_enum(segment.source, KvSource::kRagged, "segment.source");
  converted.kv_len = segment.kv_len;
  converted.first_pos = segment.first_pos;
  converted.group_indptr = segment.group_indptr;
  converted.num_groups = segment.num_groups;
  converted.mask = to_enum(segment.mask, SegmentMask::kAllVisible, "segment.mask");
  converted.shard = to_shard(segment.shard);
  return converted;
}

BatchView to_batch(const folio_batch& batch, std::span<const KvSegment> segments) {
  BatchView converted;
  converted.where = to_enum(batch.where, Where::kDevice, "batch.where");
  converted.num_requests = batch.num_requests;
  converted.num_tokens = batch.num_tokens;
  converted.max_q_len = batch.max_q_len;
  converted.max_kv_len = batch.max_kv_len;
  converted.cu_q = batch.cu_q;
  converted.q_first_pos = batch.q_first_pos;
  converted.segments = segments;
  converted.custom_mask.scope = to_enum(batch.custom_mask_scope, CustomMaskScope::kTail, "batch.custom_mask_scope");
  converted.custom_mask.tail_len = batch.custom_mask_tail_len;
  converted.kv_start = batch.kv_start;
  converted.causal = batch.causal;
  converted.spans = batch.spans;
  return converted;
}

SegmentArgs to_segment_args(const folio_segment_args& args) {
  SegmentArgs converted;
  converted.cache = to_cache({args.cache, args.k_token_scales, args.v_token_scales}, "cache");
  converted.table = to_table(args.table, "table.kind");
  converted.ragged.k = to_view(args.ragged.k, "ragged.k.dtype");
  converted.ragged.v = to_view(args.ragged.v, "ragged.v.dtype");
  converted.ragged.indptr = args.ragged.indptr;
  converted.k_scale = to_scale(args.k_scale, "k_scale.granularity");
  converted.v_scale = to_scale(args.v_scale, "v_scale.granularity");
  return converted;
}

AttentionArgs to_args(const folio_attention_args& args, std::span<const SegmentArgs> segments) {
  AttentionArgs converted;
  converted.q = to_view(args.q, "q.dtype");
  converted.out = to_view(args.out, "out.dtype");
  converted.lse = to_lse(&args.lse);
  converted.segments = segments;
  converted.sm_scale = args.sm_scale;
  converted.logits_soft_cap = args.logits_soft_cap;
  converted.alibi_slopes = args.alibi_slopes;
  converted.sinks = args.sinks;
  converted.q_scale = to_scale(args.q_scale, "q_scale.granularity");
  converted.out_scale = to_scale(args.out_scale, "out_scale.granularity");
  converted.rope = to_rope(args.rope_theta, args.rope_scale);
  converted.custom_mask = args.custom_mask;
  converted.custom_mask_bytes = args.custom_mask_bytes;
  converted.out_block_scale = {args.out_block_scale, args.out_block_scale_first_row};
  return converted;
}

CacheWriteArgs to_args(const folio_cache_write_args& args) {
  CacheWriteArgs converted;
  converted.k = to_view(args.k, "k.dtype");
  converted.v = to_view(args.v, "v.dtype");
  converted.slot_mapping = args.slot_mapping;
  converted.num_slots = args.num_slots;
  converted.cache = to_cache({args.cache, args.k_token_scales, args.v_token_scales}, "cache");
  converted.k_scale = to_scale(args.k_scale, "k_scale.granularity");
  converted.v_scale = to_scale(args.v_scale, "v_scale.granularity");
  converted.status = args.status;
  return converted;
}

KvCacheShape to_shape(const folio_kv_cache_shape& shape) {
  to_dtype(shape.dtype, "shape.dtype");
  return std::bit_cast<KvCacheShape>(shape);
}

}  // namespace folio::inline v0::capi
