/* Pools of slots: a model's keys and values, the slots' allocator, the requests' table; see docs/kvcache.md. Host
 * memory unless a comment says otherwise. No handle here is thread-safe, except for reading a folio_kv_pool.
 *
 * "Taken" is not an error: a call that finds too little free returns FOLIO_OK, changes nothing and sets *allocated to
 * 0. */
#ifndef FOLIO_C_POOLS_H_
#define FOLIO_C_POOLS_H_

#include "folio/c/cache.h"

FOLIO_C_BEGIN

/* ---- The keys and values of every layer ---- */

typedef struct folio_kv_pool folio_kv_pool;

typedef int32_t folio_kv_pool_layout;
enum {
  FOLIO_POOL_TOKEN_MAJOR = 0, /* [slots, KV heads, head dim]: pages of any size that divides the slots */
  FOLIO_POOL_HEAD_MAJOR = 1,  /* [pages, KV heads, page_size, head dim] */
  FOLIO_POOL_CPU_PACKED = 2   /* FOLIO_KV_CPU_PACKED */
};

typedef struct folio_kv_pool_config {
  uint32_t struct_size;
  int32_t num_slots; /* without the dummy page, slots 0 to page_size - 1; a multiple of page_size */
  int32_t page_size; /* 0 = 1 */
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_v;
  folio_dtype dtype; /* float32, float16, bfloat16 or fp8 */
  folio_kv_pool_layout layout;
  int32_t reserved; /* 0 */
} folio_kv_pool_config;
#define FOLIO_KV_POOL_CONFIG_INIT \
  { (uint32_t)sizeof(folio_kv_pool_config), 0, 1, 0, 0, 0, 0, FOLIO_DTYPE_BFLOAT16, FOLIO_POOL_TOKEN_MAJOR, 0 }
FOLIO_C_API folio_status folio_kv_pool_config_init(folio_kv_pool_config* config, size_t struct_size) FOLIO_C_NOEXCEPT;

/* Bytes of one layer's keys and values, the dummy page's included. */
FOLIO_C_API folio_status folio_kv_pool_bytes_per_layer(const folio_kv_pool_config* config, size_t* k_bytes,
                                                       size_t* v_bytes) FOLIO_C_NOEXCEPT;
/* A pool with host memory of its own, zeroed. */
FOLIO_C_API folio_status folio_create_kv_pool(const folio_kv_pool_config* config,
                                              folio_kv_pool** pool) FOLIO_C_NOEXCEPT;
/* A pool over the caller's memory, on whichever device: an address a layer in k and v [num_layers]. The memory outlives
 * the pool; the arrays of addresses are copied. */
FOLIO_C_API folio_status folio_create_kv_pool_over(const folio_kv_pool_config* config, void* const* k, void* const* v,
                                                   folio_kv_pool** pool) FOLIO_C_NOEXCEPT;
/* NULL is fine. Backends and views of it must not be used any more. */
FOLIO_C_API void folio_free_kv_pool(folio_kv_pool* pool) FOLIO_C_NOEXCEPT;

/* The layer as pages of page_size tokens; 0 = the pool's. Borrowed from the pool. */
FOLIO_C_API folio_status folio_kv_pool_view(const folio_kv_pool* pool, int32_t layer, int32_t page_size,
                                            folio_kv_cache_view* view) FOLIO_C_NOEXCEPT;
/* The layer as [num_slots + page_size, num_kv_heads, head_dim]; token-major pools only. Borrowed from the pool. */
FOLIO_C_API folio_status folio_kv_pool_buffers(const folio_kv_pool* pool, int32_t layer, folio_tensor_view* k,
                                               folio_tensor_view* v) FOLIO_C_NOEXCEPT;
/* Scales of an fp8 layer, per tensor or head; arrays are borrowed. */
FOLIO_C_API folio_status folio_kv_pool_set_scales(folio_kv_pool* pool, int32_t layer, const folio_scale* k,
                                                  const folio_scale* v) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_kv_pool_scales(const folio_kv_pool* pool, int32_t layer, folio_scale* k,
                                              folio_scale* v) FOLIO_C_NOEXCEPT;
/* Stores token t of k and v in slots[t] of the layer, by folio_write_kv_cache. k is [..., num_kv_heads, head_dim_qk] or
 * [..., num_kv_heads * head_dim_qk], num_slots tokens in all; v likewise. */
FOLIO_C_API folio_status folio_kv_pool_write(const folio_kv_pool* pool, const folio_context* context, int32_t layer,
                                             const folio_const_tensor_view* k, const folio_const_tensor_view* v,
                                             const int64_t* slots, int64_t num_slots, void* stream) FOLIO_C_NOEXCEPT;

