// Ties the C structures and values to the C++ ones: views are reinterpreted, so sizes and offsets must be equal; codes
// and enumerators are cast. Sizes are pinned as well, since what is compiled against the header relies on them.
#include <cstddef>
#include <type_traits>

#include "folio/c/folio.h"
#include "folio/kv_cache.hpp"
#include "folio/kvcache/kv_pool.hpp"
#include "folio/kvcache/slot_changes.hpp"
#include "folio/merge.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "folio/types/error.hpp"

namespace folio::inline v0::capi {
namespace {

// clang-format off
#define FOLIO_SAME_SIZE(c, cpp, bytes) static_assert(sizeof(c) == (bytes) && sizeof(cpp) == (bytes) && alignof(c) == alignof(cpp) && std::is_trivially_copyable_v<cpp>)
#define FOLIO_SAME_FIELD(c, cpp, field) static_assert(offsetof(c, field) == offsetof(cpp, field) && sizeof(c::field) == sizeof(cpp::field))
#define FOLIO_SAME_VALUE(c, cpp) static_assert((c) == static_cast<int64_t>(cpp))
// clang-format on

FOLIO_SAME_SIZE(folio_tensor_view, TensorView, 96);
FOLIO_SAME_FIELD(folio_tensor_view, TensorView, data);
FOLIO_SAME_FIELD(folio_tensor_view, TensorView, dtype);
FOLIO_SAME_FIELD(folio_tensor_view, TensorView, rank);
FOLIO_SAME_FIELD(folio_tensor_view, TensorView, shape);
FOLIO_SAME_FIELD(folio_tensor_view, TensorView, strides);
FOLIO_SAME_SIZE(folio_const_tensor_view, ConstTensorView, 96);
FOLIO_SAME_FIELD(folio_const_tensor_view, ConstTensorView, data);
FOLIO_SAME_FIELD(folio_const_tensor_view, ConstTensorView, dtype);
FOLIO_SAME_FIELD(folio_const_tensor_view, ConstTensorView, rank);
FOLIO_SAME_FIELD(folio_const_tensor_view, ConstTensorView, shape);
FOLIO_SAME_FIELD(folio_const_tensor_view, ConstTensorView, strides);

FOLIO_SAME_SIZE(folio_kv_strides, KvStrides, 24);
FOLIO_SAME_FIELD(folio_kv_strides, KvStrides, page);
FOLIO_SAME_FIELD(folio_kv_strides, KvStrides, token);
FOLIO_SAME_FIELD(folio_kv_strides, KvStrides, head);
// The C++ view has the token scales behind the fields of the C view, which has none.
FOLIO_SAME_SIZE(folio_kv_cache, KvCacheView, 160);
FOLIO_SAME_FIELD(folio_kv_cache, KvCacheView, k_token_scales);
FOLIO_SAME_FIELD(folio_kv_cache, KvCacheView, v_token_scales);
static_assert(sizeof(folio_kv_cache_view) == 96);
FOLIO_SAME_SIZE(folio_token_scales, TokenScales, 32);
FOLIO_SAME_FIELD(folio_token_scales, TokenScales, data);
FOLIO_SAME_FIELD(folio_token_scales, TokenScales, strides);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, format);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, dtype);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, k);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, v);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, num_pages);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, page_size);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, num_kv_heads);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, head_dim_qk);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, head_dim_v);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, k_strides);
FOLIO_SAME_FIELD(folio_kv_cache_view, KvCacheView, v_strides);
FOLIO_SAME_SIZE(folio_kv_cache_shape, KvCacheShape, 32);
FOLIO_SAME_FIELD(folio_kv_cache_shape, KvCacheShape, num_pages);
FOLIO_SAME_FIELD(folio_kv_cache_shape, KvCacheShape, page_size);
FOLIO_SAME_FIELD(folio_kv_cache_shape, KvCacheShape, num_kv_heads);
FOLIO_SAME_FIELD(folio_kv_cache_shape, KvCacheShape, head_dim_qk);
FOLIO_SAME_FIELD(folio_kv_cache_shape, KvCacheShape, head_dim_v);
FOLIO_SAME_FIELD(folio_kv_cache_shape, KvCacheShape, dtype);
FOLIO_SAME_SIZE(folio_page_table_view, PageTableView, 48);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, kind);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, indices);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, num_indices);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, indptr);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, row_stride);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, first_column);
FOLIO_SAME_FIELD(folio_page_table_view, PageTableView, num_rows);
FOLIO_SAME_SIZE(folio_scale, Scale, 32);
FOLIO_SAME_FIELD(folio_scale, Scale, value);
FOLIO_SAME_FIELD(folio_scale, Scale, data);
FOLIO_SAME_FIELD(folio_scale, Scale, granularity);
FOLIO_SAME_FIELD(folio_scale, Scale, request_stride);
FOLIO_SAME_SIZE(folio_lse_view, LseView, 32);
FOLIO_SAME_FIELD(folio_lse_view, LseView, data);
FOLIO_SAME_FIELD(folio_lse_view, LseView, token_stride);
FOLIO_SAME_FIELD(folio_lse_view, LseView, head_stride);
FOLIO_SAME_FIELD(folio_lse_view, LseView, base);
FOLIO_SAME_SIZE(folio_kv_shard, KvShard, 12);
FOLIO_SAME_FIELD(folio_kv_shard, KvShard, world);
FOLIO_SAME_FIELD(folio_kv_shard, KvShard, rank);
FOLIO_SAME_FIELD(folio_kv_shard, KvShard, interleave);
FOLIO_SAME_SIZE(folio_executor, Executor, 24);
static_assert(std::is_same_v<folio_parallel_body, ParallelBody>);
static_assert(std::is_same_v<decltype(folio_executor::parallel_for), decltype(Executor::parallel_for)>);

