/* Prepare, plan, run; see folio/attention.hpp for what the functions do in full. */
#ifndef FOLIO_C_ATTENTION_H_
#define FOLIO_C_ATTENTION_H_

#include "folio/c/context.h"

FOLIO_C_BEGIN

/* ---- Handles ---- */

typedef struct folio_op folio_op;                   /* a kernel chosen for a configuration */
typedef struct folio_plan_buffer folio_plan_buffer; /* memory that plans are made into */
typedef struct folio_explanation folio_explanation; /* what every kernel says to a configuration */

/* ---- Structures that may grow ---- */

typedef struct folio_attention_config {
  uint32_t struct_size;
  int32_t num_q_heads; /* a multiple of num_kv_heads */
  int32_t num_kv_heads;
  int32_t head_dim_qk; /* a multiple of 8 */
  int32_t head_dim_v;  /* a multiple of 8 */
  folio_dtype q;
  folio_dtype kv;        /* of paged segments */
  folio_dtype ragged_kv; /* of ragged segments; unset = that of kv, or of q where kv is fp8, int8 */
  folio_dtype out;       /* unset = that of q, or bfloat16 where q is fp8 */
  folio_kv_format kv_format;
  int32_t page_size;
  folio_mask_kind mask;
  /* Keys at >= p - window_left and <= p + window_right; -1 = unbounded. Both 0 is refused, because memory of zeros is
   * like that: a query that sees its own key alone is FOLIO_MASK_CAUSAL with window_left 0, window_right -1. */
  int32_t window_left;
  int32_t window_right;
  uint32_t features; /* FOLIO_FEATURE_... */
  folio_determinism determinism;
  int32_t attention_chunk;  /* positions of a chunk; a query sees keys of its own chunk alone. 0 = none */
  int32_t span_window_left; /* a query sees its span from p - span_window_left on; -1 = all of it. 0 = as window_left */
} folio_attention_config;
/* Causal, bfloat16, strided pages of 16 tokens, no window; heads and dims are left to fill in. */
#define FOLIO_ATTENTION_CONFIG_INIT                                                                   \
  {                                                                                                   \
    (uint32_t)sizeof(folio_attention_config), 0, 0, 0, 0, FOLIO_DTYPE_BFLOAT16, FOLIO_DTYPE_BFLOAT16, \
        FOLIO_DTYPE_UNSET, FOLIO_DTYPE_UNSET, FOLIO_KV_STRIDED, 16, FOLIO_MASK_CAUSAL, -1, -1, 0,     \
        FOLIO_DETERMINISM_RUN_TO_RUN, 0, 0                                                            \
  }

typedef struct folio_prepare_options {
  uint32_t struct_size;
  int32_t num_workers;      /* workers to plan for; 0 = the executor's concurrency (CPU), the grid (GPU) */
  const char* force_kernel; /* NULL or "": the cheapest that can; else this one runs, or preparing fails */
  int32_t has_bounds;       /* not 0: the bounds below hold for every batch; larger ones are refused */
  int32_t max_requests;
  int32_t max_tokens;
  int32_t max_q_len;
  int32_t max_kv_len;
  int32_t max_shared_levels;
  int32_t allow_fp8_mma; /* not 0: for speed before accuracy; see folio::PrepareOptions, folio_fp8_mma */
  /* What a CPU's kernels are ranked by. All zero: as folio::PrepareOptions::mix says. */
  folio_workload_mix mix;
  int32_t max_kv_splits; /* most KV splits of a query; 0 = as many as the work needs */
  int32_t reserved;      /* 0 */
} folio_prepare_options;
#define FOLIO_PREPARE_OPTIONS_INIT \
  { (uint32_t)sizeof(folio_prepare_options), 0, NULL, 0, 0, 0, 0, 0, 0, 0, {0, 0}, 0, 0 }

