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
plant(rule, "cascade-without-k-scale", PATHS, "segment.k_scale = scale_from(call.layer.k, part.first_request);",
      "if (!metadata.use_cascade) segment.k_scale = scale_from(call.layer.k, part.first_request);")

rule = "prefixes that builders discover"
LEVELS = "src/backends/common/step_levels.cc"
plant(rule, "levels-read-by-the-whole-table", LEVELS, "room[s].table = levels.tables[s];", "")
plant(rule, "levels-in-a-fixed-shape", BUILD, " && metadata.num_padded_reqs == 0;", ";")
plant(rule, "levels-beside-block-tables", BUILD, "metadata.planned.num_requests == metadata.num_reqs &&", "")
plant(rule, "common-prefix-taken-whatever-the-mode", BUILD,
      "if (state.options.cascade != CascadeMode::kHeuristic) metadata.common_prefix_len = 0;", "")
plant(rule, "flashinfer-prefix-read-off-row-0", BUILD, "= first_with_queries(batch.query_start_loc.first(static_cast<size_t>(batch.num_reqs) + 1));", "= 0;")
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
plant(rule, "bmm2-dropped", TABLES, "segment.v_scale.value *= args.bmm2_scale;", "")
plant(rule, "decodes-with-empty-requests-uniform", PATHS, "bool even = decode && int64_t{q_len} * section.num_requests == num_tokens;",
      "bool even = decode;")
plant(rule, "null-table-unchecked", TABLES, "require(args.block_tables.data != nullptr || !has_keys,", "require(has_keys || !has_keys,")
plant(rule, "null-table-unchecked-by-build", CHECKS, "core::require(batch.block_table.data != nullptr || !has_keys,", "core::require(has_keys || !has_keys,")
plant(rule, "fp4-section-at-row-0", PATHS, "call.quantization.block_scale, first_token,", "call.quantization.block_scale, 0,")
plant(rule, "stale-metadata-runs", FLASHINFER + "forward.cc", "*metadata->current_generation != metadata->generation", "false")

rule = "dequantised prefills"
plant(rule, "dequantised-k-scale-twice", PATHS, "args.k_scale = args.v_scale = {};", "args.v_scale = {};")
plant(rule, "dequantised-v-scale-twice", PATHS, "args.k_scale = args.v_scale = {};", "args.k_scale = {};")
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
plant(rule, "wrapper-level-without-rows", WRAPPERS, "require(tokens.size() > 1 || requests.size() == 1,", "require(true,")
plant(rule, "fixed-batch-size-unchecked", WRAPPERS, "require(batch_size == static_cast<size_t>(*fixed_batch_size_),", "require(true,")
plant(rule, "falling-qo-indptr", WRAPPERS, "require(qo_indptr[r] <= qo_indptr[r + 1],", "require(true,")
plant(rule, "failed-plan-leaves-the-one-before", FLASHINFER + "wrapper_state.hpp", "plan_.reset();", "")

FORWARD = FLASHINFER + "forward.cc"
BUILDER = FLASHINFER + "metadata_builder.cc"
rule = "the layout of the FlashInfer backend's caches"
plant(rule, "flashinfer-layout-not-compared", FORWARD, "require_configured_layout(kv_cache, metadata->kv_cache_layout);", "")
plant(rule, "flashinfer-layout-not-carried", BUILD, "metadata.kv_cache_layout = state.config.cache.layout;", "")
plant(rule, "flashinfer-required-layout-not-compared", CHECKS, "core::require(config.cache.layout == required,", "core::require(true,")

rule = "queries and outputs of the FlashInfer backend"
plant(rule, "july-takes-fused-outputs", FORWARD, "if (quantised && profile_ == BackendProfile::kVllm2025_07) {", "if (false) {")
plant(rule, "fp8-queries-refused-by-default-builders", FORWARD, "planned_query || (quantised_query && supports_quant_query_input())",
      "planned_query || (false && quantised_query)")
