/* The prefix cache: a radix tree over token sequences whose keys and values are in the pool, and the allocator of
 * models with windowed layers; see folio/kvcache/prefix_cache.hpp for the life of a request. One thread at a time,
 * locks included. */
#ifndef FOLIO_C_PREFIX_CACHE_H_
#define FOLIO_C_PREFIX_CACHE_H_

#include "folio/c/pools.h"

FOLIO_C_BEGIN

/* ---- What calls want done with slots ---- */

typedef struct folio_slot_changes folio_slot_changes;

/* The window copy of slot `from` becomes that of slot `to`. */
typedef struct folio_slot_move {
  int32_t from;
  int32_t to;
} folio_slot_move;

/* An empty list. Calls below append to it; its owner does what it says and clears it. */
FOLIO_C_API folio_status folio_create_slot_changes(folio_slot_changes** changes) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_slot_changes(folio_slot_changes* changes) FOLIO_C_NOEXCEPT; /* NULL is fine */
FOLIO_C_API folio_status folio_slot_changes_clear(folio_slot_changes* changes) FOLIO_C_NOEXCEPT;
/* Slots that are nobody's any more. These three arrays live until `changes` is appended to, cleared or freed. */
FOLIO_C_API folio_status folio_slot_changes_freed(const folio_slot_changes* changes, const int32_t** slots,
                                                  int64_t* num_slots) FOLIO_C_NOEXCEPT;
/* Windowed caches only: slots that lose their window copies and stay held; copies that move, which comes first. */
FOLIO_C_API folio_status folio_slot_changes_window_freed(const folio_slot_changes* changes, const int32_t** slots,
                                                         int64_t* num_slots) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_slot_changes_moved(const folio_slot_changes* changes, const folio_slot_move** moves,
                                                  int64_t* num_moves) FOLIO_C_NOEXCEPT;

/* ---- The tree ---- */

typedef struct folio_prefix_cache folio_prefix_cache;
typedef struct folio_prefix_lock folio_prefix_lock;

typedef struct folio_prefix_cache_options {
  uint32_t struct_size;
  int32_t page_size;      /* prefixes are kept in whole pages; 0 = 1 */
  int32_t window_left;    /* windowed layers have copies of their own; >= 1. 0 or -1: there are none */
  int32_t partial_leaves; /* not 0: of the last leaf that is evicted only the end goes */
} folio_prefix_cache_options;
#define FOLIO_PREFIX_CACHE_OPTIONS_INIT \
  { (uint32_t)sizeof(folio_prefix_cache_options), 1, -1, 0 }
FOLIO_C_API folio_status folio_prefix_cache_options_init(folio_prefix_cache_options* options,
                                                         size_t struct_size) FOLIO_C_NOEXCEPT;

/* A request's tokens, borrowed for the call. Entries with different extra keys share nothing. */
typedef struct folio_prefix_key {
  const int32_t* tokens;
  int64_t num_tokens;
  const char* extra_key; /* any bytes; NULL only with 0 */
  size_t extra_key_bytes;
} folio_prefix_key;

/* Counts of slots. */
typedef struct folio_prefix_cache_sizes {
  uint32_t struct_size;
  int32_t reserved; /* 0 */
  int64_t size;
  int64_t evictable;
  int64_t protected_slots;
  int64_t window_size;
  int64_t window_evictable;
  int64_t window_protected;
  int64_t num_nodes;
} folio_prefix_cache_sizes;
#define FOLIO_PREFIX_CACHE_SIZES_INIT \
  { (uint32_t)sizeof(folio_prefix_cache_sizes), 0, 0, 0, 0, 0, 0, 0, 0 }
FOLIO_C_API folio_status folio_prefix_cache_sizes_init(folio_prefix_cache_sizes* sizes,
                                                       size_t struct_size) FOLIO_C_NOEXCEPT;

/* options NULL = the defaults. */
FOLIO_C_API folio_status folio_create_prefix_cache(const folio_prefix_cache_options* options,
                                                   folio_prefix_cache** cache) FOLIO_C_NOEXCEPT;
/* NULL is fine. Locks may outlive the cache. */
FOLIO_C_API void folio_free_prefix_cache(folio_prefix_cache* cache) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_prefix_cache_get_sizes(const folio_prefix_cache* cache,
                                                      folio_prefix_cache_sizes* sizes) FOLIO_C_NOEXCEPT;
/* Tokens of the longest prefix that is there. Changes nothing. */
FOLIO_C_API folio_status folio_prefix_cache_match(const folio_prefix_cache* cache, const folio_prefix_key* key,
                                                  int64_t* num_tokens) FOLIO_C_NOEXCEPT;
/* Writes the slots of the longest prefix to slots [key->num_tokens] and keeps it: *lock is the caller's, freed by
 * folio_free_prefix_lock or folio_prefix_cache_finish. It covers folio_prefix_lock_length tokens, 0 included. */
FOLIO_C_API folio_status folio_prefix_cache_acquire(folio_prefix_cache* cache, const folio_prefix_key* key,
                                                    int32_t* slots, folio_prefix_lock** lock) FOLIO_C_NOEXCEPT;
