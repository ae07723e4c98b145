#pragma once

#include <cstdint>
#include <span>

#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0 {

/// A partial attention result: normalised outputs and their LSE.
struct AttentionStateView {
  ConstTensorView out;         ///< [tokens, heads, head_dim]: float32, float16 or bfloat16; innermost contiguous
  const float* lse = nullptr;  ///< element (t, h) at lse[t * token_stride + h * head_stride]
  int64_t lse_token_stride = 0;
  int64_t lse_head_stride = 0;
  LseBase base = LseBase::kE;
};

/// merged = a (+) b: out = (e^a.lse * a.out + e^b.lse * b.out) / (e^a.lse + e^b.lse), float32 inside. A state whose LSE
/// is infinite (either sign) is empty: it contributes nothing, whatever its values; both empty: out 0, LSE -inf. A NaN
/// LSE gives NaN. The output's dtype: float32, float16, bfloat16, or fp8 with `out_scale` (per tensor). `out` and `lse`
/// may be those of `a` (in-place merge). Throws kInvalidArgument on shapes that differ.
///
/// On a GPU everything lies in device memory, an out_scale's array included, which is not checked; merges are enqueued
/// on `stream` and may be captured. Results are those of a CPU but for the last bit of a weight or LSE where the C
/// library's expf or logf rounds otherwise, and for NaNs' payloads.
FOLIO_API void merge_state(const Context& context, const AttentionStateView& a, const AttentionStateView& b,
                           TensorView out, LseView lse, const Scale& out_scale = {}, Stream stream = {});

/// a = a (+) b for the tokens whose `mask` byte is not 0 (null = all).
FOLIO_API void merge_state_in_place(const Context& context, TensorView a_out, LseView a_lse,
                                    const AttentionStateView& b, const uint8_t* mask = nullptr, Stream stream = {});

/// Merges `num_states` states per token: `states` is [tokens, num_states, heads, head_dim], its lse element (t, s, h)
/// at lse[t * lse_token_stride + s * lse_state_stride + h * lse_head_stride]. Folded in order of s.
struct AttentionStatesView {
  ConstTensorView out;
  const float* lse = nullptr;
  int64_t lse_token_stride = 0;
  int64_t lse_state_stride = 0;
  int64_t lse_head_stride = 0;
  LseBase base = LseBase::kE;
};
FOLIO_API void merge_states(const Context& context, const AttentionStatesView& states, TensorView out, LseView lse,
                            const Scale& out_scale = {}, Stream stream = {});

/// Log-sum-exps of attention with ALiBi as FlashInfer has them. Folio's bias of a logit is -slope * (position - key);
/// FlashInfer's is slope * (key - row), where rows count from the request's first query. `lse` [cu_q[R], heads], base
/// 2, packed, gets slopes[head] * first_pos[request] * log2(e) added, in place and in double. cu_q: [R + 1]; first_pos:
/// [R], the position of a request's first query; slopes: [heads]. Throws kInvalidArgument for arrays of other sizes. On
/// a GPU all arrays lie in device memory, and the call is enqueued on `stream` and may be captured.
FOLIO_API void shift_alibi_lse(const Context& context, float* lse, std::span<const int32_t> cu_q,
                               std::span<const int32_t> first_pos, std::span<const float> slopes, Stream stream = {});

}  // namespace folio::inline v0
