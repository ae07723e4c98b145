"""Mistakes in what divides KV caches over ranks and combines their results; see mutations.py."""

from mutations import plant

DISTRIBUTED = "src/distributed/"
GATHER = DISTRIBUTED + "gather_combine.cc"
EXCHANGE = DISTRIBUTED + "exchange_combine.cc"
COMBINE = DISTRIBUTED + "lse_combine.cc"
PLAN = DISTRIBUTED + "dcp_attention.cc"
RUN = DISTRIBUTED + "dcp_run.cc"
STATE = DISTRIBUTED + "dcp_state.hpp"
AGREEMENT = DISTRIBUTED + "dcp_agreement.cc"
SHARD_BATCH = "src/kernels/cuda/common/merge_states/shard_batch.hpp"
THREADS = DISTRIBUTED + "thread_group.cc"
SUMS = DISTRIBUTED + "rank_sum.cc"
TRANSPORT = DISTRIBUTED + "dcp_transport.cc"
PEERS = "src/kernels/cuda/common/peer_memory/peer_memory.hpp"
RANKS = "src/kernels/cuda/common/merge_states/ranks.hpp"
STEP = "src/backends/common/dcp_step.cc"

rule = "combining ranks' results"
plant(rule, "combine-base-ignored", GATHER, "log_base_(base == LseBase::k2 ? std::numbers::ln2 : 1.0)", "log_base_(1.0 + 0 * static_cast<int>(base))")
plant(rule, "combine-exchanged-base-ignored", EXCHANGE, "states.base = call.partial.base;", "states.base = LseBase::kE;")
plant(rule, "combine-nan-of-an-empty-shard", GATHER, "if (weight == 0.0f) {", "if (false) {")
plant(rule, "combine-nan-lse-not-empty", COMBINE, "(std::isnan(lse) && call.nan == NanLse::kIsEmpty)", "false")
plant(rule, "combine-nan-hidden", COMBINE, "(std::isnan(lse) && call.nan == NanLse::kIsEmpty)", "std::isnan(lse)")
plant(rule, "combine-positive-infinity-not-empty", COMBINE, "const bool empty = std::isinf(lse) ||",
      "const bool empty = (std::isinf(lse) && lse < 0) ||")
plant(rule, "combine-padding-rows-sent", COMBINE, "  empty_out(rows.query_start_loc.back(), num_tokens);\n", "")
plant(rule, "combine-lse-of-another-rank", GATHER, "memory.gathered[mine * all + t * heads + head]", "memory.gathered[t * heads + head]")
plant(rule, "combine-result-lse-not-summed", GATHER, "(top_ * log_base_ + std::log(sum_))", "(top_ * log_base_)")

rule = "attention over a divided cache"
plant(rule, "heads-times-ranks-twice", PLAN, "cached.num_q_heads = config.num_q_heads * world;",
      "cached.num_q_heads = config.num_q_heads * world * world;")
plant(rule, "heads-of-all-ranks-for-new-tokens", PLAN, "  fresh.out = DType::kFloat32;\n",
      "  fresh.out = DType::kFloat32;\n  fresh.num_q_heads *= 2;\n")
plant(rule, "sinks-count-on-every-rank", PLAN, "  cached.features.bits &= ~Features(Feature::kSinks).bits;\n", "",
      RUN, "    args.q_scale = args_.q_scale;\n", "    args.q_scale = args_.q_scale;\n    args.sinks = args_.sinks;\n")
plant(rule, "dcp-sinks-dropped", RUN, "    args.sinks = args_.sinks == nullptr ? nullptr : args_.sinks + first_out;\n", "")
plant(rule, "sinks-of-cached-rows-dropped", PLAN,
      "passes.fresh = passes.fresh || state.config.attention.features.has(Feature::kSinks);", "")
