#include "folio/merge.hpp"

#include <bit>

#include "capi/convert.hpp"

using folio::capi::deref;
using folio::capi::guarded;
using folio::capi::to_scale;
using folio::capi::to_span;
using folio::capi::to_view;

namespace {

// The same layout on both sides (layout.cc).
template <typename To, typename From>
To to_state(const From& state) {
  to_view(state.out, "out.dtype");
  folio::capi::to_enum(state.base, folio::LseBase::k2, "base");
  return std::bit_cast<To>(state);
}

}  // namespace

folio_status folio_merge_state(const folio_context* context, const folio_attention_state* a,
                               const folio_attention_state* b, const folio_tensor_view* out, const folio_lse_view* lse,
                               const folio_scale* out_scale, void* stream) noexcept {
  return guarded([&] {
    folio::merge_state(deref(context, "context").context, to_state<folio::AttentionStateView>(deref(a, "a")),
                       to_state<folio::AttentionStateView>(deref(b, "b")), to_view(deref(out, "out"), "out.dtype"),
                       folio::capi::to_lse(lse), to_scale(out_scale, "out_scale.granularity"), folio::Stream{stream});
  });
}

folio_status folio_merge_state_in_place(const folio_context* context, const folio_tensor_view* a_out,
                                        const folio_lse_view* a_lse, const folio_attention_state* b,
                                        const uint8_t* mask, void* stream) noexcept {
  return guarded([&] {
    folio::merge_state_in_place(deref(context, "context").context, to_view(deref(a_out, "a_out"), "a_out.dtype"),
                                folio::capi::to_lse(&deref(a_lse, "a_lse")),
                                to_state<folio::AttentionStateView>(deref(b, "b")), mask, folio::Stream{stream});
  });
}

folio_status folio_merge_states(const folio_context* context, const folio_attention_states* states,
                                const folio_tensor_view* out, const folio_lse_view* lse, const folio_scale* out_scale,
                                void* stream) noexcept {
  return guarded([&] {
    folio::merge_states(deref(context, "context").context,
                        to_state<folio::AttentionStatesView>(deref(states, "states")),
                        to_view(deref(out, "out"), "out.dtype"), folio::capi::to_lse(lse),
                        to_scale(out_scale, "out_scale.granularity"), folio::Stream{stream});
  });
}

folio_status folio_shift_alibi_lse(const folio_context* context, float* lse, const int32_t* cu_q,
                                   const int32_t* first_pos, int32_t num_requests, const float* slopes,
                                   int32_t num_heads, void* stream) noexcept {
  return guarded([&] {
    const folio::Context& device = deref(context, "context").context;
    folio::shift_alibi_lse(device, &deref(lse, "lse"), to_span(cu_q, int64_t{num_requests} + 1, "cu_q"),
                           to_span(first_pos, num_requests, "first_pos"), to_span(slopes, num_heads, "slopes"),
                           folio::Stream{stream});
  });
}
