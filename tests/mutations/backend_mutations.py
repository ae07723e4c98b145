"""Mistakes planted in what backends answer: capabilities, versions, selection, dispatch, padding. Their expectations are
data under tests/golden/; see mutations.py for the form."""

from mutations import plant

COMMON = "src/backends/common/"
FLASH_ATTN = "src/backends/flash_attn/"
FLASHINFER = "src/backends/flashinfer/"
DISPATCH = "src/backends/dispatch/"
CAPABILITY = COMMON + "capability.cc"

RULE = "backends: capability"
plant(RULE, "reasons-stop-at-the-first", CAPABILITY, "if (refused) reasons.push_back",
      "if (refused && reasons.empty()) reasons.push_back")
plant(RULE, "mla-request-ignored", CAPABILITY, "asked.use_mla != backend.is_mla", "false")
plant(RULE, "least-capability-excluded", CAPABILITY, "*device.capability >= *min_capability)",
      "*device.capability > *min_capability)")
plant(RULE, "greatest-capability-excluded", CAPABILITY, "*device.capability <= *max_capability)",
      "*device.capability < *max_capability)")
plant(RULE, "capability-by-major-only", "include/folio/backends/capability.hpp",
      "friend constexpr auto operator<=>(const DeviceCapability&, const DeviceCapability&) = default;",
      "friend constexpr auto operator<=>(const DeviceCapability& a, const DeviceCapability& b) { return a.major <=> b.major; }\n"
      "  friend constexpr bool operator==(const DeviceCapability&, const DeviceCapability&) = default;")
plant(RULE, "preferred-page-not-the-smallest", CAPABILITY,
      "return std::ranges::min_element(page_sizes, {}, &PageSizeRule::value)->value;", "return page_sizes.front().value;")
plant(RULE, "hybrid-pages-unrestricted", FLASH_ATTN + "backend.cc", "if (has_float32_states(facts)) return",
      "if (has_float32_states(facts) && false) return")
plant(RULE, "graphs-of-version-2-for-mixed-batches", FLASH_ATTN + "backend.cc",
      "get_flash_attn_version(facts.platform) == 3) return GraphSupport::kAlways;",
      "get_flash_attn_version(facts.platform) >= 2) return GraphSupport::kAlways;")
plant(RULE, "forced-off-kernels-have-sinks", FLASHINFER + "backend.cc",
      "facts.use_block_table_kernels.value_or(true) &&\n         facts.supports_block_table_kernels;",
      "facts.supports_block_table_kernels;")

RULE = "backends: versions"
plant(RULE, "fa3-on-8.9", FLASH_ATTN + "version.cc", " || device == kSm89", "")
plant(RULE, "fa4-head-size-limit-off-by-one", FLASH_ATTN + "version.cc", "*head_size > 128", "*head_size > 136")
plant(RULE, "override-ignored", FLASH_ATTN + "version.cc", "version = platform.flash_attn_version.value_or(version);", "")
plant(RULE, "alibi-keeps-fa4", FLASH_ATTN + "version.cc", "(version == 3 || version == 4)", "version == 3")

RULE = "backends: selection"
plant(RULE, "blackwell-order-from-10-on", COMMON + "selection.cc", "device.capability->major == 10", "device.capability->major >= 10")
plant(RULE, "layout-configured-over-required", COMMON + "selection.cc", "if (requests.required) {",
      "if (requests.required && !requests.configured) {")

RULE = "backends: dispatch"
plant(RULE, "force-off-not-first", DISPATCH + "trtllm_attention.cc", "if (!query.force_use_trtllm.value_or(true)) return false;", "")
plant(RULE, "dcp-of-two-allowed", DISPATCH + "trtllm_attention.cc", "query.dcp_world_size > 1", "query.dcp_world_size > 2")
plant(RULE, "drafts-in-prefill", DISPATCH + "trtllm_attention.cc", "query.has_spec && !query.is_prefill", "query.has_spec")
plant(RULE, "decode-limit-off-by-one", DISPATCH + "trtllm_attention.cc", "query.num_tokens <= kMostDecodeTokens",
      "query.num_tokens < kMostDecodeTokens")
plant(RULE, "batch-invariance-ignored", DISPATCH + "families.cc", "if (facts.batch_invariant) return", "if (false) return")
plant(RULE, "another-profile-than-the-builders", DISPATCH + "families.cc", "core::require(profile == this->profile(),",
      "core::require(true,")
plant(RULE, "batch-invariance-not-compared", DISPATCH + "families.cc",
      "core::require(state_->native() || invariant == batch_invariant(),", "core::require(true,")
plant(RULE, "answers-not-remembered", DISPATCH + "families.cc",
      "std::call_once(looked_up[at], [&] { answers[at] = look_up(family); });", "answers[at] = look_up(family);")
plant(RULE, "lines-repeated", COMMON + "once_log.cc", "if (!state_->said.emplace(level, text).second) return;", "")
plant(RULE, "rope-of-each-head", "src/attention/concat_mla_k.cc", "row_of<const std::byte>(k_pe, token, 0)",
      "row_of<const std::byte>(k_pe, token, head)")

RULE = "backends: batches"
plant(RULE, "slice-keeps-the-longest-query", COMMON + "attention_metadata.cc", "result.max_query_len = 0;", "")
plant(RULE, "slice-not-rebased", COMMON + "attention_metadata.cc", "return start - first;", "return start;")
plant(RULE, "graph-padding-off-by-one", COMMON + "graph_padding.cc", "static_cast<size_t>(size) + 1, size)", "static_cast<size_t>(size), size)")
plant(RULE, "schedule-not-rounded", COMMON + "graph_padding.cc", "(int64_t{num_reqs} + 3) / 4 * 4 * 4", "int64_t{num_reqs} * 4")
plant(RULE, "scale-of-zeros-is-zero", "src/attention/kv_scales.cc", "if (largest != 0.0f) scale", "scale")
