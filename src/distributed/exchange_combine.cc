// The combines whose rows travel with their LSEs: dcp_a2a_lse_reduce, and the one for 16-bit results of all heads.
#include <cstring>

#include "distributed/combine_call.hpp"

namespace folio::inline v0::distributed {
namespace {

/// A row is its values and then its LSE's bits.
struct RowLayout {
  DType dtype = DType::kUnset;
  size_t element = 0;    ///< bytes
  int64_t lse_at = 0;    ///< element
  int64_t elements = 0;  ///< of a row
  size_t bytes = 0;
  int64_t floats() const { return static_cast<int64_t>(bytes / sizeof(float)); }
};

RowLayout row_layout(const CombineCall& call) {
  const int32_t dim = call.head_dim();
  RowLayout row;
  row.dtype = call.partial.out.dtype;
  row.element = static_cast<size_t>(size_of(row.dtype));
  // A float needs its alignment, so odd 16-bit rows get one more element.
  row.lse_at = dim % 2 == 0 || row.element == sizeof(float) ? dim : dim + 1;
  // On a GPU, rows of 16-bit values begin where eight can be read at once; the workspace's floats leave room for that.
  const bool wide = call.gpu() != nullptr && row.element == 2 && dim % 8 == 0;
  row.elements = wide ? dim + 8 : row.lse_at + lse_lanes(row.dtype);
  row.bytes = static_cast<size_t>(row.elements) * row.element;
  return row;
}

struct RowMemory {
  float* cleaned;
  std::byte* send;
  std::byte* received;
};

RowMemory row_memory(const CombineCall& call) {
  const CombineParts parts = combine_parts(call.group.size(), call.num_tokens(), call.num_heads(), call.head_dim());
  auto* const base = static_cast<std::byte*>(call.workspace.data);
  std::byte* const send = base + parts.lse + parts.gathered;
  return {reinterpret_cast<float*>(base), send, send + parts.send};
}

/// Sends every rank the rows of its heads: received [W, T, H / W].
void exchange_rows(const CombineCall& call, const RowLayout& row, const RowMemory& memory) {
  const int32_t world = call.group.size(), heads = call.num_heads(), local = call.local_heads();
  const int32_t dim = call.head_dim();
  const int64_t tokens = call.num_tokens();
  const ConstTensorView& in = call.partial.out;
  clean_lses(call, memory.cleaned);
  const auto pack = [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const auto r = static_cast<int32_t>(at / tokens);
      const int64_t t = at % tokens;
      for (int32_t h = 0; h < local; ++h) {
        const int32_t head = call.head_of(r, h);
        std::byte* to = memory.send + static_cast<size_t>(at * local + h) * row.bytes;
        const auto from = static_cast<size_t>(t * in.strides[0] + head * in.strides[1]);
        std::memcpy(to, static_cast<const std::byte*>(in.data) + from * row.element,
                    static_cast<size_t>(dim) * row.element);
        std::memcpy(to + static_cast<size_t>(row.lse_at) * row.element, memory.cleaned + t * heads + head,
                    sizeof(float));
      }
    }
  };
  if (call.gpu() != nullptr) {
    kernels::cuda::PackParams params;
    params.cleaned = memory.cleaned;
    params.heads = {world, local, call.head_groups};
    params.partial = static_cast<const std::byte*>(in.data);
    params.dtype = in.dtype;
    params.token_stride = in.strides[0];
    params.head_stride = in.strides[1];
    params.num_tokens = tokens;
    params.head_dim = dim;
    params.lse_at = row.lse_at;
    params.row_elements = row.elements;
    params.send = memory.send;
    call.gpu()->enqueue(params, call.stream);
  } else {
    for_rows(call.context, int64_t{world} * tokens, int64_t{local} * dim, pack);
  }
  call.group.all_to_all(memory.send, memory.received, static_cast<size_t>(tokens * local) * row.bytes, call.stream);
}

/// `count` partial results of one rank's heads: rows [count, T, H / W].
AttentionStatesView states_of(const CombineCall& call, const RowLayout& row, const std::byte* rows, int64_t count) {
  const int64_t tokens = call.num_tokens(), local = call.local_heads();
  AttentionStatesView states;
  states.out = ConstTensorView(rows, row.dtype, {tokens, count, local, call.head_dim()});
  states.out.strides = {local * row.elements, tokens * local * row.elements, row.elements, 1, 0};
  states.lse = reinterpret_cast<const float*>(rows + static_cast<size_t>(row.lse_at) * row.element);
  states.lse_token_stride = local * row.floats();
  states.lse_state_stride = tokens * local * row.floats();
  states.lse_head_stride = row.floats();
  states.base = call.partial.base;
  return states;
}

}  // namespace

void all_to_all_combine(const CombineCall& call) {
  const RowLayout row = row_layout(call);
  const RowMemory memory = row_memory(call);
  exchange_rows(call, row, memory);
  const AttentionStatesView states = states_of(call, row, memory.received, call.group.size());
  merge_states(call.context, states, call.out, call.lse, {}, call.stream);
}

void all_to_all_all_gather(const CombineCall& call) {
  const RowLayout row = row_layout(call);
  const RowMemory memory = row_memory(call);
  const int64_t tokens = call.num_tokens(), local = call.local_heads();
  const size_t part = static_cast<size_t>(tokens * local) * row.bytes;
  exchange_rows(call, row, memory);
  TensorView own(memory.send, row.dtype, {tokens, local, call.head_dim()});
  own.strides[0] = local * row.elements;
  own.strides[1] = row.elements;
  auto* const own_lse = reinterpret_cast<float*>(memory.send + static_cast<size_t>(row.lse_at) * row.element);
  merge_states(call.context, states_of(call, row, memory.received, call.group.size()), own,
               {own_lse, local * row.floats(), row.floats(), call.partial.base}, {}, call.stream);
  call.group.all_gather(memory.send, memory.received, part, call.stream);
  for (int32_t r = 0; r < call.group.size(); ++r) {
    const int64_t to = r * local;
    TensorView out = call.out;
    out.data = static_cast<std::byte*>(out.data) + to * out.strides[1] * size_of(out.dtype);
    out.shape[1] = local;
    LseView lse = call.lse;
    if (lse.data != nullptr) lse.data += to * lse.head_stride;
    const std::byte* const theirs = memory.received + static_cast<size_t>(r) * part;
    merge_states(call.context, states_of(call, row, theirs, 1), out, lse, {}, call.stream);
  }
}

}  // namespace folio::inline v0::distributed
