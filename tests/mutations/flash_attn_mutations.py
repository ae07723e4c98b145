"""Mistakes in the FlashAttention backend and in what it shares with others; see mutations.py."""

from mutations import plant

FLASH = "src/backends/flash_attn/"
COMMON = "src/backends/common/"
SEALED = "src/attention/sealed_plan.cc"

rule = "shared prefixes"
plant(rule, "prefix-not-capped-at-computed-tokens", COMMON + "batch_checks.cc",
      "usable = std::min(usable, batch.seq_lens[static_cast<size_t>(i)] - query_len);",
      "usable = std::min(usable, batch.seq_lens[static_cast<size_t>(i)]);")
plant(rule, "prefix-not-rounded-to-pages", COMMON + "batch_checks.cc", "usable / page_size * page_size : 0", "usable : 0")
plant(rule, "suffix-at-position-0", FLASH + "build.cc", "step.suffix_first_pos.assign(num_reqs, prefix);",
      "step.suffix_first_pos.assign(num_reqs, 0);")
plant(rule, "suffix-reads-the-prefix-pages", FLASH + "forward.cc",
      "first_column = metadata.common_prefix_len / metadata.page_size;", "first_column = 0;")
plant(rule, "prefix-read-off-row-0", FLASH + "build.cc",
      "first_with_queries(checked.query_start_loc.first(static_cast<size_t>(checked.num_reqs) + 1));", "0;")
plant(rule, "one-layers-prefix-read-off-row-0", FLASH + "cascade_attention.cc",
      "shared.data += first_with_queries(args.cu_query_lens) * shared.row_stride;", "")
plant(rule, "negative-suffix-of-padding", FLASH + "build.cc", "std::max(batch.seq_lens[i] - prefix, 0)", "batch.seq_lens[i] - prefix")
plant(rule, "batch-invariance-shares-prefixes", FLASH + "build.cc",
      "if (state.config.determinism >= Determinism::kBatchInvariant || step.dcp) prefix = 0;",
      "if (step.dcp) prefix = 0;")
plant(rule, "cascade-without-strict-gain", COMMON + "cascade_heuristic.cc", "prefix_tiles < ceil_div", "prefix_tiles <= ceil_div")
plant(rule, "cascade-below-least-prefix", COMMON + "cascade_heuristic.cc", "input.common_prefix_len < kMinPrefix",
      "input.common_prefix_len < kMinPrefix - 1")

rule = "prefixes that builders discover"
LEVELS = COMMON + "step_levels.cc"
plant(rule, "another-table-is-believed", LEVELS, "core::require(page == expected,", "core::require(true || page == expected,")
plant(rule, "another-table-keeps-the-first", LEVELS, "moved.tables[s].indices = table.data;", "")
plant(rule, "levels-of-a-stale-step-moved", FLASH + "build.cc",
      "static_cast<void>(workspace_size(metadata.plans.front()->plan));", "")
plant(rule, "bounds-for-one-level", FLASH + "metadata_builder.cc", "return options.max_cascade_levels;", "return 1;")
plant(rule, "captured-batches-discover", FLASH + "build.cc", "build_step(0, batch, /*fast_build=*/false, /*may_discover=*/false, stream);",
      "build_step(0, batch, /*fast_build=*/false, /*may_discover=*/true, stream);")
plant(rule, "vllm-discovers-under-alibi", FLASH + "metadata_builder.cc", "state.has_alibi || state.aot_window", "state.aot_window")

rule = "schedules"
plant(rule, "schedule-not-checked", FLASH + "forward.cc", "check_sealed(*plan, schedule, stream);",
      "static_cast<void>(workspace_size(*plan));")
plant(rule, "checksum-not-compared", SEALED, "core::require(header.checksum == checksum(", "core::require(true || header.checksum == checksum(")
plant(rule, "sealed-plan-runs-from-its-buffer", SEALED,
      "state_.passes.front().view = reinterpret_cast<const scheduler::PlanImageHeader*>(image)->view;",
      "state_.passes.front().view = planned.view();")
plant(rule, "stale-tail-of-a-schedule", FLASH + "schedule_memory.cc", "if (schedule.size() < used_) clear(", "if (false) clear(")
plant(rule, "old-schedule-not-stale", FLASH + "build.cc", "if (step.schedule) step.schedule->invalidate();", "")
plant(rule, "fast-build-schedules", FLASH + "build.cc", "state.aot_schedule && !fast_build", "state.aot_schedule")
plant(rule, "splits-not-limited", FLASH + "metadata_builder.cc", "prepare.max_kv_splits = max_splits(options);",
      "static_cast<void>(max_splits(options));")
plant(rule, "splits-limit-the-workers", FLASH + "metadata_builder.cc", "prepare.max_kv_splits = max_splits(options);",
      "prepare.num_workers = max_splits(options);")
