#pragma once

#include <bit>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/common/handles.hpp"
#include "capi/common/structs.hpp"
#include "core/checked_math.hpp"
#include "folio/backends/common.hpp"
#include "folio/c/backends.h"

/// What the engine backends' C functions share: structures of engines, layers and steps to the C++ ones.
namespace folio::inline v0::capi {

template <>
inline constexpr const char* kInitFunction<folio_engine_config> = "folio_engine_config_init";
template <>
inline constexpr const char* kInitFunction<folio_layer_config> = "folio_layer_config_init";
template <>
inline constexpr const char* kInitFunction<folio_step_batch> = "folio_step_batch_init";
template <>
inline constexpr const char* kInitFunction<folio_forward_args> = "folio_forward_args_init";
template <>
inline constexpr const char* kInitFunction<folio_flashinfer_options> = "folio_flashinfer_options_init";
template <>
inline constexpr const char* kInitFunction<folio_flash_attn_options> = "folio_flash_attn_options_init";
template <>
inline constexpr const char* kInitFunction<folio_token_pool_config> = "folio_token_pool_config_init";
template <>
inline constexpr const char* kInitFunction<folio_radix_attention> = "folio_radix_attention_init";
template <>
inline constexpr const char* kInitFunction<folio_forward_batch> = "folio_forward_batch_init";

backends::EngineConfig to_engine(const folio_engine_config* config);
backends::AttentionSpec to_spec(const folio_attention_spec* spec);
backends::KvCacheLayout to_layout(folio_kv_cache_layout layout, const char* name);
backends::CascadeMode to_cascade(folio_cascade_mode mode);
backends::CommonAttentionMetadata to_batch(const folio_step_batch* batch);
backends::BlockTableView to_block_table(const folio_block_table& table);

/// The fields that both backends' layers have in common; `given` is read_struct's copy.
template <typename LayerConfig>
LayerConfig to_layer(const folio_layer_config& given) {
  LayerConfig converted;
  converted.num_heads = given.num_heads;
  converted.head_size = given.head_size;
  converted.scale = given.scale;
  converted.num_kv_heads = given.num_kv_heads;
  converted.alibi_slopes = to_optional_span(given.alibi_slopes, given.num_heads, "config.alibi_slopes");
  if (given.sliding_window != 0) converted.sliding_window = given.sliding_window;
  if (given.kv_cache_dtype != nullptr) converted.kv_cache_dtype = given.kv_cache_dtype;
  converted.model_dtype = to_dtype(given.model_dtype, "config.model_dtype");
  core::require(converted.model_dtype != DType::kUnset, "config.model_dtype is unset");
  if (given.logits_soft_cap != 0.0f) converted.logits_soft_cap = given.logits_soft_cap;
  converted.attn_type = to_enum(given.attn_type, backends::AttentionType::kEncoderDecoder, "config.attn_type");
  if (given.kv_sharing_target_layer_name != nullptr) {
    converted.kv_sharing_target_layer_name = given.kv_sharing_target_layer_name;
  }
  converted.sinks = to_view(given.sinks, "config.sinks.dtype");
  return converted;
}

/// What forwards and cache writes take.
struct ForwardArgs {
  backends::AttentionLayerScales scales;
  ConstTensorView query, key, value;
  TensorView kv_cache, output;
  backends::OutputQuantization quantization;
};
ForwardArgs to_forward_args(const folio_forward_args* args);

/// The layers of a builder with their names, from handles that have an `impl`.
template <typename Impl, typename Handle>
std::vector<backends::AttentionLayer<Impl>> to_layers(const Handle* const* layers, const char* const* names,
                                                      int32_t num_layers) {
  std::vector<backends::AttentionLayer<Impl>> converted;
  for (const Handle* layer : to_span(layers, num_layers, "layers")) {
    const size_t number = converted.size();
    core::require(layer != nullptr, "layers[", number, "] is null");
    const char* const name = names == nullptr ? nullptr : names[number];
    core::require(names == nullptr || name != nullptr, "names[", number, "] is null");
    converted.push_back({name != nullptr ? std::string(name) : std::to_string(number), &layer->impl});
  }
  return converted;
}

/// A builder's handle: with its kernel's name.
template <typename Handle, typename Builder, typename Impl, typename LayerHandle, typename Options>
Handle* make_builder(const folio_context* context, const folio_attention_spec* spec, const LayerHandle* const* layers,
                     const char* const* names, int32_t num_layers, const folio_engine_config* config,
                     const Options& to_options) {
  const Context& device = deref(context, "context").context;
  const auto group = to_layers<Impl>(layers, names, num_layers);
  Builder made(device, to_spec(spec), group, to_engine(config), to_options());
  std::string name = made.kernel_name();
  return new Handle{std::move(made), std::move(name)};
}

/// `no_step` is what is said of metadata that nothing has filled.
template <typename LayerHandle, typename MetadataHandle>
void forward(const LayerHandle* layer, const MetadataHandle* metadata, const folio_forward_args* args, void* stream,
             const char* no_step) {
  deref(layer, "layer");
  const ForwardArgs given = to_forward_args(args);
  core::require(metadata == nullptr || metadata->step.has_value(), no_step);
  layer->impl.forward(given.scales, given.query, given.key, given.value, given.kv_cache,
                      metadata == nullptr ? nullptr : &*metadata->step, given.output, given.quantization,
                      Stream{stream});
}

/// A layer's cache over packed memory, by the backend's own shape.
template <typename Backend>
folio_tensor_view make_kv_cache(void* data, int64_t num_pages, const folio_attention_spec* spec,
                                folio_kv_cache_layout layout) {
  const backends::AttentionSpec sizes = to_spec(spec);
  core::require(num_pages >= 0, "num_pages is ", num_pages);
  const auto shape = Backend::get_kv_cache_shape(num_pages, sizes.page_size, sizes.num_kv_heads, sizes.head_size);
  int64_t elements = 1;  // strides are products of these
  for (const int64_t size : shape) elements = core::checked_mul(elements, size);
  return std::bit_cast<folio_tensor_view>(
      Backend::kv_cache_tensor(data, sizes.dtype, shape, to_layout(layout, "layout")));
}

}  // namespace folio::inline v0::capi
