"""Mistakes in the token-pool backend, many of them pymllm's or SGLang's; see mutations.py."""

from mutations import plant

POOL = "src/backends/token_pool/"
RANGE = POOL + "device/kv_range_rule.hpp"
LISTS = POOL + "kv_lists.cc"
READING = POOL + "reading.cc"
STEP = POOL + "step.cc"
FORWARD = POOL + "forward.cc"
METADATA = POOL + "metadata.cc"
GRAPHS = POOL + "graphs.cc"
INPUTS = POOL + "graph_inputs.cc"
INPUTS_RULE = POOL + "device/graph_inputs_rule.hpp"
TREE = POOL + "tree_window.cc"
BACKEND = POOL + "backend.cc"
RANKS = POOL + "ranks.cc"
DEVICE_LISTS = POOL + "device/kv_lists_rule.hpp"
LIST_RULE = POOL + "device/kv_indices_rule.hpp"

rule = "which keys the token-pool backend reads"
plant(rule, "pool-window-one-key-short", RANGE, "window_start(first_query, window_left, job.page_size)",
      "window_start(first_query + (job.role == WrapperRole::kWindow), window_left, job.page_size)")
plant(rule, "pool-window-one-key-long", READING, "attention.window_left = config.sliding_window_size.value_or(-1);",
      "attention.window_left = config.sliding_window_size.value_or(-1) + 1;")
plant(rule, "pool-window-not-planned", READING, "attention.window_left = config.sliding_window_size.value_or(-1);", "")
plant(rule, "pool-window-from-the-end", RANGE, "window_start(first_query, window_left, job.page_size)",
      "window_start(end - 1, window_left, job.page_size)")
plant(rule, "pool-window-start-not-a-position", READING,
      "segments_[0].first_pos = device_lengths ? lists_.device_first_pos() : lists_.first_pos().data();", "")
plant(rule, "pool-window-on-full-layers", RANGE, "job.role == WrapperRole::kWindow ? job.window_left : -1;", "job.window_left;")
plant(rule, "pool-prefix-slice-with-new-tokens", RANGE, "(job.ragged ? first_query : end)",
      "(job.ragged && job.role != WrapperRole::kWindow ? first_query : end)")
plant(rule, "pool-prefix-slice-one-short", RANGE, "(job.ragged ? first_query : end)",
      "(job.ragged && first_query > 0 ? first_query - 1 : end)")
plant(rule, "pool-extend-not-causal", BACKEND, "cross ? MaskKind::kNone : choice.mask",
      "cross || choice.ragged ? MaskKind::kNone : choice.mask")
plant(rule, "pool-ragged-at-position-0", READING, "segments_[1].first_pos = step.prefix_lens.data();",
      "segments_[1].first_pos = segments_[0].first_pos;")
plant(rule, "pool-schedule-in-window-starts", LISTS, "job.window_left = whole || ", "job.window_left = (whole && config.page_size < 0) || ")
plant(rule, "pool-indptr-shifted", LISTS, "create_kv_indices(args, indices);",
      "create_kv_indices(args, indices);\n  for (size_t r = count; r > 0; --r) indptr[r] = indptr[r - 1];")
plant(rule, "pool-last-page-0", RANGE, "len == 0 ? 1 : (len - 1) % page_size + 1;", "len == 0 ? 1 : len % page_size;")
plant(rule, "pool-last-page-full", RANGE, "len == 0 ? 1 : (len - 1) % page_size + 1;", "len >= 0 ? page_size : 1;")
plant(rule, "pool-encoder-slots-as-decoder", RANGE,
      "range.first_pos + (job.role == WrapperRole::kSelf ? own_tokens(job.shard, job.encoder_lens[r]) : 0);", "range.first_pos;")
