#include "folio/paged_attention.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/op_state.hpp"
#include "attention/run_args.hpp"
#include "core/aligned_buffer.hpp"
#include "core/error.hpp"
#include "scheduler/batch.hpp"

namespace folio::inline v0 {
namespace {

using core::require;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// Scratch memory that grows, on the host or on a GPU.
class OwnWorkspace {
 public:
  /// Makes it at least so large. What it was keeps its memory if the new one cannot be had.
  void reserve(const attention::GpuBackend* gpu, size_t bytes) {
    if (bytes <= view_.bytes) return;
    if (gpu != nullptr) {
      device_ = gpu->allocate(bytes);
      view_ = {device_.get(), bytes};
    } else {
      host_ = core::AlignedBuffer(bytes, core::AlignedBuffer::kWorkspaceAlignment);
      view_ = {host_.data(), bytes};
    }
  }
  const Workspace& view() const { return view_; }

 private:
  core::AlignedBuffer host_;
  std::shared_ptr<void> device_;
  Workspace view_;
};

/// An op, and the last plan of the batches that came with its configuration.
struct Prepared {
  AttentionConfig config;  ///< as it was asked for, which the op has resolved
  AttentionOp op;
  PlanBuffer buffer;
  uint64_t last_use = 0;  ///< the number of the call that used it last
};

void check_tensors(const PagedAttentionArgs& args) {
  require(args.q.rank == 3, "q has rank ", args.q.rank, "; it must be [tokens, num_q_heads, head_dim_qk]");
  require(args.q.shape[0] >= 0 && args.q.shape[0] <= kMaxInt32, "q has ", args.q.shape[0],
          " tokens; it must have 0 to ", kMaxInt32);
  require(args.q.shape[1] >= 1 && args.q.shape[1] <= kMaxInt32, "q has ", args.q.shape[1], " heads");
  require(args.q.shape[2] == args.cache.head_dim_qk, "q has head_dim ", args.q.shape[2], "; the cache's keys have ",
          args.cache.head_dim_qk);
  require(size_of(args.q.dtype) != 0, "q.dtype is ", args.q.dtype);
  require(size_of(args.out.dtype) != 0, "out.dtype is ", args.out.dtype);
  if (args.out.dtype == DType::kFloat4E2M1x2) {
    core::fail(ErrorCode::kUnsupported, "out is ", args.out.dtype,
               ", which needs block scales; `run` takes them (AttentionArgs::out_block_scale)");
  }
  require(!args.causal || args.window_right == -1, "window_right is ", args.window_right,
          " with causal; a causal token sees no key ahead");
}

/// Before the core sees lengths, so that messages have the caller's names.
void check_lengths(const PagedAttentionArgs& args) {
  const size_t requests = args.seq_lens.size();
  const int64_t tokens = args.q.shape[0];
  require(requests < static_cast<size_t>(kMaxInt32), "seq_lens has ", requests, " requests");
  require(args.page_table.num_rows >= static_cast<int64_t>(requests), "page_table has ", args.page_table.num_rows,
          " rows; seq_lens has ", requests, " requests");
  for (size_t r = 0; r < requests; ++r) {
    require(args.seq_lens[r] >= 0 && args.seq_lens[r] <= scheduler::kMaxKvLen, "seq_lens[", r, "] is ",
            args.seq_lens[r], "; it must be 0 to ", scheduler::kMaxKvLen);
  }
  if (args.cu_q.empty()) {
    require(tokens == static_cast<int64_t>(requests), "q has ", tokens, " tokens and seq_lens ", requests,
            " requests; without cu_q every request has one token");
    return;
  }
  require(args.cu_q.size() == requests + 1, "cu_q has ", args.cu_q.size(), " entries; seq_lens has ", requests,
          " requests, and cu_q one entry more");
  require(args.cu_q[0] == 0, "cu_q[0] is ", args.cu_q[0], "; it must be 0");
  for (size_t r = 0; r < requests; ++r) {
    require(args.cu_q[r] <= args.cu_q[r + 1], "cu_q falls from ", args.cu_q[r], " to ", args.cu_q[r + 1],
            " at request ", r);
  }
  require(args.cu_q[requests] <= tokens, "cu_q ends at ", args.cu_q[requests], "; q has ", tokens, " tokens");
}

AttentionConfig config_of(const PagedAttentionArgs& args) {
  AttentionConfig config;
  config.num_q_heads = static_cast<int32_t>(args.q.shape[1]);
  config.num_kv_heads = args.cache.num_kv_heads;
  config.head_dim_qk = args.cache.head_dim_qk;
  config.head_dim_v = args.cache.head_dim_v;
  config.q = args.q.dtype;
  config.kv = args.cache.dtype;
  config.out = args.out.dtype;
  config.kv_format = args.cache.format;
  config.page_size = args.cache.page_size;
  config.mask = args.causal ? MaskKind::kCausal : MaskKind::kNone;
  config.window_left = args.window_left;
  config.window_right = args.window_right;
  config.determinism = args.determinism;
  if (args.logits_soft_cap != 0.0f) config.features = config.features | Feature::kSoftCap;
  if (args.alibi_slopes != nullptr) config.features = config.features | Feature::kAlibi;
  if (args.sinks != nullptr) config.features = config.features | Feature::kSinks;
  return config;
}

/// Without padding, equal bytes are equal configurations, whatever fields it gets.
bool is_equal(const AttentionConfig& a, const AttentionConfig& b) {
  static_assert(std::has_unique_object_representations_v<AttentionConfig>);
  return std::memcmp(&a, &b, sizeof(AttentionConfig)) == 0;
}

/// Whether the buffer holds a plan of this batch: plans are a function of lengths alone.
bool is_planned(const detail::PlanBufferState& state, const BatchView& batch) {
  const scheduler::PlanView& view = state.view();
  if (!state.planned || view.num_requests != batch.num_requests || state.num_tokens != batch.num_tokens) return false;
  const int32_t requests = batch.num_requests;
  return std::equal(batch.cu_q, batch.cu_q + requests + 1, view.cu_q) &&
         std::equal(view.segments[0].kv_len, view.segments[0].kv_len + requests, batch.segments[0].kv_len);
}

AttentionArgs layer_args(const PagedAttentionArgs& args, const SegmentArgs& pages) {
  AttentionArgs layer;
  layer.q = args.q;
  layer.out = args.out;
  layer.lse = args.lse;
  layer.segments = {&pages, 1};
  layer.sm_scale = args.sm_scale;
  layer.logits_soft_cap = args.logits_soft_cap;
  layer.alibi_slopes = args.alibi_slopes;
  layer.sinks = args.sinks;
  layer.q_scale = args.q_scale;
  layer.out_scale = args.out_scale;
  return layer;
}

}  // namespace

struct detail::PagedAttentionState {
  Context context;
  Stream stream;
  std::vector<Prepared> prepared;
  OwnWorkspace workspace;
  std::vector<int32_t> one_token_each;  ///< 0, 1, 2, ...: cu_q of decodes
  std::optional<AttentionPlan> last_plan;
  uint64_t num_calls = 0;