/* ---- Which slots are free ---- */

typedef struct folio_token_allocator folio_token_allocator;

/* num_slots: a multiple of page_size. The slots handed out are page_size to num_slots + page_size - 1. */
FOLIO_C_API folio_status folio_create_token_allocator(int32_t num_slots, int32_t page_size,
                                                      folio_token_allocator** allocator) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_token_allocator(folio_token_allocator* allocator) FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Slots that are free; those of an open group do not count. */
FOLIO_C_API folio_status folio_token_allocator_available(const folio_token_allocator* allocator,
                                                         int32_t* slots) FOLIO_C_NOEXCEPT;
/* Fills slots [num_slots] from fresh pages. */
FOLIO_C_API folio_status folio_token_allocator_alloc(folio_token_allocator* allocator, int32_t* slots,
                                                     int64_t num_slots, int32_t* allocated) FOLIO_C_NOEXCEPT;
/* Slots of requests that grow from prefix_lens[r] to seq_lens[r] tokens, in order within pages: num_slots is the sum of
 * the differences; last_slots[r] is the slot of token prefix_lens[r] - 1, not read where that is 0. */
FOLIO_C_API folio_status folio_token_allocator_alloc_extend(folio_token_allocator* allocator,
                                                            const int32_t* prefix_lens, const int32_t* seq_lens,
                                                            const int32_t* last_slots, int32_t num_requests,
                                                            int32_t* slots, int64_t num_slots,
                                                            int32_t* allocated) FOLIO_C_NOEXCEPT;
/* The same by one token a request, which seq_lens count: slots [num_requests]. */
FOLIO_C_API folio_status folio_token_allocator_alloc_decode(folio_token_allocator* allocator, const int32_t* seq_lens,
                                                            const int32_t* last_slots, int32_t num_requests,
                                                            int32_t* slots, int32_t* allocated) FOLIO_C_NOEXCEPT;
/* Gives back the pages of the slots. A slot that is not held is refused, and nothing changes. */
FOLIO_C_API folio_status folio_token_allocator_free(folio_token_allocator* allocator, const int32_t* slots,
                                                    int64_t num_slots) FOLIO_C_NOEXCEPT;
/* From open to close, pages that are freed are held back. One group at a time. */
FOLIO_C_API folio_status folio_token_allocator_open_group(folio_token_allocator* allocator) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_token_allocator_close_group(folio_token_allocator* allocator) FOLIO_C_NOEXCEPT;
/* Everything is free again. Refused while a group is open. */
FOLIO_C_API folio_status folio_token_allocator_clear(folio_token_allocator* allocator) FOLIO_C_NOEXCEPT;

/* ---- Which slot each token of a request lies in ---- */

typedef struct folio_req_to_token_pool folio_req_to_token_pool;

/* max_reqs rows, 1 to max_reqs, and the dummy row 0, which has slot 0 throughout. */
FOLIO_C_API folio_status folio_create_req_to_token_pool(int32_t max_reqs, int32_t max_context_len,
                                                        folio_req_to_token_pool** pool) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_req_to_token_pool(folio_req_to_token_pool* pool) FOLIO_C_NOEXCEPT; /* NULL is fine */
FOLIO_C_API folio_status folio_req_to_token_pool_available(const folio_req_to_token_pool* pool,
                                                           int32_t* rows) FOLIO_C_NOEXCEPT;
/* Fills rows [num_rows] with those that have been free longest. */
FOLIO_C_API folio_status folio_req_to_token_pool_alloc(folio_req_to_token_pool* pool, int32_t* rows, int32_t num_rows,
                                                       int32_t* allocated) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_req_to_token_pool_free_row(folio_req_to_token_pool* pool, int32_t row) FOLIO_C_NOEXCEPT;
/* Writes slots at positions first, first + 1, ... of a held row. */
FOLIO_C_API folio_status folio_req_to_token_pool_write(folio_req_to_token_pool* pool, int32_t row, int32_t first,
                                                       const int32_t* slots, int64_t num_slots) FOLIO_C_NOEXCEPT;
/* The rows as a dense page table with pages of one token. Borrowed from the pool; later writes show in it. */
FOLIO_C_API folio_status folio_req_to_token_pool_table(const folio_req_to_token_pool* pool,
                                                       folio_page_table_view* table) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_req_to_token_pool_clear(folio_req_to_token_pool* pool) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_POOLS_H_ */
