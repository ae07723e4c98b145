#include "folio/distributed/dcp_attention.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "distributed/dcp_state.hpp"
#include "folio/page_table.hpp"

namespace folio::inline v0::distributed {
namespace {

/// What ranks must agree on.
uint64_t digest_of(const DcpConfig& config) {
  const AttentionConfig& attention = config.attention;
  return Digest()
      .add(attention.num_q_heads)
      .add(attention.num_kv_heads)
      .add(attention.head_dim_qk)
      .add(attention.head_dim_v)
      .add(attention.q)
      .add(attention.mask)
      .add(attention.window_left)
      .add(attention.window_right)
      .add(attention.attention_chunk)
      .add(attention.features.bits)
      .add(config.interleave)
      .add(config.combine)
      .add(config.replicated_queries)
      .add(config.all_heads_out)
      .value();
}

void check_config(const Context& context, const ProcessGroup& group, const DcpConfig& config) {
  core::require(group.size() == 1 || group.device() == context.device(),
                "the group's buffers lie in another memory than the context's: a group of threads over a GPU's has ",
                "ThreadGroupOptions::context");
  const AttentionConfig& attention = config.attention;
  if (attention.mask == MaskKind::kCustom) {
    core::fail(ErrorCode::kUnsupported, "the mask is a custom one; DcpAttention takes kCausal and kNone");
  }
  if (attention.features.has(Feature::kRopeLlama)) {
    core::fail(ErrorCode::kUnsupported, "features has kRopeLlama; DcpAttention takes kSoftCap, kAlibi and kSinks");
  }
  for (const Feature feature : {Feature::kSpans, Feature::kRequestCausal, Feature::kKvStart}) {
    if (attention.features.has(feature)) {
      core::fail(ErrorCode::kUnsupported, "features is ", attention.features.bits,
                 ", with kSpans, kRequestCausal or kKvStart; DcpAttention takes kSoftCap, kAlibi and kSinks");
    }
  }
  core::require(config.interleave >= 1, "interleave is ", config.interleave, "; it must be 1 or more");
  core::require(attention.page_size % config.interleave == 0, "interleave is ", config.interleave,
                ", which does not divide the page size (", attention.page_size, ")");
  core::require(config.combine == DcpCombine::kAllGatherReduceScatter || config.combine == DcpCombine::kAllToAll,
                "combine is ", static_cast<int32_t>(config.combine));
  if (!config.all_heads_out) return;
  core::require(
      config.replicated_queries,
      "all_heads_out is set with replicated_queries false; a rank's new tokens need the queries of all heads");
  core::require(config.combine == DcpCombine::kAllGatherReduceScatter || group.size() == 1,
                "all_heads_out is set with combine ", to_string(config.combine),
                ", which leaves every rank its own heads; it needs ", to_string(DcpCombine::kAllGatherReduceScatter));
}

/// Partial results are float32 whatever the model's dtype, and sinks belong to the new tokens' pass, once.
AttentionConfig cached_config(const AttentionConfig& config, int32_t world) {
  AttentionConfig cached = config;
  cached.num_q_heads = config.num_q_heads * world;
  cached.out = DType::kFloat32;
  cached.features.bits &= ~Features(Feature::kSinks).bits;
  return cached;
}

AttentionConfig fresh_config(const AttentionConfig& config) {
  AttentionConfig fresh = config;
  fresh.out = DType::kFloat32;
  return fresh;
}

PrepareOptions prepare_options(const DcpConfig& config) {
  PrepareOptions options;
  options.force_kernel = config.force_kernel;
  options.num_workers = config.num_workers;
  return options;
}

}  // namespace

DcpAttention::DcpAttention(const Context& context, ProcessGroup& group, const DcpConfig& config) {
  check_config(context, group, config);
  AttentionOp cached = prepare(context, cached_config(config.attention, group.size()), prepare_options(config));
  AttentionOp fresh = prepare(context, fresh_config(config.attention), prepare_options(config));
  DcpConfig resolved = config;
  const DType out = config.attention.out;
  resolved.attention = fresh.config();
  resolved.attention.out = out;
  if (out == DType::kUnset) resolved.attention.out = is_fp8(config.attention.q) ? DType::kBFloat16 : config.attention.q;
  PlanBuffer cached_buffer = make_plan_buffer(cached);
  PlanBuffer fresh_buffer = make_plan_buffer(fresh);
  state_ = std::make_unique<DcpState>(DcpState{context,
                                               &group,
                                               resolved,
                                               std::move(cached),
                                               std::move(fresh),
                                               std::move(cached_buffer),
                                               std::move(fresh_buffer),
                                               digest_of(resolved),
                                               {},
                                               {},
                                               {},
                                               {},
                                               {},
                                               {}});
}

DcpAttention::DcpAttention(DcpAttention&&) noexcept = default;
DcpAttention& DcpAttention::operator=(DcpAttention&&) noexcept = default;
DcpAttention::~DcpAttention() = default;

const DcpConfig& DcpAttention::config() const noexcept {
  return state_->config;
}
const AttentionOp& DcpAttention::cached_op() const noexcept {
  return state_->cached_op;
}
const AttentionOp& DcpAttention::fresh_op() const noexcept {
  return state_->fresh_op;
}
const ProcessGroup& DcpAttention::group() const noexcept {
  return *state_->group;
}

DcpPlan DcpAttention::plan(const DcpBatch& batch, Stream stream) {
  DcpState& state = *state_;
  const int32_t num_requests = batch.num_requests;
  core::require(num_requests >= 0, "num_requests is ", num_requests);
  core::require(batch.cu_q != nullptr, "cu_q is null");
  core::require(batch.seq_lens != nullptr || num_requests == 0, "seq_lens is null");
  core::require(batch.num_cached >= 0 && batch.num_cached <= num_requests, "num_cached is ", batch.num_cached,
                "; it must be from 0 to ", num_requests);
  core::require(
      state.config.attention.determinism != Determinism::kScheduleInvariant || batch.num_cached == num_requests,
      "num_cached is ", batch.num_cached, " of ", num_requests,
      "; kScheduleInvariant needs every request's keys read from the cache");
  core::require(!batch.cross_attention || batch.num_cached == num_requests, "cross_attention is set with a num_cached ",
                "of ", batch.num_cached, "; an encoder's keys lie in the cache, so that it must be num_requests, ",
                num_requests);
  const auto count = static_cast<size_t>(num_requests);
  state.first_pos.resize(count);
  state.cached_len.resize(count);
  state.fresh_len.resize(count);
  state.indptr.assign(batch.cu_q, batch.cu_q + num_requests + 1);
  state.no_tokens.assign(count + 1, 0);

  Digest digest(state.config_digest);
  digest.add(num_requests).add(batch.num_cached).add(batch.all_visible).add(batch.cross_attention);
  bool any_cached = false, any_fresh = false;
  for (int32_t r = 0; r < num_requests; ++r) {
    const auto i = static_cast<size_t>(r);
    const int64_t q_len = int64_t{batch.cu_q[r + 1]} - batch.cu_q[r];
    const int32_t seq_len = batch.seq_lens[r];
    core::require(q_len >= 0, "request ", r, ": cu_q descends");
    core::require(seq_len >= (batch.cross_attention ? 0 : q_len), "request ", r, ": seq_lens is ", seq_len, "; it has ",
                  q_len, batch.cross_attention ? " queries" : " new tokens");
    const bool from_cache = r < batch.num_cached;
    const auto older = static_cast<int32_t>(seq_len - q_len);  // before the first key, of an encoder shorter than that
    const int32_t whole = from_cache ? seq_len : older;
    state.first_pos[i] = older;
    state.fresh_len[i] = from_cache ? 0 : static_cast<int32_t>(q_len);
    state.cached_len[i] = shard_len(whole, state.group->size(), state.group->rank(), state.config.interleave);
    any_cached = any_cached || (whole > 0 && q_len > 0);
    any_fresh = any_fresh || state.fresh_len[i] > 0;
    digest.add(q_len).add(seq_len);
  }

  KvSegment segment;
  segment.mask = batch.all_visible ? SegmentMask::kAllVisible : SegmentMask::kAsConfig;
  BatchView view;
  view.num_requests = num_requests;
  view.num_tokens = batch.cu_q[num_requests];
  view.cu_q = batch.cu_q;
  view.q_first_pos = state.first_pos.data();
  view.segments = {&segment, 1};
  DcpPlan planned;
  planned.num_requests = num_requests;
  planned.num_tokens = view.num_tokens;
  planned.reads_new_tokens = any_fresh;
  planned.digest = digest.value();
  if (any_cached) {
    segment.kv_len = state.cached_len.data();
    segment.shard = {state.group->size(), state.group->rank(), state.config.interleave};
    planned.cached = folio::plan(state.cached_op, view, state.cached_buffer, stream);
  }
  // The sinks' denominators are added here, and rows without any key get their zeros.
  if (any_fresh || !any_cached || state.config.attention.features.has(Feature::kSinks)) {
    segment.shard = {};
    segment.source = KvSource::kRagged;
    segment.kv_len = state.fresh_len.data();
    if (any_fresh) segment.first_pos = state.first_pos.data();
    planned.fresh = folio::plan(state.fresh_op, view, state.fresh_buffer, stream);
  }
  return planned;
}

}  // namespace folio::inline v0::distributed