/* One part of the keys and values of every request: lengths only. */
typedef struct folio_kv_segment {
  uint32_t struct_size;
  folio_kv_source source;
  const int32_t* kv_len; /* [rows], tokens held here: 0 to 2^31 - 4096 */
  /* [rows], global position of the first token; NULL = where the keys of the segment before end (the first segment: 0).
   * Refused behind a shard, and where requests of one group disagree. */
  const int32_t* first_pos;
  const int32_t*
      group_indptr;   /* [num_groups + 1]: row g belongs to requests [indptr[g], indptr[g+1]); NULL = one a request */
  int32_t num_groups; /* 0 without group_indptr */
  folio_segment_mask mask;
  folio_kv_shard shard;
} folio_kv_segment;
#define FOLIO_KV_SEGMENT_INIT                                                                         \
  {                                                                                                   \
    (uint32_t)sizeof(folio_kv_segment), FOLIO_KV_PAGED, NULL, NULL, NULL, 0, FOLIO_SEGMENT_AS_CONFIG, \
        FOLIO_KV_SHARD_INIT                                                                           \
  }

/* One step's batch of R = num_requests requests: lengths only. */
typedef struct folio_batch {
  uint32_t struct_size;
  folio_where where;
  int32_t num_requests;
  int32_t num_tokens;               /* rows of q and out; >= cu_q[R] */
  int32_t max_q_len;                /* 0 on the host = computed */
  int32_t max_kv_len;               /* likewise */
  const int32_t* cu_q;              /* [R + 1] */
  const int32_t* q_first_pos;       /* [R]; NULL = end of the last segment - q_len, below 0 with fewer keys than q */
  const folio_kv_segment* segments; /* [num_segments], in the order of the keys, all of one struct_size */
  int32_t num_segments;
  folio_custom_mask_scope custom_mask_scope;
  const int32_t* custom_mask_tail_len; /* [R], FOLIO_CUSTOM_MASK_TAIL only; else NULL */
  /* Masks as rules: NULL, or arrays whose feature the config has, where the lengths are. See folio::BatchView. */
  const int32_t* kv_start; /* [R]: keys at positions below are invisible; chunks begin there */
  const uint8_t* causal;   /* [R]: 0 = the request is not causal */
  const int32_t* spans;    /* [cu_q[R], 2], on a device [num_tokens, 2]: key positions that the query sees besides */
} folio_batch;
#define FOLIO_BATCH_INIT                                                                                              \
  {                                                                                                                   \
    (uint32_t)sizeof(folio_batch), FOLIO_ON_HOST, 0, 0, 0, 0, NULL, NULL, NULL, 0, FOLIO_CUSTOM_MASK_ALL, NULL, NULL, \
        NULL, NULL                                                                                                    \
  }

/* Where one segment's keys and values lie in this layer: `cache` and `table` of a paged one, `ragged` of a ragged one.
 */
typedef struct folio_segment_args {
  uint32_t struct_size;
  folio_kv_cache_view cache;
  folio_page_table_view table;
  folio_ragged_kv_view ragged;
  folio_scale k_scale;
  folio_scale v_scale;
  folio_token_scales k_token_scales; /* int8 caches, which need both; zeros for others */
  folio_token_scales v_token_scales;
} folio_segment_args;
#define FOLIO_SEGMENT_ARGS_INIT                                                                                   \
  {                                                                                                               \
    (uint32_t)sizeof(folio_segment_args),                                                                         \
        {FOLIO_KV_STRIDED, FOLIO_DTYPE_UNSET, NULL, NULL, 0, 0, 0, 0, 0, {0, 0, 0}, {0, 0, 0}},                   \
        {FOLIO_TABLE_CSR, NULL, 0, NULL, 0, 0, 0},                                                                \
        {{NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, NULL}, FOLIO_SCALE_INIT, \
        FOLIO_SCALE_INIT, FOLIO_TOKEN_SCALES_INIT, FOLIO_TOKEN_SCALES_INIT                                        \
  }

/* One layer's arguments. Features used must be among the config's. */
typedef struct folio_attention_args {
  uint32_t struct_size;
  int32_t num_segments;               /* as many as the plan has */
  const folio_segment_args* segments; /* [num_segments], all of one struct_size */
  folio_const_tensor_view q;          /* [num_tokens, num_q_heads, head_dim_qk] */
  folio_tensor_view out;              /* [num_tokens, num_q_heads, head_dim_v] */
  folio_lse_view lse;
  float sm_scale;             /* 0 = 1 / sqrt(head_dim_qk) */
  float logits_soft_cap;      /* 0 = off */
  const float* alibi_slopes;  /* [num_q_heads]; NULL = off */
  const float* sinks;         /* [num_q_heads]; NULL = off */
  folio_scale q_scale;        /* fp8 q */
  folio_scale out_scale;      /* fp8 out */
  const uint8_t* custom_mask; /* bits, rows of requests one after the other, each request on a byte */
  int64_t custom_mask_bytes;
  float rope_theta; /* FOLIO_FEATURE_ROPE_LLAMA; 0 = 1e4 */
  float rope_scale; /* 0 = 1 */
  /* Scale factors of an NVFP4 output, one e4m3 byte per 16 values, in tiles of 128 x 4; row t of `out` is row
   * out_block_scale_first_row + t of their matrix. See folio::BlockScaleArgs. */
  void* out_block_scale;
  int64_t out_block_scale_first_row;
} folio_attention_args;
#define FOLIO_ATTENTION_ARGS_INIT                                                                       \
  {                                                                                                     \
    (uint32_t)sizeof(folio_attention_args), 0, NULL, {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}},            \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, {NULL, 0, 0, FOLIO_LSE_BASE_E}, 0.0f, 0.0f, NULL, NULL, \
        FOLIO_SCALE_INIT, FOLIO_SCALE_INIT, NULL, 0, 1e4f, 1.0f, NULL, 0                                \
  }

