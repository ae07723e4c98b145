#pragma once

#include <cstdint>
#include <optional>

#include "folio/context.hpp"
#include "folio/merge.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::backends {

/// vLLM's merge of the attention to a prefix and to what follows it, by the rule of merge_state. LSEs are natural and
/// [num_heads, num_tokens], packed, as FlashAttention returns them.
/// - output, prefix_output, suffix_output: [num_tokens, num_heads, head_size]; the output may also be fp8, with a
/// scale.
/// - output_lse: null = not wanted.
/// - prefill_tokens_with_context: the tokens from here on have no prefix: they get the suffix's values, whatever stands
///   in the prefix's rows, which are not read. None = all have one.
/// Throws kInvalidArgument as merge_state does, and for a number of tokens that there are not.
FOLIO_API void merge_attn_states(const Context& context, const TensorView& output, const ConstTensorView& prefix_output,
                                 const float* prefix_lse, const ConstTensorView& suffix_output, const float* suffix_lse,
                                 float* output_lse = nullptr,
                                 std::optional<int64_t> prefill_tokens_with_context = std::nullopt,
                                 const Scale& output_scale = {}, Stream stream = {});

}  // namespace folio::inline v0::backends
