#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "capi/common/handles.hpp"
#include "capi/common/structs.hpp"
#include "folio/attention.hpp"
#include "folio/c/folio.h"
#include "folio/kv_cache.hpp"
#include "folio/kvcache/slot_changes.hpp"

struct folio_op {
  folio::AttentionOp op;
  std::string kernel_name;
};

struct folio_plan_buffer {
  folio::PlanBuffer buffer;
};

struct folio_slot_changes {
  folio::SlotChanges changes;
};

struct folio_explanation {
  std::vector<folio::KernelAnswer> kernels;
};

/// The core's structures.
namespace folio::inline v0::capi {

template <>
inline constexpr const char* kInitFunction<folio_context_options> = "folio_context_options_init";
template <>
inline constexpr const char* kInitFunction<folio_attention_config> = "folio_attention_config_init";
template <>
inline constexpr const char* kInitFunction<folio_prepare_options> = "folio_prepare_options_init";
template <>
inline constexpr const char* kInitFunction<folio_kv_segment> = "folio_kv_segment_init";
template <>
inline constexpr const char* kInitFunction<folio_batch> = "folio_batch_init";
template <>
inline constexpr const char* kInitFunction<folio_segment_args> = "folio_segment_args_init";
template <>
inline constexpr const char* kInitFunction<folio_attention_args> = "folio_attention_args_init";
template <>
inline constexpr const char* kInitFunction<folio_cache_write_args> = "folio_cache_write_args_init";
template <>
inline constexpr const char* kInitFunction<folio_op_info> = "folio_op_info_init";
template <>
inline constexpr const char* kInitFunction<folio_plan_summary> = "folio_plan_summary_init";
template <>
inline constexpr const char* kInitFunction<folio_kv_pool_config> = "folio_kv_pool_config_init";
template <>
inline constexpr const char* kInitFunction<folio_prefix_cache_options> = "folio_prefix_cache_options_init";
template <>
inline constexpr const char* kInitFunction<folio_prefix_cache_sizes> = "folio_prefix_cache_sizes_init";

template <>
inline constexpr std::array<uint32_t, 1> kEarlierSizes<folio_context_options> = {48};
template <>
inline constexpr std::array<uint32_t, 1> kEarlierSizes<folio_attention_config> = {64};
template <>
inline constexpr std::array<uint32_t, 2> kEarlierSizes<folio_prepare_options> = {48, 64};
template <>
inline constexpr std::array<uint32_t, 1> kEarlierSizes<folio_batch> = {64};
template <>
inline constexpr std::array<uint32_t, 1> kEarlierSizes<folio_segment_args> = {416};
template <>
inline constexpr std::array<uint32_t, 1> kEarlierSizes<folio_attention_args> = {352};
template <>
inline constexpr std::array<uint32_t, 2> kEarlierSizes<folio_cache_write_args> = {376, 440};

ContextOptions to_options(const folio_context_options* options);
AttentionConfig to_config(const folio_attention_config* config, const char* name);
WorkloadMix to_mix(const folio_workload_mix& mix);
PrepareOptions to_options(const folio_prepare_options* options);
KvSegment to_segment(const folio_kv_segment& segment);
BatchView to_batch(const folio_batch& batch, std::span<const KvSegment> segments);
SegmentArgs to_segment_args(const folio_segment_args& args);
AttentionArgs to_args(const folio_attention_args& args, std::span<const SegmentArgs> segments);
CacheWriteArgs to_args(const folio_cache_write_args& args);
KvCacheShape to_shape(const folio_kv_cache_shape& shape);

}  // namespace folio::inline v0::capi
