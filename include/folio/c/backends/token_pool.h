/* The backend of engines that serve from slots (SGLang's, pymllm's); see folio/backends/token_pool.hpp and
 * docs/token_pool.md.
 *
 *     once a model: a backend over the request table
 *     once a step:  folio_token_pool_init_forward_metadata
 *     once a layer: folio_token_pool_forward, which stores the new keys and values, then attends */
#ifndef FOLIO_C_BACKENDS_TOKEN_POOL_H_
#define FOLIO_C_BACKENDS_TOKEN_POOL_H_

#include "folio/c/backends/step.h"

FOLIO_C_BEGIN

typedef struct folio_token_pool_backend folio_token_pool_backend;

typedef int32_t folio_forward_mode;
enum {
  FOLIO_FORWARD_EXTEND = 1,
  FOLIO_FORWARD_DECODE = 2,
  FOLIO_FORWARD_MIXED = 3,
  FOLIO_FORWARD_IDLE = 4,
  FOLIO_FORWARD_TARGET_VERIFY = 5,
  FOLIO_FORWARD_DRAFT_EXTEND = 6
};

typedef int32_t folio_extend_path;
enum { FOLIO_EXTEND_AUTO = 0, FOLIO_EXTEND_RAGGED = 1, FOLIO_EXTEND_PAGED = 2 };

typedef int32_t folio_radix_attention_type;
enum { FOLIO_RADIX_DECODER = 0, FOLIO_RADIX_DECODER_BIDIRECTIONAL = 1, FOLIO_RADIX_ENCODER_ONLY = 2 };

/* All that the backend is told about the model and its pools. */
typedef struct folio_token_pool_config {
  uint32_t struct_size;
  int32_t num_heads; /* of this device, like the next */
  int32_t num_kv_heads;
  int32_t head_dim;           /* of queries and keys */
  int32_t v_head_dim;         /* of values; 0 = head_dim */
  folio_dtype kv_cache_dtype; /* must be set, like the next */
  folio_dtype q_dtype;        /* of q, k, v and out */
  folio_kv_format kv_format;
  int32_t page_size;                         /* tokens that the allocator keeps together; 0 = 1 */
  int32_t max_context_len;                   /* tokens that a request can have */
  folio_page_table_view req_to_token;        /* dense, a slot a position; borrowed, as folio_req_to_token_pool_table */
  int32_t max_req_pool_size;                 /* most requests of a batch */
  int32_t sliding_window_size;               /* keys left of the query, itself not counted; 0 = no windowed layers */
  folio_page_table_view window_req_to_token; /* the table in window slots; zeros: one pool has all layers */
  int32_t is_encoder_decoder;                /* not 0: there are cross-attention layers */
  int32_t skip_prefill;                      /* not 0: decodes only */
  int32_t logit_cap;                         /* not 0: some layers have one */
  folio_extend_path extend_path;
  folio_determinism determinism;
  int32_t reserved; /* 0 */
} folio_token_pool_config;
#define FOLIO_TOKEN_POOL_CONFIG_INIT                                                                           \
  {                                                                                                            \
    (uint32_t)sizeof(folio_token_pool_config), 0, 0, 0, 0, FOLIO_DTYPE_BFLOAT16, FOLIO_DTYPE_BFLOAT16,         \
        FOLIO_KV_STRIDED, 1, 0, {FOLIO_TABLE_CSR, NULL, 0, NULL, 0, 0, 0}, 0, 0,                               \
        {FOLIO_TABLE_CSR, NULL, 0, NULL, 0, 0, 0}, 0, 0, 0, FOLIO_EXTEND_AUTO, FOLIO_DETERMINISM_RUN_TO_RUN, 0 \
  }
FOLIO_C_API folio_status folio_token_pool_config_init(folio_token_pool_config* config,
                                                      size_t struct_size) FOLIO_C_NOEXCEPT;

/* One layer of the model. */
typedef struct folio_radix_attention {
  uint32_t struct_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;          /* 0 = head_dim */
  int32_t layer_id;            /* the pool's layer */
  float scaling;               /* 0 = 1 / sqrt(head_dim) */
  float logit_cap;             /* 0 = off */
  int32_t sliding_window_size; /* keys left of the query that it sees, itself not counted; 0 = all */
  int32_t is_cross_attention;
  folio_radix_attention_type attn_type;
  int32_t reserved; /* 0 */
} folio_radix_attention;
#define FOLIO_RADIX_ATTENTION_INIT \
  { (uint32_t)sizeof(folio_radix_attention), 0, 0, 0, 0, 0, 0.0f, 0.0f, 0, 0, FOLIO_RADIX_DECODER, 0 }
FOLIO_C_API folio_status folio_radix_attention_init(folio_radix_attention* layer, size_t struct_size) FOLIO_C_NOEXCEPT;

/* One step's batch of R = batch_size requests, borrowed until the step's last forward. Arrays marked (host) lie there;
 * on a CPU they may be NULL where their twin is given. */
