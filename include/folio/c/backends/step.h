/* What the engine backends share: an engine's configuration, its layers, one step's batch. See
 * folio/backends/common.hpp; the fields have its names. Everything is Folio's native profile. */
#ifndef FOLIO_C_BACKENDS_STEP_H_
#define FOLIO_C_BACKENDS_STEP_H_

#include "folio/c/folio.h"

FOLIO_C_BEGIN

typedef int32_t folio_kv_cache_layout;
enum { FOLIO_LAYOUT_NHD = 0, FOLIO_LAYOUT_HND = 1 };

typedef int32_t folio_attention_type;
enum {
  FOLIO_ATTENTION_DECODER = 0,
  FOLIO_ATTENTION_ENCODER = 1,
  FOLIO_ATTENTION_ENCODER_ONLY = 2,
  FOLIO_ATTENTION_ENCODER_DECODER = 3
};

/* Who decides which requests of a step read the pages they begin with together. */
typedef int32_t folio_cascade_mode;
enum {
  FOLIO_CASCADE_OFF = 0,
  FOLIO_CASCADE_HEURISTIC = 1, /* common_prefix_len of a build says it; the default */
  FOLIO_CASCADE_AUTO = 2       /* the block table does */
};

/* What an engine is configured with. A backend refuses what it cannot honour. */
typedef struct folio_engine_config {
  uint32_t struct_size;
  folio_dtype dtype;           /* of queries, new keys and values, outputs; must be set */
  int32_t num_attention_heads; /* of the whole model, like the next */
  int32_t num_kv_heads;
  int32_t max_model_len;          /* longest request in tokens; 0 = no bound */
  int32_t max_num_seqs;           /* most requests of a batch; 0 = no bound */
  int32_t max_num_batched_tokens; /* most tokens of a batch; 0 = no bound */
  int32_t tensor_parallel_size;   /* ranks that divide the heads; 0 = 1 */
  const char* cache_dtype;        /* "auto", "bfloat16", "fp8_e4m3", ...; NULL = "auto", the model's */
  folio_kv_cache_layout layout;   /* of the caches that layers are given */
  int32_t num_speculative_tokens; /* 0 = no drafts */
  int32_t full_decode_graphs;     /* not 0: decodes are replayed from captured graphs */
  int32_t max_capture_size;       /* most tokens of a captured batch */
  folio_determinism determinism;
  int32_t reserved; /* 0 */
} folio_engine_config;
#define FOLIO_ENGINE_CONFIG_INIT                                                                                    \
  {                                                                                                                 \
    (uint32_t)sizeof(folio_engine_config), FOLIO_DTYPE_BFLOAT16, 0, 0, 0, 0, 0, 1, NULL, FOLIO_LAYOUT_NHD, 0, 0, 0, \
        FOLIO_DETERMINISM_RUN_TO_RUN, 0                                                                             \
  }
FOLIO_C_API folio_status folio_engine_config_init(folio_engine_config* config, size_t struct_size) FOLIO_C_NOEXCEPT;

/* A group of layers that share a KV cache format and page tables. Sizes are those of one rank. */
typedef struct folio_attention_spec {
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t head_size;
  folio_dtype dtype; /* as stored */
} folio_attention_spec;

/* One layer as the model defines it. Arrays are copied. */
typedef struct folio_layer_config {
  uint32_t struct_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  float scale;                              /* multiplies q . k; above 0 */
  float logits_soft_cap;                    /* 0 = off */
  int32_t sliding_window;                   /* keys that a query sees, its own included; 0 = all */
  folio_dtype model_dtype;                  /* what kv_cache_dtype "auto" means; must be set */
  const char* kv_cache_dtype;               /* NULL = "auto" */
  const char* kv_sharing_target_layer_name; /* the earlier layer whose cache this one reads; NULL = its own */
  const float* alibi_slopes;                /* [num_heads]; NULL = none */
  folio_const_tensor_view sinks;      /* [num_heads], float32, float16 or bfloat16, on the host; data NULL = none */
  folio_attention_type attn_type;     /* FlashInfer's layers: FOLIO_ATTENTION_DECODER */
  int32_t update_kv_cache_in_forward; /* FlashAttention's layers: not 0 = forward writes k and v itself */
} folio_layer_config;
#define FOLIO_LAYER_CONFIG_INIT                                                                           \
  {                                                                                                       \
    (uint32_t)sizeof(folio_layer_config), 0, 0, 0, 0.0f, 0.0f, 0, FOLIO_DTYPE_BFLOAT16, NULL, NULL, NULL, \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, FOLIO_ATTENTION_DECODER, 0                                \
  }
FOLIO_C_API folio_status folio_layer_config_init(folio_layer_config* config, size_t struct_size) FOLIO_C_NOEXCEPT;