  Prepared& find_or_prepare(const PagedAttentionArgs& args) {
    const AttentionConfig config = config_of(args);
    const auto found = std::ranges::find_if(prepared, [&](const Prepared& p) { return is_equal(p.config, config); });
    if (found != prepared.end()) return *found;
    validate(args.cache);
    AttentionOp op = prepare(context, config);
    workspace.reserve(context.state().gpu.get(), workspace_size(op));
    init_workspace(op, workspace.view(), stream);
    Prepared made{config, op, make_plan_buffer(op)};
    if (prepared.size() < static_cast<size_t>(PagedAttention::kMaxConfigs)) {
      return prepared.emplace_back(std::move(made));
    }
    return *std::ranges::min_element(prepared, {}, &Prepared::last_use) = std::move(made);
  }

  const int32_t* cu_q_of(const PagedAttentionArgs& args) {
    if (!args.cu_q.empty()) return args.cu_q.data();
    while (one_token_each.size() <= args.seq_lens.size()) {
      one_token_each.push_back(static_cast<int32_t>(one_token_each.size()));
    }
    return one_token_each.data();
  }

  AttentionPlan plan_of(Prepared& used, const PagedAttentionArgs& args) {
    KvSegment keys;
    keys.kv_len = args.seq_lens.data();
    BatchView batch;
    batch.num_requests = static_cast<int32_t>(args.seq_lens.size());
    batch.num_tokens = static_cast<int32_t>(args.q.shape[0]);
    batch.cu_q = cu_q_of(args);
    batch.segments = {&keys, 1};
    const PlanBufferState& buffer = used.buffer.state();
    if (is_planned(buffer, batch)) return {&buffer, buffer.generation};
    return folio::plan(used.op, batch, used.buffer, stream);
  }
};

PagedAttention::PagedAttention(const Context& context, Stream stream)
    : state_(std::make_unique<detail::PagedAttentionState>(
          detail::PagedAttentionState{context, stream, {}, {}, {}, {}, 0})) {
  require(context.state().gpu != nullptr || stream.handle == nullptr,
          "a stream is given with a CPU's context, which has none; leave it out");
  state_->prepared.reserve(static_cast<size_t>(kMaxConfigs));
}
PagedAttention::PagedAttention(PagedAttention&&) noexcept = default;
PagedAttention& PagedAttention::operator=(PagedAttention&&) noexcept = default;
PagedAttention::~PagedAttention() = default;

void PagedAttention::operator()(const PagedAttentionArgs& args) {
  detail::PagedAttentionState& state = *state_;
  const attention::GpuBackend* const gpu = state.context.state().gpu.get();
  if (gpu != nullptr && gpu->is_capturing(state.stream)) {
    core::fail(ErrorCode::kUnsupported,
               "the stream is being captured, and a replay would use this plan for ever; graphs take an op with ",
               "GraphBounds (PrepareOptions::bounds) and lengths on the device");
  }
  check_tensors(args);
  check_lengths(args);
  Prepared& used = state.find_or_prepare(args);
  if (gpu == nullptr) validate(args.page_table, args.seq_lens, args.cache.page_size, args.cache.num_pages);
  const AttentionPlan plan = state.plan_of(used, args);
  SegmentArgs pages;
  pages.cache = args.cache;
  pages.table = args.page_table;
  pages.k_scale = args.k_scale;
  pages.v_scale = args.v_scale;
  run(plan, layer_args(args, pages), state.workspace.view(), state.stream);
  used.last_use = ++state.num_calls;
  state.last_plan = plan;
}

AttentionPlan PagedAttention::plan() const {
  require(state_->last_plan.has_value(), "nothing was called yet, so that there is no plan");
  return *state_->last_plan;
}

}  // namespace folio::inline v0
