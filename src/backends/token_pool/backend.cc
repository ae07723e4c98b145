#include "folio/backends/token_pool/backend.hpp"

#include <algorithm>

#include "backends/token_pool/backend_state.hpp"
#include "backends/token_pool/gpu.hpp"
#include "backends/token_pool/list_report.hpp"
#include "backends/token_pool/ranks.hpp"
#include "backends/token_pool/request_table.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;
using token_pool::ReadingChoice;
using token_pool::WrapperRole;

void check(const Context& context, const TokenPoolConfig& config) {
  const bool on_host = context.device().type == DeviceType::kCpu;
  const auto at_least_one = [](const char* name, int32_t value) {
    require(value >= 1, name, " is ", value, "; it must be 1 or more");
  };
  at_least_one("num_heads", config.num_heads);
  at_least_one("num_kv_heads", config.num_kv_heads);
  at_least_one("page_size", config.page_size);
  at_least_one("max_context_len", config.max_context_len);
  at_least_one("max_req_pool_size", config.max_req_pool_size);
  check_dcp_ranks(context, token_pool::parallel_of(config));
  const KvShard shard = token_pool::shard_of(config);
  const int32_t own_context_len = token_pool::own_tokens(shard, config.max_context_len);
  const auto check_columns = [&](const char* name, const PageTableView& table) {
    const int64_t columns = token_pool::slot_table(table).num_columns;
    require(columns >= own_context_len, name, " has ", columns, " columns; max_context_len is ", config.max_context_len,
            shard.world == 1 ? "" : ", of which this rank has ",
            shard.world == 1 ? "" : std::to_string(own_context_len));
  };
  check_columns("req_to_token", config.req_to_token);
  require(!config.sliding_window_size || *config.sliding_window_size >= 0, "sliding_window_size is ",
          config.sliding_window_size.value_or(0), "; it must not be negative (unset: no window)");
  if (config.window_req_to_token.indices != nullptr) {
    require(config.sliding_window_size.has_value(), "window_req_to_token is given without sliding_window_size");
    check_columns("window_req_to_token", config.window_req_to_token);
  }
  require(!config.sliding_window_size || !config.is_encoder_decoder,
          "Sliding window and cross attention are not supported together");
  const bool is_float =
      config.q_dtype == DType::kFloat32 || config.q_dtype == DType::kFloat16 || config.q_dtype == DType::kBFloat16;
  if (!is_float) {
    core::fail(ErrorCode::kUnsupported, "q_dtype is ", config.q_dtype, "; float32, float16 and bfloat16 are offered");
  }
  const bool two_wrappers = config.sliding_window_size || config.is_encoder_decoder;
  const bool buffers = !config.kv_indptr_buf.empty() || !config.kv_last_page_len_buf.empty();
  require(!buffers || !two_wrappers, "kv_indptr_buf or kv_last_page_len_buf is given; a backend with ",
          "two wrappers has its own");
  const auto rows = static_cast<size_t>(config.max_req_pool_size);
  require(config.kv_indptr_buf.empty() || config.kv_indptr_buf.size() > rows, "kv_indptr_buf has ",
          config.kv_indptr_buf.size(), " entries; max_req_pool_size + 1 is ", rows + 1);
  require(config.kv_last_page_len_buf.empty() || config.kv_last_page_len_buf.size() >= rows,
          "kv_last_page_len_buf has ", config.kv_last_page_len_buf.size(), " entries; max_req_pool_size is ", rows);
  if (on_host && config.page_size == 1) {
    const bool ones = std::ranges::all_of(config.kv_last_page_len_buf, [](int32_t len) { return len == 1; });
    require(ones, "kv_last_page_len_buf does not hold ones; pages of one token have one");
  }
  if (config.extend_path == ExtendPath::kRagged && config.determinism == Determinism::kScheduleInvariant) {
    core::fail(ErrorCode::kUnsupported,
               "extend_path is kRagged: where a key is read from would depend on how tokens "
               "were divided over steps; schedule-invariant results are offered by kPaged");
  }
}

}  // namespace

