#include <algorithm>

#include "backends/token_pool/backend_state.hpp"
#include "backends/token_pool/ranks.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;
using token_pool::Graphs;
using token_pool::GraphSet;
using State = TokenPoolBackend::State;

void check_mode(const char* what, ForwardMode mode) {
  if (!is_decode_or_idle(mode) && !is_target_verify(mode)) {
    core::fail(ErrorCode::kInvalidArgument, "CUDA-graph ", what,
               " is for forward modes decode, idle and target_verify; forward_mode is ", to_string(mode));
  }
}

ForwardBatch batch_of(int32_t bs, std::span<const int32_t> req_pool_indices, std::span<const int32_t> seq_lens,
                      std::span<const int32_t> seq_lens_cpu, ForwardMode mode, const GraphBatchExtras& extras) {
  ForwardBatch batch;
  batch.forward_mode = is_idle(mode) ? ForwardMode::kDecode : mode;
  batch.batch_size = bs;
  const auto count = static_cast<size_t>(std::max(bs, 0));
  const auto first = [count](auto values) { return values.first(std::min(values.size(), count)); };
  batch.req_pool_indices = first(req_pool_indices);
  batch.seq_lens = first(seq_lens);
  batch.seq_lens_cpu = first(seq_lens_cpu);
  batch.encoder_lens = first(extras.encoder_lens);
  batch.encoder_lens_cpu = first(extras.encoder_lens_cpu);
  batch.spec_info = extras.spec_info;
  batch.token_to_kv_pool = extras.token_to_kv_pool;
  batch.window_token_to_kv_pool = extras.window_token_to_kv_pool;
  return batch;
}

GraphSet* find(Graphs& graphs, const ForwardBatch& batch) {
  const SpecInfo& spec = batch.spec_info;
  for (const std::unique_ptr<GraphSet>& captured : graphs.captured) {
    const bool same_tokens = !is_target_verify(batch.forward_mode) ||
                             captured->num_tokens == int64_t{batch.batch_size} * spec.draft_token_num;
    const bool same_rows =
        spec.kv_indptr.empty() || captured->num_tokens + 1 == static_cast<int64_t>(spec.kv_indptr.size());
    if (captured->bs == batch.batch_size && captured->mode == batch.forward_mode && same_tokens && same_rows &&
        captured->tree == !spec.tree_mask.empty() && captured->draft_rows == !spec.kv_indptr.empty()) {
      return captured.get();
    }
  }
  return nullptr;
}

}  // namespace

void TokenPoolBackend::init_cuda_graph_state(int32_t max_bs, int32_t max_num_tokens,
                                             std::span<int32_t> kv_indices_buf) {
  State& state = *state_;
  const TokenPoolConfig& config = state.config;
  token_pool::check_graphs(state.context, config);
  require(max_bs >= 1 && max_num_tokens >= max_bs, "max_bs is ", max_bs, " and max_num_tokens ", max_num_tokens,
          "; max_bs must be 1 or more, max_num_tokens at least as many");
  require(kv_indices_buf.empty() || state.roles.size() == 1,
          "kv_indices_buf is given; a backend with two wrappers has its own");
  if (state.current != &state.eager) {  // what the present metadata shows is about to go
    state.metadata = std::monostate();
    state.current = nullptr;
  }
  Graphs& graphs = state.graphs.emplace();
  graphs.max_bs = max_bs;
  graphs.max_num_tokens = max_num_tokens;
  for (size_t w = 0; w < state.roles.size(); ++w) {
    if (!kv_indices_buf.empty()) {
      graphs.kv_indices.push_back(kv_indices_buf);
      continue;
    }
    const auto entries =
        static_cast<size_t>(core::checked_mul(int64_t{max_num_tokens}, int64_t{config.max_context_len}));
    ContextMemory& own = graphs.own_indices.emplace_back(state.context.device());
    own.reserve(entries * sizeof(int32_t));
    graphs.kv_indices.emplace_back(own.as<int32_t>(), entries);
  }
}

