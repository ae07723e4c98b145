#include "folio/backends/flashinfer/block_table.hpp"

#include <algorithm>
#include <cmath>

#include "backends/common/tensor_checks.hpp"
#include "backends/flashinfer/block_table_state.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;

bool same_question(const AttentionConfig& a, const AttentionConfig& b) {
  return a.num_q_heads == b.num_q_heads && a.num_kv_heads == b.num_kv_heads && a.head_dim_qk == b.head_dim_qk &&
         a.head_dim_v == b.head_dim_v && a.q == b.q && a.kv == b.kv && a.out == b.out && a.kv_format == b.kv_format &&
         a.page_size == b.page_size && a.window_left == b.window_left && a.features == b.features;
}

DType out_dtype(const BlockTableArgs& args) {
  const auto* plain = std::get_if<TensorView>(&args.out);
  return plain != nullptr ? plain->dtype : DType::kFloat4E2M1x2;
}

AttentionConfig config_of(const BlockTableArgs& args, Determinism determinism) {
  AttentionConfig config;
  config.num_q_heads = core::checked_cast<int32_t>(args.query.shape[1]);
  config.num_kv_heads = args.kv_cache.num_kv_heads;
  config.head_dim_qk = args.kv_cache.head_dim_qk;
  config.head_dim_v = args.kv_cache.head_dim_v;
  config.q = args.query.dtype;
  config.kv = args.kv_cache.dtype;
  config.out = out_dtype(args);
  config.kv_format = args.kv_cache.format;
  config.page_size = args.kv_cache.page_size;
  config.mask = MaskKind::kCausal;
  config.window_left = args.window_left;
  if (args.sinks != nullptr) config.features = config.features | Feature::kSinks;
  if (args.logits_soft_cap != 0.0f) config.features = config.features | Feature::kSoftCap;
  if (args.alibi_slopes != nullptr) config.features = config.features | Feature::kAlibi;
  config.determinism = determinism;
  return config;
}

/// The scale factors' memory as the core takes it.
BlockScaleArgs check_fp4(const FP4Tensor& out, const ConstTensorView& query, int32_t head_dim) {
  const std::array<int64_t, 3> shape{query.shape[0], query.shape[1], head_dim};
  require(out.original_shape == shape, "FP4Tensor.original_shape is [", out.original_shape[0], ", ",
          out.original_shape[1], ", ", out.original_shape[2], "]; the output is [", shape[0], ", ", shape[1], ", ",
          shape[2], "]");
  require(out.data.dtype == DType::kFloat4E2M1x2 || out.data.dtype == DType::kUnset, "FP4Tensor.data is ",
          out.data.dtype, "; it must be fp4_e2m1x2 or unset");
  require(out.scale_start_index >= 0, "FP4Tensor.scale_start_index is ", out.scale_start_index,
          "; it must not be negative");
  return nvfp4_block_scale("FP4Tensor.scale", out.scale, out.scale_start_index, query.shape[0], query.shape[1],
                           head_dim);
}

void check(const BlockTableArgs& args, std::span<const int32_t> cu_q) {
  require(args.query.rank == 3, "query has rank ", args.query.rank, "; it must be [tokens, num_qo_heads, head_dim]");
  require(std::isfinite(args.bmm1_scale) && args.bmm1_scale != 0.0f, "bmm1_scale is ", args.bmm1_scale,
          "; it must be finite and not 0");
  require(std::isfinite(args.bmm2_scale), "bmm2_scale is ", args.bmm2_scale, "; it must be finite");
  const bool fp4 = std::holds_alternative<FP4Tensor>(args.out);
  require(fp4 || args.o_sf_scale == 0.0f, "o_sf_scale is ", args.o_sf_scale, ", but out is no FP4Tensor");
  const bool sf_array = fp4 && args.out_scale.data != nullptr;
  require(!fp4 || sf_array || (std::isfinite(args.o_sf_scale) && args.o_sf_scale > 0.0f), "o_sf_scale is ",
          args.o_sf_scale, "; an FP4Tensor needs a finite, positive one");
  require(!sf_array || args.o_sf_scale == 0.0f, "o_sf_scale is ", args.o_sf_scale,
          ", and out_scale is an array; give one");
  require(args.v_scale.data == nullptr || args.bmm2_scale == 1.0f, "bmm2_scale is ", args.bmm2_scale,
          ", and v_scale is an array; with one bmm2_scale is 1");
  const auto batch_size = core::checked_cast<int32_t>(args.seq_lens.size());
  require(args.block_tables.num_rows >= batch_size, "block_tables has ", args.block_tables.num_rows,
          " rows; seq_lens has ", batch_size, " entries");
  const bool has_keys = std::ranges::any_of(args.seq_lens, [](int32_t seq_len) { return seq_len > 0; });
  require(args.block_tables.data != nullptr || !has_keys, "block_tables has no data; seq_lens has keys");
  const int64_t capacity = int64_t{args.block_tables.num_columns} * args.kv_cache.page_size;
  for (int32_t r = 0; r < batch_size; ++r) {
    const int32_t seq_len = args.seq_lens[static_cast<size_t>(r)];
    require(seq_len >= 0 && (args.max_seq_len == 0 || seq_len <= args.max_seq_len), "request ", r, " has a seq_len of ",
            seq_len, "; max_seq_len is ", args.max_seq_len);
    require(seq_len <= capacity, "request ", r, " has a seq_len of ", seq_len, "; a row of block_tables has ",
            args.block_tables.num_columns, " pages of ", args.kv_cache.page_size, " tokens");
  }
  require(cu_q.back() == args.query.shape[0], "the requests have ", cu_q.back(), " query tokens; query has ",
          args.query.shape[0]);
}

