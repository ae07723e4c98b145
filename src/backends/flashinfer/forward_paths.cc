#include <array>
#include <utility>

#include "backends/common/context_memory.hpp"
#include "backends/common/dcp_step.hpp"
#include "backends/common/layer_plans.hpp"
#include "backends/common/step_levels.hpp"
#include "backends/common/tensor_checks.hpp"
#include "backends/flashinfer/block_table_state.hpp"
#include "backends/flashinfer/forward_call.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/backends/flashinfer/kv_dequant.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0::backends {
namespace {

/// Tokens from `first` on, `count` of them.
template <typename Tensor>
Tensor tokens_of(Tensor tensor, int64_t first, int64_t count) {
  using Bytes =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(tensor.data)>>, const std::byte, std::byte>;
  if (tensor.data != nullptr)
    tensor.data = static_cast<Bytes*>(tensor.data) + first * tensor.strides[0] * size_of(tensor.dtype);
  tensor.shape[0] = count;
  return tensor;
}

/// Requests of one section of a batch, decodes or prefills.
struct Section {
  int32_t first_request = 0;
  int32_t num_requests = 0;
};

BlockTableView rows_of(const BlockTableView& table, const Section& section) {
  BlockTableView rows = table;
  if (table.data != nullptr) rows.data += section.first_request * table.row_stride;
  rows.num_rows = section.num_requests;
  return rows;
}

/// A layer's scale for the requests from `first` on.
Scale scale_from(Scale scale, int32_t first) {
  if (scale.data == nullptr) return scale;
  if (scale.granularity == ScaleGranularity::kPerRequest) scale.data += first;
  if (scale.granularity == ScaleGranularity::kPerRequestAndHead) scale.data += first * scale.request_stride;
  return scale;
}

/// What quantised outputs are divided by, or multiplied with.
Scale output_scale(const OutputQuantization& quantization) {
  Scale scale;
  if (quantization.scale_where == Where::kDevice) {
    scale.data = quantization.scale;
  } else if (quantization.scale != nullptr) {
    scale.value = *quantization.scale;
  }
  return scale;
}

/// Without the requests of padding behind the others: they have no queries.
Section without_padding(Section section, std::span<const int32_t> qo_indptr) {
  const auto first = static_cast<size_t>(section.first_request);
  while (section.num_requests > 0 && qo_indptr[first + static_cast<size_t>(section.num_requests)] ==
                                         qo_indptr[first + static_cast<size_t>(section.num_requests) - 1]) {
    --section.num_requests;
  }
  return section;
}

/// Replaces an fp8 cache by a 16-bit copy of what the section uses, in the workspace's memory. `seq_lens`: where the
/// context's kernels read them.
void dequantize(const Context& context, BlockTableWorkspace::State& state, const AttentionLayerScales& layer,
                DType dtype, std::span<const int32_t> seq_lens, BlockTableArgs& args, Stream stream) {
  const KvCacheView& cache = args.kv_cache;
  const int64_t pages = num_dequantized_pages(args.seq_lens, cache.page_size);
  const int64_t elements =
      pages * cache.page_size * cache.num_kv_heads * (int64_t{cache.head_dim_qk} + cache.head_dim_v);
  const auto bytes = static_cast<size_t>(elements * size_of(dtype));
  state.dequantized.reserve(bytes);
  const size_t entries = args.seq_lens.size() * static_cast<size_t>(args.block_tables.num_columns);
  state.dequantized_table.reserve(entries * sizeof(int32_t));
  const std::span<int32_t> table(state.dequantized_table.as<int32_t>(), entries);
  const KvCacheShape shape{pages, cache.page_size, cache.num_kv_heads, cache.head_dim_qk, cache.head_dim_v, dtype};
  auto* const k = state.dequantized.as<std::byte>();
  const KvCacheView mock =
      make_hnd_view(shape, k, k + pages * cache.page_size * cache.num_kv_heads * cache.head_dim_qk * size_of(dtype));
  trtllm_prefill_attn_kvfp8_dequant(context, cache, args.block_tables, seq_lens, layer.k.value, layer.v.value, mock,
                                    table, stream);
  args.kv_cache = mock;
  args.block_tables = {table.data(), core::checked_cast<int32_t>(args.seq_lens.size()), args.block_tables.num_columns,
                       args.block_tables.num_columns};
}

}  // namespace

