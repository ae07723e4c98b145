"""The mistakes that mutate.py plants: for every rule of the numerics contract, the off-by-ones and omissions of its
implementations. Each is one or more textual edits; every old text occurs exactly once in its file."""

import dataclasses

SHARED = "src/kernels/cpu/common/"
KERNEL = "src/kernels/cpu/generic/"
COMBINE = "src/kernels/cpu/generic/combine/"
SCHEDULER = "src/scheduler/"
ATTENTION = "src/attention/"
KVCACHE = "src/kvcache/"
CACHE = "src/kernels/cpu/generic/cache/"

TILE_LOOP = SHARED + "scheduler.cc"
EPILOGUE = SHARED + "epilogue.cc"
PRODUCER = SHARED + "producer.hpp"
MASK = SHARED + "mask.hpp"
SOFTMAX = SHARED + "softmax.hpp"
CONVERT = SHARED + "convert.hpp"
MASK_BOUNDS = SCHEDULER + "mask_bounds.hpp"
BATCH = SCHEDULER + "batch.cc"
TILE_SPACE = SCHEDULER + "tile_space.cc"
TILES = SCHEDULER + "tile_space.hpp"
STATIC = SCHEDULER + "static_scheduler.cc"
GEMM = KERNEL + "gemm.hpp"
GEMM_QK_BF16 = KERNEL + "gemm_qk_bf16.hpp"
TABLE = KVCACHE + "page_table.cc"


@dataclasses.dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    rule: str
    edits: tuple


# Not mistakes: what the copies leave out, so that a changed header recompiles once and not once per instruction set.
PREPARATIONS = (
    Edit("src/kernels/CMakeLists.txt", "  list(APPEND directories cpu/amx cpu/avx2 cpu/avx512)\n"
         "  list(APPEND attention_kernels kernels_amx kernels_avx2 kernels_avx512)", "  list(APPEND directories cpu/amx cpu/avx2 cpu/avx512)"),
    Edit("src/kernels/inventory.cc", '#if defined(__x86_64__)\n  kernels', '#if 0\n  kernels'),
    Edit(KERNEL + "CMakeLists.txt", 'MATCHES "x86_64|AMD64|amd64"', 'MATCHES "no instruction-set variants"'),
    Edit(KERNEL + "kernel.cc", '#if defined(__x86_64__)\n  static', '#if 0\n  static'),
    Edit(KERNEL + "kernel.cc", '#if defined(__x86_64__)\nstd::string', '#if 0\nstd::string'),
    Edit(SHARED + "collective_test.cc", '#if defined(__x86_64__)\n  all.push_back', '#if 0\n  all.push_back'),
)

MUTATIONS = []


def plant(rule, name, file, old, new, *more):
    """Notes one mistake; `more` has further edits: file, old, new, ..."""
    parts = (file, old, new, *more)
    edits = tuple(Edit(*parts[i:i + 3]) for i in range(0, len(parts), 3))
    MUTATIONS.append(Mutation(name, rule, edits))


rule = "logits: scale"
plant(rule, "sm-scale-omitted", TILE_LOOP, "scale_of(segment.k_scale, request, tile.kv_head) * args.sm_scale",
      "scale_of(segment.k_scale, request, tile.kv_head)")
plant(rule, "sm-scale-default-of-v", ATTENTION + "run.cc", "static_cast<float>(op.config.head_dim_qk)",
      "static_cast<float>(op.config.head_dim_v)")

rule = "logits: soft cap"
plant(rule, "cap-omitted", SOFTMAX, "if (work.soft_cap != 0.0f) {", "if (false) {")
plant(rule, "cap-before-scale", SOFTMAX, "splat(row.logit_scale / work.soft_cap)", "splat(1.0f / work.soft_cap)",
      SOFTMAX, "splat(work.soft_cap * kLog2E)", "splat(work.soft_cap * kLog2E * row.logit_scale)")
plant(rule, "cap-not-multiplied-back", SOFTMAX, "splat(work.soft_cap * kLog2E)", "splat(kLog2E)")
plant(rule, "cap-over-alibi", SOFTMAX, "s[i] = multiply_add(slope, load<Vec>(distances + i * kLanes), s[i]);",
      "s[i] = work.soft_cap == 0.0f ? multiply_add(slope, load<Vec>(distances + i * kLanes), s[i])\n"
      "           : tanh(multiply_add(slope, load<Vec>(distances + i * kLanes),\n"
      "                               load<Vec>(scores + i * kLanes) * splat(row.logit_scale * kLog2E)) *\n"
      "                  splat(1.0f / (work.soft_cap * kLog2E))) * splat(work.soft_cap * kLog2E);")

rule = "logits: ALiBi"
plant(rule, "alibi-omitted", SOFTMAX, "if (work.alibi) {", "if (false) {")
plant(rule, "alibi-sign", SOFTMAX, "row.alibi_slope * -kLog2E", "row.alibi_slope * kLog2E")
plant(rule, "alibi-base", SOFTMAX, "row.alibi_slope * -kLog2E", "row.alibi_slope * -1.0f")
plant(rule, "alibi-one-further", SOFTMAX, "(distance < 0 ? -distance : distance)",
      "((distance < 0 ? -distance : distance) + 1)")
plant(rule, "alibi-signed-distance", SOFTMAX, "(distance < 0 ? -distance : distance)", "(distance)")
plant(rule, "alibi-ignores-first-pos", MASK, "return kv.first_pos + local;", "return local;")
plant(rule, "alibi-ignores-shard", MASK, "if (kv.shard_world == 1) return", "return")
plant(rule, "alibi-slope-of-kv-head", TILE_LOOP, "args.alibi_slopes[q_head]", "args.alibi_slopes[tile.kv_head]")

rule = "logits: rotary embedding"
ROTATE = KERNEL + "producer.hpp"
plant(rule, "rope-of-few-rows-omitted", GEMM, " || work.rope != nullptr", "")
plant(rule, "rope-rotates-keys-by-local-tokens", GEMM, "key_position(work.kv, int64_t{first} + t + j)",
      "int64_t{first} + t + j")
plant(rule, "rope-counts-from-the-tile", GEMM, "int64_t{first} + t + j", "int64_t{0} + t + j")
plant(rule, "rope-rotates-back", ROTATE, "multiply_add(x, rotation.cosine, -(y * rotation.sine))", "multiply_add(x, rotation.cosine, y * rotation.sine)",
      ROTATE, "multiply_add(y, rotation.cosine, x * rotation.sine)", "multiply_add(y, rotation.cosine, -(x * rotation.sine))")
plant(rule, "rope-quarter-forgotten", ROTATE, "(quarter + splat_int(1)) & splat_int(2)", "quarter & splat_int(2)")
plant(rule, "rope-scale-multiplies", SHARED + "kernel.cc", "head_dim) / static_cast<double>(rope.scale)",
      "head_dim) * static_cast<double>(rope.scale)")
plant(rule, "rope-neighbours-for-halves", SHARED + "kernel.cc", "-2.0 * d / head_dim", "-1.0 * d / head_dim")