plant(rule, "vllms-most-splits-in-the-native-profile", FLASH + "metadata_builder.cc",
      "options.max_num_splits_for_graphs.value_or(native ? 0 : kVllmsDefault)",
      "options.max_num_splits_for_graphs.value_or(kVllmsDefault)")
plant(rule, "one-step-in-flight", FLASH + "build.cc", "state.next_step = (state.next_step + 1) % state.steps.size();", "")

rule = "kinds of attention"
plant(rule, "vllms-encoder-window-to-both-sides", FLASH + "impl.cc",
      "profile == BackendProfile::kNative && config.attn_type == AttentionType::kEncoder;",
      "config.attn_type == AttentionType::kEncoder;")
plant(rule, "encoder-window-to-one-side", FLASH + "impl.cc", "return {left, both_sides ? left : 0};", "return {left, 0};")
plant(rule, "decoder-window-to-both-sides", FLASH + "impl.cc", "return {left, both_sides ? left : 0};", "return {left, left};")
plant(rule, "non-causal-ignored", FLASH + "build.cc", "if (all_visible) segment.mask", "if (false) segment.mask")
plant(rule, "encoder-lengths-ignored", FLASH + "build.cc",
      "if (!batch.encoder_seq_lens.empty()) keys.seq_lens = batch.encoder_seq_lens;", "")
plant(rule, "padded-keys-written", FLASH + "forward.cc", "const auto num_slots = static_cast<int64_t>(slot_mapping.size());",
      "const auto num_slots = key.shape[0];")
plant(rule, "shared-cache-written", FLASH + "forward.cc", "if (is_encoder() || kv_sharing_target_layer_name_) return;",
      "if (is_encoder()) return;")
plant(rule, "query-scale-forgotten", FLASH + "forward.cc", "if (is_fp8(query.dtype)) args.q_scale = layer.q;", "")

rule = "virtual batches"
plant(rule, "chunk-not-cut-at-the-last-key", COMMON + "local_attention.cc", "take(Piece{num_queries, end - start,",
      "take(Piece{num_queries, chunk,")
plant(rule, "chunk-relative-to-the-queries", COMMON + "local_attention.cc", "const int32_t start = position / chunk * chunk;",
      "const int32_t start = (seq_len - query_len) / chunk * chunk + done / chunk * chunk;")
plant(rule, "fast-prefill-takes-any-token", COMMON + "fast_prefill.cc", "core::require(wanted[k] == last_ones,", "core::require(true,")

rule = "what is given twice"
plant(rule, "positions-not-compared", COMMON + "batch_checks.cc",
      "core::require(first == batch.num_computed_tokens(i) && last == seq_len - 1,", "core::require(true,")
plant(rule, "last-position-not-compared", COMMON + "batch_checks.cc", "&& last == seq_len - 1,", ",")
plant(rule, "any-prefilling-flag", COMMON + "batch_checks.cc", "prefilling.empty() || prefilling[at] <= 1,", "true,")
plant(rule, "upper-bound-below-the-length", COMMON + "batch_checks.cc",
      "core::require(bounds[at] >= seq_len && (!in_prompt || bounds[at] == seq_len),",
      "core::require(!in_prompt || bounds[at] == seq_len,")
plant(rule, "upper-bound-of-a-prompt-above-it", COMMON + "batch_checks.cc",
      "core::require(bounds[at] >= seq_len && (!in_prompt || bounds[at] == seq_len),", "core::require(bounds[at] >= seq_len,")
plant(rule, "layout-not-compared", FLASH + "forward.cc",
      "require_configured_layout(kv_cache, metadata->kv_cache_layout);", "")
plant(rule, "versions-not-compared", FLASH + "metadata_builder.cc", "check_version(layer, options.facts);",
      "static_cast<void>(check_version);")

rule = "quantised outputs"
plant(rule, "device-scale-on-a-cpu", FLASH + "forward.cc", "core::require(on_gpu(context),", "core::require(true,")
plant(rule, "output-scale-not-checked", FLASH + "forward.cc", "core::require(std::isfinite(scale) && scale > 0.0f,", "core::require(true,")
plant(rule, "fp8-output-with-block-scales", FLASH + "forward.cc", "core::require(fp4 || !has_block_scale,", "core::require(true,")
plant(rule, "fp4-output-of-whole-heads", FLASH + "forward.cc", "fp4 ? head_size_ / 2 : head_size_", "head_size_")
plant(rule, "factors-of-every-section-from-row-0", COMMON + "tensor_checks.cc", "return {scale.data, first_row};", "return {scale.data, 0};")
plant(rule, "factors-of-the-last-rows-have-no-room", COMMON + "tensor_checks.cc",
      "core::ceil_div<int64_t>(first_row + num_tokens, kNvfp4TileRows)", "core::ceil_div<int64_t>(num_tokens, kNvfp4TileRows)")
