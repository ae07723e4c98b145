// Every default, as the header's ..._INIT macros have them.
#include <cstring>

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::init_struct;

folio_status folio_context_options_init(folio_context_options* options, size_t struct_size) noexcept {
  static constexpr folio_context_options kDefaults = FOLIO_CONTEXT_OPTIONS_INIT;
  return init_struct(options, struct_size, kDefaults, "options");
}

folio_status folio_attention_config_init(folio_attention_config* config, size_t struct_size) noexcept {
  static constexpr folio_attention_config kDefaults = FOLIO_ATTENTION_CONFIG_INIT;
  return init_struct(config, struct_size, kDefaults, "config");
}

folio_status folio_prepare_options_init(folio_prepare_options* options, size_t struct_size) noexcept {
  static constexpr folio_prepare_options kDefaults = FOLIO_PREPARE_OPTIONS_INIT;
  return init_struct(options, struct_size, kDefaults, "options");
}

folio_status folio_kv_segment_init(folio_kv_segment* segment, size_t struct_size) noexcept {
  static constexpr folio_kv_segment kDefaults = FOLIO_KV_SEGMENT_INIT;
  return init_struct(segment, struct_size, kDefaults, "segment");
}

folio_status folio_batch_init(folio_batch* batch, size_t struct_size) noexcept {
  static constexpr folio_batch kDefaults = FOLIO_BATCH_INIT;
  return init_struct(batch, struct_size, kDefaults, "batch");
}

folio_status folio_segment_args_init(folio_segment_args* args, size_t struct_size) noexcept {
  static constexpr folio_segment_args kDefaults = FOLIO_SEGMENT_ARGS_INIT;
  return init_struct(args, struct_size, kDefaults, "args");
}

folio_status folio_attention_args_init(folio_attention_args* args, size_t struct_size) noexcept {
  static constexpr folio_attention_args kDefaults = FOLIO_ATTENTION_ARGS_INIT;
  return init_struct(args, struct_size, kDefaults, "args");
}

folio_status folio_cache_write_args_init(folio_cache_write_args* args, size_t struct_size) noexcept {
  static constexpr folio_cache_write_args kDefaults = FOLIO_CACHE_WRITE_ARGS_INIT;
  return init_struct(args, struct_size, kDefaults, "args");
}

folio_status folio_op_info_init(folio_op_info* info, size_t struct_size) noexcept {
  static constexpr folio_op_info kDefaults = FOLIO_OP_INFO_INIT;
  return init_struct(info, struct_size, kDefaults, "info");
}

folio_status folio_plan_summary_init(folio_plan_summary* summary, size_t struct_size) noexcept {
  static constexpr folio_plan_summary kDefaults = FOLIO_PLAN_SUMMARY_INIT;
  return init_struct(summary, struct_size, kDefaults, "summary");
}

folio_status folio_kv_pool_config_init(folio_kv_pool_config* config, size_t struct_size) noexcept {
  static constexpr folio_kv_pool_config kDefaults = FOLIO_KV_POOL_CONFIG_INIT;
  return init_struct(config, struct_size, kDefaults, "config");
}

folio_status folio_prefix_cache_options_init(folio_prefix_cache_options* options, size_t struct_size) noexcept {
  static constexpr folio_prefix_cache_options kDefaults = FOLIO_PREFIX_CACHE_OPTIONS_INIT;
  return init_struct(options, struct_size, kDefaults, "options");
}

folio_status folio_prefix_cache_sizes_init(folio_prefix_cache_sizes* sizes, size_t struct_size) noexcept {
  static constexpr folio_prefix_cache_sizes kDefaults = FOLIO_PREFIX_CACHE_SIZES_INIT;
  return init_struct(sizes, struct_size, kDefaults, "sizes");
}

folio_status folio_scale_init(folio_scale* scale) noexcept {
  return guarded([&] {
    static constexpr folio_scale kDefaults = FOLIO_SCALE_INIT;
    std::memcpy(&deref(scale, "scale"), &kDefaults, sizeof(kDefaults));
  });
}

folio_status folio_kv_shard_init(folio_kv_shard* shard) noexcept {
  return guarded([&] { deref(shard, "shard") = FOLIO_KV_SHARD_INIT; });
}

folio_status folio_token_scales_init(folio_token_scales* scales) noexcept {
  return guarded([&] { deref(scales, "scales") = FOLIO_TOKEN_SCALES_INIT; });
}