rule = "positions"
plant(rule, "default-q-pos-one-late", BATCH, ": ends[r] - q_len;", ": ends[r] - q_len + 1;")
plant(rule, "default-q-pos-zero", BATCH, ": ends[r] - q_len;", ": 0;")
plant(rule, "default-q-pos-without-first-pos", BATCH, "ends[r] = first_pos[r] + kv_len[r];", "ends[r] = kv_len[r];")
plant(rule, "default-q-pos-of-first-segment", BATCH, "ends[r] = first_pos[r] + kv_len[r];",
      "if (s == 0) ends[r] = first_pos[r] + kv_len[r];")
plant(rule, "q-pos-of-first-token", TILE_LOOP, "int64_t{plan.q_first_pos[request]} + index", "int64_t{plan.q_first_pos[request]}")
plant(rule, "first-pos-ignored-by-kernel", TILE_LOOP, "{lengths.first_pos[tile.kv_row], lengths.kv_len[tile.kv_row], lengths.shard}",
      "{0, lengths.kv_len[tile.kv_row], lengths.shard}")
plant(rule, "first-pos-ignored-by-scheduler", TILE_SPACE, "keys{lengths.first_pos[kv_row], ", "keys{0, ")
plant(rule, "first-pos-dropped", BATCH, "first_pos[row] = segment.first_pos[row];", "first_pos[row] = 0;")

rule = "causal"
plant(rule, "causal-strict", MASK_BOUNDS, "? p_hi + bounds.right : kPositionLimit", "? p_hi + bounds.right - 1 : kPositionLimit")
plant(rule, "causal-one-further", MASK_BOUNDS, "? p_hi + bounds.right : kPositionLimit",
      "? p_hi + bounds.right + 1 : kPositionLimit")
plant(rule, "causal-of-first-row", TILE_SPACE, "visible_range(keys, bounds, first, last);",
      "visible_range(keys, bounds, first, first);")
plant(rule, "all-visible-ignored", MASK_BOUNDS, "if (segment_mask == SegmentMask::kAllVisible) return bounds;", "")

rule = "window"
plant(rule, "window-left-one-less", MASK_BOUNDS, "? p_lo - bounds.left : -kPositionLimit", "? p_lo - bounds.left + 1 : -kPositionLimit")
plant(rule, "window-left-one-more", MASK_BOUNDS, "? p_lo - bounds.left : -kPositionLimit", "? p_lo - bounds.left - 1 : -kPositionLimit")
plant(rule, "window-left-ignored", MASK_BOUNDS, "bounds.left_bounded = rules.window_left >= 0;", "bounds.left_bounded = false;")
plant(rule, "window-of-zero-unbounded", MASK_BOUNDS, "bounds.left_bounded = rules.window_left >= 0;", "bounds.left_bounded = rules.window_left > 0;")
plant(rule, "window-right-ignored", MASK_BOUNDS, "rules.window_right >= 0 || rules.kind == MaskKind::kCausal;", "rules.kind == MaskKind::kCausal;")
plant(rule, "window-right-beyond-causal", MASK_BOUNDS, "rules.kind == MaskKind::kCausal || rules.window_right < 0 ? 0 : rules.window_right",
      "rules.window_right < 0 ? 0 : rules.window_right")
plant(rule, "window-start-of-last-row", TILE_SPACE, "visible_range(keys, bounds, first, last);",
      "visible_range(keys, bounds, last, last);")
plant(rule, "window-dropped-by-custom-mask", MASK_BOUNDS, "bounds.left_bounded = rules.window_left >= 0;",
      "bounds.left_bounded = rules.window_left >= 0 && rules.kind != MaskKind::kCustom;")
plant(rule, "window-start-of-first-request", TILE_SPACE, "TokenRange{std::min(all.begin, one.begin), std::max(all.end, one.end)}",
      "TokenRange{all.begin, std::max(all.end, one.end)}")

rule = "masks as rules"
plant(rule, "causal-strict-beside-rules", MASK_BOUNDS, "rules.kind == MaskKind::kCausal && query.causal ? p : right;",
      "rules.kind == MaskKind::kCausal && query.causal ? p - 1 : right;")
plant(rule, "window-one-less-beside-rules", MASK_BOUNDS, "own.first = p - rules.window_left;", "own.first = p - rules.window_left + 1;")
plant(rule, "chunk-unknown-to-kernels", MASK_BOUNDS, "return per_query || attention_chunk > 0;", "return per_query;")
plant(rule, "chunk-ignored", MASK_BOUNDS, "if (rules.attention_chunk > 0) {", "if (false) {")
plant(rule, "chunk-begins-at-zero", MASK_BOUNDS, "chunk_begin(p, query.kv_start, rules.attention_chunk)", "chunk_begin(p, 0, rules.attention_chunk)")
plant(rule, "chunk-below-its-start-truncated", MASK_BOUNDS, "into < 0 ? into + chunk : into", "into")
plant(rule, "chunk-cuts-one-side", MASK_BOUNDS, "within.last = begin + rules.attention_chunk - 1;", "")
plant(rule, "chunk-one-longer", MASK_BOUNDS, "within.last = begin + rules.attention_chunk - 1;", "within.last = begin + rules.attention_chunk;")
plant(rule, "start-ignored", MASK_BOUNDS, "if (query.has_start) within.first = query.kv_start;", "")
plant(rule, "start-hides-one-more", MASK_BOUNDS, "if (query.has_start) within.first = query.kv_start;",
      "if (query.has_start) within.first = int64_t{query.kv_start} + 1;")
plant(rule, "start-of-the-next-request", MASK_BOUNDS, "masks.kv_start[request];", "masks.kv_start[request > 0 ? request - 1 : 0];")
plant(rule, "request-always-causal", MASK_BOUNDS, "mask.causal = masks.causal[request] != 0;", "mask.causal = true;")
plant(rule, "request-not-causal-loses-its-window", MASK_BOUNDS, "rules.kind == MaskKind::kCausal && query.causal ? p : right;",
      "rules.kind == MaskKind::kCausal ? (query.causal ? p : kPositionLimit) : right;")
plant(rule, "span-ignored", MASK_BOUNDS, "if (query.span_begin >= query.span_end) return own;", "return own;")
plant(rule, "span-one-further", MASK_BOUNDS, "int64_t{query.span_end} - 1};", "int64_t{query.span_end}};")
plant(rule, "span-of-the-request", MASK_BOUNDS, "masks.spans[2 * int64_t{token} + 1]", "masks.spans[1]")
plant(rule, "span-beyond-the-chunk", MASK_BOUNDS, "if (span.last > within.last) span.last = within.last;", "")
plant(rule, "span-beyond-the-start", MASK_BOUNDS, "if (span.first < within.first) span.first = within.first;", "")
plant(rule, "span-not-clamped-by-the-window", MASK_BOUNDS, "span.first = p - rules.span_window_left;", "")
plant(rule, "span-not-clamped-on-the-right", MASK_BOUNDS,
      "if (right < span.last) span.last = right;", "")
plant(rule, "span-clamped-always", MASK_BOUNDS, "rules.span_window_left >= 0 && p -", "p -")
plant(rule, "span-in-place-of-the-mask", MASK_BOUNDS, "if (own.empty()) return span;", "return span;")
plant(rule, "span-of-the-first-row", MASK_BOUNDS, "for (int32_t token = begin; token < end; ++token) {",
      "for (int32_t token = begin; token < begin + 1; ++token) {")
