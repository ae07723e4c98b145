#include <cstring>

#include "capi/convert.hpp"
#include "capi/guard.hpp"
#include "folio/c/folio.h"

using folio::capi::guarded;

namespace {

/// Writes the defaults of the version that this library knows, or of the caller's where that is older, and zeros into
/// the fields behind them. `defaults` is static, so that its padding is 0 too.
template <typename Struct>
folio_status init(Struct* given, size_t struct_size, const Struct& defaults, const char* name) noexcept {
  return guarded([&] {
    folio::capi::deref(given, name);
    folio::capi::check_struct_size(struct_size, folio::capi::kKnownSizes<Struct>, name,
                                   folio::capi::kInitFunction<Struct>);
    auto* const bytes = reinterpret_cast<unsigned char*>(given);
    const size_t known = struct_size < sizeof(Struct) ? struct_size : sizeof(Struct);
    std::memcpy(bytes, &defaults, known);
    std::memset(bytes + known, 0, struct_size - known);
    given->struct_size = static_cast<uint32_t>(struct_size);
  });
}

}  // namespace

folio_status folio_context_options_init(folio_context_options* options, size_t struct_size) noexcept {
  static constexpr folio_context_options kDefaults = FOLIO_CONTEXT_OPTIONS_INIT;
  return init(options, struct_size, kDefaults, "options");
}

folio_status folio_attention_config_init(folio_attention_config* config, size_t struct_size) noexcept {
  static constexpr folio_attention_config kDefaults = FOLIO_ATTENTION_CONFIG_INIT;
  return init(config, struct_size, kDefaults, "config");
}

folio_status folio_prepare_options_init(folio_prepare_options* options, size_t struct_size) noexcept {
  static constexpr folio_prepare_options kDefaults = FOLIO_PREPARE_OPTIONS_INIT;
  return init(options, struct_size, kDefaults, "options");
}

folio_status folio_kv_segment_init(folio_kv_segment* segment, size_t struct_size) noexcept {
  static constexpr folio_kv_segment kDefaults = FOLIO_KV_SEGMENT_INIT;
  return init(segment, struct_size, kDefaults, "segment");
}

folio_status folio_batch_init(folio_batch* batch, size_t struct_size) noexcept {
  static constexpr folio_batch kDefaults = FOLIO_BATCH_INIT;
  return init(batch, struct_size, kDefaults, "batch");
}

folio_status folio_segment_args_init(folio_segment_args* args, size_t struct_size) noexcept {
  static constexpr folio_segment_args kDefaults = FOLIO_SEGMENT_ARGS_INIT;
  return init(args, struct_size, kDefaults, "args");
}

folio_status folio_attention_args_init(folio_attention_args* args, size_t struct_size) noexcept {
  static constexpr folio_attention_args kDefaults = FOLIO_ATTENTION_ARGS_INIT;
  return init(args, struct_size, kDefaults, "args");
}

folio_status folio_cache_write_args_init(folio_cache_write_args* args, size_t struct_size) noexcept {
  static constexpr folio_cache_write_args kDefaults = FOLIO_CACHE_WRITE_ARGS_INIT;
  return init(args, struct_size, kDefaults, "args");
}

folio_status folio_scale_init(folio_scale* scale) noexcept {
  return guarded([&] {
    static constexpr folio_scale kDefaults = FOLIO_SCALE_INIT;
    std::memcpy(&folio::capi::deref(scale, "scale"), &kDefaults, sizeof(kDefaults));
  });
}

folio_status folio_kv_shard_init(folio_kv_shard* shard) noexcept {
  return guarded([&] { folio::capi::deref(shard, "shard") = FOLIO_KV_SHARD_INIT; });
}
