"""Mistakes in what divides the queries of prefills over ranks; see mutations.py."""

from mutations import plant

DISTRIBUTED = "src/distributed/"
TOKENS = DISTRIBUTED + "pcp_tokens.cc"
PREPARE = DISTRIBUTED + "pcp_attention.cc"
PLAN = DISTRIBUTED + "pcp_plan.cc"
LAYOUT = DISTRIBUTED + "pcp_layout.cc"
RUN = DISTRIBUTED + "pcp_run.cc"
EXCHANGE = DISTRIBUTED + "pcp_exchange.cc"
AGREEMENT = DISTRIBUTED + "pcp_agreement.cc"

rule = "attention over divided queries"
plant(rule, "pcp-chunks-in-a-row", TOKENS, "chunk(q_len, world, 2 * world - 1 - pair)", "chunk(q_len, world, world + pair)")
plant(rule, "pcp-decodes-on-one-rank", TOKENS, "(int64_t{rank} + request) % world", "(int64_t{rank} + 0 * request) % world")
plant(rule, "pcp-window-not-used", PLAN, "if (config.window_left >= 0) first = std::max(first, first_query - config.window_left);\n", "")
plant(rule, "pcp-chunks-of-attention-overlooked-by-one", PLAN, "first_query / config.attention_chunk * config.attention_chunk",
      "(first_query / config.attention_chunk + 1) * config.attention_chunk")
plant(rule, "pcp-older-pages-from-the-start", EXCHANGE, "std::copy(row.begin() + first, row.end(), table_memory() + begin);",
      "std::copy(row.begin(), row.end() - first, table_memory() + begin);")
plant(rule, "pcp-sinks-with-every-state", RUN, "if (state == layout_.num_states - 1) args.sinks = args_.sinks;\n", "",
      RUN, "  args.alibi_slopes = args_.alibi_slopes;\n", "  args.alibi_slopes = args_.alibi_slopes;\n  args.sinks = args_.sinks;\n")
plant(rule, "pcp-sinks-dropped", RUN, "if (state == layout_.num_states - 1) args.sinks = args_.sinks;\n", "")
plant(rule, "pcp-shard-of-another-rank", PLAN, "segment.shard = {world_, p, state_.config.interleave};",
      "segment.shard = {world_, rank_, state_.config.interleave};")
plant(rule, "pcp-batches-not-compared", AGREEMENT, "theirs.digest == mine.digest", "true")
plant(rule, "pcp-k-scales-not-compared", AGREEMENT, "theirs.k_scale == mine.k_scale", "true")
plant(rule, "pcp-batch-decides-the-exchange", PLAN, "config_.determinism == Determinism::kBatchInvariant", "false")
plant(rule, "pcp-new-tokens-at-position-0", PLAN, "first_new_.push_back(first_query(i));", "first_new_.push_back(0);")
plant(rule, "pcp-dearer-exchange", PLAN, "planned.pass_kv_bytes < planned.pass_q_bytes", "planned.pass_kv_bytes > planned.pass_q_bytes")
plant(rule, "pcp-scales-of-the-first-request", RUN, "request < 0 ? 1.0f : scale_of(scale, request, h)", "scale_of(scale, 0 * request, h)")

rule = "steps of divided queries within bounds"
plant(rule, "pcp-bounds-take-pass-kv", PREPARE, "state_->can_pass_kv = !config.bounds && can_pass_kv(", "state_->can_pass_kv = can_pass_kv(")
plant(rule, "pcp-padding-not-in-the-plan", PLAN, "return batch_.max_tokens > 0 ? batch_.max_tokens : max_pcp_tokens(cu_q(), world_);",
      "return max_pcp_tokens(cu_q(), world_);")
plant(rule, "pcp-rows-of-padding-not-asked-for", DISTRIBUTED + "pcp_state.hpp", "return bounded() ? plan.max_tokens : plan.num_tokens;", "return plan.num_tokens;")
plant(rule, "pcp-longer-requests-than-bounds", PLAN, "core::require(batch_.seq_lens[i] <= bounds.max_kv_len,", "core::require(true,")
plant(rule, "pcp-fewer-rows-than-tokens", PLAN, "batch_.max_tokens >= most && ", "")
plant(rule, "pcp-workspace-of-one-request", LAYOUT, "sizes_within_bounds(state, state.config.bounds->max_requests, state.max_rank_tokens())",
      "sizes_within_bounds(state, 1, state.max_rank_tokens())")