plant(rule, "rules-where-all-is-visible", MASK_BOUNDS, "if (segment_mask == SegmentMask::kAllVisible) return bounds;",
      "if (segment_mask == SegmentMask::kAllVisible) {\n    bounds.by_query = rules.has_more();\n    return bounds;\n  }")
plant(rule, "spans-beside-the-rows", TILE_SPACE, "view_.cu_q[request] + first - view_.q_first_pos[request]", "view_.cu_q[request]")
plant(rule, "undeclared-spans-taken", BATCH, 'declared("spans", batch.spans, Feature::kSpans, "kSpans");', "")
plant(rule, "undeclared-starts-taken", BATCH, 'declared("kv_start", batch.kv_start, Feature::kKvStart, "kKvStart");', "")
plant(rule, "undeclared-flags-taken", BATCH, 'declared("causal", batch.causal, Feature::kRequestCausal, "kRequestCausal");', "")
plant(rule, "fast-path-forgets-the-rules", TILE_SPACE, "view_.visible_positions == nullptr;", "true;")
plant(rule, "device-positions-of-the-wrong-request", SCHEDULER + "device/batch.hpp",
      "int64_t{job.q_first_pos[r]} + (token - cu_q[r])", "int64_t{job.q_first_pos[0]} + (token - cu_q[r])")
plant(rule, "device-fast-path-forgets-the-rules", SCHEDULER + "device_scheduler.cc",
      "input.rules.has_more() || ", "")
plant(rule, "device-spans-beside-the-rows", SCHEDULER + "device/tile_space.hpp",
      "job.cu_q[tile.request] + tile.p_lo - job.q_first_pos[tile.request]", "job.cu_q[tile.request]")

rule = "prices of starts"
plant(rule, "start-not-priced", TILES, "kv_tile == 0 ? 0 : start_cost + kv_tile * kv_tile_cost", "kv_tile * kv_tile_cost")
plant(rule, "start-forgotten-at-a-cut", TILES, "offset <= start_cost ? 0 : quotient(offset - start_cost, kv_tile_cost)",
      "quotient(offset, kv_tile_cost)")

rule = "custom mask"
plant(rule, "mask-bit-order", MASK, "static_cast<uint64_t>(bytes[i]) << (8 * (i - first))",
      "((bytes[i] * 0x0202020202ull & 0x010884422010ull) % 1023) << (8 * (i - first))")
plant(rule, "mask-blocks-not-byte-aligned", BATCH, "ceil_div((batch.cu_q[r + 1] - batch.cu_q[r]) * given, 8)",
      "(batch.cu_q[r + 1] - batch.cu_q[r]) * given / 8")
plant(rule, "mask-rows-byte-aligned", TILE_LOOP, "int64_t{index} * plan.mask_columns[request]",
      "int64_t{index} * ((plan.mask_columns[request] + 7) / 8 * 8)")
plant(rule, "mask-and-causal", MASK_BOUNDS, "rules.window_right >= 0 || rules.kind == MaskKind::kCausal;",
      "rules.window_right >= 0 || rules.kind != MaskKind::kNone;")
plant(rule, "mask-over-all-visible", TILE_LOOP, "config.mask == MaskKind::kCustom && lengths.mask == SegmentMask::kAsConfig",
      "config.mask == MaskKind::kCustom")
plant(rule, "mask-tail-one-late", BATCH, "static_cast<int32_t>(keys - given)", "static_cast<int32_t>(keys - given + 1)")
plant(rule, "mask-tail-from-the-front", BATCH, "static_cast<int32_t>(keys - given)", "0")
plant(rule, "mask-ignores-earlier-segments", TILE_LOOP, "int64_t{plan.mask_first_column[request]} - lengths.key_offset[request]",
      "int64_t{plan.mask_first_column[request]}")
plant(rule, "mask-hides-before-the-tail", MASK, "word & (masked | bit_range(0, begin))", "word & masked")
plant(rule, "mask-loses-the-ninth-byte", MASK, "if (last == first + 8)", "if (false)")
plant(rule, "mask-of-first-request", TILE_LOOP, "args.custom_mask + plan.mask_byte_indptr[request]", "args.custom_mask")

rule = "sinks"
plant(rule, "sink-omitted", EPILOGUE, "if (args.sinks != nullptr) {", "if (false) {")
plant(rule, "sink-counted-twice", EPILOGUE, "std::exp2(sink - new_max)", "2.0f * std::exp2(sink - new_max)")
plant(rule, "sink-scaled-by-sm-scale", EPILOGUE, "args.sinks[q_head] * kLog2E", "args.sinks[q_head] * kLog2E * args.sm_scale")
plant(rule, "sink-in-base-2", EPILOGUE, "args.sinks[q_head] * kLog2E", "args.sinks[q_head]")
plant(rule, "sink-of-kv-head", EPILOGUE, "args.sinks[q_head] * kLog2E", "args.sinks[kv_head] * kLog2E")
plant(rule, "sink-not-in-lse", EPILOGUE, "float factor = 1.0f;", "float factor = 1.0f;\n  const float max0 = row_max, sum0 = row_sum;",
      EPILOGUE, "static_cast<double>(row_max) + std::log2(static_cast<double>(row_sum));",
      "static_cast<double>(max0) + std::log2(static_cast<double>(sum0));")
plant(rule, "sink-does-not-rescale-values", EPILOGUE, "acc[d] * factor / row_sum", "acc[d] / row_sum")

rule = "LSE"
plant(rule, "lse-bases-swapped", EPILOGUE, "args.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2",
      "args.lse.base == LseBase::kE ? lse2 : lse2 * kLn2")
plant(rule, "lse-base-ignored", EPILOGUE, "args.lse.base == LseBase::k2 ? lse2 : lse2 * kLn2", "lse2 * kLn2")
plant(rule, "lse-strides-swapped", EPILOGUE, "token * args.lse.token_stride + q_head * args.lse.head_stride",
      "token * args.lse.head_stride + q_head * args.lse.token_stride")
plant(rule, "lse-is-the-maximum", EPILOGUE, "static_cast<double>(row_max) + std::log2(static_cast<double>(row_sum));",
      "static_cast<double>(row_max);")

rule = "rows without keys"
plant(rule, "empty-row-nan", EPILOGUE, "acc[d] = empty ? 0.0f : ", "acc[d] = ")
plant(rule, "empty-row-lse-zero", EPILOGUE, "empty ? static_cast<double>(row_max) : ", "empty ? 0.0 : ")
plant(rule, "empty-row-not-written", TILE_SPACE, "if (tile.num_kv_tiles == 0 && !everywhere) add_empty_range(tile, request);", "")

rule = "scales"
plant(rule, "k-scale-omitted", TILE_LOOP, "scale_of(segment.k_scale, request, tile.kv_head) * args.sm_scale", "args.sm_scale")
plant(rule, "k-scale-twice", TILE_LOOP, "scale_of(segment.k_scale, request, tile.kv_head) * args.sm_scale",
      "scale_of(segment.k_scale, request, tile.kv_head) * scale_of(segment.k_scale, request, tile.kv_head) * args.sm_scale")
