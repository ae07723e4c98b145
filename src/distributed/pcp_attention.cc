// Which kernels serve divided queries.
#include "folio/distributed/pcp_attention.hpp"

#include <utility>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/pcp_state.hpp"
#include "folio/distributed/context_parallel.hpp"

namespace folio::inline v0::distributed {
namespace {

/// Whether rows of the cache can be gathered as they are. Others have scales beside them or in them.
bool can_gather(const AttentionConfig& config) {
  return config.kv_format != KvFormat::kFp8DsMla && config.kv != DType::kInt8;
}

void check_config(const PcpConfig& config) {
  const AttentionConfig& attention = config.attention;
  if (attention.mask == MaskKind::kCustom) {
    core::fail(ErrorCode::kUnsupported, "the mask is a custom one; PcpAttention takes kCausal and kNone");
  }
  const Features taken = Feature::kSoftCap | Feature::kAlibi | Feature::kSinks;
  if ((attention.features.bits & ~taken.bits) != 0) {
    core::fail(ErrorCode::kUnsupported, "features is ", attention.features.bits,
               "; PcpAttention takes kSoftCap, kAlibi and kSinks");
  }
  if (attention.determinism == Determinism::kScheduleInvariant) {
    core::fail(
        ErrorCode::kUnsupported,
        "determinism is kScheduleInvariant; PcpAttention reads a step's new tokens apart from older ones, so that "
        "results depend on the steps");
  }
  core::require(config.interleave >= 1, "interleave is ", config.interleave, "; it must be 1 or more");
  core::require(attention.page_size >= 1 && attention.page_size % config.interleave == 0, "interleave is ",
                config.interleave, ", which does not divide the page size (", attention.page_size, ")");
  core::require(config.exchange == PcpExchange::kAutomatic || config.exchange == PcpExchange::kPassQ ||
                    config.exchange == PcpExchange::kPassKv,
                "exchange is ", static_cast<int32_t>(config.exchange));
  if (config.exchange == PcpExchange::kPassKv && !can_gather(attention)) {
    core::fail(ErrorCode::kUnsupported, "exchange is kPassKv over a cache of ", attention.kv, " in format ",
               to_string(attention.kv_format), ", which has scales of its own; it takes kPassQ");
  }
  if (!config.bounds) return;
  core::require(config.bounds->max_shared_levels == 0, "bounds.max_shared_levels is ", config.bounds->max_shared_levels,
                "; PcpAttention shares none: it must be 0");
  if (config.exchange == PcpExchange::kPassKv) {
    core::fail(ErrorCode::kUnsupported,
               "exchange is kPassKv with bounds; what it sends is the batch's, which no graph knows: bounds take "
               "kPassQ");
  }
}

/// A GPU's kernels take so many shards as segments.
bool can_pass_kv(const Context& context, const ProcessGroup& group, const AttentionConfig& config) {
  return can_gather(config) &&
         (context.device().type == DeviceType::kCpu || group.size() <= kernels::cuda::kMaxSegments);
}

/// Partial results are float32 whatever the model's dtype, and sinks belong to the new tokens' pass, once.
AttentionConfig shard_config(const AttentionConfig& config) {
  AttentionConfig shard = config;
  shard.out = DType::kFloat32;
  shard.features.bits &= ~Features(Feature::kSinks).bits;
  return shard;
}

AttentionConfig gathered_config(const AttentionConfig& config) {
  AttentionConfig gathered = shard_config(config);
  if (can_gather(config)) gathered.kv_format = KvFormat::kStrided;
  return gathered;
}

/// `config` has its dtypes resolved.
AttentionConfig unpaged_config(const AttentionConfig& config) {
  AttentionConfig fresh = config;
  fresh.out = DType::kFloat32;
  fresh.kv = config.ragged_kv;
  fresh.kv_format = KvFormat::kStrided;
  fresh.page_size = kFreshPage;
  return fresh;
}

/// Bounds of the plans of one op.
PrepareOptions options_of(const PcpConfig& config, int64_t max_requests, int64_t max_tokens, int32_t max_kv_len) {
  PrepareOptions options;
  options.force_kernel = config.force_kernel;
  options.num_workers = config.num_workers;
  if (!config.bounds) return options;
  GraphBounds bounds;
  bounds.max_requests = core::checked_cast<int32_t>(max_requests);
  bounds.max_tokens = core::checked_cast<int32_t>(max_tokens);
  bounds.max_q_len = bounds.max_tokens;  // rows that pad a rank's are one request
  bounds.max_kv_len = max_kv_len;
  options.bounds = bounds;
  return options;
}

/// Bytes that a StepImage has at most.
size_t max_image_bytes(const PcpState& state) {
  const auto requests = static_cast<size_t>(state.config.bounds->max_requests);
  const auto world = static_cast<size_t>(state.world());
  const int32_t tokens = state.max_rank_tokens();
  const auto rows = world * (2 * requests + 1);
  const auto pages = static_cast<size_t>(state.max_fresh_pages(state.config.bounds->max_requests, tokens));
  const size_t slots = static_cast<size_t>(tokens) + world * static_cast<size_t>(state.piece_rows(tokens));
  const size_t ints = (2 * requests + 1) + 2 * pages + 3 * rows + 1 + requests;
  constexpr size_t kArrays = 8;
  return slots * sizeof(int64_t) + ints * sizeof(int32_t) + kArrays * alignof(int64_t);
}

}  // namespace

PcpAttention::PcpAttention(const Context& context, ProcessGroup& group, const PcpConfig& config) {
  check_config(config);
  if (config.exchange == PcpExchange::kPassKv && !can_pass_kv(context, group, config.attention)) {
    core::fail(ErrorCode::kUnsupported, "exchange is kPassKv over ", group.size(), " ranks; a GPU's kernels take ",
               kernels::cuda::kMaxSegments);
  }
  core::require(group.size() == 1 || group.device() == context.device(),
                "the group's buffers lie in another memory than the context's");
  const GraphBounds bounds = config.bounds.value_or(GraphBounds{});
  const int64_t chunks = 2 * int64_t{bounds.max_requests}, world_size = group.size();
  const int64_t rank_tokens = config.bounds ? max_rank_tokens(bounds, group.size()) : 0;
  AttentionOp shard = prepare(context, shard_config(config.attention),
                              options_of(config, world_size * (chunks + 1), world_size * rank_tokens,
                                         max_dcp_context_len(bounds.max_kv_len, group.size(), config.interleave)));
  PcpConfig unbounded = config;
  unbounded.bounds.reset();
  AttentionOp gathered = prepare(context, gathered_config(config.attention), options_of(unbounded, 0, 0, 0));
  PcpConfig resolved = config;
  resolved.attention.kv = shard.config().kv;
  resolved.attention.ragged_kv = shard.config().ragged_kv;
  if (resolved.attention.out == DType::kUnset) {
    resolved.attention.out = is_fp8(config.attention.q) ? DType::kBFloat16 : config.attention.q;
  }
  AttentionOp fresh =
      prepare(context, unpaged_config(resolved.attention), options_of(config, chunks, rank_tokens, bounds.max_q_len));
  PlanBuffer fresh_buffer = make_plan_buffer(fresh);
  PlanBuffer shard_buffer = make_plan_buffer(shard);
  PlanBuffer gathered_buffer = make_plan_buffer(gathered);
  state_ = std::make_unique<PcpState>(PcpState{context, &group, resolved, std::move(fresh), std::move(shard),
                                               std::move(gathered), std::move(fresh_buffer), std::move(shard_buffer),
                                               std::move(gathered_buffer)});
  const auto world = static_cast<size_t>(group.size());
  state_->config_digest = digest_of(resolved);
  state_->can_pass_kv = !config.bounds && can_pass_kv(context, group, resolved.attention);
  state_->records.resize(static_cast<size_t>(group.size()));
  state_->arrays.gathered.resize(static_cast<size_t>(group.size()));
  state_->gathered.resize(world);
  state_->segments.resize(world);
  state_->arguments.resize(world);
  if (config.bounds && state_->gpu() != nullptr) state_->image.reserve(*state_->gpu(), max_image_bytes(*state_));
}

PcpAttention::PcpAttention(PcpAttention&&) noexcept = default;
PcpAttention& PcpAttention::operator=(PcpAttention&&) noexcept = default;
PcpAttention::~PcpAttention() = default;

const PcpConfig& PcpAttention::config() const noexcept {
  return state_->config;
}
const AttentionOp& PcpAttention::fresh_op() const noexcept {
  return state_->fresh_op;
}
const AttentionOp& PcpAttention::shard_op() const noexcept {
  return state_->shard_op;
}
const AttentionOp& PcpAttention::gathered_op() const noexcept {
  return state_->gathered_op;
}
const ProcessGroup& PcpAttention::group() const noexcept {
  return *state_->group;
}

}  // namespace folio::inline v0::distributed