plant(rule, "queries-at-the-end-of-the-context", PLAN, "state.first_pos[i] = own.first_pos;", "state.first_pos[i] = own.first_pos - static_cast<int32_t>(q_len);")
plant(rule, "local-positions", PLAN, "    segment.shard = shard_of(state);\n", "")
plant(rule, "new-tokens-at-position-0", PLAN, "    if (passes.reads_new_tokens) segment.first_pos = first_pos;\n", "")
plant(rule, "new-tokens-read-twice", SHARD_BATCH, "shard_count_below(shard, from_cache ? seq_len : older)", "shard_count_below(shard, seq_len)")
ORDER = "src/kernels/cuda/common/merge_states/ranks.hpp"
plant(rule, "heads-by-rank-not-by-kv-head", ORDER, "return {place / per_group % ranks, place / (per_group * ranks) * per_group + place % per_group};",
      "return {place / heads, place % heads + 0 * (ranks + per_group)};")
plant(rule, "slopes-of-one-rank", RUN, "params.slopes + rank * params.slopes_rank_stride", "params.slopes")
plant(rule, "queries-of-one-rank", RUN, "params.from + rank * params.rank_stride +", "params.from +")
plant(rule, "batches-not-compared", AGREEMENT, "theirs.digest == mine.digest", "true")
plant(rule, "sm-scales-not-compared", AGREEMENT, "theirs.sm_scale == mine.sm_scale", "true")
plant(rule, "default-sm-scale-not-resolved", AGREEMENT, "args.sm_scale == 0.0f ? by_default : args.sm_scale", "args.sm_scale + 0 * by_default")
plant(rule, "soft-caps-not-compared", AGREEMENT, "theirs.logits_soft_cap == mine.logits_soft_cap", "true")
plant(rule, "q-scales-not-compared", AGREEMENT, "if (theirs.q_scales == mine.q_scales) return;", "return;")
plant(rule, "q-scales-of-one-head-compared", AGREEMENT, "of_heads ? state.config.attention.num_kv_heads : 1", "of_heads ? 1 : 1")
plant(rule, "q-scales-of-one-request-compared", AGREEMENT, "of_requests ? plan.num_requests : 1", "of_requests ? 1 : 1")
plant(rule, "q-scale-dropped", RUN, "    args.q_scale = args_.q_scale;\n", "")
plant(rule, "cross-attention-like-a-decoder", PLAN, "batch.cross_attention ? 0 : q_len", "q_len")
plant(rule, "seq-lens-beyond-the-bounds", PLAN, "core::require(seq_len <= max_seq_len(state),", "core::require(true,")
plant(rule, "bounds-not-compared", AGREEMENT, ".add(bounds.max_kv_len)", "")
plant(rule, "a-failing-rank-not-told", AGREEMENT, "core::require(theirs.failed == 0,", "core::require(true,")
plant(rule, "shared-levels-in-bounds", PLAN, "config.bounds->max_shared_levels == 0, ", "true, ")
plant(rule, "cross-attention-partly-cached", PLAN, "!batch.cross_attention || batch.num_cached == num_requests", "true")
plant(rule, "cross-attention-not-compared", PLAN, ".add(batch.cross_attention)", "")
plant(rule, "encoders-shorter-than-queries-at-0", PLAN, "state.first_pos[i] = own.first_pos;", "state.first_pos[i] = own.first_pos < 0 ? 0 : own.first_pos;")
plant(rule, "all-heads-in-the-order-of-kv-heads", GATHER, "if (call.head_groups == 1) {\n    deliver(", "if (call.head_groups >= 1) {\n    deliver(")
plant(rule, "all-heads-of-one-group", GATHER, "to = int64_t{r} * local + h;", "to = int64_t{r} * local + 0 * h;")
plant(rule, "all-heads-lse-unmoved", GATHER, "lse.data += to * lse.head_stride", "lse.data += from * lse.head_stride")
plant(rule, "all-heads-with-own-sinks", RUN, "args_.sinks + first_out", "args_.sinks")
plant(rule, "all-heads-with-one-ranks-queries", RUN, "(all ? part : state_.group->rank()) * heads()", "(all ? 0 * part : state_.group->rank()) * heads()")
plant(rule, "all-heads-new-tokens-of-one-rank", RUN, "return state_.config.all_heads_out ? state_.group->size() : 1;", "return 1;")
plant(rule, "all-heads-from-gathered-queries", PLAN, "core::require(\n      config.replicated_queries,\n", "core::require(\n      true,\n")
plant(rule, "all-heads-over-a2a", PLAN, "config.combine == DcpCombine::kAllGatherReduceScatter || group.size() == 1", "true")
plant(rule, "partials-in-the-models-dtype", PLAN, "  fresh.out = DType::kFloat32;\n", "", PLAN,
      "  cached.out = world > 1 ? partial : DType::kFloat32;\n", "")