plant(rule, "v-scale-omitted", TILE_LOOP, "row.value_scale = scale_of(segment.v_scale, request, tile.kv_head);", "")
plant(rule, "v-scale-twice", SOFTMAX, "store(scores + i * kLanes, s[i] * value_scale);",
      "store(scores + i * kLanes, s[i] * value_scale * value_scale);")
plant(rule, "k-and-v-scale-swapped", TILE_LOOP, "row.value_scale = scale_of(segment.v_scale,", "row.value_scale = scale_of(segment.k_scale,",
      TILE_LOOP, "scale_of(segment.k_scale, request, tile.kv_head) * args.sm_scale",
      "scale_of(segment.v_scale, request, tile.kv_head) * args.sm_scale")
plant(rule, "q-scale-omitted", TILE_LOOP, "scale_of(args.q_scale, request, tile.kv_head) * ", "")
plant(rule, "scale-of-first-head", TILE_LOOP, "return scale.data[kv_head];", "return scale.data[0];")
plant(rule, "scale-of-first-request", TILE_LOOP, "return scale.data[request];", "return scale.data[0];")
plant(rule, "scale-stride-ignored", TILE_LOOP, "scale.data[request * scale.request_stride + kv_head]", "scale.data[kv_head]")
plant(rule, "scale-of-first-request-of-work-tile", TILE_LOOP, "row.value_scale = scale_of(segment.v_scale, request,",
      "row.value_scale = scale_of(segment.v_scale, tile.request,")
plant(rule, "out-scale-multiplied", EPILOGUE, "store_row(acc, out_scale,", "store_row(acc, 1.0f / out_scale,")
plant(rule, "out-scale-omitted", EPILOGUE, "store_row(acc, out_scale,", "store_row(acc, 1.0f,")
plant(rule, "out-scale-in-memory-ignored", EPILOGUE,
      "args.out_scale.data == nullptr ? args.out_scale.value : args.out_scale.data[0]", "args.out_scale.value")