typedef struct folio_forward_batch {
  uint32_t struct_size;
  folio_forward_mode forward_mode; /* must be set */
  int32_t batch_size;
  int32_t draft_token_num;         /* target verify: tokens of each draft, its root included */
  const int32_t* req_pool_indices; /* [R], rows of the request table */
  const int32_t* seq_lens;         /* [R], tokens in the cache after the step; verifying: before it */
  const int32_t* seq_lens_cpu;     /* (host) [R] */
  const int64_t* out_cache_loc;    /* [num_out_cache_loc], the slot of each new token */
  int64_t num_out_cache_loc;
  const int32_t* extend_prefix_lens;     /* extends: [R], tokens that were cached before */
  const int32_t* extend_prefix_lens_cpu; /* (host) */
  const int32_t* extend_seq_lens;        /* extends: [R], new tokens; NULL = the difference */
  const int32_t* extend_seq_lens_cpu;    /* (host) */
  const uint8_t* tree_mask;              /* trees of drafts, folio::backends::SpecInfo; NULL: chains */
  const uint8_t* tree_mask_cpu;          /* (host) */
  int64_t tree_mask_bytes;               /* of both */
  const int32_t* spec_kv_indptr;         /* draft decodes with branches: [num_branches + 1]; NULL: none */
  const int32_t* spec_kv_indptr_cpu;     /* (host) */
  int64_t num_branches;
  const int32_t* spec_kv_indices; /* [num_spec_kv_indices] */
  int64_t num_spec_kv_indices;
  const int32_t* encoder_lens;     /* cross attention: [R], slots in front of the row */
  const int32_t* encoder_lens_cpu; /* (host) */
  const int64_t* encoder_out_cache_loc;
  int64_t num_encoder_out_cache_loc;
  const folio_kv_pool* token_to_kv_pool;
  const folio_kv_pool* window_token_to_kv_pool; /* with window_req_to_token */
  const int64_t* window_out_cache_loc;          /* [num_window_out_cache_loc] */
  int64_t num_window_out_cache_loc;
} folio_forward_batch;
#define FOLIO_FORWARD_BATCH_INIT                                                                                      \
  {                                                                                                                   \
    (uint32_t)sizeof(folio_forward_batch), 0, 0, 0, NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, 0, \
        NULL, NULL, 0, NULL, 0, NULL, NULL, NULL, 0, NULL, NULL, NULL, 0                                              \
  }
FOLIO_C_API folio_status folio_forward_batch_init(folio_forward_batch* batch, size_t struct_size) FOLIO_C_NOEXCEPT;

/* Chooses kernels. The request table must outlive the backend. */
FOLIO_C_API folio_status folio_create_token_pool_backend(const folio_context* context,
                                                         const folio_token_pool_config* config,
                                                         folio_token_pool_backend** backend) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_token_pool_backend(folio_token_pool_backend* backend) FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Which kernel decodes; lives as long as the backend. */
FOLIO_C_API folio_status folio_token_pool_kernel_name(const folio_token_pool_backend* backend,
                                                      const char** name) FOLIO_C_NOEXCEPT;
/* Makes the step's lists and plans. Rows of the request table name the new tokens' slots before. After a failure there
 * is no step. */
FOLIO_C_API folio_status folio_token_pool_init_forward_metadata(folio_token_pool_backend* backend,
                                                                const folio_forward_batch* batch,
                                                                void* stream) FOLIO_C_NOEXCEPT;
/* One layer of the step: q [tokens, num_heads, head_dim] or [tokens, num_heads * head_dim], k and v likewise with KV
 * heads, out with v_head_dim. k and v NULL, both: the cache is only read. keep_kv_cache not 0: k and v are not stored.
 */
FOLIO_C_API folio_status folio_token_pool_forward(folio_token_pool_backend* backend, const folio_radix_attention* layer,
                                                  const folio_forward_batch* batch, const folio_const_tensor_view* q,
                                                  const folio_const_tensor_view* k, const folio_const_tensor_view* v,
                                                  const folio_tensor_view* out, int32_t keep_kv_cache,
                                                  void* stream) FOLIO_C_NOEXCEPT;
/* Reports what kernels of earlier steps have found, once; waits for nothing. On a CPU: FOLIO_OK. */
FOLIO_C_API folio_status folio_token_pool_check_plans(folio_token_pool_backend* backend) FOLIO_C_NOEXCEPT;

/* Memory for captured batches of up to max_bs requests and max_num_tokens queries. Forgets earlier captures. */
FOLIO_C_API folio_status folio_token_pool_init_cuda_graph_state(folio_token_pool_backend* backend, int32_t max_bs,
                                                                int32_t max_num_tokens) FOLIO_C_NOEXCEPT;
/* Metadata for capturing forwards of batch->batch_size requests and num_tokens queries: decodes or target verify. */
FOLIO_C_API folio_status folio_token_pool_capture_metadata(folio_token_pool_backend* backend,
                                                           const folio_forward_batch* batch, int32_t num_tokens,
                                                           void* stream) FOLIO_C_NOEXCEPT;
/* Metadata for replaying such a batch with other lengths and slots. seq_lens_sum: their sum, padding included; -1 = not
 * known. */
FOLIO_C_API folio_status folio_token_pool_replay_metadata(folio_token_pool_backend* backend,
                                                          const folio_forward_batch* batch, int64_t seq_lens_sum,
                                                          void* stream) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_BACKENDS_TOKEN_POOL_H_ */