rule = "partial results of 16 bits"
plant(rule, "partials-of-one-rank-rounded", PLAN, "cached.out = world > 1 ? partial : DType::kFloat32;", "cached.out = partial;",
      STATE, "return group->size() > 1 ? config.partial_dtype : DType::kFloat32;", "return config.partial_dtype;")
plant(rule, "partials-always-float32", PLAN, "cached.out = world > 1 ? partial : DType::kFloat32;", "cached.out = world > 0 || partial == out_of(config) ? DType::kFloat32 : partial;",
      STATE, "return group->size() > 1 ? config.partial_dtype : DType::kFloat32;", "return DType::kFloat32;")
plant(rule, "partials-of-another-dtype-than-out", PLAN, "wide && partial == out, ", "wide, ")
plant(rule, "partials-of-8-bits", PLAN, "wide && partial == out, ", "(wide || is_fp8(partial)) && partial == out, ")
plant(rule, "partial-dtypes-not-compared", AGREEMENT, "\n      .add(config.partial_dtype)", "")
plant(rule, "partials-summed-by-the-group", RUN, "partial != DType::kFloat32 || state_.config.combine == DcpCombine::kAllToAll", "state_.config.combine == DcpCombine::kAllToAll")
plant(rule, "all-heads-of-one-rank", EXCHANGE, "memory.received + static_cast<size_t>(r) * part;", "memory.received + static_cast<size_t>(0 * r) * part;")
plant(rule, "all-heads-from-the-first-place-on", EXCHANGE, "const int64_t to = r * local;", "const int64_t to = 0 * r * local;")

rule = "layers in two steps"
plant(rule, "started-layers-not-refused", AGREEMENT, "core::require(!state.started,", "core::require(!state.started || true,")
plant(rule, "finish-of-no-layer", RUN, "core::require(state.started,", "core::require(true,")
plant(rule, "layers-stay-started", RUN, "  if (state.forked) state.exchange->join(stream);\n  state.started = false;\n", "  if (state.forked) state.exchange->join(stream);\n")
plant(rule, "plans-of-a-started-layer", PLAN, "    check_finished(state);\n", "")

rule = "peer memory: what a machine without a GPU can catch"
plant(rule, "transports-named-anyhow", TRANSPORT, """core::require(name == "peer", "transport is""", """core::require(true, "transport is""")
plant(rule, "transports-name-swapped", TRANSPORT, 'return transport == DcpTransport::kGroup ? "group" : "auto";', 'return transport == DcpTransport::kGroup ? "auto" : "group";')
plant(rule, "transports-not-compared", AGREEMENT, "\n      .add(config.transport)", "")
plant(rule, "peer-memory-of-a-cpu", PLAN, "if (config.transport == DcpTransport::kPeer && context.device().type == DeviceType::kCpu) {", "if (false) {")
plant(rule, "rank-0-missing-is-no-fault", PEERS, "static_cast<uint32_t>(missing + 1)", "static_cast<uint32_t>(missing)",
      PEERS, "static_cast<int32_t>(word & 0xff) - 1", "static_cast<int32_t>(word & 0xff)")
plant(rule, "heads-placed-by-rank", RANKS, "(owner.head / per_group * ranks + owner.rank) * per_group + owner.head % per_group", "owner.rank * heads + owner.head")

