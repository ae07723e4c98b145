/* Codes, enumerations and views that every part of the C interface takes. */
#ifndef FOLIO_C_TYPES_H_
#define FOLIO_C_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define FOLIO_C_API __attribute__((visibility("default")))
#else
#define FOLIO_C_API
#endif

#ifdef __cplusplus
#define FOLIO_C_NOEXCEPT noexcept
#define FOLIO_C_BEGIN extern "C" {
#define FOLIO_C_END }
#else
#define FOLIO_C_NOEXCEPT
#define FOLIO_C_BEGIN
#define FOLIO_C_END
#endif

FOLIO_C_BEGIN

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

/* "ok", "invalid argument", "unsupported", ...; "unknown status" for other values. Static storage. */
FOLIO_C_API const char* folio_status_name(folio_status status) FOLIO_C_NOEXCEPT;

/* Why the last failing call on this thread failed; "" before any. Valid until this thread's next failing call. */
FOLIO_C_API const char* folio_last_error(void) FOLIO_C_NOEXCEPT;
/* Sets that text, for libraries over this one whose callers read folio_last_error too. NULL = "". Copied. */
FOLIO_C_API void folio_set_last_error(const char* message) FOLIO_C_NOEXCEPT;

/* The linked library's version, "major.minor.patch". Static storage. */
FOLIO_C_API const char* folio_version(void) FOLIO_C_NOEXCEPT;

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

/* "float32", "bfloat16", ...; "invalid" for other values. Static storage. */
FOLIO_C_API const char* folio_dtype_name(folio_dtype dtype) FOLIO_C_NOEXCEPT;
/* Bytes of one element; FOLIO_DTYPE_FLOAT4_E2M1X2 counts as one byte. 0 for FOLIO_DTYPE_UNSET and other values. */
FOLIO_C_API int32_t folio_dtype_size(folio_dtype dtype) FOLIO_C_NOEXCEPT;

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

/* A view of packed row-major memory: `rank` sizes of `shape`, 0 to FOLIO_MAX_RANK. */
FOLIO_C_API folio_status folio_make_tensor_view(void* data, folio_dtype dtype, int32_t rank, const int64_t* shape,
                                                folio_tensor_view* view) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_make_const_tensor_view(const void* data, folio_dtype dtype, int32_t rank,
                                                      const int64_t* shape,
                                                      folio_const_tensor_view* view) FOLIO_C_NOEXCEPT;

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

/* A cache with its token scales, for calls that move pages. Scales are zeros but for int8 caches, which need both. */
typedef struct folio_kv_cache {
  folio_kv_cache_view view;
  folio_token_scales k_token_scales;
  folio_token_scales v_token_scales;
} folio_kv_cache;

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

/* Structures that never change, where zeros are not what their ..._INIT macro has, or for symmetry with it. */
FOLIO_C_API folio_status folio_scale_init(folio_scale* scale) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_kv_shard_init(folio_kv_shard* shard) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_token_scales_init(folio_token_scales* scales) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_TYPES_H_ */