plant(rule, "pool-cross-attention-of-decoder-length", RANGE, "range.whole_len = job.encoder_lens[r];", "range.whole_len = job.seq_lens[r];")
plant(rule, "pool-cross-attention-causal", BACKEND, "cross ? MaskKind::kNone : choice.mask", "choice.mask")
plant(rule, "pool-verify-without-drafts", RANGE, "job.seq_lens[r] + job.drafts;", "job.seq_lens[r];")
plant(rule, "pool-decode-one-key-short", RANGE, "(job.ragged ? first_query : end) - range.first_pos);",
      "(job.ragged || job.drafts == 0 ? first_query : end) - range.first_pos);")
plant(rule, "pool-shared-indptr-ignored", BACKEND, "wrapper.memory.kv_indptr = config.kv_indptr_buf;", "")

rule = "what the token-pool backend cannot read"
plant(rule, "pool-encoders-by-pages", BACKEND, "set.self_by_slots && roles[wrapper] == WrapperRole::kSelf ? 1 : config.page_size;", "config.page_size;")
plant(rule, "pool-positions-beyond-the-row", LISTS, "require(end <= table.num_columns,", "require(true,")
plant(rule, "pool-device-row-ends-unchecked", DEVICE_LISTS, "return end > columns ? fault", "return end > columns + end ? fault")
plant(rule, "pool-unserved-requests-keep-their-row", DEVICE_LISTS, "range.table_start = kNoRow;", "{}")
plant(rule, "pool-device-plans-of-unserved-requests", DEVICE_LISTS, "range.len = range.whole_len = range.first_pos = range.table_start = 0;", "{}")
plant(rule, "pool-lists-by-the-device-lengths", DEVICE_LISTS, "range.len = job.planned.lens[r];", "{}")
plant(rule, "pool-host-lengths-unreported", DEVICE_LISTS, "listed.found.fault = KvRangeFault::kHostLengths;", "{}")
plant(rule, "pool-slots-of-no-page-read", LIST_RULE, "out[j] = fault == KvRangeFault::kNone ? slot / job.page_size : kDummySlot;", "out[j] = slot / job.page_size;")

rule = "trees of drafts in the token-pool backend"
plant(rule, "pool-trees-of-no-ancestors", STEP, 'require(differ == 0, "tree_mask of request ",', 'require(true, "tree_mask of request ",')
plant(rule, "pool-trees-of-later-drafts", STEP, 'require(later == 0, "tree_mask of request ",', 'require(true, "tree_mask of request ",')
plant(rule, "pool-tree-as-chain", METADATA, "choice.mask = MaskKind::kCustom;", "{}")
plant(rule, "pool-tree-window-by-row", TREE, "seq_lens[r] + depth - window_left;", "seq_lens[r] + row - window_left;")
plant(rule, "pool-tree-window-one-short", TREE, "seq_lens[r] + depth - window_left;", "seq_lens[r] + depth - window_left + 1;")
plant(rule, "pool-tree-window-of-ancestors", TREE, "depth - drafts.depth(column) <= window_left;", "depth - drafts.depth(column) <= window_left + 1;")
plant(rule, "pool-tree-blocks-not-on-bytes", TREE, "block += core::ceil_div(int64_t{n} * lens[r], int64_t{8});",
      "block += int64_t{n} * lens[r] / 8;")
plant(rule, "pool-tree-keys-at-position-0", TREE, "oldest - first_pos[r]", "oldest - 0 * first_pos[r]")

rule = "forwards of the token-pool backend"
plant(rule, "pool-tokens-beside-their-row", STEP, "require(slot == table.at(rows[r], column), name,", "require(true, name,")
plant(rule, "pool-slots-checked-once-for-any-array", FORWARD, "checked.slots.data() == slots.data() && ", "")
plant(rule, "pool-cap-not-planned", READING, "if (config.logit_cap) attention.features = Feature::kSoftCap;", "")
plant(rule, "pool-cap-dropped", READING, "args.logits_soft_cap = call.logit_cap;", "")
plant(rule, "pool-k-scale-dropped", READING, "args_[0].k_scale = call.k_scale;", "")
plant(rule, "pool-v-scale-dropped", READING, "args_[0].v_scale = call.v_scale;", "")
plant(rule, "pool-value-dim-is-head-dim", READING, "config.value_head_dim();", "config.head_dim;")
plant(rule, "pool-shared-lists-overwritten", FORWARD, "{.ragged = false, .mask = choice.mask, .primary = false};",
      "{.ragged = false, .mask = choice.mask, .primary = true};")