rule = "groups of threads"
plant(rule, "timeout-not-told", THREADS, "{ return meeting_->timeout(); }", "{ return std::chrono::minutes(5); }")
plant(rule, "buffers-left-too-early", THREADS, "    meeting_->meet_inside();\n    if (gpu_failure_", "    if (gpu_failure_")
plant(rule, "leaving-not-noticed", THREADS, '{ meeting_->fail("rank ", rank_, " has left it"); }', "= default;")
plant(rule, "sums-in-another-order", SUMS, "std::copy_n(sent[0] + done, length, sums.data());\n    for (const float* const values : sent.subspan(1)) {",
      "std::copy_n(sent.back() + done, length, sums.data());\n    for (const float* const values : sent.first(sent.size() - 1)) {")
plant(rule, "sums-of-the-first-step", SUMS, "sums[i] += values[done + i];", "sums[i] += values[i];")
plant(rule, "sums-over-their-parts", SUMS, "check_exchange(part, bytes, out, bytes);", "check_buffer(\"send\", part, bytes);")
plant(rule, "sums-of-nothing", SUMS, 'core::require(!sent.empty(), "sent has no parts; a sum has one or more");', "if (sent.empty()) return;")
plant(rule, "missing-thread-not-told", THREADS, 'groups[0]->fail("not every rank has a thread");', "")

rule = "threads in a forked child"
plant(rule, "fork-not-noticed", "src/platform/thread_pool.cc", "return forks.load(std::memory_order_relaxed) != fork_depth_;", "return false;")

rule = "backends over a divided cache"
plant(rule, "dcp-sinks-not-handed-on", STEP, "  dcp.sinks = args.sinks;\n", "")
plant(rule, "dcp-sinks-of-rank-0", STEP, "    dcp.sinks += plan.attention->group().rank() * config.attention.num_q_heads;\n", "")
plant(rule, "dcp-replicated-queries-ignored", STEP, "  dcp.replicated_queries = parallel.dcp_replicated_queries;\n", "")
plant(rule, "dcp-all-heads-ignored", STEP, "  dcp.all_heads_out = parallel.dcp_all_heads_out;\n", "")
plant(rule, "dcp-all-heads-from-own-queries", STEP, "!parallel.dcp_all_heads_out || parallel.dcp_replicated_queries", "true")
plant(rule, "dcp-all-heads-over-a2a", STEP, "!parallel.dcp_all_heads_out || combine == distributed::DcpCombine::kAllGatherReduceScatter", "true")
plant(rule, "dcp-layers-query-ranks-unchecked", "src/backends/common/dcp_step.hpp", "core::require(given == expected,", "core::require(true,")
plant(rule, "dcp-cross-attention-like-a-decoder", STEP, "  step.cross_attention = keys_ == DcpKeys::kEncoders;\n", "")
FLASH = "src/backends/flash_attn/"
plant(rule, "dcp-encoders-lengths-checked", FLASH + "build.cc", "state.is_encoder() ? checked : batch);", "checked);")
plant(rule, "dcp-schedule-not-sealed", FLASH + "build.cc", "    plan.cached = step.schedule->plan();\n", "")
plant(rule, "dcp-new-tokens-schedule-not-sealed", FLASH + "build.cc", "    plan.fresh = step.new_tokens_schedule->plan();\n", "")
plant(rule, "dcp-schedule-unchecked", FLASH + "forward.cc", '    check_schedule("scheduler_metadata", dcp_plan->plan.cached, metadata->scheduler_metadata, stream);\n', "")
plant(rule, "dcp-new-tokens-schedule-unchecked", FLASH + "forward.cc", '    check_schedule("new_tokens_scheduler_metadata", dcp_plan->plan.fresh, metadata->new_tokens_scheduler_metadata,\n                   stream);\n', "")
plant(rule, "dcp-graphs-over-groups-that-wait", STEP, "if (context.device().type == DeviceType::kCpu || !parallel.dcp_group->enqueues()) {", "if (false) {")
plant(rule, "dcp-table-of-one-rank", "src/backends/common/batch_checks.cc", " * config.parallel.decode_context_parallel_size;", ";")
plant(rule, "dcp-wrong-local-lengths-taken", STEP, "core::require(local[at] == expected,", "core::require(true || local[at] == expected,")