/// The plan for these lengths: the last one where they are the same.
void plan_for(BlockTableWorkspace::State& state, BlockTableKernel& kernel, std::span<const int32_t> cu_q,
              std::span<const int32_t> seq_lens, Stream stream) {
  if (kernel.plan && std::ranges::equal(kernel.cu_q, cu_q) && std::ranges::equal(kernel.seq_lens, seq_lens)) return;
  kernel.plan.reset();
  kernel.cu_q.assign(cu_q.begin(), cu_q.end());
  kernel.seq_lens.assign(seq_lens.begin(), seq_lens.end());
  KvSegment segment;
  segment.kv_len = kernel.seq_lens.data();
  BatchView view;
  view.num_requests = core::checked_cast<int32_t>(kernel.seq_lens.size());
  view.num_tokens = kernel.cu_q.back();
  view.cu_q = kernel.cu_q.data();
  view.segments = {&segment, 1};
  kernel.plan.emplace(plan(kernel.op, view, kernel.buffer, stream));
  ++state.num_plans;
}

/// The output as the core takes it.
void set_output(const BlockTableArgs& args, AttentionArgs& attention) {
  if (const auto* fp4 = std::get_if<FP4Tensor>(&args.out)) {
    attention.out_block_scale = check_fp4(*fp4, args.query, args.kv_cache.head_dim_v);
    attention.out = fp4->data;
    attention.out.dtype = DType::kFloat4E2M1x2;
    attention.out_scale = args.out_scale;
    if (args.out_scale.data == nullptr) attention.out_scale.value = args.o_sf_scale;
  } else {
    attention.out = std::get<TensorView>(args.out);
    attention.out_scale = args.out_scale;
  }
}

void run_call(BlockTableWorkspace::State& state, const BlockTableArgs& args, std::span<const int32_t> cu_q,
              Stream stream) {
  check(args, cu_q);
  AttentionArgs attention;
  set_output(args, attention);
  BlockTableKernel& kernel = state.kernel_for(config_of(args, state.determinism));
  plan_for(state, kernel, cu_q, args.seq_lens, stream);
  SegmentArgs segment;
  segment.cache = args.kv_cache;
  segment.table = to_page_table(args.block_tables, core::checked_cast<int32_t>(args.seq_lens.size()));
  segment.k_scale = args.k_scale;
  segment.v_scale = args.v_scale;
  if (args.v_scale.data == nullptr) segment.v_scale.value *= args.bmm2_scale;
  attention.q = args.query;
  attention.lse = args.lse;
  attention.segments = {&segment, 1};
  attention.q_scale = args.q_scale;
  attention.sm_scale = args.bmm1_scale;
  attention.logits_soft_cap = args.logits_soft_cap;
  attention.alibi_slopes = args.alibi_slopes;
  attention.sinks = args.sinks;
  run(*kernel.plan, attention, state.memory_for(kernel), stream);
}

}  // namespace

BlockTableKernel& BlockTableWorkspace::State::kernel_for(const AttentionConfig& config) {
  const bool captured = of_captured_shape && graph_bounds.has_value();
  auto& candidates = captured ? graph_kernels : kernels;
  for (const auto& kernel : candidates) {
    if (same_question(kernel->op.config(), config)) return *kernel;
  }
  PrepareOptions options;
  options.force_kernel = force_kernel;
  if (captured) options.bounds = graph_bounds;
  AttentionOp op = prepare(context, config, options);
  if (given.data != nullptr) init_workspace(op, given);
  auto kernel = std::make_unique<BlockTableKernel>(std::move(op));
  if (captured) {
    kernel->memory.emplace(context.device());
    kernel->memory->reserve(folio::workspace_size(kernel->op));
    init_workspace(kernel->op, {kernel->memory->data(), kernel->memory->bytes()});
  }
  candidates.push_back(std::move(kernel));
  return *candidates.back();
}

void BlockTableWorkspace::State::prepare_for_graphs(const AttentionConfig& config) {
  of_captured_shape = true;
  static_cast<void>(kernel_for(config));
  of_captured_shape = false;
}

void BlockTableWorkspace::State::plan_for_graphs(std::span<const int32_t> lengths_q, std::span<const int32_t> seq_lens,
                                                 Stream stream) {
  for (const auto& kernel : graph_kernels) plan_for(*this, *kernel, lengths_q, seq_lens, stream);
}

