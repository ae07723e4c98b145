"""Mistakes about what is left out of a batch or given for nothing, about memory that overlaps, and in the C API's
defaults; see mutations.py."""

from mutations import ATTENTION, BATCH, KVCACHE, SCHEDULER, TILE_SPACE, plant

ORACLE = "src/testing/reference_attention.cc"
DEVICE_BATCH = SCHEDULER + "device/batch.hpp"
ARGS = ATTENTION + "run_args.cc"
ALIASING = ATTENTION + "aliasing.cc"
QUANTIZE = ATTENTION + "quantize.cc"
ROWS = KVCACHE + "page_rows.cc"
CONVERT = "src/capi/convert.cc"
STRUCTS = "src/capi/common/structs.cc"
BACKEND_STEPS = "src/capi/backends/"

rule = "positions left out"
plant(rule, "left-out-first-pos-is-zero", BATCH, "static_cast<int32_t>(row), ends) : ends[row];", "static_cast<int32_t>(row), ends) : 0;")
plant(rule, "left-out-first-pos-of-groups-is-zero", BATCH, "return first < 0 ? 0 : ends[first];", "return 0;")
plant(rule, "groups-may-disagree", BATCH, "if (ends[r] != ends[first]) {", "if (false) {")
plant(rule, "requests-without-queries-disagree", BATCH, "if (batch.cu_q[r] == batch.cu_q[r + 1]) continue;", "")
plant(rule, "shards-end-where-their-keys-do", BATCH, "if (segment.shard.world > 1) {", "if (false) {")
plant(rule, "device-first-pos-left-out-is-zero", DEVICE_BATCH,
      "segment.first_pos != nullptr ? segment.first_pos[r] : to_int32(end);",
      "segment.first_pos != nullptr ? segment.first_pos[r] : 0;")
plant(rule, "oracle-first-pos-left-out-is-zero", ORACLE, "return end_position(batch, s, request);", "return 0;")

rule = "arguments of run"
plant(rule, "table-sum-wraps", ARGS, "core::checked_add(core::checked_mul(int64_t{row}, table.row_stride), table.first_column + pages);",
      "int64_t(uint64_t(row) * uint64_t(table.row_stride) + uint64_t(table.first_column + pages));")
plant(rule, "csr-strides-ignored", ROWS, "require(table.row_stride == 0 && table.first_column == 0,", "require(true,")
plant(rule, "mask-bytes-without-a-mask", ARGS, "args.custom_mask != nullptr || args.custom_mask_bytes == 0,", "true,")
plant(rule, "keys-without-pages", ARGS, "cache.num_pages == 0 && lengths.kv_len", "cache.num_pages < 0 && lengths.kv_len")
plant(rule, "scales-in-memory-unchecked", ARGS, "if (scale.data == nullptr || !readable) return;",
      "if (scale.data == nullptr || readable) return;")
plant(rule, "negative-page-counts", ROWS, "require(pages >= 0,", "require(true,")

rule = "rows of fp8_ds_mla"
ROWS_OF_CACHES = "src/kernels/cpu/generic/cache/convert_rows.cc"
plant(rule, "blocks-share-the-first-scale", "src/kernels/cpu/generic/producer.hpp", "row + kDsMlaScalesOffset + 4 * block",
      "row + kDsMlaScalesOffset")
plant(rule, "infinities-make-the-scale", ROWS_OF_CACHES, "if (std::isfinite(value)) most", "most")
plant(rule, "zeros-have-no-scale", ROWS_OF_CACHES, "std::max(most / kLargestE4M3, std::numeric_limits<float>::min())",
      "most / kLargestE4M3")
plant(rule, "rope-read-from-the-scales", ROWS_OF_CACHES, "from + kDsMlaRopeOffset, elements", "from + kDsMlaScalesOffset, elements")
plant(rule, "rows-without-their-ends", KVCACHE + "strided_set.cc", "cache.format == KvFormat::kFp8DsMla ? kDsMlaRowBytes : ", "")
plant(rule, "scales-of-writes-ignored", ATTENTION + "cache_args.cc", "  return cache.format == KvFormat::kFp8DsMla || cache.dtype == DType::kInt8;\n",
      "  return cache.dtype == DType::kInt8;\n")

rule = "int8 caches"
CPU_COMMON = "src/kernels/cpu/common/"
plant(rule, "masked-tokens-take-their-scale", CPU_COMMON + "token_scales.hpp",
      "select(lanes_of_bits(static_cast<uint32_t>(visible >> i)), scaled, Vec{})",
      "select(lanes_of_bits(static_cast<uint32_t>(visible | ~visible)), scaled, Vec{})")