TokenPoolWorkspace::TokenPoolWorkspace(const Context& context)
    : state_(std::make_unique<State>(State{ContextMemory(context.device()), ContextMemory(context.device())})) {}
TokenPoolWorkspace::~TokenPoolWorkspace() = default;
size_t TokenPoolWorkspace::bytes() const noexcept {
  return state_->memory.bytes() + state_->over_ranks.bytes();
}

TokenPoolBackend::State::State(const Context& context_, const TokenPoolConfig& config_)
    : context(context_), config(config_), on_host(context_.device().type == DeviceType::kCpu) {
  check(context, config);
  if (config.sliding_window_size) {
    dispatch = WrapperDispatch::kSlidingWindow;
    roles = {WrapperRole::kWindow, WrapperRole::kFull};
  } else if (config.is_encoder_decoder) {
    dispatch = WrapperDispatch::kCrossAttention;
    roles = {WrapperRole::kSelf, WrapperRole::kCross};
  } else {
    roles = {WrapperRole::kFull};
  }
  if (!on_host) report = token_pool::gpu::make_report(context.device().index);
  workspace = config.workspace ? config.workspace : std::make_shared<TokenPoolWorkspace>(context);
  add_wrappers(eager, false);
  wrappers.resize(roles.size());
  for (size_t w = 0; w < roles.size(); ++w) reading(eager, w, {});
}

void TokenPoolBackend::State::add_wrappers(token_pool::StepSet& set, bool graph) {
  for (size_t w = 0; w < roles.size(); ++w) {
    token_pool::Wrapper wrapper;
    wrapper.role = roles[w];
    wrapper.memory.kv_indptr = config.kv_indptr_buf;
    wrapper.memory.kv_last_page_len = config.kv_last_page_len_buf;
    wrapper.memory.fixed = graph;
    wrapper.memory.report = report.get();
    if (graph) wrapper.memory.kv_indices = graphs->kv_indices[w];
    set.wrappers.push_back(std::move(wrapper));
  }
}

token_pool::KvReading& TokenPoolBackend::State::reading(token_pool::StepSet& set, size_t wrapper,
                                                        const ReadingChoice& choice) {
  token_pool::Wrapper& w = set.wrappers[wrapper];
  const bool cross = w.role == WrapperRole::kCross;
  const token_pool::ReadingKind kind{w.role, choice.ragged && !cross, cross ? MaskKind::kNone : choice.mask,
                                     page_size_of(set, wrapper)};
  for (const token_pool::Wrapper::Entry& entry : w.readings) {
    if (entry.choice.primary == choice.primary && entry.reading->kind() == kind) return *entry.reading;
  }
  token_pool::ListMemory memory;
  memory.report = report.get();
  if (choice.primary) memory = w.memory;
  auto made = std::make_unique<token_pool::KvReading>(context, config, kind, memory, set.shape);
  if (!set.shape) {  // a captured shape's memory is its own
    shared_memory().reserve(made->workspace_bytes());
    made->init_workspace(workspace_of(set), {});
  }
  return *w.readings.emplace_back(token_pool::Wrapper::Entry{choice, std::move(made)}).reading;
}

token_pool::KvReading& TokenPoolBackend::State::planned(token_pool::StepSet& set, size_t wrapper,
                                                        const ReadingChoice& choice, Stream stream) {
  token_pool::KvReading& chosen = reading(set, wrapper, choice);
  if (!chosen.is_planned(set.number)) {
    chosen.plan(set.step, set.number, stream);
    if (!set.shape) shared_memory().reserve(chosen.workspace_bytes());
  }
  return chosen;
}

ContextMemory& TokenPoolBackend::State::shared_memory() const {
  TokenPoolWorkspace::State& shared = workspace->state();
  return token_pool::is_divided(config) ? shared.over_ranks : shared.memory;
}

int32_t TokenPoolBackend::State::page_size_of(const token_pool::StepSet& set, size_t wrapper) const {
  return set.self_by_slots && roles[wrapper] == WrapperRole::kSelf ? 1 : config.page_size;
}

void TokenPoolBackend::State::check_reports() {
  if (report != nullptr) token_pool::throw_fault(*report);
}

