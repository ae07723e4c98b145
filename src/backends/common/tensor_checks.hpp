#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "folio/context.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::backends {

/// Throws kInvalidArgument unless `tensor` is [tokens, heads, head_size] with contiguous heads and at least
/// `min_tokens` tokens.
void require_shape(const char* name, const ConstTensorView& tensor, int64_t min_tokens, int64_t heads,
                   int64_t head_size);

/// Throws kInvalidArgument for a scale of values that are not fp8: the write would not apply it, and reading alone
/// would be wrong.
void require_no_scale(const char* name, const Scale& scale, DType dtype);

/// The memory of an NVFP4 output's scale factors as the core takes it, for `num_tokens` rows from `first_row` on.
/// Throws kInvalidArgument, naming the tensor, unless it is kFloat8E4M3 or kUnset and packed
/// [>= round_up(first_row + num_tokens, 128), round_up(heads * head_size / 16, 4)].
BlockScaleArgs nvfp4_block_scale(const char* name, const TensorView& scale, int64_t first_row, int64_t num_tokens,
                                 int64_t heads, int64_t head_size);

/// Sets [tokens, heads, head_size] with contiguous heads, padding included, to zero (in every dtype, all bits zero;
/// kUnset: bytes). On a GPU enqueued.
void fill_with_zeros(const Context& context, const TensorView& output, Stream stream);

/// Heads of a layer's queries: its own, times the ranks whose heads it is given. Throws kInvalidArgument for
/// dcp_query_ranks below 1 and for another number of slopes, which may be none.
int32_t checked_query_heads(int32_t num_heads, int32_t dcp_query_ranks, const std::vector<float>& alibi_slopes);

/// A layer's sinks, [num_heads] float32, float16 or bfloat16 on the host, as float32. `wrong_count` is what is said of
/// another number of heads.
std::vector<float> sinks_as_float(const ConstTensorView& sinks, int32_t num_heads, const std::string& wrong_count);

/// The first `count` tokens.
template <typename Tensor>
Tensor first_tokens(Tensor tensor, int64_t count) {
  tensor.shape[0] = count;
  return tensor;
}

}  // namespace folio::inline v0::backends