FOLIO_SAME_SIZE(folio_attention_state, AttentionStateView, 128);
FOLIO_SAME_FIELD(folio_attention_state, AttentionStateView, out);
FOLIO_SAME_FIELD(folio_attention_state, AttentionStateView, lse);
FOLIO_SAME_FIELD(folio_attention_state, AttentionStateView, lse_token_stride);
FOLIO_SAME_FIELD(folio_attention_state, AttentionStateView, lse_head_stride);
FOLIO_SAME_FIELD(folio_attention_state, AttentionStateView, base);
FOLIO_SAME_SIZE(folio_attention_states, AttentionStatesView, 136);
FOLIO_SAME_FIELD(folio_attention_states, AttentionStatesView, out);
FOLIO_SAME_FIELD(folio_attention_states, AttentionStatesView, lse);
FOLIO_SAME_FIELD(folio_attention_states, AttentionStatesView, lse_token_stride);
FOLIO_SAME_FIELD(folio_attention_states, AttentionStatesView, lse_state_stride);
FOLIO_SAME_FIELD(folio_attention_states, AttentionStatesView, lse_head_stride);
FOLIO_SAME_FIELD(folio_attention_states, AttentionStatesView, base);
FOLIO_SAME_SIZE(folio_slot_move, SlotChanges::Move, 8);
FOLIO_SAME_FIELD(folio_slot_move, SlotChanges::Move, from);
FOLIO_SAME_FIELD(folio_slot_move, SlotChanges::Move, to);

FOLIO_SAME_SIZE(folio_workload_mix, WorkloadMix, 16);
FOLIO_SAME_FIELD(folio_workload_mix, WorkloadMix, decode_tokens);
FOLIO_SAME_FIELD(folio_workload_mix, WorkloadMix, prefill_tokens);