/* A dense table: row i holds request i's page ids in order; entries beyond its pages are never read. */
typedef struct folio_block_table {
  const int32_t* data;
  int32_t num_rows;
  int32_t num_columns;
  int64_t row_stride; /* entries from a row to the next, >= num_columns */
} folio_block_table;

/* Tokens [begin, end) of a request that see each other whatever their order. */
typedef struct folio_bidirectional_range {
  int32_t request;
  int32_t begin;
  int32_t end;
} folio_bidirectional_range;

/* One step's batch. R = num_reqs, T = num_actual_tokens. Everything is borrowed until the step's last forward. Arrays
 * marked (host) are copies for planning where the others lie on a device; on a CPU they may be NULL. */
typedef struct folio_step_batch {
  uint32_t struct_size;
  folio_where where; /* of the arrays */
  int32_t num_reqs;
  int32_t num_actual_tokens; /* rows of the queries that count */
  int32_t max_query_len;
  int32_t max_seq_len;            /* an upper bound of seq_lens */
  const int32_t* query_start_loc; /* [R + 1] */
  const int32_t* seq_lens;        /* [R], the new tokens included */
  folio_block_table block_table;  /* [>= R, columns] */
  const int64_t* slot_mapping;    /* [num_slots]: where each new token's K and V go; negative = nowhere */
  int64_t num_slots;              /* <= T */
  int32_t non_causal;             /* not 0: queries see all keys of their request */
  int32_t num_bidirectional_ranges;
  const uint8_t* causal_per_request;                     /* [R]; NULL = as non_causal says */
  const folio_bidirectional_range* bidirectional_ranges; /* ascending by request */
  const int32_t* query_start_loc_host;                   /* (host) [R + 1] */
  const int32_t* seq_lens_host;                          /* (host) [R] */
  const int32_t* seq_lens_host_upper_bound;              /* (host) [R], for planning ahead of drafts */
  folio_block_table block_table_host;                    /* (host) where FOLIO_CASCADE_AUTO looks at pages */
  const int32_t* encoder_seq_lens;                       /* [R], cross attention only */
  const int32_t* encoder_seq_lens_host;                  /* (host) [R] */
  const int64_t* positions;                              /* [T]; checked on a CPU */
  const uint8_t* is_prefilling;                          /* (host) [R]: 1 while a prompt is being computed */
} folio_step_batch;
#define FOLIO_STEP_BATCH_INIT                                                                                        \
  {                                                                                                                  \
    (uint32_t)sizeof(folio_step_batch), FOLIO_ON_HOST, 0, 0, 0, 0, NULL, NULL, {NULL, 0, 0, 0}, NULL, 0, 0, 0, NULL, \
        NULL, NULL, NULL, NULL, {NULL, 0, 0, 0}, NULL, NULL, NULL, NULL                                              \
  }
FOLIO_C_API folio_status folio_step_batch_init(folio_step_batch* batch, size_t struct_size) FOLIO_C_NOEXCEPT;

/* What a layer's forward takes besides the layer and the step's metadata. */
typedef struct folio_forward_args {
  uint32_t struct_size;
  folio_where output_scale_where; /* where output_scale lies */
  folio_const_tensor_view query;  /* [>= T, num_heads, head_size] */
  folio_const_tensor_view key;    /* [>= T, num_kv_heads, head_size]; data NULL where the layer only reads its cache */
  folio_const_tensor_view value;
  folio_tensor_view kv_cache; /* as folio_flashinfer_kv_cache or folio_flash_attn_kv_cache makes it, any strides */
  folio_tensor_view output;   /* [>= T, num_heads, head_size] */
  folio_scale q_scale;        /* real = stored * scale */
  folio_scale k_scale;
  folio_scale v_scale;
  const float* output_scale;            /* fp8: stored = real / scale; NVFP4: the global factor; NULL = other outputs */
  folio_tensor_view output_block_scale; /* NVFP4's factors; data NULL = other outputs */
} folio_forward_args;
#define FOLIO_FORWARD_ARGS_INIT                                                                           \
  {                                                                                                       \
    (uint32_t)sizeof(folio_forward_args), FOLIO_ON_HOST, {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}},          \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}},                   \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, FOLIO_SCALE_INIT, \
        FOLIO_SCALE_INIT, FOLIO_SCALE_INIT, NULL, {                                                       \
      NULL, FOLIO_DTYPE_UNSET, 0, {0}, {                                                                  \
        0                                                                                                 \
      }                                                                                                   \
    }                                                                                                     \
  }
FOLIO_C_API folio_status folio_forward_args_init(folio_forward_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_BACKENDS_STEP_H_ */
