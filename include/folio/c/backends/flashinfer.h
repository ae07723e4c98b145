/* The backend behind vLLM's FlashInfer attention layer; see folio/backends/flashinfer.hpp and docs/backends.md.
 *
 *     once a model: a layer handle each, a builder for each group of layers, a metadata handle
 *     once a step:  folio_flashinfer_build
 *     once a layer: folio_flashinfer_forward, which writes the new keys and values, then attends */
#ifndef FOLIO_C_BACKENDS_FLASHINFER_H_
#define FOLIO_C_BACKENDS_FLASHINFER_H_

#include "folio/c/backends/step.h"

FOLIO_C_BEGIN

typedef struct folio_flashinfer_layer folio_flashinfer_layer;       /* one layer's attention; immutable */
typedef struct folio_flashinfer_builder folio_flashinfer_builder;   /* plans the steps of a group of layers */
typedef struct folio_flashinfer_metadata folio_flashinfer_metadata; /* what one step's layers need */

typedef struct folio_flashinfer_options {
  uint32_t struct_size;
  int32_t quantize_query;   /* not 0: queries come as fp8 e4m3; needs an e4m3 cache */
  folio_dtype output_dtype; /* fp8_e4m3 or float4_e2m1x2: outputs are quantised in the kernel. Unset: the model's */
  folio_cascade_mode cascade;
  int32_t max_cascade_levels; /* most shared prefixes inside each other; 0 = 4 */
  int32_t num_capture_sizes;
  const int32_t* capture_sizes; /* full_decode_graphs: tokens of captured batches, ascending; NULL = vLLM's default */
  const char* force_kernel;     /* NULL or "": none */
  size_t workspace_buffer_size; /* bytes to begin with; 0 = what ordinary steps need */
} folio_flashinfer_options;
#define FOLIO_FLASHINFER_OPTIONS_INIT \
  { (uint32_t)sizeof(folio_flashinfer_options), 0, FOLIO_DTYPE_UNSET, FOLIO_CASCADE_HEURISTIC, 4, 0, NULL, NULL, 0 }
FOLIO_C_API folio_status folio_flashinfer_options_init(folio_flashinfer_options* options,
                                                       size_t struct_size) FOLIO_C_NOEXCEPT;

FOLIO_C_API folio_status folio_create_flashinfer_layer(const folio_context* context, const folio_layer_config* config,
                                                       folio_flashinfer_layer** layer) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_flashinfer_layer(folio_flashinfer_layer* layer) FOLIO_C_NOEXCEPT; /* NULL is fine */

/* A builder for layers [num_layers], which are read here and not kept. names [num_layers]: for messages; NULL = their
 * numbers. options NULL = the defaults. */
FOLIO_C_API folio_status folio_create_flashinfer_builder(const folio_context* context, const folio_attention_spec* spec,
                                                         const folio_flashinfer_layer* const* layers,
                                                         const char* const* names, int32_t num_layers,
                                                         const folio_engine_config* config,
                                                         const folio_flashinfer_options* options,
                                                         folio_flashinfer_builder** builder) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_flashinfer_builder(folio_flashinfer_builder* builder) FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Which kernel runs; lives as long as the builder. */
FOLIO_C_API folio_status folio_flashinfer_kernel_name(const folio_flashinfer_builder* builder,
                                                      const char** name) FOLIO_C_NOEXCEPT;

/* Swaps requests i and j of the engine's batch. */
typedef void (*folio_swap_requests)(void* self, int32_t i, int32_t j) FOLIO_C_NOEXCEPT;
/* Brings the batch into the order that builds expect, decodes in front. Both arrays: [num_requests]. *swapped: 1 if
 * requests were swapped. */
FOLIO_C_API folio_status folio_flashinfer_reorder_batch(folio_flashinfer_builder* builder,
                                                        const int32_t* num_scheduled_tokens,
                                                        const int32_t* num_computed_tokens, int32_t num_requests,
                                                        folio_swap_requests swap, void* self,
                                                        int32_t* swapped) FOLIO_C_NOEXCEPT;

/* An empty handle, to be filled by builds. It reads the builder's memory: use it no longer than that. */
FOLIO_C_API folio_status folio_create_flashinfer_metadata(folio_flashinfer_metadata** metadata) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_flashinfer_metadata(folio_flashinfer_metadata* metadata)
    FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Plans a step. On failure metadata is empty. The builder's earlier metadata become stale. common_prefix_len: tokens
 * that all requests begin with, in whole pages; 0 = none. */
FOLIO_C_API folio_status folio_flashinfer_build(folio_flashinfer_builder* builder, int32_t common_prefix_len,
                                                const folio_step_batch* batch, void* stream,
                                                folio_flashinfer_metadata* metadata) FOLIO_C_NOEXCEPT;
/* One layer of the step: writes k and v into the cache, attends, writes output. metadata NULL (a profiling run): the
 * output becomes 0. */
FOLIO_C_API folio_status folio_flashinfer_forward(const folio_flashinfer_layer* layer,
                                                  const folio_flashinfer_metadata* metadata,
                                                  const folio_forward_args* args, void* stream) FOLIO_C_NOEXCEPT;
/* A layer's cache over packed memory: [num_pages, 2, page_size, num_kv_heads, head_size], K at 0, V at 1. */
FOLIO_C_API folio_status folio_flashinfer_kv_cache(void* data, int64_t num_pages, const folio_attention_spec* spec,
                                                   folio_kv_cache_layout layout,
                                                   folio_tensor_view* kv_cache) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_BACKENDS_FLASHINFER_H_ */
