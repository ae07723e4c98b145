#include "folio/backends/flashinfer.hpp"

#include <optional>
#include <string>
#include <utility>

#include "capi/backends/step.hpp"

using folio::Stream;
using folio::backends::FlashInferImpl;
using folio::backends::FlashInferMetadataBuilder;
using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_span;

struct folio_flashinfer_layer {
  FlashInferImpl impl;
};

struct folio_flashinfer_builder {
  FlashInferMetadataBuilder builder;
  std::string kernel_name;
};

struct folio_flashinfer_metadata {
  std::optional<folio::backends::FlashInferMetadata> step;
};

namespace {

folio::backends::FlashInferOptions to_options(const folio_flashinfer_options* options) {
  folio::backends::FlashInferOptions converted;
  if (options == nullptr) return converted;
  const folio_flashinfer_options given = folio::capi::read_struct(options, "options");
  converted.quantize_query = given.quantize_query != 0;
  converted.output_dtype = folio::capi::to_dtype(given.output_dtype, "options.output_dtype");
  converted.force_kernel = folio::capi::to_string(given.force_kernel);
  const auto sizes = to_span(given.capture_sizes, given.num_capture_sizes, "options.capture_sizes");
  converted.capture_sizes.assign(sizes.begin(), sizes.end());
  converted.workspace_buffer_size = given.workspace_buffer_size;
  converted.cascade = folio::capi::to_cascade(given.cascade);
  if (given.max_cascade_levels != 0) converted.max_cascade_levels = given.max_cascade_levels;
  return converted;
}

}  // namespace

folio_status folio_create_flashinfer_layer(const folio_context* context, const folio_layer_config* config,
                                           folio_flashinfer_layer** layer) noexcept {
  return guarded([&] {
    deref(layer, "layer") = nullptr;
    const folio::Context& device = deref(context, "context").context;
    const folio_layer_config given = folio::capi::read_struct(config, "config");
    folio::core::require(given.update_kv_cache_in_forward == 0, "config.update_kv_cache_in_forward is ",
                         given.update_kv_cache_in_forward,
                         "; FlashInfer's layers always write in forward, and it is 0");
    *layer = new folio_flashinfer_layer{
        FlashInferImpl(device, folio::capi::to_layer<folio::backends::FlashInferLayerConfig>(given))};
  });
}

void folio_free_flashinfer_layer(folio_flashinfer_layer* layer) noexcept {
  delete layer;
}

folio_status folio_create_flashinfer_builder(const folio_context* context, const folio_attention_spec* spec,
                                             const folio_flashinfer_layer* const* layers, const char* const* names,
                                             int32_t num_layers, const folio_engine_config* config,
                                             const folio_flashinfer_options* options,
                                             folio_flashinfer_builder** builder) noexcept {
  return guarded([&] {
    deref(builder, "builder") = nullptr;
    *builder = folio::capi::make_builder<folio_flashinfer_builder, FlashInferMetadataBuilder, FlashInferImpl>(
        context, spec, layers, names, num_layers, config, [&] { return to_options(options); });
  });
}

void folio_free_flashinfer_builder(folio_flashinfer_builder* builder) noexcept {
  delete builder;
}

folio_status folio_flashinfer_kernel_name(const folio_flashinfer_builder* builder, const char** name) noexcept {
  return guarded([&] {
    deref(builder, "builder");
    deref(name, "name") = builder->kernel_name.c_str();
  });
}

folio_status folio_flashinfer_reorder_batch(folio_flashinfer_builder* builder, const int32_t* num_scheduled_tokens,
                                            const int32_t* num_computed_tokens, int32_t num_requests,
                                            folio_swap_requests swap, void* self, int32_t* swapped) noexcept {
  return guarded([&] {
    deref(builder, "builder");
    deref(swapped, "swapped");
    folio::core::require(swap != nullptr, "swap is null");
    *swapped = builder->builder.reorder_batch(to_span(num_scheduled_tokens, num_requests, "num_scheduled_tokens"),
                                              to_span(num_computed_tokens, num_requests, "num_computed_tokens"),
                                              [&](int32_t i, int32_t j) { swap(self, i, j); })
                   ? 1
                   : 0;
  });
}

folio_status folio_create_flashinfer_metadata(folio_flashinfer_metadata** metadata) noexcept {
  return guarded([&] {
    deref(metadata, "metadata") = nullptr;
    *metadata = new folio_flashinfer_metadata();
  });
}

void folio_free_flashinfer_metadata(folio_flashinfer_metadata* metadata) noexcept {
  delete metadata;
}

folio_status folio_flashinfer_build(folio_flashinfer_builder* builder, int32_t common_prefix_len,
                                    const folio_step_batch* batch, void* stream,
                                    folio_flashinfer_metadata* metadata) noexcept {
  return guarded([&] {
    deref(metadata, "metadata").step.reset();
    deref(builder, "builder");
    metadata->step = builder->builder.build(common_prefix_len, folio::capi::to_batch(batch), Stream{stream});
  });
}

folio_status folio_flashinfer_forward(const folio_flashinfer_layer* layer, const folio_flashinfer_metadata* metadata,
                                      const folio_forward_args* args, void* stream) noexcept {
  return guarded([&] {
    folio::capi::forward(layer, metadata, args, stream, "metadata holds no step; folio_flashinfer_build fills it");
  });
}

folio_status folio_flashinfer_kv_cache(void* data, int64_t num_pages, const folio_attention_spec* spec,
                                       folio_kv_cache_layout layout, folio_tensor_view* kv_cache) noexcept {
  return guarded([&] {
    deref(kv_cache, "kv_cache");
    *kv_cache = folio::capi::make_kv_cache<folio::backends::FlashInferBackend>(data, num_pages, spec, layout);
  });
}