void FlashInferImpl::check_paths(const Call& call) const {
  const FlashInferMetadata& metadata = call.metadata;
  if (metadata.dcp_plans.front()) {
    if (!call.as_planned) {
      core::fail(ErrorCode::kUnsupported, "queries of ", call.query.dtype, " and outputs of ", call.output.dtype,
                 " are given under decode context parallelism; the step was planned for ", metadata.q_data_type,
                 " and ", metadata.output_data_type,
                 " (FlashInferOptions::quantize_query and output_dtype, of which fp8 is offered there)");
    }
    static_cast<void>(dcp_plan_for_window(metadata.dcp_plans, window_left_));
    return;
  }
  if (metadata.planned.num_requests > 0 && call.as_planned) {
    static_cast<void>(workspace_size(plan_for_window(metadata.plans, window_left_)));
  }
  if (call.as_planned && metadata.planned.num_requests == metadata.num_reqs) {
    if (call.output.dtype == DType::kFloat4E2M1x2) static_cast<void>(planned_block_scale(call));
    return;
  }
  core::require(metadata.block_table_workspace != nullptr, "the metadata has no block_table_workspace");
  if (!call.as_planned && metadata.use_cascade && metadata.log != nullptr) {
    (*metadata.log)(LogLevel::kWarning,
                    "queries or outputs are of other types than the step was planned for: prefixes that requests share "
                    "are read once for each; FlashInferOptions::quantize_query and output_dtype plan for them");
  }
  run_block_tables(call, /*check_only=*/true, {});
}

BlockScaleArgs FlashInferImpl::planned_block_scale(const Call& call) const {
  const PlannedPart& part = call.metadata.planned;
  return nvfp4_block_scale("output_block_scale", call.quantization.block_scale, part.first_token, part.num_tokens,
                           num_heads_, head_size_);
}

void FlashInferImpl::run_planned(const Call& call, Stream stream) const {
  const FlashInferMetadata& metadata = call.metadata;
  const PlannedPart& part = metadata.planned;
  SegmentArgs segment;
  segment.cache = call.cache;
  segment.k_scale = scale_from(call.layer.k, part.first_request);
  segment.v_scale = scale_from(call.layer.v, part.first_request);
  const BlockTableView table = rows_of(metadata.block_table, {part.first_request, part.num_requests});
  segment.table = to_page_table(table, part.num_requests);
  LevelArgs room;
  std::span<const SegmentArgs> segments(&segment, 1);
  if (metadata.cascade.num_levels > 0) {
    segments = segment_args(metadata.cascade, segment, room);
  } else if (metadata.use_cascade) {
    room[0] = room[1] = segment;
    room[0].table = to_page_table(rows_of(metadata.block_table, {metadata.prefix_request, 1}), 1);
    room[1].table.first_column = metadata.common_prefix_len / metadata.page_size;
    segments = std::span(room).first(2);
  }
  AttentionArgs args;
  args.q = tokens_of(call.query, part.first_token, part.num_tokens);
  args.out = tokens_of(call.output, part.first_token, part.num_tokens);
  args.segments = segments;
  args.sm_scale = scale_;
  args.logits_soft_cap = logits_soft_cap_;
  args.alibi_slopes = kernel_values(alibi_slopes_, gpu_alibi_slopes_);
  args.sinks = kernel_values(sinks_, gpu_sinks_);
  // A checkpoint's q scale describes quantised queries; 16-bit ones are what they are.
  if (is_fp8(call.query.dtype)) args.q_scale = scale_from(call.layer.q, part.first_request);
  if (call.quantization.wanted()) args.out_scale = output_scale(call.quantization);
  if (call.output.dtype == DType::kFloat4E2M1x2) args.out_block_scale = planned_block_scale(call);
  if (metadata.dcp_plans.front()) {
    const DcpWindowPlan& plan = dcp_plan_for_window(metadata.dcp_plans, window_left_);
    run_dcp(plan, args, call.key, call.value, metadata.workspace, stream);
    return;
  }
  run(plan_for_window(metadata.plans, window_left_), args, metadata.workspace, stream);
}

