#include <algorithm>
#include <limits>
#include <vector>

#include "backends/common/batch_checks.hpp"
#include "core/error.hpp"
#include "folio/backends/cascade.hpp"
#include "folio/backends/cascade_heuristic.hpp"

namespace folio::inline v0::backends {
namespace {

/// The op of the widest window: -1 is all keys.
const AttentionOp& widest(std::span<const AttentionOp> ops) {
  core::require(!ops.empty(), "there are no ops; a cascade is planned for at least one");
  return *std::max_element(ops.begin(), ops.end(), [](const AttentionOp& a, const AttentionOp& b) {
    const int32_t left_a = a.config().window_left;
    const int32_t left_b = b.config().window_left;
    return left_b < 0 ? left_a >= 0 : left_a >= 0 && left_a < left_b;
  });
}

}  // namespace

std::string_view to_string(CascadeMode mode) {
  switch (mode) {
    case CascadeMode::kOff: return "off";
    case CascadeMode::kHeuristic: return "heuristic";
    case CascadeMode::kAuto: return "auto";
  }
  return "invalid";
}

CascadeMode cascade_mode_from_name(std::string_view name) {
  for (const CascadeMode mode : {CascadeMode::kOff, CascadeMode::kHeuristic, CascadeMode::kAuto}) {
    if (name == to_string(mode)) return mode;
  }
  core::fail(ErrorCode::kInvalidArgument, "'", name, "' is no cascade mode; off, heuristic and auto are");
}

struct StepCascade::State {
  State(std::span<const AttentionOp> ops, const StepCascadeOptions& given)
      : options(given),
        context(widest(ops).context()),
        planner(widest(ops), given.mode == CascadeMode::kOff ? 0 : given.max_levels),
        num_query_heads(ops.front().config().num_q_heads),
        num_kv_heads(ops.front().config().num_kv_heads) {
    for (const AttentionOp& op : ops) {
      use_alibi = use_alibi || op.config().features.has(Feature::kAlibi);
      use_window = use_window || op.config().window_left >= 0;
    }
  }

  bool heuristic_agrees(int32_t common_prefix_len, const CascadeBatch& batch);
  CascadeBatch lengths_of(const CommonAttentionMetadata& batch) const;

  StepCascadeOptions options;
  Context context;
  CascadePlanner planner;
  int32_t num_query_heads;
  int32_t num_kv_heads;
  bool use_alibi = false;
  bool use_window = false;
  std::vector<int32_t> query_lens;
};

StepCascade::StepCascade(std::span<const AttentionOp> ops, const StepCascadeOptions& options) {
  core::require(options.mode >= CascadeMode::kOff && options.mode <= CascadeMode::kAuto, "mode is ",
                static_cast<int32_t>(options.mode), "; kOff, kHeuristic and kAuto are offered");
  core::require(options.num_sms >= 1, "num_sms is ", options.num_sms, "; it is 1 or more");
  state_ = std::make_unique<State>(ops, options);
}

StepCascade::StepCascade(StepCascade&&) noexcept = default;
StepCascade& StepCascade::operator=(StepCascade&&) noexcept = default;
StepCascade::~StepCascade() = default;

const StepCascadeOptions& StepCascade::options() const noexcept {
  return state_->options;
}

/// The rule looks at what can be shared: whole pages that all requests with queries had computed. Batches that the
/// planner will refuse are not weighed.
bool StepCascade::State::heuristic_agrees(int32_t common_prefix_len, const CascadeBatch& batch) {
  if (batch.cu_q == nullptr || batch.kv_len == nullptr) return false;
  query_lens.clear();
  int64_t usable = common_prefix_len;
  for (int32_t r = 0; r < batch.num_requests; ++r) {
    const int64_t query_len = int64_t{batch.cu_q[r + 1]} - batch.cu_q[r];
    if (query_len < 0 || query_len > std::numeric_limits<int32_t>::max() || batch.kv_len[r] < 0) return false;
    if (query_len == 0) continue;  // padding
    query_lens.push_back(static_cast<int32_t>(query_len));
    usable = std::min(usable, batch.kv_len[r] - query_len);
  }
  const int32_t page_size = planner.costs().page_size;
  CascadeHeuristicInput input;
  input.common_prefix_len = static_cast<int32_t>(std::max(int64_t{0}, usable)) / page_size * page_size;
  input.query_lens = query_lens;
  input.num_query_heads = num_query_heads;
  input.num_kv_heads = num_kv_heads;
  input.use_alibi = use_alibi;
  input.use_sliding_window = use_window;
  input.use_local_attention = options.use_local_attention;
  input.num_sms = options.num_sms;
  return !query_lens.empty() && use_cascade_attention(input);
}

/// The batch with its own block table, wherever that lies.
CascadeBatch StepCascade::State::lengths_of(const CommonAttentionMetadata& given) const {
  const CommonAttentionMetadata batch = given.where == Where::kHost ? given : host_batch(context, given);
  const auto num_reqs = static_cast<size_t>(std::max(0, batch.num_reqs));
  core::require(batch.query_start_loc.size() > num_reqs && batch.seq_lens.size() >= num_reqs, "query_start_loc has ",
                batch.query_start_loc.size(), " entries and seq_lens ", batch.seq_lens.size(), "; num_reqs is ",
                batch.num_reqs);
  CascadeBatch lengths;
  lengths.num_requests = batch.num_reqs;
  lengths.cu_q = batch.query_start_loc.data();
  lengths.kv_len = batch.seq_lens.data();
  lengths.table = to_page_table(batch.block_table, batch.num_reqs);
  if (on_gpu(context)) lengths.device_indices = batch.block_table.data;
  return lengths;
}

const Cascade& StepCascade::plan(int32_t common_prefix_len, const CommonAttentionMetadata& batch, Stream stream) {
  CascadeBatch lengths = state_->lengths_of(batch);
  if (on_gpu(state_->context)) {
    check_table_copy(batch.block_table_host, batch.block_table, batch.num_reqs);
    lengths.table = to_page_table(batch.block_table_host, batch.num_reqs);
  }
  return plan(common_prefix_len, lengths, stream);
}

const Cascade& StepCascade::plan(int32_t common_prefix_len, const CascadeBatch& batch, Stream stream) {
  State& state = *state_;
  core::require(common_prefix_len >= 0, "common_prefix_len is ", common_prefix_len, "; it is 0 or more");
  if (state.options.mode != CascadeMode::kHeuristic) return state.planner.discover(batch, stream);
  const bool shared = state.heuristic_agrees(common_prefix_len, batch);
  return state.planner.share(batch, shared ? common_prefix_len : 0, stream);
}

const Cascade& StepCascade::share(int32_t prefix_tokens, const CommonAttentionMetadata& batch, Stream stream) {
  return state_->planner.share(state_->lengths_of(batch), prefix_tokens, stream);
}

}  // namespace folio::inline v0::backends
