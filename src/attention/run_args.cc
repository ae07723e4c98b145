#include "attention/run_args.hpp"

#include <algorithm>
#include <cmath>

#include "attention/cache_args.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"
#include "kvcache/page_rows.hpp"

namespace folio::inline v0::attention {
namespace {

using detail::PlanBufferState;
using scheduler::SegmentLengths;

using core::require;

/// [tokens, heads, dim], innermost contiguous.
void check_rows(const char* name, const ConstTensorView& view, DType dtype, int64_t tokens, int64_t heads,
                int64_t dim) {
  require(view.rank == 3, name, " has rank ", view.rank, "; it must be [tokens, heads, head_dim]");
  require(view.dtype == dtype, name, " is ", to_string(view.dtype), "; the op was prepared for ", to_string(dtype));
  require(view.shape[0] == tokens && view.shape[1] == heads && view.shape[2] == dim, name, " is [", view.shape[0], ", ",
          view.shape[1], ", ", view.shape[2], "]; it must be [", tokens, ", ", heads, ", ", dim, "]");
  require(view.strides[2] == 1 || dim == 1, name, "'s innermost stride is ", view.strides[2], "; it must be 1");
  require(view.data != nullptr || tokens == 0, name, ".data is null");
}

/// Writing needs every row apart from every other: the nearer dimension's rows fit below the farther one's stride.
void check_rows_apart(const char* name, int64_t tokens, int64_t token_stride, int64_t heads, int64_t head_stride,
                      int64_t row_length) {
  const bool heads_inside = head_stride <= token_stride;
  const int64_t near_stride = heads_inside ? head_stride : token_stride;
  const int64_t near_count = heads_inside ? heads : tokens;
  const int64_t far_stride = heads_inside ? token_stride : head_stride;
  const int64_t far_count = heads_inside ? tokens : heads;
  const bool near_apart = near_count <= 1 || near_stride >= row_length;
  const int64_t near_extent =
      near_count <= 1 ? row_length : core::checked_add(core::checked_mul(near_count - 1, near_stride), row_length);
  const bool far_apart = far_count <= 1 || far_stride >= near_extent;
  require(near_apart && far_apart, name, "'s rows overlap: token stride ", token_stride, ", head stride ", head_stride);
}

/// A scale of the op. `readable`: its values lie in host memory. They are checked for the requests that have queries.
void check_scale(const char* name, const Scale& scale, bool allowed, const char* why_not,
                 const detail::PlanBufferState& plan, bool readable) {
  const scheduler::PlanView& view = plan.view();
  const int32_t heads = plan.op->config.num_kv_heads;
  attention::check_scale(name, scale, allowed, why_not, heads, view.num_requests, false);
  if (scale.data == nullptr || !readable) return;
  const auto check = [&](int64_t index, int64_t count) {
    for (int64_t i = index; i < index + count; ++i) {
      require(std::isfinite(scale.data[i]) && scale.data[i] > 0.0f, name, ".data[", i, "] is ", scale.data[i],
              "; it must be finite and above 0");
    }
  };
  if (scale.granularity == ScaleGranularity::kPerTensor) return check(0, 1);
  if (scale.granularity == ScaleGranularity::kPerHead) return check(0, heads);
  const bool per_head = scale.granularity == ScaleGranularity::kPerRequestAndHead;
  for (int32_t r = 0; r < view.num_requests; ++r) {
    if (view.cu_q[r] == view.cu_q[r + 1]) continue;
    check(per_head ? r * scale.request_stride : r, per_head ? heads : 1);
  }
}

void check_optional_features(const AttentionConfig& config, const AttentionArgs& args) {
  const auto declared = [&](Feature feature, bool given, const char* name, const char* feature_name) {
    require(!given || config.features.has(feature), name, " is given, but the op was not prepared for it; add ",
            feature_name, " to config.features");
  };
  require(std::isfinite(args.sm_scale), "sm_scale is ", args.sm_scale, "; it must be finite");
  require(std::isfinite(args.logits_soft_cap) && args.logits_soft_cap >= 0.0f, "logits_soft_cap is ",
          args.logits_soft_cap, "; it must be finite and not negative (0 = off)");
  declared(Feature::kSoftCap, args.logits_soft_cap != 0.0f, "logits_soft_cap", "Feature::kSoftCap");
  declared(Feature::kAlibi, args.alibi_slopes != nullptr, "alibi_slopes", "Feature::kAlibi");
  declared(Feature::kSinks, args.sinks != nullptr, "sinks", "Feature::kSinks");
  for (const auto& [name, value] : {std::pair{"theta", args.rope.theta}, {"scale", args.rope.scale}}) {
    require(std::isfinite(value) && value > 0.0f, "rope.", name, " is ", value, "; it must be finite and positive");
  }
  const RopeArgs plain;
  declared(Feature::kRopeLlama, args.rope.theta != plain.theta || args.rope.scale != plain.scale, "rope",
           "Feature::kRopeLlama");
  const bool nvfp4 = config.out == DType::kFloat4E2M1x2;
  require(args.out_block_scale.data == nullptr || nvfp4, "out_block_scale is given, but out is ",
          to_string(config.out));
  require(args.out_block_scale.data != nullptr || !nvfp4,
          "out_block_scale.data is null; an NVFP4 output needs nvfp4_scale_bytes of it");
  require(args.out_block_scale.first_row >= 0, "out_block_scale.first_row is ", args.out_block_scale.first_row,
          "; it must not be negative");
}

/// Tokens of `row` in [indptr[row], indptr[row + 1]), all below `limit`.
void check_span(const char* name, const int32_t* indptr, int32_t row, int64_t needed, int64_t limit) {
  const int64_t begin = indptr[row];
  const int64_t end = indptr[row + 1];
  require(begin >= 0 && begin <= end && end <= limit, name, " of row ", row, " is [", begin, ", ", end,
          "); it must ascend within [0, ", limit, "]");
  require(end - begin >= needed, name, " of row ", row, " has ", end - begin, " entries; its length needs ", needed);
}

/// `readable`: lengths and tables lie in host memory.
void check_paged(const AttentionConfig& config, const SegmentLengths& lengths, const SegmentArgs& args, bool readable) {
  require(args.ragged.k.data == nullptr && args.ragged.v.data == nullptr && args.ragged.indptr == nullptr,
          "the plan has it paged, but ragged tensors are given");
  const KvCacheView& cache = args.cache;
  validate(cache);
  require(cache.format == config.kv_format, "the cache's format is ", to_string(cache.format), ", kv_format ",
          to_string(config.kv_format));
  require(cache.dtype == config.kv, "the cache is ", to_string(cache.dtype), "; the op was prepared for ",
          to_string(config.kv));
  require(cache.page_size == config.page_size && cache.num_kv_heads == config.num_kv_heads &&
              cache.head_dim_qk == config.head_dim_qk && cache.head_dim_v == config.head_dim_v,
          "the cache has page_size ", cache.page_size, ", num_kv_heads ", cache.num_kv_heads, ", head_dim_qk ",
          cache.head_dim_qk, ", head_dim_v ", cache.head_dim_v, "; the op was prepared for ", config.page_size, ", ",
          config.num_kv_heads, ", ", config.head_dim_qk, ", ", config.head_dim_v);

  const PageTableView& table = args.table;
  const bool csr = table.kind == PageTableKind::kCsr;
  require(csr || table.kind == PageTableKind::kDense, "table.kind is ", static_cast<int32_t>(table.kind));
  require(table.num_rows >= lengths.num_rows, "the table has ", table.num_rows, " rows; the plan has ",
          lengths.num_rows);
  require(!csr || table.indptr != nullptr, "table.indptr is null");
  kvcache::check_fields_of_kind(table);
  for (int32_t row = 0; cache.num_pages == 0 && lengths.kv_len != nullptr && row < lengths.num_rows; ++row) {
    require(lengths.kv_len[row] == 0, "row ", row, " has ", lengths.kv_len[row], " keys, but cache.num_pages is 0");
  }
  if (!readable) {
    // Lengths on a GPU are not known here: there may be keys.
    const bool no_keys = lengths.num_rows == 0 ||
                         (lengths.kv_len != nullptr && std::all_of(lengths.kv_len, lengths.kv_len + lengths.num_rows,
                                                                   [](int32_t kv_len) { return kv_len == 0; }));
    require(table.indices != nullptr || no_keys, "table.indices is null");
    return;
  }
  for (int32_t row = 0; row < lengths.num_rows; ++row) {
    if (lengths.kv_len[row] == 0) continue;
    const int64_t pages = (static_cast<int64_t>(lengths.kv_len[row]) + config.page_size - 1) / config.page_size;
    require(table.indices != nullptr, "table.indices is null");
    if (csr) {
      check_span("table.indptr", table.indptr, row, pages, table.num_indices);
    } else {
      const int64_t end =
          core::checked_add(core::checked_mul(int64_t{row}, table.row_stride), table.first_column + pages);
      require(end <= table.num_indices, "row ", row, " of the table ends at entry ", end, " of ", table.num_indices);
      require(lengths.num_rows == 1 || table.first_column + pages <= table.row_stride || table.row_stride == 0, "row ",
              row, " needs ", pages, " pages from column ", table.first_column, "; a row has ", table.row_stride);
    }
  }
}

void check_ragged(const AttentionConfig& config, const SegmentLengths& lengths, const SegmentArgs& args,
                  bool readable) {
  require(args.cache.k == nullptr && args.cache.v == nullptr && args.table.indices == nullptr &&
              args.table.indptr == nullptr,
          "the plan has it ragged, but a cache or table is given");
  const RaggedKvView& ragged = args.ragged;
  const int64_t tokens = ragged.k.shape[0];
  require(tokens >= 0, "ragged.k has ", tokens, " tokens");
  check_rows("ragged.k", ragged.k, config.ragged_kv, tokens, config.num_kv_heads, config.head_dim_qk);
  check_rows("ragged.v", ragged.v, config.ragged_kv, tokens, config.num_kv_heads, config.head_dim_v);
  require(ragged.indptr != nullptr || lengths.num_rows == 0, "ragged.indptr is null");
  for (int32_t row = 0; readable && row < lengths.num_rows; ++row) {
    check_span("ragged.indptr", ragged.indptr, row, lengths.kv_len[row], tokens);
  }
}

void check_segment(const PlanBufferState& plan, const SegmentLengths& lengths, const SegmentArgs& args, bool readable) {
  const AttentionConfig& config = plan.op->config;
  check_scale("k_scale", args.k_scale, true, "", plan, readable);
  check_scale("v_scale", args.v_scale, true, "", plan, readable);
  if (lengths.source == KvSource::kPaged) {
    check_paged(config, lengths, args, readable);
  } else {
    check_ragged(config, lengths, args, readable);
  }
}

}  // namespace

void check_args(const PlanBufferState& plan, const AttentionArgs& args) {
  const AttentionConfig& config = plan.op->config;
  check_rows("q", args.q, config.q, plan.num_tokens, config.num_q_heads, config.head_dim_qk);
  const bool nvfp4 = config.out == DType::kFloat4E2M1x2;
  const int32_t out_elements = nvfp4 ? config.head_dim_v / 2 : config.head_dim_v;  // of two values each
  check_rows("out", args.out, config.out, plan.num_tokens, config.num_q_heads, out_elements);
  check_rows_apart("out", plan.num_tokens, args.out.strides[0], config.num_q_heads, args.out.strides[1], out_elements);
  const auto base = static_cast<int32_t>(args.lse.base);
  require(base == static_cast<int32_t>(LseBase::kE) || base == static_cast<int32_t>(LseBase::k2), "lse.base is ", base);
  if (args.lse.data != nullptr) {
    check_rows_apart("lse", plan.num_tokens, args.lse.token_stride, config.num_q_heads, args.lse.head_stride, 1);
  }
  check_optional_features(config, args);
  const bool readable = plan.op->gpu() == nullptr;
  check_scale("q_scale", args.q_scale, is_fp8(config.q), "q is not fp8", plan, readable);
  require(args.out_scale.granularity == ScaleGranularity::kPerTensor, "out_scale must be per tensor");
  check_scale("out_scale", args.out_scale, is_fp8(config.out) || nvfp4, "out is not fp8", plan, readable);

  const scheduler::PlanView& view = plan.view();
  require(args.segments.size() == static_cast<size_t>(view.num_segments), "args has ", args.segments.size(),
          " segments; the plan has ", view.num_segments);
  for (size_t i = 0; i < args.segments.size(); ++i) {
    try {
      check_segment(plan, view.segments[i], args.segments[i], readable);
    } catch (const Error& error) {
      core::fail(error.code(), "segment ", i, ": ", error.what());
    }
  }

  const bool custom = config.mask == MaskKind::kCustom;
  require(custom || args.custom_mask == nullptr, "custom_mask is given, but config.mask is not kCustom");
  require(args.custom_mask != nullptr || args.custom_mask_bytes == 0, "custom_mask_bytes is ", args.custom_mask_bytes,
          ", but custom_mask is null");
  if (custom) {
    const int64_t bytes = view.mask_byte_indptr[view.num_requests];
    require(args.custom_mask_bytes >= bytes, "custom_mask has ", args.custom_mask_bytes, " bytes; the batch needs ",
            bytes);
    require(args.custom_mask != nullptr || bytes == 0, "custom_mask is null");
  }
}

WorkspaceLayout carve(const detail::OpState& op, int64_t partial_rows) {
  WorkspaceLayout layout;
  const auto take = [&layout](int64_t count, int64_t bytes_each) {
    const size_t begin = layout.total;
    const auto bytes = static_cast<size_t>(core::checked_mul(count, bytes_each));
    layout.total = core::checked_add(begin, round_up_to_alignment(bytes));
    return begin;
  };
  constexpr int64_t kFloat = sizeof(float);
  layout.partial_acc = take(core::checked_mul(partial_rows, int64_t{op.config.head_dim_v}), kFloat);
  layout.partial_row_max = take(partial_rows, kFloat);
  layout.partial_row_sum = take(partial_rows, kFloat);
  layout.scratch = take(op.passes.front().scheduler.num_workers, static_cast<int64_t>(op.scratch_stride));
  return layout;
}

void check_workspace(const Workspace& workspace, size_t needed) {
  if (workspace.bytes < needed) {
    core::fail(ErrorCode::kWorkspaceTooSmall, "the workspace has ", workspace.bytes, " bytes; ", needed, " are needed");
  }
  if (needed > 0 && workspace.data == nullptr) core::fail(ErrorCode::kInvalidArgument, "workspace.data is null");
  if (reinterpret_cast<uintptr_t>(workspace.data) % kWorkspaceAlignment != 0) {
    core::fail(ErrorCode::kInvalidArgument, "workspace.data must be aligned to ", kWorkspaceAlignment, " bytes");
  }
}

}  // namespace folio::inline v0::attention
