#include "folio/distributed/dcp_attention.hpp"

#include <exception>
#include <limits>
#include <new>
#include <utility>

#include "core/error.hpp"
#include "distributed/dcp_state.hpp"
#include "folio/distributed/context_parallel.hpp"
#include "kernels/cuda/common/merge_states/shard_batch.hpp"

namespace folio::inline v0::distributed {
namespace {

/// AttentionConfig::out, with its default.
DType out_of(const AttentionConfig& config) {
  if (config.out != DType::kUnset) return config.out;
  return is_fp8(config.q) ? DType::kBFloat16 : config.q;
}

/// A partial result that is rounded to the output's dtype loses no more than the output does. To any other one it
/// would.
DType partial_of(const DcpConfig& config) {
  const DType partial = config.partial_dtype, out = out_of(config.attention);
  if (partial == DType::kUnset || partial == DType::kFloat32) return DType::kFloat32;
  const bool wide = partial == DType::kFloat16 || partial == DType::kBFloat16;
  core::require(wide && partial == out, "partial_dtype is ", partial, " and out ", out,
                "; partial results are float32, or as out where that is float16 or bfloat16");
  return partial;
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
  core::require(config.combine == DcpCombine::kAllGatherReduceScatter || config.combine == DcpCombine::kAllToAll,
                "combine is ", static_cast<int32_t>(config.combine));
  core::require(config.transport == DcpTransport::kAuto || config.transport == DcpTransport::kGroup ||
                    config.transport == DcpTransport::kPeer,
                "transport is ", static_cast<int32_t>(config.transport));
  if (config.transport == DcpTransport::kPeer && context.device().type == DeviceType::kCpu) {
    core::fail(ErrorCode::kUnsupported, "transport is peer, which is for GPUs; the context is a CPU's");
  }
  core::require(!config.bounds || config.bounds->max_shared_levels == 0, "bounds.max_shared_levels is ",
                config.bounds ? config.bounds->max_shared_levels : 0,
                "; DcpAttention has no shared segments, so that it must be 0");
  if (!config.all_heads_out) return;
  core::require(
      config.replicated_queries,
      "all_heads_out is set with replicated_queries false; a rank's new tokens need the queries of all heads");
  core::require(config.combine == DcpCombine::kAllGatherReduceScatter || group.size() == 1,
                "all_heads_out is set with combine ", to_string(config.combine),
                ", which leaves every rank its own heads; it needs ", to_string(DcpCombine::kAllGatherReduceScatter));
}

/// Partial results are float32 unless asked for otherwise, and sinks belong to the new tokens' pass, once.
AttentionConfig cached_config(const AttentionConfig& config, int32_t world, DType partial) {
  AttentionConfig cached = config;
  cached.num_q_heads = config.num_q_heads * world;
  cached.out = world > 1 ? partial : DType::kFloat32;
  cached.features.bits &= ~Features(Feature::kSinks).bits;
  return cached;
}

AttentionConfig fresh_config(const AttentionConfig& config) {
  AttentionConfig fresh = config;
  fresh.out = DType::kFloat32;
  return fresh;
}

/// `max_kv_len`: of what a pass reads on one rank, within DcpConfig::bounds.
PrepareOptions prepare_options(const DcpConfig& config, int32_t max_kv_len) {
  PrepareOptions options;
  options.force_kernel = config.force_kernel;
  options.num_workers = config.num_workers;
  options.max_kv_splits = config.max_kv_splits;
  options.bounds = config.bounds;
  if (options.bounds) options.bounds->max_kv_len = max_kv_len;
  return options;
}

std::unique_ptr<DcpState> make_state(const Context& context, ProcessGroup& group, const DcpConfig& config) {
  check_config(context, group, config);
  const int32_t world = group.size();
  int32_t max_shard_len = 0, max_new_tokens = 0;
  if (config.bounds) {
    max_shard_len = max_dcp_context_len(config.bounds->max_kv_len, world, config.interleave);
    max_new_tokens = config.bounds->max_q_len;
  }
  const DType partial = partial_of(config);
  AttentionOp cached =
      prepare(context, cached_config(config.attention, world, partial), prepare_options(config, max_shard_len));
  AttentionOp fresh = prepare(context, fresh_config(config.attention), prepare_options(config, max_new_tokens));
  DcpConfig resolved = config;
  resolved.attention = fresh.config();
  resolved.attention.out = out_of(config.attention);
  resolved.partial_dtype = partial;
  PlanBuffer cached_buffer = make_plan_buffer(cached);
  PlanBuffer fresh_buffer = make_plan_buffer(fresh);
  auto state =
      std::make_unique<DcpState>(DcpState{context, &group, resolved, std::move(cached), std::move(fresh),
                                          std::move(cached_buffer), std::move(fresh_buffer), digest_of(resolved)});
  state->records.resize(static_cast<size_t>(world));
  const attention::GpuBackend* const gpu = state->gpu();
  if (gpu == nullptr) return state;
  const std::shared_ptr<void> memory = gpu->allocate_page_locked(sizeof(DcpStatus));
  state->status = {memory, new (memory.get()) DcpStatus};
  if (config.bounds) state->device.reserve(*gpu, config.bounds->max_requests, world);
  if (world > 1) state->exchange = gpu->make_side_stream();
  return state;
}

}  // namespace

DcpAttention::DcpAttention(const Context& context, ProcessGroup& group, const DcpConfig& config) {
  if (!config.bounds || group.size() == 1) {
    state_ = make_state(context, group, config);
    return;
  }
  std::vector<RankRecord> records(static_cast<size_t>(group.size()));
  std::exception_ptr failure;
  try {
    state_ = make_state(context, group, config);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  agree(group, records, state_ ? state_->config_digest : 0, failure,
        {"could not prepare attention over a divided cache", "has another configuration"});
  if (state_->gpu() != nullptr) connect_peers(*state_);
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

namespace {

bool on_device(const DcpBatch& batch) {
  return batch.where == Where::kDevice;
}

/// What the host can see of a batch, whatever its lengths.
void check_batch(const DcpState& state, const DcpBatch& batch) {
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
  if (!on_device(batch)) {
    core::require(batch.num_tokens == 0 || batch.num_tokens == batch.cu_q[num_requests], "num_tokens is ",
                  batch.num_tokens, "; with lengths on the host it is 0 or cu_q[num_requests], ",
                  batch.cu_q[num_requests]);
    return;
  }
  core::require(state.gpu() != nullptr, "where is kDevice; a CPU's lengths lie on the host");
  core::require(state.config.bounds.has_value(), "where is kDevice; lengths on the device need DcpConfig::bounds");
  const GraphBounds& bounds = *state.config.bounds;
  core::require(num_requests <= bounds.max_requests, "num_requests is ", num_requests, "; the bounds allow ",
                bounds.max_requests);
  core::require(batch.num_tokens >= 0 && batch.num_tokens <= bounds.max_tokens, "num_tokens is ", batch.num_tokens,
                "; it must be from 0 to the bounds' ", bounds.max_tokens);
}

/// Keys of a request over all ranks.
int32_t max_seq_len(const DcpState& state) {
  return state.config.bounds ? state.config.bounds->max_kv_len : std::numeric_limits<int32_t>::max();
}

KvShard shard_of(const DcpState& state) {
  return {state.group->size(), state.group->rank(), state.config.interleave};
}

/// Which passes a batch has.
struct Passes {
  bool cached = false;
  bool fresh = false;  ///< new tokens or sinks
  bool reads_new_tokens = false;
};

/// Every pass that some batch of so many requests has: a graph, which is captured with one batch, serves them all.
Passes possible_passes(const DcpBatch& batch) {
  const bool new_tokens = batch.num_cached < batch.num_requests;
  return {batch.num_requests > 0, new_tokens, new_tokens};
}

/// Reads lengths on the host into the state; the plan gets its numbers and its digest.
Passes read_lengths(DcpState& state, const DcpBatch& batch, DcpPlan& planned, Digest& digest) {
  const int32_t num_requests = batch.num_requests;
  const auto count = static_cast<size_t>(num_requests);
  state.first_pos.resize(count);
  state.cached_len.resize(count);
  state.fresh_len.resize(count);
  state.indptr.assign(batch.cu_q, batch.cu_q + num_requests + 1);
  state.no_tokens.assign(count + 1, 0);
  bool any_cached = false, any_fresh = false;
  for (int32_t r = 0; r < num_requests; ++r) {
    const auto i = static_cast<size_t>(r);
    const int64_t q_len = int64_t{batch.cu_q[r + 1]} - batch.cu_q[r];
    const int32_t seq_len = batch.seq_lens[r];
    core::require(q_len >= 0, "request ", r, ": cu_q descends");
    core::require(seq_len >= (batch.cross_attention ? 0 : q_len), "request ", r, ": seq_lens is ", seq_len, "; it has ",
                  q_len, batch.cross_attention ? " queries" : " new tokens");
    core::require(seq_len <= max_seq_len(state), "request ", r, ": seq_lens is ", seq_len, "; the bounds allow ",
                  max_seq_len(state));
    const bool from_cache = r < batch.num_cached;
    const kernels::cuda::RequestShard own = kernels::cuda::request_shard(
        q_len, seq_len, from_cache, batch.cross_attention, max_seq_len(state), shard_of(state));
    state.first_pos[i] = own.first_pos;
    state.cached_len[i] = own.cached_len;
    state.fresh_len[i] = own.fresh_len;
    any_cached = any_cached || (q_len > 0 && (from_cache ? seq_len > 0 : own.first_pos > 0));
    any_fresh = any_fresh || own.fresh_len > 0;
    digest.add(q_len).add(seq_len);
  }
  planned.num_tokens = batch.cu_q[num_requests];
  return {any_cached, any_fresh || !any_cached, any_fresh};  // rows without any key get their zeros there
}

/// Plans the batch's passes.
void plan_passes(DcpState& state, const DcpBatch& batch, const Passes& passes, DcpPlan& planned, Stream stream) {
  const bool device = on_device(batch);
  const DcpDeviceMemory& memory = state.device;
  const int32_t* const first_pos = device ? memory.first_pos : state.first_pos.data();
  KvSegment segment;
  segment.mask = batch.all_visible ? SegmentMask::kAllVisible : SegmentMask::kAsConfig;
  BatchView view;
  view.where = batch.where;
  view.num_requests = batch.num_requests;
  view.num_tokens = planned.num_tokens;
  view.cu_q = batch.cu_q;
  view.q_first_pos = first_pos;
  view.segments = {&segment, 1};
  const detail::PlanBufferState* last = nullptr;
  if (passes.cached) {
    segment.kv_len = device ? memory.cached_len : state.cached_len.data();
    segment.shard = shard_of(state);
    planned.cached = folio::plan(state.cached_op, view, state.cached_buffer, stream);
    last = &state.cached_buffer.state();
  }
  if (passes.fresh) {
    segment.shard = {};
    segment.source = KvSource::kRagged;
    segment.kv_len = device ? memory.fresh_len : state.fresh_len.data();
    if (passes.reads_new_tokens) segment.first_pos = first_pos;
    planned.fresh = folio::plan(state.fresh_op, view, state.fresh_buffer, stream);
    last = &state.fresh_buffer.state();
  }
  if (state.gpu() == nullptr || last == nullptr) return;
  const auto bytes = (static_cast<size_t>(batch.num_requests) + 1) * sizeof(int32_t);
  state.device.reserve(*state.gpu(), batch.num_requests, state.group->size());
  state.gpu()->copy(memory.indptr, attention::cu_q_on_device(*last), bytes, stream);
}

/// Enqueues this rank's lengths, from those of the whole batch, and their comparison with the other ranks'.
void shard_on_device(DcpState& state, const DcpBatch& batch, uint64_t digest, Stream stream) {
  const DcpDeviceMemory& memory = state.device;
  const int32_t world = state.group->size(), rank = state.group->rank();
  kernels::cuda::ShardBatchParams params;
  params.cu_q = batch.cu_q;
  params.seq_lens = batch.seq_lens;
  params.num_requests = batch.num_requests;
  params.num_cached = batch.num_cached;
  params.cross_attention = batch.cross_attention;
  params.max_seq_len = max_seq_len(state);
  params.shard = shard_of(state);
  params.first_pos = memory.first_pos;
  params.cached_len = memory.cached_len;
  params.fresh_len = memory.fresh_len;
  params.header = memory.headers + rank;
  params.digest = digest;
  state.gpu()->enqueue(params, stream);
  if (world == 1) return;
  state.group->all_gather(memory.headers + rank, memory.headers, sizeof(kernels::cuda::GatherHeader), stream);
  kernels::cuda::CompareHeadersParams compare;
  compare.gathered = {reinterpret_cast<const std::byte*>(memory.headers), sizeof(kernels::cuda::GatherHeader), world,
                      rank, &state.status->plan};
  state.gpu()->enqueue(compare, stream);
}

}  // namespace

DcpPlan DcpAttention::plan(const DcpBatch& batch, Stream stream) {
  DcpState& state = *state_;
  const attention::GpuBackend* const gpu = state.gpu();
  const bool several_gpus = gpu != nullptr && state.group->size() > 1;
  const bool capturing = gpu != nullptr && gpu->is_capturing(stream);
  DcpPlan planned;
  Passes passes;
  Digest digest(state.config_digest);
  std::exception_ptr failure;
  const auto on_this_rank = [&] {
    report(state);
    check_finished(state);
    check_batch(state, batch);
    check_capture(state, capturing);
    planned.num_requests = batch.num_requests;
    digest.add(batch.where)
        .add(batch.num_requests)
        .add(batch.num_cached)
        .add(batch.all_visible)
        .add(batch.cross_attention);
    if (on_device(batch)) {
      planned.num_tokens = batch.num_requests > 0 ? batch.num_tokens : 0;
      passes = possible_passes(batch);
      digest.add(batch.num_tokens);
    } else {
      passes = read_lengths(state, batch, planned, digest);
      if (gpu != nullptr && state.config.bounds && batch.num_requests > 0) passes = possible_passes(batch);
    }
    planned.reads_new_tokens = passes.reads_new_tokens;
    // The sinks' denominators are added there.
    passes.fresh = passes.fresh || state.config.attention.features.has(Feature::kSinks);
    if (!on_device(batch)) plan_passes(state, batch, passes, planned, stream);
  };
  if (several_gpus && !capturing) {
    try {
      on_this_rank();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    agree(*state.group, state.records, digest.value(), failure,
          {"could not plan this step", "runs another batch or configuration"});
  } else {
    on_this_rank();
  }
  if (several_gpus && passes.cached) {
    planned.over_peer_memory = plan_over_peers(state, planned.num_tokens, capturing, stream);
  }
  planned.digest = digest.value();
  if (!on_device(batch) || batch.num_requests == 0) return planned;
  shard_on_device(state, batch, planned.digest, stream);
  plan_passes(state, batch, passes, planned, stream);
  return planned;
}

void DcpAttention::check() {
  report(*state_);
  state_->group->check();
}

}  // namespace folio::inline v0::distributed
