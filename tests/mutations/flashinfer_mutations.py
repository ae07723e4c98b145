"""Mistakes in the FlashInfer backend, many of them the originals'; see mutations.py."""

from mutations import plant

FLASHINFER = "src/backends/flashinfer/"
BUILD = FLASHINFER + "build.cc"
CHECKS = FLASHINFER + "builder_checks.cc"
PATHS = FLASHINFER + "forward_paths.cc"
TABLES = FLASHINFER + "block_table.cc"
DEQUANT = "src/attention/dequantize_pages.cc"
WRAPPERS = FLASHINFER + "wrappers.cc"
WRAPPER_STATE = FLASHINFER + "wrapper_state.cc"

rule = "shared prefixes of the FlashInfer backend"
plant(rule, "cascade-suffix-at-position-0", BUILD, "cascade.first_pos[r] = prefix;", "cascade.first_pos[r] = 0;")
plant(rule, "cascade-suffix-reads-prefix-pages", PATHS, "first_column = metadata.common_prefix_len / metadata.page_size;",
      "first_column = 0;")
plant(rule, "cascade-under-batch-invariance", BUILD,
      "if (state.config.determinism >= Determinism::kBatchInvariant) metadata.common_prefix_len = 0;", "")
plant(rule, "cascade-arrays-with-prefix-pages", FLASHINFER + "paged_kv.cc", "table.first_column = prefix_pages;", "")
plant(rule, "cascade-without-k-scale", PATHS, "segment.k_scale = call.layer.k;", "if (!metadata.use_cascade) segment.k_scale = call.layer.k;")

rule = "prefixes that builders discover"
LEVELS = "src/backends/common/step_levels.cc"
plant(rule, "levels-read-by-the-whole-table", LEVELS, "room[s].table = levels.tables[s];", "")
plant(rule, "levels-in-a-fixed-shape", BUILD, " && metadata.num_padded_reqs == 0;", ";")
plant(rule, "levels-beside-block-tables", BUILD, "metadata.planned.num_requests == metadata.num_reqs &&", "")
plant(rule, "common-prefix-taken-whatever-the-mode", BUILD,
      "if (state.options.cascade != CascadeMode::kHeuristic) metadata.common_prefix_len = 0;", "")
plant(rule, "quantised-outputs-refused-for-levels", FLASHINFER + "forward.cc", "} else if (metadata.common_prefix_len > 0) {",
      "} else if (metadata.use_cascade) {")
plant(rule, "max-levels-forgotten", LEVELS, "options.max_levels = max_levels;", "")

rule = "graph padding"
plant(rule, "padded-last-page-0", FLASHINFER + "paged_kv.cc", "paged_kv_last_page_len.resize(padded, 1);",
      "paged_kv_last_page_len.resize(padded, 0);")
plant(rule, "padded-indptr-falls", FLASHINFER + "paged_kv.cc", "resize(padded + 1, state.paged_kv_indptr.back());", "resize(padded + 1, 0);")
plant(rule, "mixed-batches-padded", BUILD, "split.num_decodes > 0 && split.num_prefills == 0;", "split.num_decodes > 0;")

rule = "the block-table path"
plant(rule, "tables-of-all-from-row-0", PATHS, "rows.data += section.first_request * table.row_stride;", "")
plant(rule, "tables-sliced-by-tokens", PATHS, "run_section({split.num_decodes, split.num_prefills}, false);",
      "run_section({split.num_decode_tokens, split.num_prefills}, false);")
plant(rule, "force-not-passed-to-prefill", CHECKS, "query.force_use_trtllm = state.dispatch.force_use_trtllm_attention();", "")
plant(rule, "query-dtype-fallback-stays", CHECKS, "metadata.q_data_type = state.planned_q_type;",
      "metadata.q_data_type = const_cast<FlashInferMetadataBuilder::State&>(state).q_data_type = state.planned_q_type;")
plant(rule, "plan-of-other-lengths", TABLES, "std::ranges::equal(kernel.seq_lens, seq_lens)", "true")
plant(rule, "uneven-decodes-rounded", TABLES, "require(q_len * batch_size == tokens,", "require(q_len * batch_size <= tokens,")
plant(rule, "block-table-sinks-dropped", TABLES, "attention.sinks = args.sinks;", "")
plant(rule, "bmm2-dropped", TABLES, "segment.v_scale.value = args.bmm2_scale;", "")
plant(rule, "fp4-section-at-row-0", PATHS, "call.quantization.block_scale, first_token,", "call.quantization.block_scale, 0,")
plant(rule, "stale-metadata-runs", FLASHINFER + "forward.cc", "*metadata->current_generation != metadata->generation", "false")

rule = "dequantised prefills"
plant(rule, "dequantised-k-scale-twice", PATHS, "args.bmm1_scale = scale_;", "")
plant(rule, "dequantised-v-scale-twice", PATHS, "1.0f / *call.quantization.scale : 1.0f;", "1.0f / *call.quantization.scale : args.bmm2_scale;")
plant(rule, "q-scale-of-16-bit-queries", FLASHINFER + "impl.cc", "is_fp8(query_dtype) ? host_value(layer.q, \"q\") : 1.0f;",
      "host_value(layer.q, \"q\") * (size_of(query_dtype) > 0 ? 1.0f : 0.0f);")
plant(rule, "page-0-skipped", DEQUANT, "if (new_page == 0) continue;",
      "if (new_page == 0 || job.first_row()[entry / job.columns * job.table.row_stride + entry % job.columns] <= 0) continue;")
plant(rule, "dequant-without-validation", DEQUANT,
      "validate(job.table, job.seq_lens, from.page_size, from.num_pages);", "")

rule = "wrappers"
plant(rule, "wrapper-lse-in-base-e", WRAPPER_STATE, "options_.num_qo_heads, 1, LseBase::k2}", "options_.num_qo_heads, 1, LseBase::kE}")
plant(rule, "wrapper-drops-sinks", WRAPPER_STATE, "attention.sinks = args.sinks;", "")
plant(rule, "wrapper-alibi-lse-unshifted", WRAPPER_STATE, "if (args.lse != nullptr && !slopes_.empty()) {", "if (false) {")
plant(rule, "wrapper-takes-device-indices-on-a-cpu", WRAPPER_STATE, "require(!device_indices || ", "require(true || ")
plant(rule, "wrapper-levels-at-position-0", WRAPPERS, "level.first_pos[row] = before;", "level.first_pos[row] = 0;")
plant(rule, "fixed-batch-size-unchecked", WRAPPERS, "require(batch_size == static_cast<size_t>(*fixed_batch_size_),", "require(true,")