void TokenPoolBackend::init_forward_metadata_capture_cuda_graph(
    int32_t bs, int32_t num_tokens, std::span<const int32_t> req_pool_indices, std::span<const int32_t> seq_lens,
    ForwardMode forward_mode, const GraphBatchExtras& extras, std::span<const int32_t> seq_lens_cpu, Stream stream) {
  State& state = *state_;
  check_mode("capture", forward_mode);
  require(state.graphs.has_value(), "init_cuda_graph_state has not been called");
  Graphs& graphs = *state.graphs;
  require(bs >= 1 && bs <= graphs.max_bs && num_tokens >= bs && num_tokens <= graphs.max_num_tokens, "bs is ", bs,
          " and num_tokens ", num_tokens, "; init_cuda_graph_state was given up to ", graphs.max_bs, " and ",
          graphs.max_num_tokens);
  ForwardBatch batch = batch_of(bs, req_pool_indices, seq_lens, seq_lens_cpu, forward_mode, extras);
  // Trees are planned from the host's lengths, and replays plan anew: these only have to be possible.
  std::vector<int32_t> fill;
  if (!state.on_host && seq_lens_cpu.empty() && !extras.spec_info.tree_mask.empty()) {
    fill.assign(static_cast<size_t>(bs), get_cuda_graph_seq_len_fill_value());
    batch.seq_lens_cpu = fill;
  }
  auto made = std::make_unique<GraphSet>();
  made->bs = bs;
  made->mode = batch.forward_mode;
  made->num_tokens = num_tokens;
  made->tree = !extras.spec_info.tree_mask.empty();
  made->draft_rows = !extras.spec_info.kv_indptr.empty();
  state.metadata = std::monostate();
  state.current = nullptr;
  state.check_reports();
  token_pool::StepSet& set = made->set;
  set.step.read(state.config, batch, state.on_host, /*captured=*/true);
  set.step.stand_in_lengths = !fill.empty();
  // A replay's encoders may end anywhere, and what is captured reads either pages or slots.
  set.self_by_slots = token_pool::may_read_slots(state.config, extras.token_to_kv_pool);
  require(set.step.num_tokens == num_tokens, "num_tokens is ", num_tokens, "; ", to_string(batch.forward_mode), " of ",
          bs, " requests has ", set.step.num_tokens);
  set.shape = token_pool::FixedShape{set.step.num_requests, num_tokens, set.step.queries()};
  state.add_wrappers(set, true);
  size_t bytes = 0;
  for (size_t w = 0; w < state.roles.size(); ++w) {
    token_pool::ReadingChoice choice;
    if (made->tree) choice.mask = MaskKind::kCustom;
    bytes = std::max(bytes, state.reading(set, w, choice).workspace_bytes());
  }
  // Captured graphs keep the address: a larger shape gets other memory, and what there was stays.
  if (graphs.workspaces.empty() || graphs.workspaces.back()->bytes() < bytes) {
    graphs.workspaces.push_back(std::make_shared<ContextMemory>(state.context.device()));
    graphs.workspaces.back()->reserve(std::max<size_t>(bytes, 1));
  }
  set.workspace = graphs.workspaces.back();
  for (const token_pool::Wrapper& wrapper : set.wrappers) {
    wrapper.readings.front().reading->init_workspace(state.workspace_of(set), stream);
  }
  state.plan_step(set, stream);
  // Captured again: the earlier one's graph is gone, or will be.
  const GraphSet* const earlier = find(graphs, batch);
  std::erase_if(graphs.captured, [earlier](const auto& captured) { return captured.get() == earlier; });
  graphs.captured.push_back(std::move(made));
}

void TokenPoolBackend::init_forward_metadata_replay_cuda_graph(int32_t bs, std::span<const int32_t> req_pool_indices,
                                                               std::span<const int32_t> seq_lens, int64_t seq_lens_sum,
                                                               ForwardMode forward_mode,
                                                               std::span<const int32_t> seq_lens_cpu,
                                                               const GraphBatchExtras& extras, Stream stream) {
  State& state = *state_;
  check_mode("replay", forward_mode);
  require(state.graphs.has_value(), "init_cuda_graph_state has not been called");
  ForwardBatch batch = batch_of(bs, req_pool_indices, seq_lens, seq_lens_cpu, forward_mode, extras);
  batch.seq_lens_sum = seq_lens_sum;
  GraphSet* const captured = find(*state.graphs, batch);
  require(captured != nullptr, "no batch of ", bs, " requests was captured for ", to_string(batch.forward_mode),
          " with such a spec_info");
  state.metadata = std::monostate();
  state.current = nullptr;
  state.check_reports();
  captured->set.step.read(state.config, batch, state.on_host, /*captured=*/true);
  state.plan_step(captured->set, stream);
}

}  // namespace folio::inline v0::backends