plant(rule, "scales-of-the-first-page", CPU_COMMON + "producer.hpp", "copy_token_scales(kv, kv.pages[number], slot",
      "copy_token_scales(kv, kv.pages[0], slot")
plant(rule, "values-scaled-as-keys", CPU_COMMON + "scheduler.cc", "kv.v_scales = v.data +", "kv.v_scales = k.data +")
plant(rule, "infinities-make-the-int8-scale", ROWS_OF_CACHES,
      "codec_detail::select(magnitude < codec_detail::kInfinity, magnitude, 0)", "magnitude")
plant(rule, "pages-leave-their-scales", "src/kernels/cpu/generic/cache/move_rows.cc",
      "      half.to.scale(to_page, token, head) = half.from.scale(from_page, token, head);\n", "")
plant(rule, "token-scales-within-the-values", KVCACHE + "cache_view.cc",
      "require(kvcache::lie_apart(set, kvcache::k_set(cache)) && kvcache::lie_apart(set, kvcache::v_set(cache)), name,", "require(true, name,")

rule = "outputs lie apart"
plant(rule, "caches-may-be-written", ALIASING, 'outputs.apart_from("the K cache", kvcache::k_set(args.cache));', "")
plant(rule, "inputs-in-the-workspace", ALIASING, 'outputs.add("the workspace", bytes_set(workspace.data', 'outputs.add("the workspace", bytes_set(nullptr')
plant(rule, "outputs-over-each-other", ALIASING, "    apart_from(name, set);\n", "")
plant(rule, "quantised-over-its-input", QUANTIZE, 'check_apart("out", output_set("out", out), "in", attention::tensor_set("in", in));', "")
plant(rule, "quantised-rows-overlap", QUANTIZE, "require(set.distinct,", "require(true,")

rule = "huge batches"
plant(rule, "huge-batches-are-built-first", TILE_SPACE, "    refuse_huge_batches();\n", "")

rule = "zeros in C"
plant(rule, "zero-windows-are-windows", CONVERT, "given.window_left != 0 || given.window_right != 0,", "true,")
plant(rule, "zero-scale-is-zero", STRUCTS, "if (converted.value == 0.0f) converted.value = Scale{}.value;", "")
plant(rule, "zero-shard-is-refused", STRUCTS, "return zero ? KvShard{}", "return zero && shard.world != 0 ? KvShard{}")

rule = "the C interface"
plant(rule, "sizes-between-are-refused", STRUCTS, "std::find(known.earlier.begin(), known.earlier.end(), size) != known.earlier.end();",
      "!known.earlier.empty() && known.earlier.front() == size;")
plant(rule, "finish-keeps-the-lock", "src/capi/prefix_cache.cc", "const std::unique_ptr<folio_prefix_lock> taken(lock);  // whatever becomes of the call",
      "std::unique_ptr<folio_prefix_lock> taken(lock);\n  if (changes == nullptr) taken.release();")
plant(rule, "groups-are-never-closed", "src/capi/allocators.cc", "    allocator->group.reset();\n", "")
plant(rule, "failed-builds-leave-the-step-before", BACKEND_STEPS + "flashinfer.cc", 'deref(metadata, "metadata").step.reset();', 'deref(metadata, "metadata");')
plant(rule, "caches-are-kept-by-default", BACKEND_STEPS + "token_pool.cc", "keep_kv_cache == 0, Stream{stream}", "keep_kv_cache != 0, Stream{stream}")
plant(rule, "queries-are-the-keys", BACKEND_STEPS + "step.cc", 'converted.query = to_view(given.query, "query.dtype");', 'converted.query = to_view(given.key, "query.dtype");')

rule = "memory runs out"
plant(rule, "array-counts-memory-it-did-not-get", SCHEDULER + "plan_storage.hpp", "    try {\n      auto larger", "    capacity_ = grown;\n    try {\n      auto larger")

rule = "hidden instruction sets"
FEATURES = "src/platform/cpu_features.cc"
plant(rule, "sets-hide-nothing", FEATURES, "left.*feature = false;", "")

