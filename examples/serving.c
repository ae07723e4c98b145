/* Two requests with the same prompt, served in C from slots: the prefix cache finds what the first has computed, the
 * token-pool backend attends. The second request's prefill computes one token only, and must get the first one's result
 * for it, bit for bit. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "folio/c/backends.h"

enum { kHeads = 4, kKvHeads = 2, kDim = 32, kSlots = 64, kMaxContext = 32, kPrompt = 6 };

/* Prints why a call failed; 1 on failure. */
static int failed(const char* call, folio_status status) {
  if (status == FOLIO_OK) return 0;
  fprintf(stderr, "%s: %s: %s\n", call, folio_status_name(status), folio_last_error());
  return 1;
}
#define TRY(call)                        \
  do {                                   \
    if (failed(#call, (call))) return 1; \
  } while (0)

typedef struct engine {
  folio_context* context;
  folio_kv_pool* pool;
  folio_token_allocator* allocator;
  folio_req_to_token_pool* requests;
  folio_prefix_cache* prefixes;
  folio_slot_changes* changes;
  folio_token_pool_backend* backend;
  folio_radix_attention layer;
} engine;

/* A number in [-1, 1) that depends on the token, its position and the component alone. */
static float number(int32_t token, int64_t position, int64_t component, uint32_t what) {
  uint32_t bits =
      (uint32_t)token * 2654435761u + (uint32_t)position * 40503u + (uint32_t)component * 2246822519u + what;
  bits ^= bits >> 15;
  bits *= 2246822519u;
  bits ^= bits >> 13;
  return (float)(bits >> 8) / 8388608.0f - 1.0f;
}

static int start(engine* e) {
  folio_kv_pool_config sizes = FOLIO_KV_POOL_CONFIG_INIT;
  folio_token_pool_config config = FOLIO_TOKEN_POOL_CONFIG_INIT;
  const folio_radix_attention layer = FOLIO_RADIX_ATTENTION_INIT;
  TRY(folio_create_cpu_context(NULL, &e->context));
  sizes.num_slots = kSlots;
  sizes.num_layers = 1;
  sizes.num_kv_heads = kKvHeads;
  sizes.head_dim_qk = sizes.head_dim_v = kDim;
  sizes.dtype = FOLIO_DTYPE_FLOAT32;
  TRY(folio_create_kv_pool(&sizes, &e->pool));
  TRY(folio_create_token_allocator(kSlots, 1, &e->allocator));
  TRY(folio_create_req_to_token_pool(4, kMaxContext, &e->requests));
  TRY(folio_create_prefix_cache(NULL, &e->prefixes));
  TRY(folio_create_slot_changes(&e->changes));
  config.num_heads = kHeads;
  config.num_kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.kv_cache_dtype = config.q_dtype = FOLIO_DTYPE_FLOAT32;
  config.max_context_len = kMaxContext;
  config.max_req_pool_size = 4;
  config.determinism = FOLIO_DETERMINISM_SCHEDULE_INVARIANT; /* however prompts are divided over steps */
  TRY(folio_req_to_token_pool_table(e->requests, &config.req_to_token));
  TRY(folio_create_token_pool_backend(e->context, &config, &e->backend));
  e->layer = layer;
  e->layer.num_heads = kHeads;
  e->layer.num_kv_heads = kKvHeads;
  e->layer.head_dim = kDim;
  return 0;
}

static void stop(engine* e) {
  folio_free_token_pool_backend(e->backend);
  folio_free_slot_changes(e->changes);
  folio_free_prefix_cache(e->prefixes);
  folio_free_req_to_token_pool(e->requests);
  folio_free_token_allocator(e->allocator);
  folio_free_kv_pool(e->pool);
  folio_free_context(e->context);
}

/* Prefills one request; the last token's output goes to `out`. *computed: tokens that had to be computed. */
static int prefill(engine* e, const int32_t* tokens, float* out, int32_t* computed) {
  const folio_prefix_key all_but_last = {tokens, kPrompt - 1, NULL, 0};
  const folio_prefix_key all = {tokens, kPrompt, NULL, 0};
  static float q[kPrompt * kHeads * kDim], k[kPrompt * kKvHeads * kDim], v[kPrompt * kKvHeads * kDim],
      rows[kPrompt * kHeads * kDim];
  int32_t slots[kPrompt], row = 0, allocated = 0;
  int64_t locations[kPrompt], matched = 0;
  folio_prefix_lock* lock = NULL;

  /* What is there, kept from now on; then slots for the rest. */
  TRY(folio_prefix_cache_acquire(e->prefixes, &all_but_last, slots, &lock));
  TRY(folio_prefix_lock_length(lock, &matched));
  const int32_t prefix = (int32_t)matched, length = kPrompt, fresh = kPrompt - prefix;
  TRY(folio_token_allocator_alloc(e->allocator, slots + prefix, fresh, &allocated));
  TRY(folio_req_to_token_pool_alloc(e->requests, &row, 1, &allocated));
  if (!allocated) return 1; /* a real engine would evict, or wait */
  TRY(folio_req_to_token_pool_write(e->requests, row, 0, slots, kPrompt));

  for (int64_t t = 0; t < fresh; ++t) {
    const int32_t token = tokens[prefix + t];
    locations[t] = slots[prefix + t];
    for (int64_t i = 0; i < kHeads * kDim; ++i) q[t * kHeads * kDim + i] = number(token, prefix + t, i, 1);
    for (int64_t i = 0; i < kKvHeads * kDim; ++i) {
      k[t * kKvHeads * kDim + i] = number(token, prefix + t, i, 2);
      v[t * kKvHeads * kDim + i] = number(token, prefix + t, i, 3);
    }
  }
  folio_forward_batch batch = FOLIO_FORWARD_BATCH_INIT;
  batch.forward_mode = FOLIO_FORWARD_EXTEND;
  batch.batch_size = 1;
  batch.req_pool_indices = &row;
  batch.seq_lens = &length;
  batch.extend_prefix_lens = &prefix;
  batch.out_cache_loc = locations;
  batch.num_out_cache_loc = fresh;
  batch.token_to_kv_pool = e->pool;
  TRY(folio_token_pool_init_forward_metadata(e->backend, &batch, NULL));

  const int64_t q_shape[] = {fresh, kHeads, kDim}, kv_shape[] = {fresh, kKvHeads, kDim};
  folio_const_tensor_view q_view, k_view, v_view;
  folio_tensor_view out_view;
  TRY(folio_make_const_tensor_view(q, FOLIO_DTYPE_FLOAT32, 3, q_shape, &q_view));
  TRY(folio_make_const_tensor_view(k, FOLIO_DTYPE_FLOAT32, 3, kv_shape, &k_view));
  TRY(folio_make_const_tensor_view(v, FOLIO_DTYPE_FLOAT32, 3, kv_shape, &v_view));
  TRY(folio_make_tensor_view(rows, FOLIO_DTYPE_FLOAT32, 3, q_shape, &out_view));
  TRY(folio_token_pool_forward(e->backend, &e->layer, &batch, &q_view, &k_view, &v_view, &out_view, 0, NULL));
  memcpy(out, rows + (fresh - 1) * kHeads * kDim, sizeof(float) * kHeads * kDim);

  /* The end: others may share the prompt, and slots that nobody keeps are free again. */
  const int32_t* freed = NULL;
  int64_t num_freed = 0;
  TRY(folio_prefix_cache_finish(e->prefixes, lock, &all, slots, 0, e->changes));
  TRY(folio_slot_changes_freed(e->changes, &freed, &num_freed));
  TRY(folio_token_allocator_free(e->allocator, freed, num_freed));
  TRY(folio_slot_changes_clear(e->changes));
  TRY(folio_req_to_token_pool_free_row(e->requests, row));
  *computed = fresh;
  return 0;
}

int main(void) {
  const int32_t prompt[kPrompt] = {11, 7, 7, 3, 42, 5};
  static float first[kHeads * kDim], second[kHeads * kDim];
  int32_t computed_first = 0, computed_second = 0, result = 1;
  engine e = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, FOLIO_RADIX_ATTENTION_INIT};
  if (!start(&e) && !prefill(&e, prompt, first, &computed_first) && !prefill(&e, prompt, second, &computed_second)) {
    printf("the first request computed %d tokens, the second %d\n", (int)computed_first, (int)computed_second);
    result = computed_first != kPrompt || computed_second != 1 || memcmp(first, second, sizeof(first)) != 0;
    if (result) fprintf(stderr, "the second request's output differs\n");
  }
  stop(&e);
  return result;
}