plant(rule, "pool-encoder-only-cached", FORWARD, "save_kv_cache && !encoder_only", "(save_kv_cache || encoder_only)")
plant(rule, "pool-idle-unwritten", FORWARD, "std::memset(first + token * rows.strides[0] * element, 0, static_cast<size_t>(row_bytes));", "")
plant(rule, "pool-bidirectional-causal", FORWARD, "choice.mask = MaskKind::kNone;", "")
plant(rule, "pool-cross-keys-to-decoder-slots", FORWARD, "layer.is_cross_attention ? batch.encoder_out_cache_loc : own_slots;", "own_slots;")
plant(rule, "pool-window-tokens-to-the-full-pool", FORWARD, "window_pool ? batch.window_out_cache_loc : batch.out_cache_loc;", "batch.out_cache_loc;")
plant(rule, "pool-window-lists-of-full-slots", LISTS, "return own ? config_->window_req_to_token : config_->req_to_token;", "return own || true ? config_->req_to_token : config_->req_to_token;")
plant(rule, "pool-batch-invariance-by-cost", METADATA, "if (config.determinism >= Determinism::kBatchInvariant) return false;", "")
plant(rule, "pool-other-window-accepted", BACKEND, "require(state_->config.sliding_window_size == window,", "require(true,")
plant(rule, "pool-28-over-8-is-4", BACKEND, "num_attention_heads / num_kv_heads >= 4;", "num_attention_heads > 3 * num_kv_heads;")

rule = "captured batches of the token-pool backend"
plant(rule, "pool-padding-not-counted", INPUTS, "std::accumulate(result.seq_lens_cpu.begin(), result.seq_lens_cpu.end(), int64_t{0});",
      "std::accumulate(batch.seq_lens.begin(), batch.seq_lens.end(), int64_t{0});")
plant(rule, "pool-padding-count-unchecked", GRAPHS, "batch.seq_lens_sum = seq_lens_sum;", "static_cast<void>(seq_lens_sum);")
plant(rule, "pool-padding-rows-stale", INPUTS_RULE, "job.rows.fill(r, own, kPaddingRow);", "if (own) job.rows.fill(r, own, kPaddingRow);")
plant(rule, "pool-padding-length-0", INPUTS_RULE, "kPadLength = 1;", "kPadLength = 0;")
plant(rule, "pool-padding-writes-slot-1", INPUTS_RULE, "job.slots.fill(t, own, kDummySlot);", "job.slots.fill(t, own, 1);")
plant(rule, "pool-seq-lens-twins-unchecked", STEP, "require(std::ranges::equal(given, on_cpu),", "require(true,")
plant(rule, "pool-graph-buffer-overrun", LISTS, "memory_.fixed ? memory_.kv_indices : std::span(own_indices_);", "std::span(own_indices_);")

rule = "the token-pool backend over ranks"
plant(rule, "pool-ranks-own-lengths-planned", READING, "lists_.whole_lens().data();", "lists_.lens().data();")
plant(rule, "pool-ranks-new-tokens-from-the-cache", READING, "batch.num_cached = kind_.ragged ? 0 : step.num_requests;",
      "batch.num_cached = step.num_requests;")
plant(rule, "pool-ranks-lists-begin-at-windows", LISTS, "whole || job.shard.world > 1 ? -1 :", "whole ? -1 :")
plant(rule, "pool-ranks-encoders-of-all-ranks", RANGE, "own_tokens(job.shard, job.encoder_lens[r]) : 0", "job.encoder_lens[r] : 0")
plant(rule, "pool-ranks-pages-by-own-encoders", RANKS, "for (shard.rank = 0; shard.rank < shard.world; ++shard.rank) {", "{")
plant(rule, "pool-ranks-slots-of-others-accepted", STEP, "own_tokens(shard, static_cast<int32_t>(position) + 1) > before", "true")
