/* Merging partial attention results; see folio/merge.hpp. On a GPU all memory is the device's. */
#ifndef FOLIO_C_MERGE_H_
#define FOLIO_C_MERGE_H_

#include "folio/c/context.h"

FOLIO_C_BEGIN

/* A partial result: normalised outputs and their LSE, that of (t, h) at lse[t * lse_token_stride + h *
 * lse_head_stride]. An infinite LSE is an empty state. */
typedef struct folio_attention_state {
  folio_const_tensor_view out; /* [tokens, heads, head_dim]: float32, float16 or bfloat16 */
  const float* lse;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  folio_lse_base base;
} folio_attention_state;

/* Several states a token; LSE of (t, s, h) at lse[t * lse_token_stride + s * lse_state_stride + h * lse_head_stride].
 */
typedef struct folio_attention_states {
  folio_const_tensor_view out; /* [tokens, num_states, heads, head_dim] */
  const float* lse;
  int64_t lse_token_stride;
  int64_t lse_state_stride;
  int64_t lse_head_stride;
  folio_lse_base base;
} folio_attention_states;

/* out, lse = a (+) b. lse NULL: not wanted. out_scale (fp8 outputs) NULL: 1. */
FOLIO_C_API folio_status folio_merge_state(const folio_context* context, const folio_attention_state* a,
                                           const folio_attention_state* b, const folio_tensor_view* out,
                                           const folio_lse_view* lse, const folio_scale* out_scale,
                                           void* stream) FOLIO_C_NOEXCEPT;
/* a = a (+) b for the tokens whose byte of `mask` [tokens] is not 0; mask NULL: all. */
FOLIO_C_API folio_status folio_merge_state_in_place(const folio_context* context, const folio_tensor_view* a_out,
                                                    const folio_lse_view* a_lse, const folio_attention_state* b,
                                                    const uint8_t* mask, void* stream) FOLIO_C_NOEXCEPT;
/* Folds the states of each token in their order. */
FOLIO_C_API folio_status folio_merge_states(const folio_context* context, const folio_attention_states* states,
                                            const folio_tensor_view* out, const folio_lse_view* lse,
                                            const folio_scale* out_scale, void* stream) FOLIO_C_NOEXCEPT;
/* lse [cu_q[num_requests], num_heads], base 2: adds slopes[h] * first_pos[r] * log2(e), FlashInfer's bias of ALiBi. */
FOLIO_C_API folio_status folio_shift_alibi_lse(const folio_context* context, float* lse, const int32_t* cu_q,
                                               const int32_t* first_pos, int32_t num_requests, const float* slopes,
                                               int32_t num_heads, void* stream) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_MERGE_H_ */
