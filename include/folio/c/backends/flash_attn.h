/* The backend behind vLLM's FlashAttention layer; see folio/backends/flash_attn.hpp and docs/flash_attn.md.
 *
 *     once a model: a layer handle each, a builder for each group of layers, a metadata handle a step in flight
 *     once a step:  folio_flash_attn_build
 *     once a layer: folio_flash_attn_write, then folio_flash_attn_forward */
#ifndef FOLIO_C_BACKENDS_FLASH_ATTN_H_
#define FOLIO_C_BACKENDS_FLASH_ATTN_H_

#include "folio/c/backends/step.h"

FOLIO_C_BEGIN

typedef struct folio_flash_attn_layer folio_flash_attn_layer;       /* one layer's attention; immutable */
typedef struct folio_flash_attn_builder folio_flash_attn_builder;   /* plans the steps of a group of layers */
typedef struct folio_flash_attn_metadata folio_flash_attn_metadata; /* what one step's layers need */

typedef struct folio_flash_attn_options {
  uint32_t struct_size;
  int32_t quantize_query;   /* not 0: queries come as fp8 e4m3; needs an e4m3 cache */
  folio_dtype output_dtype; /* fp8 or float4_e2m1x2: outputs are quantised in the kernel. Unset: the model's */
  folio_cascade_mode cascade;
  int32_t max_cascade_levels;       /* most shared prefixes inside each other; 0 = 4 */
  int32_t steps_in_flight;          /* steps whose metadata is valid at a time; 0 = 2 */
  int32_t plan_from_device_lengths; /* not 0, GPUs: builds plan on the device and may be captured */
  int32_t reserved;                 /* 0 */
  const char* force_kernel;         /* NULL or "": none */
} folio_flash_attn_options;
#define FOLIO_FLASH_ATTN_OPTIONS_INIT \
  { (uint32_t)sizeof(folio_flash_attn_options), 0, FOLIO_DTYPE_UNSET, FOLIO_CASCADE_HEURISTIC, 4, 2, 0, 0, NULL }
FOLIO_C_API folio_status folio_flash_attn_options_init(folio_flash_attn_options* options,
                                                       size_t struct_size) FOLIO_C_NOEXCEPT;

FOLIO_C_API folio_status folio_create_flash_attn_layer(const folio_context* context, const folio_layer_config* config,
                                                       folio_flash_attn_layer** layer) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_flash_attn_layer(folio_flash_attn_layer* layer) FOLIO_C_NOEXCEPT; /* NULL is fine */

/* A builder for layers [num_layers], which are read here and not kept. names [num_layers]: for messages; NULL = their
 * numbers. options NULL = the defaults. */
FOLIO_C_API folio_status folio_create_flash_attn_builder(const folio_context* context, const folio_attention_spec* spec,
                                                         const folio_flash_attn_layer* const* layers,
                                                         const char* const* names, int32_t num_layers,
                                                         const folio_engine_config* config,
                                                         const folio_flash_attn_options* options,
                                                         folio_flash_attn_builder** builder) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_flash_attn_builder(folio_flash_attn_builder* builder) FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Which kernel runs; lives as long as the builder. */
FOLIO_C_API folio_status folio_flash_attn_kernel_name(const folio_flash_attn_builder* builder,
                                                      const char** name) FOLIO_C_NOEXCEPT;

/* An empty handle, to be filled by builds. It reads the builder's memory: use it no longer than that. */
FOLIO_C_API folio_status folio_create_flash_attn_metadata(folio_flash_attn_metadata** metadata) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_flash_attn_metadata(folio_flash_attn_metadata* metadata)
    FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Plans a step, with requests in any order. On failure metadata is empty. common_prefix_len: tokens that all requests
 * begin with, in whole pages; 0 = none. fast_build not 0: no schedule is made ahead of time. */
FOLIO_C_API folio_status folio_flash_attn_build(folio_flash_attn_builder* builder, int32_t common_prefix_len,
                                                const folio_step_batch* batch, int32_t fast_build, void* stream,
                                                folio_flash_attn_metadata* metadata) FOLIO_C_NOEXCEPT;
/* Makes `metadata` a step for another group, whose pages alone lie elsewhere. `step` may be the same handle. */
FOLIO_C_API folio_status folio_flash_attn_update_block_table(const folio_flash_attn_builder* builder,
                                                             const folio_flash_attn_metadata* step,
                                                             const folio_block_table* block_table,
                                                             const int64_t* slot_mapping, int64_t num_slots,
                                                             folio_flash_attn_metadata* metadata) FOLIO_C_NOEXCEPT;
/* Writes key and value of args into its cache: token i to slot_mapping[i]. */
FOLIO_C_API folio_status folio_flash_attn_write(const folio_flash_attn_layer* layer, const folio_forward_args* args,
                                                const int64_t* slot_mapping, int64_t num_slots,
                                                void* stream) FOLIO_C_NOEXCEPT;
/* One layer of the step: attends and writes output. metadata NULL (a profiling run): the output becomes 0. */
FOLIO_C_API folio_status folio_flash_attn_forward(const folio_flash_attn_layer* layer,
                                                  const folio_flash_attn_metadata* metadata,
                                                  const folio_forward_args* args, void* stream) FOLIO_C_NOEXCEPT;
/* A layer's cache over packed memory: [2, num_pages, page_size, num_kv_heads, head_size], K at 0, V at 1. */
FOLIO_C_API folio_status folio_flash_attn_kv_cache(void* data, int64_t num_pages, const folio_attention_spec* spec,
                                                   folio_kv_cache_layout layout,
                                                   folio_tensor_view* kv_cache) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_BACKENDS_FLASH_ATTN_H_ */
