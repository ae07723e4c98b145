/* The C interface of Folio: C11 and C++. See folio/attention.hpp for what the functions do in full.
 *
 * Every function that can fail returns a folio_status; on failure folio_last_error() says why, output handles are set
 * to NULL and other outputs are left as they are. No exception crosses this interface. Null is refused for every
 * pointer unless its comment says otherwise.
 *
 * Structures that may grow start with struct_size. The FOLIO_..._INIT macros set it, with every default; so do the
 * folio_..._init functions, for languages without macros. Memory of zeros is no such structure: struct_size 0 is
 * refused. Fields of a later version have 0 as their default. A library older than the header refuses fields it does
 * not know, unless they are 0. Structures without struct_size never change; in them zero is the default or is refused.
 *
 * Handles are freed once each, in any order. Contexts and ops may be used from several threads at once; a plan buffer
 * from one at a time. Memory given to a call is borrowed: on a CPU until the call returns. */
#ifndef FOLIO_C_FOLIO_H_
#define FOLIO_C_FOLIO_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define FOLIO_C_API __attribute__((visibility("default")))
#else
#define FOLIO_C_API
#endif

#ifdef __cplusplus
#define FOLIO_C_NOEXCEPT noexcept
extern "C" {
#else
#define FOLIO_C_NOEXCEPT
#endif

/* ---- Enumerations: 32-bit integers; values never change ---- */

typedef int32_t folio_status;
enum {
  FOLIO_OK = 0,
  FOLIO_INVALID_ARGUMENT = 1, /* a value that no configuration accepts */
  FOLIO_UNSUPPORTED = 2,      /* well-formed, but no kernel here offers it */
  FOLIO_UNAVAILABLE = 3,      /* offered in general, absent on this machine or in this build */
  FOLIO_OUT_OF_MEMORY = 4,
  FOLIO_WORKSPACE_TOO_SMALL = 5,
  FOLIO_STALE_PLAN = 6, /* its buffer has been planned into again */
  FOLIO_DEVICE_ERROR = 7,
  FOLIO_INTERNAL = 8 /* a bug in Folio */
};

typedef int32_t folio_dtype;
enum {
  FOLIO_DTYPE_UNSET = 0, /* where a default exists, the field's comment names it */
  FOLIO_DTYPE_FLOAT32 = 1,
  FOLIO_DTYPE_FLOAT16 = 2,
  FOLIO_DTYPE_BFLOAT16 = 3,
  FOLIO_DTYPE_FLOAT8_E4M3 = 4,
  FOLIO_DTYPE_FLOAT8_E5M2 = 5,
  FOLIO_DTYPE_FLOAT4_E2M1X2 = 6,
  FOLIO_DTYPE_INT8 = 7 /* caches alone; see folio_token_scales */
};

typedef int32_t folio_kv_format;
enum { FOLIO_KV_STRIDED = 0, FOLIO_KV_CPU_PACKED = 1, FOLIO_KV_FP8_DS_MLA = 2 };

typedef int32_t folio_mask_kind;
enum { FOLIO_MASK_NONE = 0, FOLIO_MASK_CAUSAL = 1, FOLIO_MASK_CUSTOM = 2 };

typedef int32_t folio_determinism;
enum {
  FOLIO_DETERMINISM_NONE = 0,
  FOLIO_DETERMINISM_RUN_TO_RUN = 1,
  FOLIO_DETERMINISM_BATCH_INVARIANT = 2,
  FOLIO_DETERMINISM_SCHEDULE_INVARIANT = 3
};

/* Bits of folio_attention_config.features. */
enum {
  FOLIO_FEATURE_SOFT_CAP = 1 << 0,
  FOLIO_FEATURE_ALIBI = 1 << 1,
  FOLIO_FEATURE_SINKS = 1 << 2,
  FOLIO_FEATURE_ROPE_LLAMA = 1 << 3,
  FOLIO_FEATURE_SPANS = 1 << 4,          /* folio_batch.spans; FOLIO_MASK_CAUSAL only */
  FOLIO_FEATURE_REQUEST_CAUSAL = 1 << 5, /* folio_batch.causal; FOLIO_MASK_CAUSAL only */
  FOLIO_FEATURE_KV_START = 1 << 6        /* folio_batch.kv_start */
};

typedef int32_t folio_kv_source;
enum { FOLIO_KV_PAGED = 0, FOLIO_KV_RAGGED = 1 };

typedef int32_t folio_segment_mask;
enum { FOLIO_SEGMENT_AS_CONFIG = 0, FOLIO_SEGMENT_ALL_VISIBLE = 1 };

typedef int32_t folio_custom_mask_scope;
enum { FOLIO_CUSTOM_MASK_ALL = 0, FOLIO_CUSTOM_MASK_TAIL = 1 };

typedef int32_t folio_page_table_kind;
enum { FOLIO_TABLE_CSR = 0, FOLIO_TABLE_DENSE = 1 };

typedef int32_t folio_scale_granularity;
enum {
  FOLIO_SCALE_PER_TENSOR = 0,
  FOLIO_SCALE_PER_HEAD = 1,
  FOLIO_SCALE_PER_REQUEST = 2,
  FOLIO_SCALE_PER_REQUEST_AND_HEAD = 3
};

typedef int32_t folio_lse_base;
enum { FOLIO_LSE_BASE_E = 0, FOLIO_LSE_BASE_2 = 1 };

typedef int32_t folio_where;
enum { FOLIO_ON_HOST = 0, FOLIO_ON_DEVICE = 1 };

/* Whether the threads of Folio's own pool stay on one CPU each; see folio::ThreadPinning. */
typedef int32_t folio_thread_pinning;
enum { FOLIO_PINNING_AUTOMATIC = 0, FOLIO_PINNING_PINNED = 1, FOLIO_PINNING_UNPINNED = 2 };

/* ---- Views: plain structures that never change ---- */

enum { FOLIO_MAX_RANK = 5 };

/* A strided tensor, borrowed; strides in elements. Only the first `rank` sizes and strides count. */
typedef struct folio_tensor_view {
  void* data;
  folio_dtype dtype;
  int32_t rank;
  int64_t shape[FOLIO_MAX_RANK];
  int64_t strides[FOLIO_MAX_RANK];
} folio_tensor_view;

typedef struct folio_const_tensor_view {
  const void* data;
  folio_dtype dtype;
  int32_t rank;
  int64_t shape[FOLIO_MAX_RANK];
  int64_t strides[FOLIO_MAX_RANK];
} folio_const_tensor_view;

/* Element strides of the K or V half of a cache. */
typedef struct folio_kv_strides {
  int64_t page;
  int64_t token; /* FOLIO_KV_CPU_PACKED: from a token pair to the next, in V */
  int64_t head;
} folio_kv_strides;

/* One layer's paged cache, borrowed; folio_make_..._view fills it. */
typedef struct folio_kv_cache_view {
  folio_kv_format format;
  folio_dtype dtype;
  void* k;
  void* v;
  int64_t num_pages;
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_v;
  folio_kv_strides k_strides;
  folio_kv_strides v_strides;
} folio_kv_cache_view;

/* The scales of an int8 cache's keys or values, float32, one a token and KV head; strides in elements. A view has no
 * place for them: they stand beside it in the arguments of calls. See folio::TokenScales. */
typedef struct folio_token_scales {
  float* data;
  folio_kv_strides strides;
} folio_token_scales;
#define FOLIO_TOKEN_SCALES_INIT \
  {                             \
    NULL, {                     \
      0, 0, 0                   \
    }                           \
  }

/* The sizes of one layer's paged cache. */
typedef struct folio_kv_cache_shape {
  int64_t num_pages;
  int32_t page_size;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_v;
  folio_dtype dtype;
} folio_kv_cache_shape;

/* Keys and values outside pages: [tokens, num_kv_heads, head_dim]; row r's tokens are [indptr[r], indptr[r + 1]). */
typedef struct folio_ragged_kv_view {
  folio_const_tensor_view k;
  folio_const_tensor_view v;
  const int32_t* indptr;
} folio_ragged_kv_view;

typedef struct folio_page_table_view {
  folio_page_table_kind kind;
  const int32_t* indices; /* CSR: [num_indices]; dense: [num_rows, row_stride] */
  int64_t num_indices;    /* CSR: entries in `indices`; dense: entries addressable from `indices` */
  const int32_t* indptr;  /* CSR: [num_rows + 1] */
  int64_t row_stride;     /* dense: entries from a row to the next */
  int32_t first_column;   /* dense: page j of row r is indices[r * row_stride + first_column + j] */
  int32_t num_rows;
} folio_page_table_view;

/* Stored values times the scale are the real ones: `value`, or the array `data` where given (then value is 1 or 0). */
typedef struct folio_scale {
  float value; /* 0 = 1 */
  const float* data;
  folio_scale_granularity granularity;
  int64_t request_stride; /* FOLIO_SCALE_PER_REQUEST_AND_HEAD only */
} folio_scale;
#define FOLIO_SCALE_INIT \
  { 1.0f, NULL, FOLIO_SCALE_PER_TENSOR, 0 }

/* Log-sum-exp of row (t, h) at data[t * token_stride + h * head_stride]; data NULL: not wanted. */
typedef struct folio_lse_view {
  float* data;
  int64_t token_stride;
  int64_t head_stride;
  folio_lse_base base;
} folio_lse_view;

/* A shard of a segment over ranks: token g lies on rank (g / interleave) % world. All zero: not divided. */
typedef struct folio_kv_shard {
  int32_t world;
  int32_t rank;
  int32_t interleave;
} folio_kv_shard;
#define FOLIO_KV_SHARD_INIT \
  { 1, 0, 1 }

typedef void (*folio_parallel_body)(void* context, int64_t index) FOLIO_C_NOEXCEPT;

/* The engine's threads: parallel_for calls body(context, i) once for every i in [0, n), in any order, on any threads,
 * and returns when all calls have. parallel_for NULL: Folio's own pool; the other fields are then 0. */
typedef struct folio_executor {
  void* self;
  int32_t concurrency; /* calls that make progress at once, at least 1 */
  void (*parallel_for)(void* self, int64_t n, folio_parallel_body body, void* context);
} folio_executor;

/* A plan: valid until its buffer is planned into again (then FOLIO_STALE_PLAN) or freed (then not to be used). Not to
 * be looked into. Freely copied. */
typedef struct folio_plan {
  const void* buffer;
  uint64_t generation;
} folio_plan;

/* The tokens of an engine's work, in any unit: those of decode, where a request has one token a step, and those of
 * prefill. All zero: not known; see folio::WorkloadMix. */
typedef struct folio_workload_mix {
  double decode_tokens;
  double prefill_tokens;
} folio_workload_mix;

/* ---- Structures that may grow ---- */

typedef struct folio_context_options {
  uint32_t struct_size;
  int32_t num_threads;          /* 0 = as many as the process may run on; at most 1024; 0 with an executor */
  folio_executor executor;      /* must outlive the context and everything made with it */
  const char* force_kernel;     /* NULL or "": none */
  int32_t allow_fp8_mma;        /* not 0: of every op; as folio_prepare_options.allow_fp8_mma, either permits */
  int32_t validate_tables;      /* not 0: runs check page tables first; see folio::ContextOptions::validate_tables */
  folio_thread_pinning pinning; /* of Folio's own pool; 0 with an executor and on a GPU */
  int32_t reserved;             /* 0 */
} folio_context_options;
#define FOLIO_CONTEXT_OPTIONS_INIT \
  { (uint32_t)sizeof(folio_context_options), 0, {NULL, 0, NULL}, NULL, 0, 0, FOLIO_PINNING_AUTOMATIC, 0 }

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
} folio_prepare_options;
#define FOLIO_PREPARE_OPTIONS_INIT                                           \
  {                                                                          \
    (uint32_t)sizeof(folio_prepare_options), 0, NULL, 0, 0, 0, 0, 0, 0, 0, { \
      0, 0                                                                   \
    }                                                                        \
  }

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
} folio_attention_args;
#define FOLIO_ATTENTION_ARGS_INIT                                                                       \
  {                                                                                                     \
    (uint32_t)sizeof(folio_attention_args), 0, NULL, {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}},            \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, {NULL, 0, 0, FOLIO_LSE_BASE_E}, 0.0f, 0.0f, NULL, NULL, \
        FOLIO_SCALE_INIT, FOLIO_SCALE_INIT, NULL, 0, 1e4f, 1.0f                                         \
  }

