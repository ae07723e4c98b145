/* Paged KV caches: views, writes, copies, conversions, gathers; see folio/kv_cache.hpp.
 *
 * On a GPU all memory is the device's, calls are enqueued on `stream` and may be captured, and ids are read when
 * kernels run: what is out of range is left out and makes *status 1 (NULL = not wanted), which nothing sets back. On a
 * CPU stream and status are NULL, and ids are checked before anything is written. */
#ifndef FOLIO_C_CACHE_H_
#define FOLIO_C_CACHE_H_

#include "folio/c/context.h"

FOLIO_C_BEGIN

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
  int32_t* status; /* GPUs only, in device memory: becomes 1 if a slot lies beyond the cache. NULL = not wanted */
} folio_cache_write_args;
#define FOLIO_CACHE_WRITE_ARGS_INIT                                                                               \
  {                                                                                                               \
    (uint32_t)sizeof(folio_cache_write_args), {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}},                             \
        {NULL, FOLIO_DTYPE_UNSET, 0, {0}, {0}}, NULL, 0,                                                          \
        {FOLIO_KV_STRIDED, FOLIO_DTYPE_UNSET, NULL, NULL, 0, 0, 0, 0, 0, {0, 0, 0}, {0, 0, 0}}, FOLIO_SCALE_INIT, \
        FOLIO_SCALE_INIT, FOLIO_TOKEN_SCALES_INIT, FOLIO_TOKEN_SCALES_INIT, NULL                                  \
  }
FOLIO_C_API folio_status folio_cache_write_args_init(folio_cache_write_args* args, size_t struct_size) FOLIO_C_NOEXCEPT;

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
/* The same with token scales, which int8 caches need and others do not have (NULL): packed as the halves are. Each is
 * folio_token_scale_elements long. */
FOLIO_C_API folio_status folio_make_nhd_cache(const folio_kv_cache_shape* shape, void* k, void* v,
                                              float* k_token_scales, float* v_token_scales,
                                              folio_kv_cache* cache) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_make_hnd_cache(const folio_kv_cache_shape* shape, void* k, void* v,
                                              float* k_token_scales, float* v_token_scales,
                                              folio_kv_cache* cache) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_make_cpu_packed_cache(const folio_kv_cache_shape* shape, void* k, void* v,
                                                     float* k_token_scales, float* v_token_scales,
                                                     folio_kv_cache* cache) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_token_scale_elements(const folio_kv_cache_shape* shape,
                                                    int64_t* elements) FOLIO_C_NOEXCEPT;
/* Checks a cache on its own: sizes, dtype, strides, pointers, token scales. O(1). */
FOLIO_C_API folio_status folio_validate_kv_cache(const folio_kv_cache* cache) FOLIO_C_NOEXCEPT;

/* Writes tokens into their slots; all slots are checked before anything is written. */
FOLIO_C_API folio_status folio_write_kv_cache(const folio_context* context, const folio_cache_write_args* args,
                                              void* stream) FOLIO_C_NOEXCEPT;

/* Copies whole pages within or between caches of equal sizes, format and dtype: page source[i] to destination[i].
 * Destinations are distinct and disjoint from sources of the same cache. */
FOLIO_C_API folio_status folio_copy_pages(const folio_context* context, const folio_kv_cache* from,
                                          const folio_kv_cache* to, const int32_t* source, const int32_t* destination,
                                          int64_t num_pages, void* stream, int32_t* status) FOLIO_C_NOEXCEPT;

/* Scales of a conversion; NULL members are 1. */
typedef struct folio_cache_convert_scales {
  const folio_scale* from_k;
  const folio_scale* from_v;
  const folio_scale* to_k;
  const folio_scale* to_v;
} folio_cache_convert_scales;
/* Converts pages to another format or dtype: page source[i] of `from` becomes destination[i] of `to`. scales NULL: all
 * are 1. */
FOLIO_C_API folio_status folio_convert_pages(const folio_context* context, const folio_kv_cache* from,
                                             const folio_kv_cache* to, const int32_t* source,
                                             const int32_t* destination, int64_t num_pages,
                                             const folio_cache_convert_scales* scales, void* stream,
                                             int32_t* status) FOLIO_C_NOEXCEPT;

/* Gathers the first kv_len[r] tokens of each of num_rows rows, one row after the other, into k_out [sum of kv_len,
 * num_kv_heads, head_dim_qk] and v_out, converted to their dtype. k_scale, v_scale NULL: 1. */
FOLIO_C_API folio_status folio_gather_kv(const folio_context* context, const folio_kv_cache* cache,
                                         const folio_page_table_view* table, const int32_t* kv_len, int32_t num_rows,
                                         const folio_tensor_view* k_out, const folio_tensor_view* v_out,
                                         const folio_scale* k_scale, const folio_scale* v_scale, void* stream,
                                         int32_t* status) FOLIO_C_NOEXCEPT;

/* Pages of a cache that folio_dequantize_pages fills, page 0 included, which stays unwritten. Lengths on the host. */
FOLIO_C_API folio_status folio_num_dequantized_pages(const int32_t* seq_lens, int32_t num_requests, int32_t page_size,
                                                     int64_t* pages) FOLIO_C_NOEXCEPT;
/* Copies the fp8 pages that requests use into a 16-bit cache. table: dense, a row a request. new_table: [num_requests *
 * columns], pages numbered from 1, 0 beyond a request's. */
FOLIO_C_API folio_status folio_dequantize_pages(const folio_context* context, const folio_kv_cache* from,
                                                const folio_page_table_view* table, int32_t columns,
                                                const int32_t* seq_lens, int32_t num_requests, float k_scale,
                                                float v_scale, const folio_kv_cache* to, int32_t* new_table,
                                                void* stream, int32_t* status) FOLIO_C_NOEXCEPT;

/* k[t, h] = k_nope[t, h] followed by k_pe[t, 0]: keys of multi-head latent attention. */
FOLIO_C_API folio_status folio_concat_mla_k(const folio_context* context, const folio_tensor_view* k,
                                            const folio_const_tensor_view* k_nope, const folio_const_tensor_view* k_pe,
                                            void* stream) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_CACHE_H_ */
