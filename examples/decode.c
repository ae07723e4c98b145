/* A decode step in C: two requests, one new token each, over a paged KV cache. All keys are equal, so that every query
 * weighs its keys equally and the result can be checked by hand: the mean of the request's values. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "folio/c/folio.h"

enum { kNumQHeads = 4, kNumKvHeads = 2, kHeadDim = 8, kPageSize = 16, kNumPages = 4, kNumRequests = 2 };

/* Prints why a call failed; 1 on failure. */
static int failed(const char* call, folio_status status) {
  if (status == FOLIO_OK) return 0;
  fprintf(stderr, "%s failed with code %d: %s\n", call, (int)status, folio_last_error());
  return 1;
}
#define TRY(call)                         \
  do {                                    \
    if (failed(#call, (call))) goto done; \
  } while (0)

static folio_const_tensor_view rows(const float* data, int64_t tokens, int64_t heads) {
  folio_const_tensor_view view = {data, FOLIO_DTYPE_FLOAT32, 3, {0}, {0}};
  view.shape[0] = tokens;
  view.shape[1] = heads;
  view.shape[2] = kHeadDim;
  view.strides[0] = heads * kHeadDim;
  view.strides[1] = kHeadDim;
  view.strides[2] = 1;
  return view;
}

int main(void) {
  /* Request 0 has 3 tokens in page 2; request 1 has 18 in pages 0 and 3. */
  const int32_t kv_len[kNumRequests] = {3, 18};
  const int32_t page_indptr[kNumRequests + 1] = {0, 1, 3};
  const int32_t pages[] = {2, 0, 3};
  const int32_t cu_q[kNumRequests + 1] = {0, 1, 2};
  enum { kNumTokens = 3 + 18 };

  static float k_cache[kNumPages * kPageSize * kNumKvHeads * kHeadDim];
  static float v_cache[kNumPages * kPageSize * kNumKvHeads * kHeadDim];
  static float k[kNumTokens * kNumKvHeads * kHeadDim];
  static float v[kNumTokens * kNumKvHeads * kHeadDim];
  static float q[kNumRequests * kNumQHeads * kHeadDim];
  static float out[kNumRequests * kNumQHeads * kHeadDim];
  int64_t slots[kNumTokens];

  folio_context* context = NULL;
  folio_op* op = NULL;
  folio_plan_buffer* buffer = NULL;
  void* workspace = NULL;
  int result = 1;

  printf("Folio %s\n", folio_version());

  folio_context_options context_options = FOLIO_CONTEXT_OPTIONS_INIT;
  context_options.num_threads = 2;
  TRY(folio_create_cpu_context(&context_options, &context));

  /* Once: pick the kernel, make a buffer for plans, allocate the workspace. */
  folio_attention_config config = FOLIO_ATTENTION_CONFIG_INIT;
  config.num_q_heads = kNumQHeads;
  config.num_kv_heads = kNumKvHeads;
  config.head_dim_qk = kHeadDim;
  config.head_dim_v = kHeadDim;
  config.q = FOLIO_DTYPE_FLOAT32;
  config.kv = FOLIO_DTYPE_FLOAT32;
  config.page_size = kPageSize;
  TRY(folio_prepare(context, &config, NULL, &op));

  const char* kernel = NULL;
  TRY(folio_kernel_name(op, &kernel));
  printf("kernel: %s\n", kernel);

  TRY(folio_create_plan_buffer(op, &buffer));
  size_t workspace_bytes = 0;
  TRY(folio_workspace_size(op, &workspace_bytes));
  workspace = aligned_alloc(256, workspace_bytes > 0 ? workspace_bytes : 256);
  if (workspace == NULL) goto done;
  TRY(folio_init_workspace(op, workspace, workspace_bytes, NULL));

  /* Write the tokens' keys and values into their pages. Token t of a request has the value t in every component. */
  for (int request = 0, token = 0; request < kNumRequests; ++request) {
    for (int t = 0; t < kv_len[request]; ++t, ++token) {
      slots[token] = (int64_t)pages[page_indptr[request] + t / kPageSize] * kPageSize + t % kPageSize;
      for (int i = 0; i < kNumKvHeads * kHeadDim; ++i) {
        k[token * kNumKvHeads * kHeadDim + i] = 0.25f;
        v[token * kNumKvHeads * kHeadDim + i] = (float)t;
      }
    }
  }
  const folio_kv_cache_shape shape = {kNumPages, kPageSize, kNumKvHeads, kHeadDim, kHeadDim, FOLIO_DTYPE_FLOAT32};
  folio_cache_write_args write = FOLIO_CACHE_WRITE_ARGS_INIT;
  TRY(folio_make_nhd_view(&shape, k_cache, v_cache, &write.cache));
  write.k = rows(k, kNumTokens, kNumKvHeads);
  write.v = rows(v, kNumTokens, kNumKvHeads);
  write.slot_mapping = slots;
  write.num_slots = kNumTokens;
  TRY(folio_write_kv_cache(context, &write, NULL));

  /* [snippet] */
  /* Once per step: plan, from lengths alone. */
  folio_kv_segment segment = FOLIO_KV_SEGMENT_INIT;
  segment.kv_len = kv_len;
  folio_batch batch = FOLIO_BATCH_INIT;
  batch.num_requests = kNumRequests;
  batch.num_tokens = kNumRequests;
  batch.cu_q = cu_q;
  batch.segments = &segment;
  batch.num_segments = 1;
  folio_plan plan;
  TRY(folio_make_plan(op, &batch, buffer, NULL, &plan));

  /* Once per layer: run. */
  for (int i = 0; i < kNumRequests * kNumQHeads * kHeadDim; ++i) q[i] = 1.0f;
  folio_segment_args segment_args = FOLIO_SEGMENT_ARGS_INIT;
  segment_args.cache = write.cache;
  segment_args.table.indices = pages;
  segment_args.table.num_indices = 3;
  segment_args.table.indptr = page_indptr;
  segment_args.table.num_rows = kNumRequests;
  folio_attention_args args = FOLIO_ATTENTION_ARGS_INIT;
  args.segments = &segment_args;
  args.num_segments = 1;
  args.q = rows(q, kNumRequests, kNumQHeads);
  const int64_t out_shape[] = {kNumRequests, kNumQHeads, kHeadDim};
  TRY(folio_make_tensor_view(out, FOLIO_DTYPE_FLOAT32, 3, out_shape, &args.out));
  TRY(folio_validate(&plan, &args));
  TRY(folio_run(&plan, &args, workspace, workspace_bytes, NULL));
  /* [/snippet] */

  result = 0;
  for (int request = 0; request < kNumRequests; ++request) {
    const float mean = (float)(kv_len[request] - 1) / 2.0f;
    printf("request %d: %g (the mean of its values is %g)\n", request, (double)out[request * kNumQHeads * kHeadDim],
           (double)mean);
    for (int i = 0; i < kNumQHeads * kHeadDim; ++i) {
      const float difference = out[request * kNumQHeads * kHeadDim + i] - mean;
      /* A few roundings of a float32 sum of at most 18 terms. */
      if (!(difference < 1e-5f && difference > -1e-5f)) result = 1;
    }
  }
  if (result != 0) fprintf(stderr, "the result is wrong\n");

done:
  free(workspace);
  folio_free_plan_buffer(buffer);
  folio_free_op(op);
  folio_free_context(context);
  return result;
}