void FlashInferImpl::run_block_tables(const Call& call, bool check_only, Stream stream) const {
  const FlashInferMetadata& metadata = call.metadata;
  const std::span<const int32_t> qo_indptr = metadata.qo_indptr_host;
  const auto run_section = [&](Section section, bool decode) {
    section = without_padding(section, qo_indptr);
    if (section.num_requests == 0) return;
    const auto first = static_cast<size_t>(section.first_request);
    const auto count = static_cast<size_t>(section.num_requests);
    const int64_t first_token = qo_indptr[first];
    const int64_t num_tokens = qo_indptr[first + count] - first_token;
    BlockTableArgs args;
    args.query = tokens_of(call.query, first_token, num_tokens);
    args.kv_cache = call.cache;
    args.block_tables = rows_of(metadata.block_table, section);
    args.seq_lens = metadata.seq_lens_host.subspan(first, count);
    args.max_seq_len = metadata.max_seq_len;
    args.bmm1_scale = scale_;
    if (is_fp8(call.query.dtype)) args.q_scale = scale_from(call.layer.q, section.first_request);
    args.k_scale = scale_from(call.layer.k, section.first_request);
    args.v_scale = scale_from(call.layer.v, section.first_request);
    args.window_left = window_left_;
    args.sinks = kernel_values(sinks_, gpu_sinks_);
    args.logits_soft_cap = logits_soft_cap_;
    args.alibi_slopes = kernel_values(alibi_slopes_, gpu_alibi_slopes_);
    const TensorView out = tokens_of(call.output, first_token, num_tokens);
    args.out = out;
    if (call.quantization.wanted()) args.out_scale = output_scale(call.quantization);
    if (out.dtype == DType::kFloat4E2M1x2) {
      args.out = FP4Tensor{out, call.quantization.block_scale, first_token, {num_tokens, num_heads_, head_size_}};
      if (args.out_scale.data == nullptr) args.o_sf_scale = std::exchange(args.out_scale.value, 1.0f);
    }
    // Decodes with empty requests among them have lengths like prefills.
    const int32_t q_len = qo_indptr[first + 1] - qo_indptr[first];
    const bool even = decode && int64_t{q_len} * section.num_requests == num_tokens;
    // The originals' prefill kernels cannot mix 16-bit queries with fp8 keys. The copy has the k and v scales in it.
    const bool native = metadata.profile == BackendProfile::kNative;
    const bool copied = !decode && !native && is_fp8(kv_cache_dtype_) && !is_fp8(call.query.dtype);
    BlockTableWorkspace::State& state = metadata.block_table_workspace->state();
    state.of_captured_shape = metadata.num_padded_reqs > 0;
    if (check_only) {
      if (copied) {  // one host value each
        static_cast<void>(bmm1_scale(call.layer, call.query.dtype));
        static_cast<void>(bmm2_scale(call.layer));
      }
      set_context_lengths(state, args, qo_indptr.subspan(first, count + 1), 0);
      check_block_table_call(state, args);
      return;
    }
    if (copied) {
      dequantize(context_, state, call.layer, call.query.dtype, metadata.seq_lens.subspan(first, count), args, stream);
      args.k_scale = args.v_scale = {};
    }
    if (even) {
      trtllm_batch_decode_with_kv_cache(*metadata.block_table_workspace, args, q_len, stream);
    } else {
      trtllm_batch_context_with_kv_cache(*metadata.block_table_workspace, args, qo_indptr.subspan(first, count + 1), 0,
                                         stream);
    }
  };
  const BatchSplit& split = metadata.split;
  const bool all = !call.as_planned;
  if (metadata.prefill_use_trtllm || all) run_section({split.num_decodes, split.num_prefills}, false);
  if (metadata.decode_use_trtllm || all) run_section({0, split.num_decodes}, true);
}

}  // namespace folio::inline v0::backends