/* ---- Functions ---- */

/* Every default of a structure, as its ..._INIT macro has them, into memory with any content. struct_size: its size
 * where the caller was compiled, sizeof(folio_...). */
FOLIO_C_API folio_status folio_attention_config_init(folio_attention_config* config,
                                                     size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_prepare_options_init(folio_prepare_options* options,
                                                    size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_kv_segment_init(folio_kv_segment* segment, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_batch_init(folio_batch* batch, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_segment_args_init(folio_segment_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_attention_args_init(folio_attention_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;

/* NULL is fine for both. */
FOLIO_C_API void folio_free_op(folio_op* op) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_plan_buffer(folio_plan_buffer* buffer) FOLIO_C_NOEXCEPT;

/* Picks the kernel for a configuration; once per group of layers. options NULL = the defaults. */
FOLIO_C_API folio_status folio_prepare(const folio_context* context, const folio_attention_config* config,
                                       const folio_prepare_options* options, folio_op** op) FOLIO_C_NOEXCEPT;
/* The chosen kernel's name; lives as long as the op. */
FOLIO_C_API folio_status folio_kernel_name(const folio_op* op, const char** name) FOLIO_C_NOEXCEPT;
/* 1 if fp8 is multiplied as it is, as folio_prepare_options.allow_fp8_mma permits; else 0. */
FOLIO_C_API folio_status folio_fp8_mma(const folio_op* op, int32_t* fp8_mma) FOLIO_C_NOEXCEPT;

/* More about an op. Output structures are filled up to the caller's struct_size. */
typedef struct folio_op_info {
  uint32_t struct_size;
  int32_t fp8_mma; /* as folio_fp8_mma */
  folio_dtype q;   /* these four: the configuration's, defaults resolved */
  folio_dtype kv;
  folio_dtype ragged_kv;
  folio_dtype out;
  folio_dtype p_dtype;     /* what probabilities are rounded to before they meet V */
  folio_dtype kv_dtype;    /* what keys and values of FOLIO_KV_FP8_DS_MLA are rounded to */
  const char* kernel_name; /* lives as long as the op */
} folio_op_info;
#define FOLIO_OP_INFO_INIT \
  { (uint32_t)sizeof(folio_op_info), 0, 0, 0, 0, 0, 0, 0, NULL }
FOLIO_C_API folio_status folio_op_info_init(folio_op_info* info, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_get_op_info(const folio_op* op, folio_op_info* info) FOLIO_C_NOEXCEPT;

/* Why each kernel of the context's device would or would not take a configuration, in order of preference. mix NULL:
 * not known. The result is freed by folio_free_explanation; its texts live as long. */
FOLIO_C_API folio_status folio_explain(const folio_context* context, const folio_attention_config* config,
                                       const folio_workload_mix* mix, folio_explanation** explanation) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_explanation_size(const folio_explanation* explanation,
                                                int32_t* kernels) FOLIO_C_NOEXCEPT;
/* available: 1 if this machine can run the kernel. refusal: "" if it takes the configuration. */
FOLIO_C_API folio_status folio_explanation_at(const folio_explanation* explanation, int32_t index, const char** name,
                                              int32_t* available, const char** refusal) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_explanation(folio_explanation* explanation) FOLIO_C_NOEXCEPT;

FOLIO_C_API folio_status folio_create_plan_buffer(const folio_op* op, folio_plan_buffer** buffer) FOLIO_C_NOEXCEPT;

/* Plans one step; lengths only. On failure *plan holds none that would run. Nor does the buffer, unless the call is
 * refused before planning begins: for NULL, a struct_size, an enumeration, another op's buffer, a stream on a CPU. */
FOLIO_C_API folio_status folio_make_plan(const folio_op* op, const folio_batch* batch, folio_plan_buffer* buffer,
                                         void* stream, folio_plan* plan) FOLIO_C_NOEXCEPT;
/* Refuses, once, if a plan made on the device since the last report met a request that it could not plan, or if a
 * captured run's check of page tables found a fault; the message names it. Waits for nothing. On a CPU: FOLIO_OK. */
FOLIO_C_API folio_status folio_check_plans(folio_plan_buffer* buffer) FOLIO_C_NOEXCEPT;

/* What a plan holds, for benchmarks and tests. O(work tiles); FOLIO_UNSUPPORTED for a plan made on the device. */
typedef struct folio_plan_summary {
  uint32_t struct_size;
  int32_t num_workers;
  int32_t num_work_tiles;
  int32_t num_partial_rows;
  int32_t num_combine_tiles;
  int32_t reserved; /* 0 */
  int64_t kv_tokens_read;
  int64_t qk_pairs;
} folio_plan_summary;
#define FOLIO_PLAN_SUMMARY_INIT \
  { (uint32_t)sizeof(folio_plan_summary), 0, 0, 0, 0, 0, 0, 0 }
FOLIO_C_API folio_status folio_plan_summary_init(folio_plan_summary* summary, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_get_plan_summary(const folio_plan* plan, folio_plan_summary* summary) FOLIO_C_NOEXCEPT;

/* Bytes of workspace for every plan of the op without shared segments, and for one plan; multiples of 256. */
FOLIO_C_API folio_status folio_workspace_size(const folio_op* op, size_t* bytes) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_plan_workspace_size(const folio_plan* plan, size_t* bytes) FOLIO_C_NOEXCEPT;
/* Once on fresh workspace memory, of folio_plan_workspace_size bytes of any plan or more; folio_run asks for its own
 * plan's. workspace: 256-byte aligned; NULL only with 0 bytes. */
FOLIO_C_API folio_status folio_init_workspace(const folio_op* op, void* workspace, size_t workspace_bytes,
                                              void* stream) FOLIO_C_NOEXCEPT;

/* Attention of one layer. stream: NULL on a CPU. */
FOLIO_C_API folio_status folio_run(const folio_plan* plan, const folio_attention_args* args, void* workspace,
                                   size_t workspace_bytes, void* stream) FOLIO_C_NOEXCEPT;
/* Checks every page id that folio_run would read; folio_run itself does not. */
FOLIO_C_API folio_status folio_validate(const folio_plan* plan, const folio_attention_args* args) FOLIO_C_NOEXCEPT;

/* The KV format and page size that run fastest here: what an engine should allocate. */
FOLIO_C_API folio_status folio_recommended_kv_format(const folio_attention_config* config, const folio_context* context,
                                                     folio_kv_format* format, int32_t* page_size) FOLIO_C_NOEXCEPT;
/* The same for an engine whose work is known. */
FOLIO_C_API folio_status folio_recommended_kv_format_for_mix(const folio_attention_config* config,
                                                             const folio_context* context,
                                                             const folio_workload_mix* mix, folio_kv_format* format,
                                                             int32_t* page_size) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_ATTENTION_H_ */