// The first version's sizes. A structure may only grow, and only where it starts with struct_size.
static_assert(sizeof(folio_plan) == 16);
static_assert(sizeof(folio_ragged_kv_view) == 200);
static_assert(sizeof(folio_context_options) == 56 && offsetof(folio_context_options, struct_size) == 0);
static_assert(sizeof(folio_attention_config) == 72 && offsetof(folio_attention_config, struct_size) == 0);
static_assert(sizeof(folio_prepare_options) == 72 && offsetof(folio_prepare_options, struct_size) == 0);
static_assert(sizeof(folio_kv_segment) == 56 && offsetof(folio_kv_segment, struct_size) == 0);
static_assert(sizeof(folio_batch) == 88 && offsetof(folio_batch, struct_size) == 0);
static_assert(sizeof(folio_segment_args) == 480 && offsetof(folio_segment_args, struct_size) == 0);
static_assert(sizeof(folio_attention_args) == 368 && offsetof(folio_attention_args, struct_size) == 0);
static_assert(sizeof(folio_cache_write_args) == 448 && offsetof(folio_cache_write_args, struct_size) == 0);
static_assert(sizeof(folio_op_info) == 40 && offsetof(folio_op_info, struct_size) == 0);
static_assert(sizeof(folio_plan_summary) == 40 && offsetof(folio_plan_summary, struct_size) == 0);
static_assert(sizeof(folio_kv_pool_config) == 40 && offsetof(folio_kv_pool_config, struct_size) == 0);
static_assert(sizeof(folio_prefix_cache_options) == 16 && offsetof(folio_prefix_cache_options, struct_size) == 0);
static_assert(sizeof(folio_prefix_cache_sizes) == 64 && offsetof(folio_prefix_cache_sizes, struct_size) == 0);
static_assert(sizeof(folio_prefix_key) == 32 && sizeof(folio_cache_convert_scales) == 32);