/* New tokens for a paged cache: token i goes to page slot / page_size, offset slot % page_size. */
typedef struct folio_cache_write_args {
  uint32_t struct_size;
  folio_const_tensor_view k;   /* [>= num_slots, num_kv_heads, head_dim_qk] */
  folio_const_tensor_view v;   /* [>= num_slots, num_kv_heads, head_dim_v] */
  const int64_t* slot_mapping; /* [num_slots]; negative: skipped. NULL only with num_slots 0 */
  int64_t num_slots;
  folio_kv_cache_view cache;
  folio_scale k_scale;
  folio_scale v_scale;
  folio_token_scales k_token_scales; /* int8 caches, which need both and get them written; zeros for others */
  folio_token_scales v_token_scales;
} folio_cache_write_args;
#define FOLIO_CACHE_WRITE_ARGS_INIT                                                                               \
  {                                                                                                               \
    (uint32_t)sizeof(folio_cache_write_args), {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}},                             \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, NULL, 0,                                                          \
        {FOLIO_KV_STRIDED, FOLIO_DTYPE_UNSET, NULL, NULL, 0, 0, 0, 0, 0, {0, 0, 0}, {0, 0, 0}}, FOLIO_SCALE_INIT, \
        FOLIO_SCALE_INIT, FOLIO_TOKEN_SCALES_INIT, FOLIO_TOKEN_SCALES_INIT                                        \
  }

