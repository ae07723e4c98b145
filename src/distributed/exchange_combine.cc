// The combine that sends every rank its heads' partial results, each row with its LSE: dcp_a2a_lse_reduce.
#include <cstring>

#include "distributed/combine_call.hpp"

namespace folio::inline v0::distributed {

void all_to_all_combine(const CombineCall& call) {
  const int32_t world = call.group.size(), heads = call.num_heads(), local = call.local_heads();
  const int32_t dim = call.head_dim();
  const int64_t tokens = call.num_tokens();
  const ConstTensorView& in = call.partial.out;
  const auto element = static_cast<size_t>(size_of(in.dtype));
  // A row is its values and then its LSE's bits. A float needs its alignment, so odd 16-bit rows get one more element.
  const int64_t lse_at = dim % 2 == 0 || element == sizeof(float) ? dim : dim + 1;
  // On a GPU, rows of 16-bit values begin where eight can be read at once; the workspace's floats leave room for that.
  const bool wide = call.gpu() != nullptr && element == 2 && dim % 8 == 0;
  const int64_t row_elements = wide ? dim + 8 : lse_at + lse_lanes(in.dtype);
  const size_t row_bytes = static_cast<size_t>(row_elements) * element;

  const CombineParts parts = combine_parts(world, tokens, heads, dim);
  auto* base = static_cast<std::byte*>(call.workspace.data);
  auto* cleaned = reinterpret_cast<float*>(base);
  std::byte* send = base + parts.lse + parts.gathered;
  std::byte* received = send + parts.send;
  clean_lses(call, cleaned);
  const auto pack = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto r = static_cast<int32_t>(row / tokens);
      const int64_t t = row % tokens;
      for (int32_t h = 0; h < local; ++h) {
        const int32_t head = call.head_of(r, h);
        std::byte* to = send + static_cast<size_t>(row * local + h) * row_bytes;
        const auto from = static_cast<size_t>(t * in.strides[0] + head * in.strides[1]);
        std::memcpy(to, static_cast<const std::byte*>(in.data) + from * element, static_cast<size_t>(dim) * element);
        std::memcpy(to + static_cast<size_t>(lse_at) * element, cleaned + t * heads + head, sizeof(float));
      }
    }
  };
  if (call.gpu() != nullptr) {
    kernels::cuda::PackParams params;
    params.cleaned = cleaned;
    params.heads = {world, local, call.head_groups};
    params.partial = static_cast<const std::byte*>(in.data);
    params.dtype = in.dtype;
    params.token_stride = in.strides[0];
    params.head_stride = in.strides[1];
    params.num_tokens = tokens;
    params.head_dim = dim;
    params.lse_at = lse_at;
    params.row_elements = row_elements;
    params.send = send;
    call.gpu()->enqueue(params, call.stream);
  } else {
    for_rows(call.context, int64_t{world} * tokens, int64_t{local} * dim, pack);
  }
  call.group.all_to_all(send, received, static_cast<size_t>(tokens * local) * row_bytes, call.stream);

  AttentionStatesView states;
  states.out = ConstTensorView(received, in.dtype, {tokens, world, local, dim});
  states.out.strides = {local * row_elements, tokens * local * row_elements, row_elements, 1, 0};
  const int64_t row_floats = static_cast<int64_t>(row_bytes / sizeof(float));
  states.lse = reinterpret_cast<const float*>(received + static_cast<size_t>(lse_at) * element);
  states.lse_token_stride = local * row_floats;
  states.lse_state_stride = tokens * local * row_floats;
  states.lse_head_stride = row_floats;
  states.base = call.partial.base;
  merge_states(call.context, states, call.out, call.lse, {}, call.stream);
}

}  // namespace folio::inline v0::distributed
