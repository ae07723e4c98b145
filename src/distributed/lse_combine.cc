#include "folio/distributed/lse_combine.hpp"

#include <cmath>
#include <limits>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/combine_call.hpp"

namespace folio::inline v0::distributed {
namespace {

using core::require;

constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();
constexpr size_t kWorkspaceAlignment = 256;

size_t floats(int64_t a, int64_t b, int64_t c, int64_t d = 1) {
  const int64_t bytes = core::checked_mul(core::checked_mul(a, b, c, d), int64_t{sizeof(float)});
  return core::checked_round_up(static_cast<size_t>(bytes), kWorkspaceAlignment);
}

void check_empty_rows(const EmptyRows& rows, int64_t num_tokens, bool readable = true) {
  require(rows.local_seq_lens.empty() || !rows.query_start_loc.empty(),
          "local_seq_lens is given without query_start_loc; give both or neither");
  if (rows.query_start_loc.empty()) return;
  require(rows.query_start_loc.size() == rows.local_seq_lens.size() + 1, "query_start_loc has ",
          rows.query_start_loc.size(), " entries; with ", rows.local_seq_lens.size(), " local_seq_lens it has ",
          rows.local_seq_lens.size() + 1);
  if (!readable) return;
  require(rows.query_start_loc.front() >= 0, "query_start_loc begins at ", rows.query_start_loc.front());
  for (size_t i = 0; i < rows.local_seq_lens.size(); ++i) {
    require(rows.query_start_loc[i] <= rows.query_start_loc[i + 1], "query_start_loc descends at ", i);
  }
  require(rows.query_start_loc.back() <= num_tokens, "query_start_loc ends at ", rows.query_start_loc.back(),
          "; there are ", num_tokens, " rows");
}

/// What all combines check. Of `out` and `lse` the merge that writes them checks the rest.
void check_call(const CombineCall& call, int64_t out_heads) {
  const ConstTensorView& in = call.partial.out;
  require(in.rank == 3 && call.out.rank == 3, "partial has rank ", in.rank, " and out ", call.out.rank,
          "; both are [tokens, heads, head_dim]");
  require(in.dtype == DType::kFloat32 || in.dtype == DType::kFloat16 || in.dtype == DType::kBFloat16, "partial is ",
          in.dtype, "; float32, float16 and bfloat16 are combined");
  for (size_t k = 0; k < 3; ++k) {
    require(in.shape[k] >= (k == 0 ? 0 : 1) && in.strides[k] >= 0, "partial has size ", in.shape[k], " and stride ",
            in.strides[k], " in dimension ", k);
  }
  require(in.strides[2] == 1 || in.shape[2] == 1, "partial's innermost stride is ", in.strides[2], "; it must be 1");
  const bool nothing = in.shape[0] == 0;
  require(nothing || (in.data != nullptr && call.partial.lse != nullptr), "partial has no memory");
  require(call.partial.lse_token_stride >= 0 && call.partial.lse_head_stride >= 0,
          "the partial's LSE has negative strides");
  require(call.out.shape[0] == in.shape[0] && call.out.shape[1] == out_heads && call.out.shape[2] == in.shape[2],
          "out is [", call.out.shape[0], ", ", call.out.shape[1], ", ", call.out.shape[2], "]; it must be [",
          in.shape[0], ", ", out_heads, ", ", in.shape[2], "]");
  require(call.out.dtype == DType::kFloat32 || call.out.dtype == DType::kFloat16 || call.out.dtype == DType::kBFloat16,
          "out is ", call.out.dtype, "; float32, float16 and bfloat16 are written");
  require(call.out.strides[2] == 1 || in.shape[2] == 1, "out's innermost stride is ", call.out.strides[2],
          "; it must be 1");
  require(nothing || call.out.data != nullptr, "out has no memory");
  check_empty_rows(call.empty, in.shape[0], call.gpu() == nullptr);
  check_workspace(call);
}

void check_divisible(int64_t heads, int32_t world) {
  if (heads % world == 0) return;
  core::fail(ErrorCode::kInvalidArgument, "H=", heads, " must be divisible by DCP world size ", world, ".");
}

CombineCall facade_call(const Context& context, ProcessGroup& group, const AttentionStateView& partial,
                        const TensorView& out, const LseView& lse, Workspace workspace, const EmptyRows& empty,
                        Stream stream) {
  return CombineCall{context, group, partial, 1, NanLse::kIsEmpty, empty, out, lse, workspace, stream};
}

}  // namespace

DcpCombine dcp_combine_from_name(std::string_view name, int32_t world) {
  if (name == "ag_rs") return DcpCombine::kAllGatherReduceScatter;
  require(name == "a2a", "dcp_comm_backend is '", name, "'; 'ag_rs' and 'a2a' are offered");
  require(world > 1, "dcp_comm_backend 'a2a' requires decode_context_parallel_size > 1");
  return DcpCombine::kAllToAll;
}

std::string_view to_string(DcpCombine combine) {
  return combine == DcpCombine::kAllToAll ? "a2a" : "ag_rs";
}

bool use_replicated_queries(std::optional<bool> wish, DcpCombine combine, int32_t world, int32_t prefill_world) {
  return world > 1 && prefill_world == 1 && wish.value_or(combine == DcpCombine::kAllToAll);
}

int32_t lse_lanes(DType dtype) {
  require(dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16, "partial results are ",
          dtype, "; an LSE is packed behind float32, float16 and bfloat16");
  return static_cast<int32_t>(sizeof(float)) / size_of(dtype);
}

void mask_empty_rows(const EmptyRows& rows, int32_t num_tokens, int32_t num_heads, const LseView& lse) {
  check_empty_rows(rows, num_tokens);
  if (rows.query_start_loc.empty()) return;
  const auto empty_out = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int32_t h = 0; h < num_heads; ++h) lse.data[t * lse.token_stride + h * lse.head_stride] = kEmptyLse;
    }
  };
  for (size_t i = 0; i < rows.local_seq_lens.size(); ++i) {
    if (rows.local_seq_lens[i] == 0) empty_out(rows.query_start_loc[i], rows.query_start_loc[i + 1]);
  }
  empty_out(rows.query_start_loc.back(), num_tokens);
}