/* ---- Handles ---- */

typedef struct folio_context folio_context;         /* a device with its executor */
typedef struct folio_op folio_op;                   /* a kernel chosen for a configuration */
typedef struct folio_plan_buffer folio_plan_buffer; /* memory that plans are made into */

/* ---- Functions ---- */

/* Every default of a structure, as its ..._INIT macro has them, into memory with any content. struct_size: its size
 * where the caller was compiled, sizeof(folio_...). */
FOLIO_C_API folio_status folio_context_options_init(folio_context_options* options,
                                                    size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_attention_config_init(folio_attention_config* config,
                                                     size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_prepare_options_init(folio_prepare_options* options,
                                                    size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_kv_segment_init(folio_kv_segment* segment, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_batch_init(folio_batch* batch, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_segment_args_init(folio_segment_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_attention_args_init(folio_attention_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_cache_write_args_init(folio_cache_write_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;
/* These two never grow. */
FOLIO_C_API folio_status folio_scale_init(folio_scale* scale) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_kv_shard_init(folio_kv_shard* shard) FOLIO_C_NOEXCEPT;

/* The linked library's version, "major.minor.patch". Static storage. */
FOLIO_C_API const char* folio_version(void) FOLIO_C_NOEXCEPT;

/* Why the last failing call on this thread failed; "" before any. Valid until this thread's next failing call. */
FOLIO_C_API const char* folio_last_error(void) FOLIO_C_NOEXCEPT;

/* A CPU context; options NULL = the defaults. */
FOLIO_C_API folio_status folio_create_cpu_context(const folio_context_options* options,
                                                  folio_context** context) FOLIO_C_NOEXCEPT;
/* A CUDA context: FOLIO_UNAVAILABLE where this build has no CUDA kernels or there is no such device. */
FOLIO_C_API folio_status folio_create_cuda_context(int32_t index, const folio_context_options* options,
                                                   folio_context** context) FOLIO_C_NOEXCEPT;
/* NULL is fine for all three. Ops and buffers keep what they need of a freed context; executors must live on. */
FOLIO_C_API void folio_free_context(folio_context* context) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_op(folio_op* op) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_plan_buffer(folio_plan_buffer* buffer) FOLIO_C_NOEXCEPT;

/* Picks the kernel for a configuration; once per group of layers. options NULL = the defaults. */
FOLIO_C_API folio_status folio_prepare(const folio_context* context, const folio_attention_config* config,
                                       const folio_prepare_options* options, folio_op** op) FOLIO_C_NOEXCEPT;
/* The chosen kernel's name; lives as long as the op. */
FOLIO_C_API folio_status folio_kernel_name(const folio_op* op, const char** name) FOLIO_C_NOEXCEPT;
/* 1 if fp8 is multiplied as it is, as folio_prepare_options.allow_fp8_mma permits; else 0. */
FOLIO_C_API folio_status folio_fp8_mma(const folio_op* op, int32_t* fp8_mma) FOLIO_C_NOEXCEPT;

FOLIO_C_API folio_status folio_create_plan_buffer(const folio_op* op, folio_plan_buffer** buffer) FOLIO_C_NOEXCEPT;

/* Plans one step; lengths only. On failure *plan holds none that would run. Nor does the buffer, unless the call is
 * refused before planning begins: for NULL, a struct_size, an enumeration, another op's buffer, a stream on a CPU. */
FOLIO_C_API folio_status folio_make_plan(const folio_op* op, const folio_batch* batch, folio_plan_buffer* buffer,
                                         void* stream, folio_plan* plan) FOLIO_C_NOEXCEPT;
/* Refuses, once, if a plan made on the device since the last report met a request that it could not plan, or if a
 * captured run's check of page tables found a fault; the message names it. Waits for nothing. On a CPU: FOLIO_OK. */
FOLIO_C_API folio_status folio_check_plans(folio_plan_buffer* buffer) FOLIO_C_NOEXCEPT;

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

/* Elements of the K and the V half of a cache, packed without gaps. */
FOLIO_C_API folio_status folio_kv_cache_elements(const folio_kv_cache_shape* shape, int64_t* k_elements,
                                                 int64_t* v_elements) FOLIO_C_NOEXCEPT;
/* Views over packed halves: [page][token][head][dim], [page][head][token][dim], and the CPU-packed format. k and v may
 * be NULL where there is nothing to point at yet. Views of int8 caches are without their token scales. */
FOLIO_C_API folio_status folio_make_nhd_view(const folio_kv_cache_shape* shape, void* k, void* v,
                                             folio_kv_cache_view* view) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_make_hnd_view(const folio_kv_cache_shape* shape, void* k, void* v,
                                             folio_kv_cache_view* view) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_make_cpu_packed_view(const folio_kv_cache_shape* shape, void* k, void* v,
                                                    folio_kv_cache_view* view) FOLIO_C_NOEXCEPT;
/* A view over rows of FOLIO_KV_FP8_DS_MLA, [num_pages][page_size][656 bytes], at a multiple of 16 bytes; see
 * folio::make_fp8_ds_mla_view. */
FOLIO_C_API folio_status folio_make_fp8_ds_mla_view(int64_t num_pages, int32_t page_size, void* data,
                                                    folio_kv_cache_view* view) FOLIO_C_NOEXCEPT;
/* The KV format and page size that run fastest here: what an engine should allocate. */
FOLIO_C_API folio_status folio_recommended_kv_format(const folio_attention_config* config, const folio_context* context,
                                                     folio_kv_format* format, int32_t* page_size) FOLIO_C_NOEXCEPT;
/* The same for an engine whose work is known. */
FOLIO_C_API folio_status folio_recommended_kv_format_for_mix(const folio_attention_config* config,
                                                             const folio_context* context,
                                                             const folio_workload_mix* mix, folio_kv_format* format,
                                                             int32_t* page_size) FOLIO_C_NOEXCEPT;
/* Writes tokens into their slots; all slots are checked before anything is written. */
FOLIO_C_API folio_status folio_write_kv_cache(const folio_context* context, const folio_cache_write_args* args,
                                              void* stream) FOLIO_C_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* FOLIO_C_FOLIO_H_ */
