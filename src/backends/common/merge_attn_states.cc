#include "folio/backends/merge_attn_states.hpp"

#include <cstddef>
#include <type_traits>

#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

template <typename Tensor>
Tensor tokens_from(Tensor tensor, int64_t first, int64_t count) {
  using Byte = std::conditional_t<std::is_same_v<Tensor, TensorView>, std::byte, const std::byte>;
  if (tensor.data != nullptr)
    tensor.data = static_cast<Byte*>(tensor.data) + first * tensor.strides[0] * size_of(tensor.dtype);
  tensor.shape[0] = count;
  return tensor;
}

}  // namespace

void merge_attn_states(const Context& context, const TensorView& output, const ConstTensorView& prefix_output,
                       const float* prefix_lse, const ConstTensorView& suffix_output, const float* suffix_lse,
                       float* output_lse, std::optional<int64_t> prefill_tokens_with_context, const Scale& output_scale,
                       Stream stream) {
  const int64_t tokens = suffix_output.shape[0];
  const int64_t merged = prefill_tokens_with_context.value_or(tokens);
  core::require(merged >= 0 && merged <= tokens, "prefill_tokens_with_context is ", merged, "; there are ", tokens,
                " tokens");
  core::require(prefix_output.rank == 3 && suffix_output.rank == 3 && output.rank == 3 &&
                    prefix_output.shape[0] >= merged && output.shape[0] == tokens,
                "prefix, suffix and output must be [num_tokens, num_heads, head_size] of the same tokens");
  if (merged > 0) {
    merge_state(context, {tokens_from(prefix_output, 0, merged), prefix_lse, 1, tokens, LseBase::kE},
                {tokens_from(suffix_output, 0, merged), suffix_lse, 1, tokens, LseBase::kE},
                tokens_from(output, 0, merged), {output_lse, 1, tokens, LseBase::kE}, output_scale, stream);
  }
  if (merged == tokens) return;
  const ConstTensorView rest = tokens_from(suffix_output, merged, tokens - merged);
  AttentionStatesView alone;
  alone.out = rest;
  alone.out.rank = 4;
  alone.out.shape = {rest.shape[0], 1, rest.shape[1], rest.shape[2]};
  alone.out.strides = {rest.strides[0], 0, rest.strides[1], rest.strides[2]};
  alone.lse = suffix_lse + merged;
  alone.lse_token_stride = 1;
  alone.lse_head_stride = tokens;
  float* rest_lse = output_lse == nullptr ? nullptr : output_lse + merged;
  merge_states(context, alone, tokens_from(output, merged, tokens - merged), {rest_lse, 1, tokens, LseBase::kE},
               output_scale, stream);
}

}  // namespace folio::inline v0::backends