Workspace BlockTableWorkspace::State::memory_for(BlockTableKernel& kernel) {
  if (kernel.memory) return {kernel.memory->data(), kernel.memory->bytes()};
  const size_t bytes = std::max(folio::workspace_size(*kernel.plan), folio::workspace_size(kernel.op));
  most_bytes = std::max(most_bytes, bytes);
  if (given.data != nullptr) return given;
  if (own.bytes() < bytes) {
    own.reserve(bytes);
    init_workspace(kernel.op, {own.data(), own.bytes()});
  }
  return {own.data(), own.bytes()};
}

BlockTableWorkspace::BlockTableWorkspace(const Context& context, Determinism determinism,
                                         const std::string& force_kernel, Workspace memory)
    : state_(new State{.context = context,
                       .determinism = determinism,
                       .force_kernel = force_kernel,
                       .given = memory,
                       .own = ContextMemory(context.device()),
                       .kernels = {},
                       .cu_q = {},
                       .of_captured_shape = false,
                       .graph_bounds = {},
                       .graph_kernels = {},
                       .dequantized = ContextMemory(context.device()),
                       .dequantized_table = ContextMemory(context.device())}) {
  require(memory.data == nullptr || context.device().type != DeviceType::kCpu,
          "memory is given for a CPU; leave it empty");
}
BlockTableWorkspace::BlockTableWorkspace(BlockTableWorkspace&&) noexcept = default;
BlockTableWorkspace& BlockTableWorkspace::operator=(BlockTableWorkspace&&) noexcept = default;
BlockTableWorkspace::~BlockTableWorkspace() = default;

size_t BlockTableWorkspace::State::held_bytes() const {
  size_t bytes = own.bytes() + dequantized.bytes() + dequantized_table.bytes();
  for (const auto& kernel : graph_kernels) bytes += kernel->memory ? kernel->memory->bytes() : 0;
  return bytes;
}

size_t BlockTableWorkspace::workspace_size() const {
  return state_->most_bytes;
}
int64_t BlockTableWorkspace::num_plans() const noexcept {
  return state_->num_plans;
}

void set_decode_lengths(BlockTableWorkspace::State& state, const BlockTableArgs& args, int32_t q_len_per_req) {
  const auto batch_size = static_cast<int64_t>(args.seq_lens.size());
  const int64_t tokens = args.query.shape[0];
  require(q_len_per_req >= 0, "q_len_per_req is ", q_len_per_req, "; it must not be negative");
  const int64_t q_len = q_len_per_req > 0 || batch_size == 0 ? q_len_per_req : tokens / batch_size;
  require(q_len * batch_size == tokens, "TRTLLM decode requires uniform query lengths per request. Got ", tokens,
          " query tokens for ", batch_size, " requests");
  state.cu_q.resize(static_cast<size_t>(batch_size) + 1);
  for (size_t r = 0; r < state.cu_q.size(); ++r) {
    state.cu_q[r] = core::checked_cast<int32_t>(static_cast<int64_t>(r) * q_len);
  }
}

void set_context_lengths(BlockTableWorkspace::State& state, const BlockTableArgs& args,
                         std::span<const int32_t> cum_seq_lens_q, int32_t max_q_len) {
  require(cum_seq_lens_q.size() == args.seq_lens.size() + 1, "cum_seq_lens_q has ", cum_seq_lens_q.size(),
          " entries; it must have one more than seq_lens, which has ", args.seq_lens.size());
  state.cu_q.resize(cum_seq_lens_q.size());
  state.cu_q[0] = 0;
  for (size_t r = 0; r + 1 < cum_seq_lens_q.size(); ++r) {
    const int32_t q_len = cum_seq_lens_q[r + 1] - cum_seq_lens_q[r];
    require(q_len >= 0 && (max_q_len == 0 || q_len <= max_q_len), "request ", r, " has ", q_len,
            " query tokens; max_q_len is ", max_q_len);
    state.cu_q[r + 1] = cum_seq_lens_q[r + 1] - cum_seq_lens_q[0];
  }
}

void check_block_table_call(BlockTableWorkspace::State& state, const BlockTableArgs& args) {
  check(args, state.cu_q);
  AttentionArgs attention;
  set_output(args, attention);
  static_cast<void>(state.kernel_for(config_of(args, state.determinism)));
}

void trtllm_batch_decode_with_kv_cache(BlockTableWorkspace& workspace, const BlockTableArgs& args,
                                       int32_t q_len_per_req, Stream stream) {
  set_decode_lengths(workspace.state(), args, q_len_per_req);
  run_call(workspace.state(), args, workspace.state().cu_q, stream);
}

void trtllm_batch_context_with_kv_cache(BlockTableWorkspace& workspace, const BlockTableArgs& args,
                                        std::span<const int32_t> cum_seq_lens_q, int32_t max_q_len, Stream stream) {
  set_context_lengths(workspace.state(), args, cum_seq_lens_q, max_q_len);
  run_call(workspace.state(), args, workspace.state().cu_q, stream);
}

}  // namespace folio::inline v0::backends
