// Every default, as the headers' ..._INIT macros have them.
#include "capi/backends/step.hpp"

using folio::capi::init_struct;

folio_status folio_engine_config_init(folio_engine_config* config, size_t struct_size) noexcept {
  static constexpr folio_engine_config kDefaults = FOLIO_ENGINE_CONFIG_INIT;
  return init_struct(config, struct_size, kDefaults, "config");
}

folio_status folio_layer_config_init(folio_layer_config* config, size_t struct_size) noexcept {
  static constexpr folio_layer_config kDefaults = FOLIO_LAYER_CONFIG_INIT;
  return init_struct(config, struct_size, kDefaults, "config");
}

folio_status folio_step_batch_init(folio_step_batch* batch, size_t struct_size) noexcept {
  static constexpr folio_step_batch kDefaults = FOLIO_STEP_BATCH_INIT;
  return init_struct(batch, struct_size, kDefaults, "batch");
}

folio_status folio_forward_args_init(folio_forward_args* args, size_t struct_size) noexcept {
  static constexpr folio_forward_args kDefaults = FOLIO_FORWARD_ARGS_INIT;
  return init_struct(args, struct_size, kDefaults, "args");
}

folio_status folio_flashinfer_options_init(folio_flashinfer_options* options, size_t struct_size) noexcept {
  static constexpr folio_flashinfer_options kDefaults = FOLIO_FLASHINFER_OPTIONS_INIT;
  return init_struct(options, struct_size, kDefaults, "options");
}

folio_status folio_flash_attn_options_init(folio_flash_attn_options* options, size_t struct_size) noexcept {
  static constexpr folio_flash_attn_options kDefaults = FOLIO_FLASH_ATTN_OPTIONS_INIT;
  return init_struct(options, struct_size, kDefaults, "options");
}

folio_status folio_token_pool_config_init(folio_token_pool_config* config, size_t struct_size) noexcept {
  static constexpr folio_token_pool_config kDefaults = FOLIO_TOKEN_POOL_CONFIG_INIT;
  return init_struct(config, struct_size, kDefaults, "config");
}

folio_status folio_radix_attention_init(folio_radix_attention* layer, size_t struct_size) noexcept {
  static constexpr folio_radix_attention kDefaults = FOLIO_RADIX_ATTENTION_INIT;
  return init_struct(layer, struct_size, kDefaults, "layer");
}

folio_status folio_forward_batch_init(folio_forward_batch* batch, size_t struct_size) noexcept {
  static constexpr folio_forward_batch kDefaults = FOLIO_FORWARD_BATCH_INIT;
  return init_struct(batch, struct_size, kDefaults, "batch");
}