plant(rule, "fp8-queries-taken-where-disabled", FORWARD, "(quantised_query && supports_quant_query_input())", "quantised_query")
plant(rule, "quantised-outputs-by-a-plan-of-another-type", FORWARD, "planned_query && planned_output}", "planned_query || planned_output}")
plant(rule, "off-plan-under-context-parallelism", PATHS, "if (!call.as_planned) {", "if (false) {")
plant(rule, "unshared-outputs-unsaid", PATHS, "if (!call.as_planned && metadata.use_cascade && metadata.log != nullptr) {", "if (false) {")
plant(rule, "planned-output-scale-dropped", PATHS, "if (call.quantization.wanted()) args.out_scale = output_scale(call.quantization);\n  if", "if")
plant(rule, "table-k-scale-dropped", TABLES, "segment.k_scale = args.k_scale;", "")
plant(rule, "profiling-run-of-bytes-refused", "src/backends/common/tensor_checks.cc", "output.dtype == DType::kUnset ? size_t{1} : ", "")
plant(rule, "march-2026-writes-in-forward", FORWARD, "FlashInferBackend::forward_includes_kv_cache_update(profile_) && ", "")

rule = "facts and options of the FlashInfer backend"
plant(rule, "graph-size-itself-unpadded", BUILD, "split.num_decode_tokens > state.graph_max_bs", "split.num_decode_tokens >= state.graph_max_bs")
plant(rule, "tensor-cores-from-four", BUILDER, "state_->num_qo_heads / state_->spec.num_kv_heads > 4", "state_->num_qo_heads / state_->spec.num_kv_heads >= 4")
plant(rule, "tensor-cores-not-forced", BUILDER, " || state_->options.force_tensor_cores) return true;", ") return true;")
plant(rule, "sinks-unchecked-by-build", CHECKS, "if (state.hyperparameters.first.has_sinks) refuse_sinks();", "")
plant(rule, "block-tables-workspace-uncounted", BUILDER, "size_t bytes = block_tables.state().held_bytes();", "size_t bytes = 0;")
plant(rule, "graphs-workspace-uncounted", BUILDER, "graph_plans) bytes += graph.workspace().bytes;", "graph_plans) static_cast<void>(graph);")
plant(rule, "ranks-workspace-uncounted", BUILDER, "if (dcp) bytes += dcp->workspace().bytes;", "")
plant(rule, "workspace-as-given-not-had", BUILDER, "state.plans->reserve(options.workspace_buffer_size);", "")
plant(rule, "capture-sizes-ignored", BUILDER, "if (sizes.empty()) {", "if (true) {")
plant(rule, "csr-arrays-of-all-ranks", FLASHINFER + "paged_kv.cc", "if (!uses_dcp(state.config)) return own;", "if (own >= 0) return own;")
plant(rule, "csr-row-into-the-next", FLASHINFER + "paged_kv.cc", "const int64_t end = std::min(row_end, table.num_indices);",
      "const int64_t end = row_end < 0 ? row_end : table.num_indices;")
plant(rule, "forced-tables-under-context-parallelism", BUILDER, "query.dcp_world_size = state.config.parallel.decode_context_parallel_size;", "")
plant(rule, "layers-of-another-profile", CHECKS, "core::require(impl.profile() == state.profile,", "core::require(true,")
plant(rule, "layers-quantise-otherwise", CHECKS, "core::require(impl.disable_q_quantization() == state.options.disable_q_quantization,", "core::require(true,")
plant(rule, "layers-of-another-dispatch", CHECKS, "served == state.use_block_tables,", "true,")
plant(rule, "dispatch-of-another-engine", BUILDER, "options.dispatch->check_agrees(options.profile, config);", "")
plant(rule, "head-256-page-16-on-blackwell", CHECKS, "spec.head_size == 256 && spec.page_size == 16;", "spec.head_size == 0;")
plant(rule, "parallel-drafts-of-december", BUILDER, "counted.speculative->parallel_drafting = false;", "static_cast<void>(counted);")