rule = "element types"
plant(rule, "e4m3-exponent-bias", CONVERT, "splat(256.0f)", "splat(128.0f)")
plant(rule, "bf16-output-truncated", COMBINE + "row_convert.cc", "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "bits >> 16")
plant(rule, "bf16-output-ties-up", COMBINE + "row_convert.cc", "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
      "(bits + 0x8000u) >> 16")
plant(rule, "e4m3-output-saturates-early", COMBINE + "row_convert.cc", "0x43e00000);  // 448", "0x43d00000);")

rule = "pages and memory"
plant(rule, "page-of-next-token", PRODUCER, "const int32_t number = local / kv.page_size;",
      "const int32_t number = (local + 1) / kv.page_size;")
plant(rule, "page-one-token-longer", PRODUCER, "smaller(count, kv.page_size - slot)", "smaller(count, kv.page_size - slot + 1)")
plant(rule, "table-indptr-shifted", TILE_LOOP, "? table.indptr[row] :", "? table.indptr[row] + 1 :")
plant(rule, "table-first-column-ignored", TILE_LOOP, "row * table.row_stride + table.first_column", "row * table.row_stride")
plant(rule, "table-row-of-request", TILE_LOOP, "const int64_t row = tile.kv_row;", "const int64_t row = tile.request;")
plant(rule, "kv-tail-one-short", MASK_BOUNDS, "TokenRange range{0, segment.kv_len};",
      "TokenRange range{0, segment.kv_len - (segment.kv_len > 0)};")
plant(rule, "kv-tail-one-long", MASK_BOUNDS, "TokenRange range{0, segment.kv_len};",
      "TokenRange range{0, segment.kv_len + (segment.kv_len > 0)};")
plant(rule, "page-offsets-32-bit", PRODUCER, "k += kv.pages[number] * kv.k_page;",
      "k += static_cast<int32_t>(kv.pages[number] * kv.k_page);")
plant(rule, "element-offsets-32-bit", PRODUCER, "v += kv.pages[number] * kv.v_page;",
      "v += static_cast<uint32_t>(kv.pages[number] * kv.v_page);")
plant(rule, "v-page-stride-of-k", TILE_LOOP, "cache.v_strides.page * element", "cache.k_strides.page * element")
plant(rule, "v-head-stride-of-k", TILE_LOOP, "tile.kv_head * cache.v_strides.head", "tile.kv_head * cache.k_strides.head")
plant(rule, "ragged-row-shifted", TILE_LOOP, "args.ragged.indptr[tile.kv_row]", "args.ragged.indptr[tile.kv_row + 1]")
plant(rule, "ragged-begins-at-zero", TILE_LOOP, "args.ragged.indptr[tile.kv_row]",
      "args.ragged.indptr[tile.kv_row] - args.ragged.indptr[0]")
plant(rule, "packed-v-pairs-swapped", CONVERT, "load_of_pairs<kType, kOdd>(from", "load_of_pairs<kType, 1 - kOdd>(from",
      GEMM, ": load_of_pairs<kType, 0>(at);", ": load_of_pairs<kType, 1>(at);")
plant(rule, "packed-v-pair-is-a-token", PRODUCER, "(slot + i) / 2 * kv.v_token", "(slot + i) * kv.v_token")
plant(rule, "head-dim-v-is-qk", TILE_LOOP, "work.head_dim_v = config.head_dim_v;",
      "work.head_dim_v = config.head_dim_qk < config.head_dim_v ? config.head_dim_qk : config.head_dim_v;")
plant(rule, "q-strides-packed", TILE_LOOP, "token * args.q.strides[0] + q_head * args.q.strides[1]",
      "(int64_t{token} * config.num_q_heads + q_head) * config.head_dim_qk")
plant(rule, "out-strides-packed", EPILOGUE, "token * args.out.strides[0] + q_head * args.out.strides[1]",
      "(int64_t{token} * config.num_q_heads + q_head) * config.head_dim_v")
plant(rule, "lengths-borrowed", BATCH, ".kv_len = kv_len,", ".kv_len = segment.kv_len,")
plant(rule, "states-not-cleared", TILE_LOOP,
      "clear(rows_from(scratch_.running, h * stride, v_stride), work.num_rows, collective_.row_padding, v_stride);", "")
plant(rule, "workspace-parts-overlap", ATTENTION + "run.cc", "workspace + layout.partial_row_sum", "workspace + layout.partial_row_max")
plant(rule, "workspace-scratch-not-counted", ATTENTION + "run_args.cc",
      "take(op.passes.front().scheduler.num_workers, static_cast<int64_t>(op.scratch_stride))",
      "take(op.passes.front().scheduler.num_workers - 1, static_cast<int64_t>(op.scratch_stride))")

rule = "heads and rows"
plant(rule, "group-heads-strided", TILE_LOOP, "tile.kv_head * params.group_size + head_of_token",
      "tile.kv_head + head_of_token * config.num_kv_heads")
plant(rule, "work-tile-begins-with-a-tokens-first-head", TILE_LOOP, "int32_t head_of_token = tile.row_begin % params.group_size;",
      "int32_t head_of_token = 0;")
plant(rule, "group-heads-strided-in-output", EPILOGUE, "kv_head * params.group_size + packed_row % params.group_size",
      "kv_head + packed_row % params.group_size * config.num_kv_heads")
plant(rule, "padding-rows-written", TILE_SPACE, "const int32_t end = first_row(request + 1);",
      "const int32_t end = first_row(request + 1) + (request + 1 == view_.num_requests ? group_size_ : 0);")
plant(rule, "last-rows-not-written", TILE_SPACE, "const int32_t end = first_row(request + 1);",
      "const int32_t end = first_row(request + 1) - (first_row(request + 1) - first_row(request) > 64);")

rule = "shards"
plant(rule, "shard-interleave-ignored", MASK_BOUNDS, "const int64_t interleave = shard.interleave;\n  return (local",
      "const int64_t interleave = 1;\n  return (local",
      MASK_BOUNDS, "const int64_t interleave = shard.interleave;\n  const int64_t stripe", "const int64_t interleave = 1;\n  const int64_t stripe")
plant(rule, "shard-rank-ignored", MASK_BOUNDS, "offset % stripe - shard.rank * interleave", "offset % stripe")
plant(rule, "shard-rank-not-interleaved", MASK_BOUNDS, "offset % stripe - shard.rank * interleave", "offset % stripe - shard.rank")
plant(rule, "shard-ignored", MASK_BOUNDS, "return shard.world == 1 ? offset : stripes_below(shard, offset);", "return offset;")

rule = "merging"
plant(rule, "merge-of-empty-states", SOFTMAX, "if (other_max == -__builtin_inff()) return;", "",
      SOFTMAX, "if (*row_max == -__builtin_inff()) {", "if (false) {")
plant(rule, "merge-weight-of-first", SOFTMAX, "*row_sum = *row_sum * scale + other_sum * other_scale;", "*row_sum = *row_sum + other_sum * other_scale;")
plant(rule, "merge-values-unweighted", SOFTMAX, "load<Quad>(other_acc + d) * other_scale", "load<Quad>(other_acc + d)")
plant(rule, "merge-order", EPILOGUE, "const int64_t partial = int64_t{params.plan.combine_sources[i]} + row - tile.row_begin;",
      "const int64_t partial = int64_t{params.plan.combine_sources[tile.source_end - 1 - (i - tile.source_begin)]} + row - tile.row_begin;")
plant(rule, "merge-last-source-lost", EPILOGUE, "i < tile.source_end; ++i", "i < tile.source_end - (tile.source_end > 2); ++i")
plant(rule, "merge-row-offset", EPILOGUE, "int64_t{params.plan.combine_sources[i]} + row - tile.row_begin",
      "int64_t{params.plan.combine_sources[i]}")
plant(rule, "combine-source-offset", SCHEDULER + "combine_tiles.cc", "arrays_.partials[i] + (row - tile.row_begin)",
      "arrays_.partials[i]")
plant(rule, "group-shifted-by-one", BATCH, "for (int32_t r = segment.group_indptr[g]; r < segment.group_indptr[g + 1]; ++r)",
      "for (int32_t r = segment.group_indptr[g] + 1; r < segment.group_indptr[g + 1]; ++r)")
plant(rule, "merge-state-takes-infinite-lse", COMBINE + "combine.cc", "if (std::isinf(value)) continue;", "")
plant(rule, "merge-state-hides-nan", COMBINE + "combine.cc", "if (std::isinf(value)) continue;",
      "if (!std::isfinite(value)) continue;")
plant(rule, "merge-state-base-ignored", COMBINE + "combine.cc", "source.base == LseBase::k2 ? value * std::numbers::ln2 : value",
      "value")

rule = "determinism"
plant(rule, "splits-not-combined", TILE_LOOP, "i == 0 || (tile.flags & scheduler::kFold) == 0", "true")
plant(rule, "splits-at-relative-positions", STATIC, "std::min(end, (begin / split + 1) * split)", "std::min(end, begin + split)")
plant(rule, "cut-splits-folded-as-one", STATIC, "if (fixed_splits_ && !first) {", "if (false) {")

rule = "KV heads walked together"
plant(rule, "next-head-reads-the-first-ones-keys", PRODUCER, "locate_tile(heads[head], next.tile, next.rows);",
      "locate_tile(heads[0], next.tile, next.rows);")
plant(rule, "next-head-has-old-masks", PRODUCER,
      "for (int32_t r = 0; r < heads[head].num_rows; ++r) next.visible[r] = now.visible[r];", "")
plant(rule, "heads-of-other-tokens-walked-together", TILE_LOOP,
      "b.kv_begin == a.kv_begin && b.kv_end == a.kv_end", "true")
plant(rule, "more-heads-than-memory", TILE_LOOP, "params_.tile.rows / row_stride(tile), 1, kMaxHeads", "kMaxHeads, 1, kMaxHeads")
plant(rule, "heads-continue-as-the-first", TILE_LOOP, "work_tiles[begin.partial + i - 1]", "work_tiles[work_tiles[first].partial + i - 1]")
plant(rule, "claims-leave-a-work-tile-out", TILE_LOOP, "at + claimed.heads, std::memory_order_relaxed", "at + claimed.heads + 1, std::memory_order_relaxed")
plant(rule, "heads-combine-into-the-first", TILE_LOOP, "combine_split(heads_[h], h * stride)", "combine_split(heads_[h], 0)")
plant(rule, "long-request-in-one-claim", TILE_LOOP, "keys_of_plan() / claims / keys)", "int64_t{kMaxHeads})")
plant(rule, "keys-of-one-tile-for-the-plan", TILE_LOOP, "keys_of_plan_ += keys_of(", "keys_of_plan_ = keys_of(")

rule = "AMX: work tiles of few rows are the AVX-512 kernel's"
AMX_KERNEL = "src/kernels/cpu/amx/kernel.cc"
plant(rule, "amx-few-rows-whatever-the-determinism", AMX_KERNEL,
      "config.determinism >= Determinism::kBatchInvariant ? 0", "config.determinism > Determinism::kScheduleInvariant ? 0")
plant(rule, "amx-few-rows-one-more", TILE_LOOP, "tile.row_end - tile.row_begin < min_rows ?", "tile.row_end - tile.row_begin <= min_rows ?")
plant(rule, "amx-all-rows-are-few", TILE_LOOP, "tile.row_end - tile.row_begin < min_rows ?", "min_rows > 0 ?")

rule = "AMX: strided values"
AMX_PRODUCER = "src/kernels/cpu/amx/producer.hpp"
plant(rule, "amx-odd-row-lost", AMX_PRODUCER, "odd ? rows.v(t + 1) : zeros", "zeros")
plant(rule, "amx-fp8-rows-out-of-turn", AMX_PRODUCER, "static_cast<uint8_t>(i / 2 + i % 2 * 64)", "static_cast<uint8_t>(i / 2 + i % 2 * 32)")

rule = "AMX: tiles exponentiated before their maximum is known"
AMX_SOFTMAX = "src/kernels/cpu/amx/softmax.hpp"
plant(rule, "amx-row-max-kept-whatever-the-sum", AMX_SOFTMAX, "inline constexpr float kMaxKeptSum = 220.0f;",
      "inline constexpr float kMaxKeptSum = 0x1p120f;")
plant(rule, "amx-tile-kept-though-row-max-rose", "src/kernels/cpu/amx/mainloop.hpp",
      "      rescale_acc_rows(work, block.first, block.max.raised, block.max.rescale);\n      return true;",
      "      rescale_acc_rows(work, block.first, block.max.raised, block.max.rescale);\n      return false;")

rule = "AMX: both GEMMs beside a softmax"
AMX_OVERLAP = "src/kernels/cpu/amx/gemm_overlap.hpp"
AMX_MAINLOOP = "src/kernels/cpu/amx/mainloop.hpp"
plant(rule, "amx-pv-after-the-rescale-of-its-own-rows", AMX_MAINLOOP, "if (pv.adds_to(at.r)) pv.drain();", "")
plant(rule, "amx-batch-overwritten-before-its-pv", AMX_MAINLOOP, "if (pv.reads(*at.batch)) pv.drain();", "")
plant(rule, "amx-single-row-block-in-the-pairs-scores", AMX_MAINLOOP, "scores_buffer(amx, kScoreBuffers - 1)", "scores_buffer(amx, 0)")
plant(rule, "amx-pairs-share-a-p-buffer", AMX_MAINLOOP, "    pair ^= 1;\n", "")
plant(rule, "amx-chunk-adds-to-the-one-before", AMX_OVERLAP, "    acc_ += 2 * kDimTile;\n", "")
plant(rule, "amx-values-of-the-chunk-before", AMX_OVERLAP, "operands_[load_quad_].v.at += 2 * operands_[load_quad_].v.step;", "")
plant(rule, "amx-second-keys-of-a-quad-from-the-first", AMX_OVERLAP, "const TileSource& keys = keys_[kTile - 4];", "const TileSource& keys = keys_[0];")

rule = "AMX: heads of strided caches together"
plant(rule, "amx-heads-share-their-factors", AMX_MAINLOOP, "amx.scratch.value_scale += head * rows;", "")
plant(rule, "amx-values-of-the-first-head", AMX_PRODUCER, "head.kv.v - first_.kv.v", "0")
plant(rule, "amx-rows-in-order-by-their-ends", AMX_PRODUCER, "      breaks_ |= uint64_t{1} << t;\n", "")
plant(rule, "amx-packed-values-of-the-token-not-the-pair", AMX_PRODUCER, "const int32_t pair = kv.packed_v ? 1 : 0;", "const int32_t pair = 0;")

rule = "AMX: float16 as two bfloat16 terms"
AMX_GEMM = "src/kernels/cpu/amx/gemm.hpp"
plant(rule, "amx-low-terms-of-q-left-out", AMX_GEMM, "count == dims ? i : (i & 1) * dims + i / 4", "count == dims ? i : i / 4")
plant(rule, "amx-low-terms-of-v-left-out", AMX_GEMM, "return i == 1 ? low_values : 0;", "return 0;")
plant(rule, "amx-infinite-float16-key-not-scored-again", "src/kernels/cpu/amx/mainloop.hpp",
      "if (operands.non_finite_keys != 0) rescore_non_finite", "if (false) rescore_non_finite")

rule = "BFMMLA"
plant(rule, "bfmmla-rows-of-q-on-each-other", GEMM_QK_BF16, "packed_q(work, r / 2 * 2) + r % 2 * kLanes", "packed_q(work, r / 2 * 2)")
plant(rule, "bfmmla-one-token-twice", GEMM_QK_BF16, "k[2 * j + 1] + 2 * d", "k[2 * j] + 2 * d")
plant(rule, "bfmmla-upper-components-forgotten", GEMM_QK_BF16, "const Vec a = lower[i][j] + upper[i][j];", "const Vec a = lower[i][j];")
plant(rule, "bfmmla-row-alone-packed-with-another", GEMM_QK_BF16, "return num_rows % 4 == 1;", "return num_rows == 1;")
plant(rule, "bfmmla-off-diagonal", GEMM_QK_BF16, "interleave_upper(FOLIO_SHUFFLE(four[0], four[1], 2, 6, 3, 7)",
      "interleave_upper(FOLIO_SHUFFLE(four[0], four[1], 0, 4, 1, 5)")
plant(rule, "bfmmla-of-float32-queries", KERNEL + "mainloop.hpp", "q == DType::kBFloat16 || is_fp8_type(q)", "q != DType::kFloat16")

rule = "sums over long contexts"
plant(rule, "states-of-any-length", SHARED + "config.hpp", "kMaxStateTokens = 16384;", "kMaxStateTokens = 1 << 30;")
plant(rule, "yardstick-of-one-sum", "src/testing/nested_sum.hpp", "kTerms = 64;", "kTerms = 1 << 30;")

rule = "refusals"
plant(rule, "keys-up-to-the-last-integer", BATCH, "if (kv_len[row] > kMaxKvLen) {", "if (false) {")
plant(rule, "device-keys-up-to-the-last-integer", SCHEDULER + "device_scheduler.cc",
      "std::min(bound_of(batch.max_kv_len, config.bounds->max_kv_len), kMaxKvLen);", "bound_of(batch.max_kv_len, config.bounds->max_kv_len);")
plant(rule, "stale-plan-runs", ATTENTION + "plan.cc", "!buffer.planned || buffer.generation != plan.generation()", "!buffer.planned")
plant(rule, "undeclared-feature-runs", ATTENTION + "run_args.cc", "require(!given || config.features.has(feature),", "require(true,")
plant(rule, "small-workspace-runs", ATTENTION + "run_args.cc", "if (workspace.bytes < needed) {", "if (workspace.bytes + 256 < needed) {")

rule = "page tables"
plant(rule, "last-page-len-of-full-page", TABLE, "return static_cast<int32_t>(length - static_cast<int64_t>(pages - 1) * page_size);",
      "return length % page_size;")
plant(rule, "last-page-len-of-empty", TABLE, "if (pages == 0) return 0;", "if (pages == 0) return page_size;")
plant(rule, "page-indptr-shifted", TABLE, "indptr[r + 1] = indptr[r] + pages;", "indptr[r + 1] = indptr[r] + pages + (r == 0);")
plant(rule, "page-count-rounded-down", TABLE, "return core::ceil_div(tokens, page_size);", "return tokens / page_size;")

rule = "cache writes"
plant(rule, "write-scale-multiplied", CACHE + "convert_rows.cc", "value /= to_scale;", "value *= to_scale;")
plant(rule, "write-scale-omitted", CACHE + "convert_rows.cc", "value /= to_scale;", "")
plant(rule, "write-pairs-swapped", CACHE + "convert_rows.cc", "target[2 * i] = first[i];\n    target[2 * i + 1] = second[i];",
      "target[2 * i] = second[i];\n    target[2 * i + 1] = first[i];")

rule = "NVFP4 outputs"
NVFP4 = COMBINE + "nvfp4.cc"
plant(rule, "nvfp4-nibbles-swapped", NVFP4, "static_cast<uint8_t>(low | (high << 4))", "static_cast<uint8_t>(high | (low << 4))")
plant(rule, "nvfp4-scale-of-the-real-not-the-stored", NVFP4, "fp8_e4m3_to_float(stored);",
      "global_scale * largest_magnitude(x) / kLargestE2m1;")
plant(rule, "nvfp4-global-scale-divides", NVFP4, "float_to_fp8_e4m3(global_scale * largest", "float_to_fp8_e4m3(1 / global_scale * largest")
plant(rule, "nvfp4-heads-share-blocks", EPILOGUE, "q_head * blocks_per_head, config", "0, config")
plant(rule, "nvfp4-first-row-ignored", EPILOGUE, "args.out_block_scale.first_row + token", "token")
plant(rule, "nvfp4-tiles-column-major", "include/folio/types/nvfp4.hpp", "in_tile % 32 * 16 + in_tile / 32 * 4", "in_tile * 4")

rule = "logits of billions"
plant(rule, "exponents-of-unrounded-logits", "src/kernels/cpu/amx/mainloop.hpp",
      "round_large_logits(block.max, scores);", "")

rule = "AMX: int8 numbers and token scales"
plant(rule, "amx-int8-upcast-unsigned", AMX_PRODUCER, "to_float((words << 16) >> 24)", "to_float((words >> 8) & 0xff)")
plant(rule, "amx-int8-keys-unscaled", "src/kernels/cpu/amx/mainloop.hpp",
      "if (operands.scales.k != nullptr) scale_token_scores(operands, scores);", "")
plant(rule, "amx-int8-scale-of-a-masked-value", AMX_SOFTMAX,
      "_mm512_maskz_mul_ps(visible_odd, odd, value_scale * splat(operands.scales.v[t + 1]))",
      "_mm512_maskz_mul_ps(0xffff, odd, value_scale * splat(operands.scales.v[t + 1]))")
plant(rule, "amx-int8-odd-value-has-its-neighbours-scale", AMX_SOFTMAX, "operands.scales.v[t + 1]", "operands.scales.v[t]")
plant(rule, "amx-int8-row-sum-of-scaled-p", AMX_SOFTMAX, "      even_sum += even;\n",
      "      even_sum += kScales == ValueScales::kOfRowsAndTokens ? even * splat(operands.scales.v[t]) : even;\n")
plant(rule, "amx-int8-scales-of-the-first-page", AMX_PRODUCER, "copy_token_scales(kv, place.page, place.slot,",
      "copy_token_scales(kv, place_of(kv, tile.first).page, place.slot,")
plant(rule, "amx-int8-nan-scale-carried-away", AMX_PRODUCER, "with_plain_nan(load<Vec>(operands.scales.v + t))", "load<Vec>(operands.scales.v + t)")
plant(rule, "amx-int8-next-tiles-scales-too-early", "src/kernels/cpu/amx/mainloop.hpp",
      "amx.scratch.token_scales + i * 2 * kTileTokens", "amx.scratch.token_scales + i % kBatchTiles * 2 * kTileTokens")

rule = "fp8 dequantized beside the MMAs"
PIPELINE = "src/kernels/cpu/amx/kv_pipeline.hpp"
plant(rule, "stage-in-use-overwritten", PIPELINE, "smaller(consumer_chunk_ + kStages, first_", "smaller(consumer_chunk_ + kStages + 1, first_")
plant(rule, "stage-consumed-before-it-is-full", PIPELINE, "while (producer_chunk_ <= consumer_chunk_) advance(*this, 1);",
      "while (producer_chunk_ < consumer_chunk_) advance(*this, 1);")
rule = "pools and allocators"
ALLOCATOR = KVCACHE + "token_allocator.cc"
WINDOW_ALLOCATOR = KVCACHE + "window_token_allocator.cc"
plant(rule, "pool-without-dummy-page", KVCACHE + "kv_pool.cc", "int64_t{config.num_slots / config.page_size} + 1;",
      "int64_t{config.num_slots / config.page_size};")
plant(rule, "pool-leading-shape-torn", KVCACHE + "kv_pool.cc", "!any || stride(i) == count * token_stride", "true")
plant(rule, "request-rows-from-0", KVCACHE + "req_to_token_pool.cc", "free_rows_[static_cast<size_t>(i)] = i + 1;",
      "free_rows_[static_cast<size_t>(i)] = i;")
plant(rule, "slots-released-early", ALLOCATOR, "if (pages > free.count()) free.take_all(released);",
      "if (pages >= free.count()) free.take_all(released);")
plant(rule, "slots-freed-twice", ALLOCATOR, "state.held_slots[static_cast<size_t>(slots[i])] = false;", "")
plant(rule, "slots-of-a-page-stay-held", ALLOCATOR, "      state.forget_page(page);\n", "")
plant(rule, "slots-continue-at-another-offset", ALLOCATOR, "(last_slot + 1) % page_size == prefix_len % page_size", "true")
plant(rule, "slots-two-continue-a-page", ALLOCATOR, "      note(r, true);\n", "")
plant(rule, "slots-of-this-call-as-last-ones", ALLOCATOR,
      "    }\n    for (size_t r = 0; r < seq_lens_.size(); ++r) {\n      state_.check_continues(r,", "      state_.check_continues(r,")
plant(rule, "slots-page-rounded-down", ALLOCATOR,
      "core::ceil_div(seq_lens_[r], state_.page_size) - core::ceil_div(prefix_len(r), state_.page_size)",
      "seq_lens_[r] / state_.page_size - prefix_len(r) / state_.page_size")
plant(rule, "window-room-not-asked", WINDOW_ALLOCATOR, "std::min(available(), window_available())", "available()")
plant(rule, "window-copy-twice", WINDOW_ALLOCATOR, "copy_of(to) = std::exchange(copy_of(from), 0);",
      "copy_of(to) = copy_of(from);")

rule = "prefix cache"
TREE = KVCACHE + "prefix_tree.cc"
PREFIXES = KVCACHE + "prefix_cache.cc"
plant(rule, "prefix-page-not-rounded", TREE, "return equal - equal % options.page_size;", "return equal;")
plant(rule, "prefix-leaf-lost-without-memory", TREE, "  } catch (...) {\n    drop_node(leaf);\n    throw;", "  } catch (...) {\n    throw;")
plant(rule, "prefix-room-for-one-leaf-only", TREE, "slots += static_cast<size_t>(at(above).size());", "(void)slots;")
plant(rule, "prefix-root-stands-alone", PREFIXES, "      tree.drop_root(node);\n", "")
plant(rule, "prefix-extra-key-ignored", TREE, "roots.find(extra_key);", "roots.begin();\n  (void)extra_key;")
plant(rule, "prefix-window-ends-on-tombstone", TREE, "return with_copies >= window ? at_end : usable;", "return at_end;")
plant(rule, "prefix-window-one-more", TREE, "return with_copies >= window ? at_end : usable;",
      "return with_copies > window ? at_end : usable;")
plant(rule, "prefix-window-before-tombstone-lost", TREE, "if (with_copies >= window) usable = at_end;", "")
plant(rule, "prefix-split-loses-locks", TREE, "  up.locks = low.locks;\n", "")
plant(rule, "prefix-split-loses-window-locks", TREE, "  up.window_locks = low.window_locks;\n", "")
plant(rule, "prefix-split-forgets-tombstone", TREE, "  up.tombstone = low.tombstone;\n", "")
plant(rule, "prefix-split-goes-on-below", PREFIXES, "std::exchange(child, tree.split(child, equal));",
      "tree.split(child, equal);")
plant(rule, "prefix-parent-counted-off", TREE, "  ++num_nodes;\n  evictable += n.size();",
      "  ++num_nodes;\n  evictable += n.size() - at(parent).size();")
plant(rule, "prefix-window-lock-one-node-short", TREE, "if (begin >= window_begin) {", "if (begin > window_begin) {")
plant(rule, "prefix-tombstone-leaf-stays", TREE, "more = above.num_children == 0 && above.tombstone;", "more = false;")
plant(rule, "prefix-parent-not-evictable", TREE, "    } else {\n      enlist(parent);\n    }", "    }")
plant(rule, "prefix-use-not-noted", PREFIXES, "  tree.touch_path(found.node);\n", "")
plant(rule, "prefix-heals-without-copies", PREFIXES, "std::max(begin, request.window_begin);", "begin;")
plant(rule, "prefix-leaf-without-copies", PREFIXES, "if (length == end || request.window_begin >= end) return result;",
      "if (length == end) return result;")
plant(rule, "prefix-duplicates-kept", PREFIXES, "changes.freed.push_back(own);", "(void)own;")
plant(rule, "prefix-not-written-back", PREFIXES,
      "  copy_slots(tree, done.node, lock.length_, end, slots.subspan(static_cast<size_t>(lock.length_)));\n", "")
plant(rule, "prefix-tail-kept", PREFIXES, "  changes.freed.insert(changes.freed.end(), rest.begin(), rest.end());\n", "")
plant(rule, "prefix-cut-miscounted", TREE, "  evictable -= slots;\n  count_window(n, 1);", "  count_window(n, 1);")
plant(rule, "prefix-cut-window-miscounted", TREE, "  evictable -= slots;\n  count_window(n, 1);", "  evictable -= slots;")
plant(rule, "prefix-cut-takes-all", PREFIXES, "tree.options.whole_leaves || missing", "tree.options.page_size > 0 || missing")
plant(rule, "prefix-evicts-too-little", PREFIXES, "while (gone.slots < wanted.slots &&", "if (gone.slots < wanted.slots &&")
rule = "cascades"
CASCADE = ATTENTION + "cascade.cc"
LEVELS = ATTENTION + "cascade_levels.cc"
PREFIX = KVCACHE + "shared_prefix.cc"
plant(rule, "new-tokens-are-shared", CASCADE, "std::max(0, batch.kv_len[r] - q_len) / costs.page_size",
      "batch.kv_len[r] / costs.page_size")
plant(rule, "shared-levels-start-at-position-0", CASCADE, "arrays.first_pos.push_back(first_page * costs.page_size);",
      "arrays.first_pos.push_back(0);")
plant(rule, "own-keys-start-at-position-0", CASCADE, "arrays.first_pos[r] = first_pos;", "arrays.first_pos[r] = 0;")
plant(rule, "own-keys-repeat-the-shared", CASCADE, "static_cast<int32_t>(row_begin[r]) + own_first_page[r];",
      "static_cast<int32_t>(row_begin[r]);")
plant(rule, "padding-loses-a-prefix-it-never-had", CASCADE, "if (full_pages[static_cast<size_t>(r)] > 0) own_first_page",
      "if (true) own_first_page")
plant(rule, "cascades-at-invariant-levels", CASCADE,
      "state.costs.determinism >= Determinism::kBatchInvariant || state.max_levels == 0 || !state.addressable) {\n    return state.emit(batch, {}, stream);\n  }\n  const auto prefixes",
      "state.max_levels == 0 || !state.addressable) {\n    return state.emit(batch, {}, stream);\n  }\n  const auto prefixes")
plant(rule, "prefixes-shared-at-invariant-levels", CASCADE,
      "state.costs.determinism >= Determinism::kBatchInvariant || state.max_levels == 0 || !state.addressable) {\n    return state.emit(batch, {}, stream);\n  }\n  const CascadeGroup",
      "state.max_levels == 0 || !state.addressable) {\n    return state.emit(batch, {}, stream);\n  }\n  const CascadeGroup")
plant(rule, "claimed-prefixes-are-believed", CASCADE, "state.check_common(batch, first, prefix_pages);", "")
plant(rule, "rows-of-one-stride-zero-table", CASCADE, "addressable = addressable && begin >= row_begin[r];", "")
plant(rule, "deeper-levels-read-from-the-start", LEVELS, "const int64_t own = saving(candidate.prefix, page_taken_before(c, around), around == 0);",
      "const int64_t own = saving(candidate.prefix, 0, around == 0);")
plant(rule, "first-partial-result-is-free", LEVELS, "product(outermost ? 4 : 2, ", "product(outermost ? 2 : 2, ")
plant(rule, "group-reads-by-request", LEVELS, "return ceil_div(rows, costs_->tile_rows);", "return rows;")
plant(rule, "prefixes-compared-at-the-last-page", PREFIX, "while (same < most && a[same] == b[same]) ++same;",
      "for (size_t i = most; i > same; --i) if (a[i - 1] == b[i - 1]) return static_cast<int32_t>(i);")

OPS = ATTENTION + "table_ops.cc"
rule = "lists on a context's device"
plant(rule, "token-indices-of-pages-alone", OPS, "const int64_t index = int64_t{page} * page_size + place;",
      "const int64_t index = int64_t{page} * page_size;")
plant(rule, "token-list-without-room", OPS, "require(total <= std::ssize(out)", "require(total <= std::ssize(out) + 1")
plant(rule, "gpu-tiles-of-pairs-in-wide-pieces", "src/kernels/cuda/common/cache/shape.cc", "if (side->step != 1) return 1;", "")
plant(rule, "gpu-quotients-uncorrected", "src/kernels/cuda/common/division.hpp",
      "values[i] = fmaf(fmaf(quotient, divisor_, -values[i]), -inverse_, quotient);", "values[i] = quotient;")
plant(rule, "gpu-quotients-lose-the-sign-of-zeros", "src/kernels/cuda/common/division.hpp",
      "fmaf(fmaf(quotient, divisor_, -values[i]), -inverse_, quotient)",
      "fmaf(fmaf(-quotient, divisor_, values[i]), inverse_, quotient)")
plant(rule, "gpu-quotients-of-infinities-by-products", "src/kernels/cuda/common/division.hpp",
      "if (largest <= largest_) {", "if (divisor_ > 0) {")
plant(rule, "gpu-moves-more-tokens-than-threads", "src/kernels/cuda/common/cache/shape.cc",
      "static_cast<uint32_t>(kMoveThreads / columns)", "static_cast<uint32_t>(kMoveThreads / columns + 1)")
plant(rule, "gpu-quotients-one-too-large", "src/kernels/cuda/common/division.hpp",
      "((uint64_t{1} << shift_) + divisor_ - 1) / divisor_", "((uint64_t{1} << shift_) + divisor_ - 1) / divisor_ + 1")