FOLIO_SAME_VALUE(FOLIO_MAX_RANK, kMaxRank);
FOLIO_SAME_VALUE(FOLIO_OK, ErrorCode::kOk);
FOLIO_SAME_VALUE(FOLIO_INVALID_ARGUMENT, ErrorCode::kInvalidArgument);
FOLIO_SAME_VALUE(FOLIO_UNSUPPORTED, ErrorCode::kUnsupported);
FOLIO_SAME_VALUE(FOLIO_UNAVAILABLE, ErrorCode::kUnavailable);
FOLIO_SAME_VALUE(FOLIO_OUT_OF_MEMORY, ErrorCode::kOutOfMemory);
FOLIO_SAME_VALUE(FOLIO_WORKSPACE_TOO_SMALL, ErrorCode::kWorkspaceTooSmall);
FOLIO_SAME_VALUE(FOLIO_STALE_PLAN, ErrorCode::kStalePlan);
FOLIO_SAME_VALUE(FOLIO_DEVICE_ERROR, ErrorCode::kDeviceError);
FOLIO_SAME_VALUE(FOLIO_INTERNAL, ErrorCode::kInternal);
FOLIO_SAME_VALUE(FOLIO_DTYPE_UNSET, DType::kUnset);
FOLIO_SAME_VALUE(FOLIO_DTYPE_FLOAT32, DType::kFloat32);
FOLIO_SAME_VALUE(FOLIO_DTYPE_FLOAT16, DType::kFloat16);
FOLIO_SAME_VALUE(FOLIO_DTYPE_BFLOAT16, DType::kBFloat16);
FOLIO_SAME_VALUE(FOLIO_DTYPE_FLOAT8_E4M3, DType::kFloat8E4M3);
FOLIO_SAME_VALUE(FOLIO_DTYPE_FLOAT8_E5M2, DType::kFloat8E5M2);
FOLIO_SAME_VALUE(FOLIO_DTYPE_FLOAT4_E2M1X2, DType::kFloat4E2M1x2);
FOLIO_SAME_VALUE(FOLIO_DTYPE_INT8, DType::kInt8);
FOLIO_SAME_VALUE(FOLIO_KV_STRIDED, KvFormat::kStrided);
FOLIO_SAME_VALUE(FOLIO_KV_CPU_PACKED, KvFormat::kCpuPacked);
FOLIO_SAME_VALUE(FOLIO_KV_FP8_DS_MLA, KvFormat::kFp8DsMla);
FOLIO_SAME_VALUE(FOLIO_MASK_NONE, MaskKind::kNone);
FOLIO_SAME_VALUE(FOLIO_MASK_CAUSAL, MaskKind::kCausal);
FOLIO_SAME_VALUE(FOLIO_MASK_CUSTOM, MaskKind::kCustom);
FOLIO_SAME_VALUE(FOLIO_DETERMINISM_NONE, Determinism::kNone);
FOLIO_SAME_VALUE(FOLIO_DETERMINISM_RUN_TO_RUN, Determinism::kRunToRun);
FOLIO_SAME_VALUE(FOLIO_DETERMINISM_BATCH_INVARIANT, Determinism::kBatchInvariant);
FOLIO_SAME_VALUE(FOLIO_DETERMINISM_SCHEDULE_INVARIANT, Determinism::kScheduleInvariant);
FOLIO_SAME_VALUE(FOLIO_FEATURE_SOFT_CAP, Feature::kSoftCap);
FOLIO_SAME_VALUE(FOLIO_FEATURE_ALIBI, Feature::kAlibi);
FOLIO_SAME_VALUE(FOLIO_FEATURE_SINKS, Feature::kSinks);
FOLIO_SAME_VALUE(FOLIO_FEATURE_ROPE_LLAMA, Feature::kRopeLlama);
FOLIO_SAME_VALUE(FOLIO_FEATURE_SPANS, Feature::kSpans);
FOLIO_SAME_VALUE(FOLIO_FEATURE_REQUEST_CAUSAL, Feature::kRequestCausal);
FOLIO_SAME_VALUE(FOLIO_FEATURE_KV_START, Feature::kKvStart);
FOLIO_SAME_VALUE(FOLIO_KV_PAGED, KvSource::kPaged);
FOLIO_SAME_VALUE(FOLIO_KV_RAGGED, KvSource::kRagged);
FOLIO_SAME_VALUE(FOLIO_SEGMENT_AS_CONFIG, SegmentMask::kAsConfig);
FOLIO_SAME_VALUE(FOLIO_SEGMENT_ALL_VISIBLE, SegmentMask::kAllVisible);
FOLIO_SAME_VALUE(FOLIO_CUSTOM_MASK_ALL, CustomMaskScope::kAll);
FOLIO_SAME_VALUE(FOLIO_CUSTOM_MASK_TAIL, CustomMaskScope::kTail);
FOLIO_SAME_VALUE(FOLIO_TABLE_CSR, PageTableKind::kCsr);
FOLIO_SAME_VALUE(FOLIO_TABLE_DENSE, PageTableKind::kDense);
FOLIO_SAME_VALUE(FOLIO_SCALE_PER_TENSOR, ScaleGranularity::kPerTensor);
FOLIO_SAME_VALUE(FOLIO_SCALE_PER_HEAD, ScaleGranularity::kPerHead);
FOLIO_SAME_VALUE(FOLIO_SCALE_PER_REQUEST, ScaleGranularity::kPerRequest);
FOLIO_SAME_VALUE(FOLIO_SCALE_PER_REQUEST_AND_HEAD, ScaleGranularity::kPerRequestAndHead);
FOLIO_SAME_VALUE(FOLIO_LSE_BASE_E, LseBase::kE);
FOLIO_SAME_VALUE(FOLIO_LSE_BASE_2, LseBase::k2);
FOLIO_SAME_VALUE(FOLIO_ON_HOST, Where::kHost);
FOLIO_SAME_VALUE(FOLIO_ON_DEVICE, Where::kDevice);
FOLIO_SAME_VALUE(FOLIO_DEVICE_CPU, DeviceType::kCpu);
FOLIO_SAME_VALUE(FOLIO_DEVICE_CUDA, DeviceType::kCuda);
FOLIO_SAME_VALUE(FOLIO_POOL_TOKEN_MAJOR, KvPoolLayout::kTokenMajor);
FOLIO_SAME_VALUE(FOLIO_POOL_HEAD_MAJOR, KvPoolLayout::kHeadMajor);
FOLIO_SAME_VALUE(FOLIO_POOL_CPU_PACKED, KvPoolLayout::kCpuPacked);
FOLIO_SAME_VALUE(FOLIO_PINNING_AUTOMATIC, ThreadPinning::kAutomatic);
FOLIO_SAME_VALUE(FOLIO_PINNING_PINNED, ThreadPinning::kPinned);
FOLIO_SAME_VALUE(FOLIO_PINNING_UNPINNED, ThreadPinning::kUnpinned);

}  // namespace
}  // namespace folio::inline v0::capi