Workspace TokenPoolBackend::State::workspace_of(const token_pool::StepSet& set) const {
  ContextMemory& memory = set.workspace ? *set.workspace : shared_memory();
  return {memory.data(), memory.bytes()};
}

TokenPoolBackend::TokenPoolBackend(const Context& context, const TokenPoolConfig& config)
    : state_(std::make_unique<State>(context, config)) {}
TokenPoolBackend::~TokenPoolBackend() = default;
TokenPoolBackend::TokenPoolBackend(TokenPoolBackend&&) noexcept = default;
TokenPoolBackend& TokenPoolBackend::operator=(TokenPoolBackend&&) noexcept = default;

void TokenPoolBackend::check_plans() {
  state_->check_reports();
  const auto check_set = [](token_pool::StepSet& set) {
    for (token_pool::Wrapper& wrapper : set.wrappers) {
      for (token_pool::Wrapper::Entry& entry : wrapper.readings) entry.reading->check_plans();
    }
  };
  check_set(state_->eager);
  if (!state_->graphs) return;
  for (const std::unique_ptr<token_pool::GraphSet>& captured : state_->graphs->captured) check_set(captured->set);
}

const std::variant<std::monostate, DecodeMetadata, PrefillMetadata>& TokenPoolBackend::forward_metadata()
    const noexcept {
  return state_->metadata;
}
const TokenPoolConfig& TokenPoolBackend::config() const noexcept {
  return state_->config;
}
WrapperDispatch TokenPoolBackend::dispatch_reason() const noexcept {
  return state_->dispatch;
}
int32_t TokenPoolBackend::num_wrappers() const noexcept {
  return static_cast<int32_t>(state_->roles.size());
}
bool TokenPoolBackend::decode_use_tensor_cores() const noexcept {
  const TokenPoolConfig& config = state_->config;
  return should_use_tensor_core(config.kv_cache_dtype, config.num_heads, config.num_kv_heads, config.force_tensor_core);
}
std::string TokenPoolBackend::kernel_name() const {
  return state_->eager.wrappers.front().readings.front().reading->op().kernel_name();
}
const std::shared_ptr<TokenPoolWorkspace>& TokenPoolBackend::workspace() const noexcept {
  return state_->workspace;
}

int32_t TokenPoolBackend::wrapper_index(const RadixAttention& layer) const {
  const WrapperDispatch dispatch = state_->dispatch;
  const int32_t window = layer.sliding_window_size;
  require(window >= -1, "the layer's sliding_window_size is ", window, "; it must be -1 (all) or more");
  require(!layer.is_cross_attention || dispatch == WrapperDispatch::kCrossAttention,
          "the layer is cross attention; the configuration has no is_encoder_decoder");
  if (window >= 0) {
    require(state_->config.sliding_window_size == window, "the layer's sliding_window_size is ", window,
            "; the configuration's is ", state_->config.sliding_window_size.value_or(-1));
    return 0;
  }
  if (dispatch == WrapperDispatch::kSlidingWindow) return 1;
  return layer.is_cross_attention ? 1 : 0;
}

void RadixAttention::forward(TokenPoolBackend& backend, const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v, const ForwardBatch& batch, const TensorView& out,
                             bool save_kv_cache, Stream stream) const {
  backend.forward(q, k, v, *this, batch, out, save_kv_cache, stream);
}

bool should_use_tensor_core(DType kv_cache_dtype, int32_t num_attention_heads, int32_t num_kv_heads,
                            std::optional<bool> forced) {
  require(num_attention_heads >= 1 && num_kv_heads >= 1, "num_attention_heads is ", num_attention_heads,
          " and num_kv_heads ", num_kv_heads, "; both must be 1 or more");
  if (forced) return *forced;
  if (is_fp8(kv_cache_dtype)) return true;
  const bool is_16_bit = kv_cache_dtype == DType::kFloat16 || kv_cache_dtype == DType::kBFloat16;
  return is_16_bit && num_attention_heads / num_kv_heads >= 4;
}

}  // namespace folio::inline v0::backends
