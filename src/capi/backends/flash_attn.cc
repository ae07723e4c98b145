#include "folio/backends/flash_attn.hpp"

#include <optional>
#include <string>
#include <utility>

#include "capi/backends/step.hpp"

using folio::Stream;
using folio::backends::FlashAttentionImpl;
using folio::backends::FlashAttentionMetadataBuilder;
using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_span;

struct folio_flash_attn_layer {
  FlashAttentionImpl impl;
};

struct folio_flash_attn_builder {
  FlashAttentionMetadataBuilder builder;
  std::string kernel_name;
};

struct folio_flash_attn_metadata {
  std::optional<folio::backends::FlashAttentionMetadata> step;
};

namespace {

folio::backends::FlashAttentionOptions to_options(const folio_flash_attn_options* options) {
  folio::backends::FlashAttentionOptions converted;
  if (options == nullptr) return converted;
  const folio_flash_attn_options given = folio::capi::read_struct(options, "options");
  folio::core::require(given.reserved == 0, "options.reserved is ", given.reserved, "; it is 0");
  if (given.quantize_query != 0) converted.quantize_query = true;
  const folio::DType output = folio::capi::to_dtype(given.output_dtype, "options.output_dtype");
  if (output != folio::DType::kUnset) converted.output_dtype = output;
  if (given.steps_in_flight != 0) converted.steps_in_flight = given.steps_in_flight;
  converted.force_kernel = folio::capi::to_string(given.force_kernel);
  converted.plan_from_device_lengths = given.plan_from_device_lengths != 0;
  converted.cascade = folio::capi::to_cascade(given.cascade);
  if (given.max_cascade_levels != 0) converted.max_cascade_levels = given.max_cascade_levels;
  return converted;
}

constexpr const char* kNoStep = "metadata holds no step; folio_flash_attn_build fills it";

}  // namespace

folio_status folio_create_flash_attn_layer(const folio_context* context, const folio_layer_config* config,
                                           folio_flash_attn_layer** layer) noexcept {
  return guarded([&] {
    deref(layer, "layer") = nullptr;
    const folio::Context& device = deref(context, "context").context;
    const folio_layer_config given = folio::capi::read_struct(config, "config");
    auto converted = folio::capi::to_layer<folio::backends::FlashAttentionLayerConfig>(given);
    converted.update_kv_cache_in_forward = given.update_kv_cache_in_forward != 0;
    *layer = new folio_flash_attn_layer{FlashAttentionImpl(device, converted)};
  });
}

void folio_free_flash_attn_layer(folio_flash_attn_layer* layer) noexcept {
  delete layer;
}

folio_status folio_create_flash_attn_builder(const folio_context* context, const folio_attention_spec* spec,
                                             const folio_flash_attn_layer* const* layers, const char* const* names,
                                             int32_t num_layers, const folio_engine_config* config,
                                             const folio_flash_attn_options* options,
                                             folio_flash_attn_builder** builder) noexcept {
  return guarded([&] {
    deref(builder, "builder") = nullptr;
    *builder = folio::capi::make_builder<folio_flash_attn_builder, FlashAttentionMetadataBuilder, FlashAttentionImpl>(
        context, spec, layers, names, num_layers, config, [&] { return to_options(options); });
  });
}

void folio_free_flash_attn_builder(folio_flash_attn_builder* builder) noexcept {
  delete builder;
}

folio_status folio_flash_attn_kernel_name(const folio_flash_attn_builder* builder, const char** name) noexcept {
  return guarded([&] {
    deref(builder, "builder");
    deref(name, "name") = builder->kernel_name.c_str();
  });
}

folio_status folio_create_flash_attn_metadata(folio_flash_attn_metadata** metadata) noexcept {
  return guarded([&] {
    deref(metadata, "metadata") = nullptr;
    *metadata = new folio_flash_attn_metadata();
  });
}

void folio_free_flash_attn_metadata(folio_flash_attn_metadata* metadata) noexcept {
  delete metadata;
}

folio_status folio_flash_attn_build(folio_flash_attn_builder* builder, int32_t common_prefix_len,
                                    const folio_step_batch* batch, int32_t fast_build, void* stream,
                                    folio_flash_attn_metadata* metadata) noexcept {
  return guarded([&] {
    deref(metadata, "metadata").step.reset();
    deref(builder, "builder");
    metadata->step =
        builder->builder.build(common_prefix_len, folio::capi::to_batch(batch), fast_build != 0, Stream{stream});
  });
}

folio_status folio_flash_attn_update_block_table(const folio_flash_attn_builder* builder,
                                                 const folio_flash_attn_metadata* step,
                                                 const folio_block_table* block_table, const int64_t* slot_mapping,
                                                 int64_t num_slots, folio_flash_attn_metadata* metadata) noexcept {
  return guarded([&] {
    deref(builder, "builder");
    deref(metadata, "metadata");
    folio::core::require(deref(step, "step").step.has_value(), kNoStep);
    metadata->step =
        builder->builder.update_block_table(*step->step, folio::capi::to_block_table(deref(block_table, "block_table")),
                                            to_span(slot_mapping, num_slots, "slot_mapping"));
  });
}

folio_status folio_flash_attn_write(const folio_flash_attn_layer* layer, const folio_forward_args* args,
                                    const int64_t* slot_mapping, int64_t num_slots, void* stream) noexcept {
  return guarded([&] {
    deref(layer, "layer");
    const folio::capi::ForwardArgs given = folio::capi::to_forward_args(args);
    layer->impl.do_kv_cache_update(given.scales, given.key, given.value, given.kv_cache,
                                   to_span(slot_mapping, num_slots, "slot_mapping"), Stream{stream});
  });
}

folio_status folio_flash_attn_forward(const folio_flash_attn_layer* layer, const folio_flash_attn_metadata* metadata,
                                      const folio_forward_args* args, void* stream) noexcept {
  return guarded([&] { folio::capi::forward(layer, metadata, args, stream, kNoStep); });
}

folio_status folio_flash_attn_kv_cache(void* data, int64_t num_pages, const folio_attention_spec* spec,
                                       folio_kv_cache_layout layout, folio_tensor_view* kv_cache) noexcept {
  return guarded([&] {
    deref(kv_cache, "kv_cache");
    *kv_cache = folio::capi::make_kv_cache<folio::backends::FlashAttentionBackend>(data, num_pages, spec, layout);
  });
}