rule = "where threads run"
PLACEMENT = "src/platform/thread_placement.cc"
POOL = "src/platform/thread_pool.cc"
plant(rule, "whole-machine-is-pinned", PLACEMENT, "if (num_cpus >= online_cpus(root)) return {};", "")
plant(rule, "part-of-a-mask-is-pinned", PLACEMENT, "if (num_threads != num_cpus) return {};", "if (num_threads > num_cpus) return {};")
plant(rule, "siblings-before-cores", PLACEMENT, "places[i].sibling = places[i - 1].sibling + 1;", "places[i].sibling = 0;")
plant(rule, "nodes-from-the-first-on", PLACEMENT, "cpu.node < caller.node, cpu.node,", "false, cpu.node,")
plant(rule, "pinned-one-further", POOL, "cpus[static_cast<size_t>(i)]", "cpus[static_cast<size_t>(i) - 1]")
CPUS = "src/platform/cpu_count.cc"
plant(rule, "the-machine-for-the-mask", CPUS, "CPU_COUNT_S(bytes, set); })) return count;", "CPU_COUNT_S(bytes, set); })) count = 0;")
plant(rule, "pinned-to-no-cpu", CPUS, "  CPU_SET_S(static_cast<size_t>(cpu), bytes, set);\n", "")
plant(rule, "an-index-is-anyones", POOL, "const int32_t own_bit = thread % kWordBits;", "const int32_t own_bit = 0;")
plant(rule, "only-the-caller-wakes", POOL, "    wake(std::numeric_limits<int32_t>::max());\n", "")
plant(rule, "only-neighbours-stand-in", POOL, "for (size_t w = 0; w < words; ++w) {", "for (size_t w = 0; w < 1; ++w) {")
plant(rule, "threads-never-sleep", POOL, "if (!may_spin_ || !spin_until([&] { return wake_up(std::memory_order_relaxed); })) {",
      "while (may_spin_ && !spin_until([&] { return wake_up(std::memory_order_relaxed); })) {\n  }\n  if (!may_spin_) {")
plant(rule, "pinning-beside-an-executor", ATTENTION + "context.cc", "core::require(options.pinning == ThreadPinning::kAutomatic,", "core::require(true,")

rule = "kernels ranked by costs"
COSTS = CPU_COMMON + "costs.cc"
CHOICE = ATTENTION + "kernel_choice.cc"
plant(rule, "costs-between-rows-of-the-row-below", COSTS, "return nanoseconds[upper - 1] * std::pow(", "return nanoseconds[upper - 1] + 0 * std::pow(")
plant(rule, "costs-of-any-page-size", COSTS, "key.page_tokens % line.page_tokens == 0 &&", "true &&")
plant(rule, "least-rows-from-the-first-that-is-faster", COSTS,
      "while (first > 0 && of_many->nanoseconds[first - 1] <= of_few->nanoseconds[first - 1]) --first;",
      "for (size_t i = kCostRows.size(); i > 0; --i) first = of_many->nanoseconds[i - 1] <= of_few->nanoseconds[i - 1] ? i - 1 : first;")
plant(rule, "a-prefill-token-costs-all-its-rows", CHOICE, "kernel.cost(features, config, rows) * group_size(config) / rows;",
      "kernel.cost(features, config, rows);")
plant(rule, "formats-of-kernels-that-refuse", CHOICE, "|| !kernel->refusal(asked).empty()) continue;", ") continue;")
plant(rule, "graphs-have-kernels-of-their-own", CHOICE, "max_q_len == 1 && determinism <= Determinism::kRunToRun;", "max_q_len == 1;")
plant(rule, "negative-mixes", CHOICE, "std::isfinite(tokens) && tokens >= 0.0,", "std::isfinite(tokens),")

rule = "machines described"
plant(rule, "newer-gpus-have-older-ones-kernels", CHOICE, "compute_capability > kernel.max_compute_capability;", "false;")
plant(rule, "older-gpus-have-newer-ones-kernels", CHOICE, "if (compute_capability >= kernel.min_compute_capability && !newer) return {};", "if (!newer) return {};")
plant(rule, "the-first-that-takes-it", CHOICE, "if (is_preferred(candidate, config)) return &candidate;", "if (is_preferred(candidate, config) || second_choice == nullptr) return &candidate;")
plant(rule, "the-last-that-takes-it", CHOICE, "if (second_choice == nullptr) second_choice = &candidate;", "second_choice = &candidate;")
plant(rule, "descriptions-left-unresolved", ATTENTION + "prepare.cc", "  const AttentionConfig resolved = resolve(config);\n  const std::vector<Candidate> all",
      "  const AttentionConfig resolved = config;\n  const std::vector<Candidate> all")