/* Hands over slots[i] of token i, in whole pages, where the tree has none. *present: leading tokens that were there,
 * whose slots stay the caller's; *inserted: tokens after these, whose slots are now the tree's. Either may be NULL.
 * window_begin: where window copies begin; 0 without a window. */
FOLIO_C_API folio_status folio_prefix_cache_insert(folio_prefix_cache* cache, const folio_prefix_key* key,
                                                   const int32_t* slots, int64_t window_begin,
                                                   folio_slot_changes* changes, int64_t* present,
                                                   int64_t* inserted) FOLIO_C_NOEXCEPT;
/* A running request's tokens so far: inserts whole pages from the lock's length on, replaces in slots
 * [key->num_tokens] what others have inserted meanwhile, and moves the lock. */
FOLIO_C_API folio_status folio_prefix_cache_extend(folio_prefix_cache* cache, folio_prefix_lock* lock,
                                                   const folio_prefix_key* key, int32_t* slots, int64_t window_begin,
                                                   folio_slot_changes* changes) FOLIO_C_NOEXCEPT;
/* The end of a request: as extend, then gives up the lock, which is freed whatever the status is, and lists all slots
 * that are not the tree's. */
FOLIO_C_API folio_status folio_prefix_cache_finish(folio_prefix_cache* cache, folio_prefix_lock* lock,
                                                   const folio_prefix_key* key, const int32_t* slots,
                                                   int64_t window_begin, folio_slot_changes* changes) FOLIO_C_NOEXCEPT;
/* Evicts at least so many slots and window copies, or all that no lock keeps. *evicted_slots and
 * *evicted_window_copies, which may be NULL, are what went. */
FOLIO_C_API folio_status folio_prefix_cache_evict(folio_prefix_cache* cache, int64_t slots, int64_t window_copies,
                                                  folio_slot_changes* changes, int64_t* evicted_slots,
                                                  int64_t* evicted_window_copies) FOLIO_C_NOEXCEPT;
/* Forgets everything; slots are not given back. Refused while locks live. */
FOLIO_C_API folio_status folio_prefix_cache_clear(folio_prefix_cache* cache) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_prefix_lock_length(const folio_prefix_lock* lock, int64_t* num_tokens) FOLIO_C_NOEXCEPT;
/* Gives the path up. NULL is fine. */
FOLIO_C_API void folio_free_prefix_lock(folio_prefix_lock* lock) FOLIO_C_NOEXCEPT;

/* ---- Slots of models with windowed layers ---- */

typedef struct folio_window_token_allocator folio_window_token_allocator;

FOLIO_C_API folio_status folio_create_window_token_allocator(int32_t num_slots, int32_t num_window_slots,
                                                             int32_t page_size,
                                                             folio_window_token_allocator** allocator) FOLIO_C_NOEXCEPT;
FOLIO_C_API void folio_free_window_token_allocator(folio_window_token_allocator* allocator)
    FOLIO_C_NOEXCEPT; /* NULL is fine */
/* Free slots and free window copies. */
FOLIO_C_API folio_status folio_window_token_allocator_available(const folio_window_token_allocator* allocator,
                                                                int32_t* slots, int32_t* window) FOLIO_C_NOEXCEPT;
/* As the functions of folio_token_allocator, all or nothing in both pools. */
FOLIO_C_API folio_status folio_window_token_allocator_alloc(folio_window_token_allocator* allocator, int32_t* slots,
                                                            int64_t num_slots, int32_t* allocated) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_window_token_allocator_alloc_extend(folio_window_token_allocator* allocator,
                                                                   const int32_t* prefix_lens, const int32_t* seq_lens,
                                                                   const int32_t* last_slots, int32_t num_requests,
                                                                   int32_t* slots, int64_t num_slots,
                                                                   int32_t* allocated) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_window_token_allocator_alloc_decode(folio_window_token_allocator* allocator,
                                                                   const int32_t* seq_lens, const int32_t* last_slots,
                                                                   int32_t num_requests, int32_t* slots,
                                                                   int32_t* allocated) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_window_token_allocator_free(folio_window_token_allocator* allocator,
                                                           const int32_t* slots, int64_t num_slots) FOLIO_C_NOEXCEPT;
/* Gives back the window copies of held slots. */
FOLIO_C_API folio_status folio_window_token_allocator_free_window(folio_window_token_allocator* allocator,
                                                                  const int32_t* slots,
                                                                  int64_t num_slots) FOLIO_C_NOEXCEPT;
/* Does what a call of the prefix cache asked for: moves, frees window copies, frees. */
FOLIO_C_API folio_status folio_window_token_allocator_apply(folio_window_token_allocator* allocator,
                                                            const folio_slot_changes* changes) FOLIO_C_NOEXCEPT;
/* window[i]: the window copy of slots[i]; -1 for negative slots. */
FOLIO_C_API folio_status folio_window_token_allocator_to_window(const folio_window_token_allocator* allocator,
                                                                const int32_t* slots, int64_t num_slots,
                                                                int32_t* window) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_window_token_allocator_clear(folio_window_token_allocator* allocator) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_PREFIX_CACHE_H_ */