void mask_empty_rows(const Context& context, const EmptyRows& rows, int32_t num_tokens, int32_t num_heads,
                     const LseView& lse, Stream stream) {
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  if (gpu == nullptr) {
    require(stream.handle == nullptr, "a CPU context takes the default stream only");
    mask_empty_rows(rows, num_tokens, num_heads, lse);
    return;
  }
  check_empty_rows(rows, num_tokens, /*readable=*/false);
  if (rows.query_start_loc.empty()) return;
  kernels::cuda::MaskRowsParams params;
  params.local_seq_lens = rows.local_seq_lens.data();
  params.query_start_loc = rows.query_start_loc.data();
  params.num_requests = core::checked_cast<int32_t>(rows.local_seq_lens.size());
  params.lse = lse.data;
  params.token_stride = lse.token_stride;
  params.head_stride = lse.head_stride;
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  gpu->enqueue(params, stream);
}

CombineParts combine_parts(int32_t world, int64_t num_tokens, int32_t num_heads, int32_t head_dim) {
  require(world >= 1 && num_tokens >= 0 && num_heads >= 0 && head_dim >= 0, "world ", world, ", num_tokens ",
          num_tokens, ", num_heads ", num_heads, " and head_dim ", head_dim, " are no sizes of a combine");
  CombineParts parts;
  parts.lse = floats(num_tokens, num_heads, 1);
  parts.gathered = floats(world, num_tokens, num_heads);
  parts.send = floats(num_tokens, num_heads, int64_t{head_dim} + 1);
  parts.received = parts.send;
  return parts;
}

size_t combine_workspace_size(int32_t world, int64_t num_tokens, int32_t num_heads, int32_t head_dim) {
  return combine_parts(world, num_tokens, num_heads, head_dim).total();
}

void check_workspace(const CombineCall& call) {
  const size_t needed = combine_workspace_size(call.group.size(), call.num_tokens(), call.num_heads(), call.head_dim());
  require(reinterpret_cast<uintptr_t>(call.workspace.data) % kWorkspaceAlignment == 0,
          "the workspace is not aligned to ", kWorkspaceAlignment, " bytes");
  if (needed > 0 && (call.workspace.data == nullptr || call.workspace.bytes < needed)) {
    core::fail(ErrorCode::kWorkspaceTooSmall, "the workspace has ", call.workspace.bytes, " bytes; the combine needs ",
               needed);
  }
}

void clean_lses(const CombineCall& call, float* cleaned) {
  const int32_t heads = call.num_heads();
  const AttentionStateView& partial = call.partial;
  if (call.gpu() != nullptr) {
    kernels::cuda::CleanLseParams params;
    params.lse = partial.lse;
    params.token_stride = partial.lse_token_stride;
    params.head_stride = partial.lse_head_stride;
    params.cleaned = cleaned;
    params.num_tokens = call.num_tokens();
    params.num_heads = heads;
    params.nan_is_empty = call.nan == NanLse::kIsEmpty;
    params.local_seq_lens = call.empty.local_seq_lens.data();
    params.query_start_loc = call.empty.query_start_loc.data();
    params.num_requests = core::checked_cast<int32_t>(call.empty.local_seq_lens.size());
    call.gpu()->enqueue(params, call.stream);
    return;
  }
  for_rows(call.context, call.num_tokens(), heads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int32_t h = 0; h < heads; ++h) {
        const float lse = partial.lse[t * partial.lse_token_stride + h * partial.lse_head_stride];
        const bool empty = std::isinf(lse) || (std::isnan(lse) && call.nan == NanLse::kIsEmpty);
        cleaned[t * heads + h] = empty ? kEmptyLse : lse;
      }
    }
  });
  mask_empty_rows(call.empty, static_cast<int32_t>(call.num_tokens()), heads, {cleaned, heads, 1});
}

void cp_lse_ag_out_rs(const Context& context, ProcessGroup& group, const AttentionStateView& partial, TensorView out,
                      LseView lse, Workspace workspace, const EmptyRows& empty, Stream stream) {
  const CombineCall call = facade_call(context, group, partial, out, lse, workspace, empty, stream);
  check_divisible(partial.out.shape[1], group.size());
  check_call(call, call.local_heads());
  all_gather_reduce_scatter(call);
}

void cp_lse_ag_out_ar(const Context& context, ProcessGroup& group, const AttentionStateView& partial, TensorView out,
                      LseView lse, Workspace workspace, const EmptyRows& empty, Stream stream) {
  const CombineCall call = facade_call(context, group, partial, out, lse, workspace, empty, stream);
  check_call(call, call.num_heads());
  all_gather_all_reduce(call);
}

void dcp_a2a_lse_reduce(const Context& context, ProcessGroup& group, const AttentionStateView& partial, TensorView out,
                        LseView lse, Workspace workspace, const EmptyRows& empty, Stream stream) {
  const CombineCall call = facade_call(context, group, partial, out, lse, workspace, empty, stream);
  check_divisible(partial.out.shape[1], group.size());
  check_call(call, call.local_heads());
  all_to_all_combine(call);
}

}  // namespace folio::inline v0::distributed
