"""Mistakes about attention in one call: what it reads off its arguments, keeps and forgets; see mutations.py."""

from mutations import ATTENTION, plant

ONE_CALL = ATTENTION + "paged_attention.cc"

rule = "attention in one call"
plant(rule, "windows-share-an-op", ONE_CALL, "  config.window_left = args.window_left;\n", "")
plant(rule, "lengths-of-the-last-call", ONE_CALL,
      "std::equal(view.segments[0].kv_len, view.segments[0].kv_len + requests, batch.segments[0].kv_len)", "true")
plant(rule, "queries-of-the-last-call", ONE_CALL, "std::equal(batch.cu_q, batch.cu_q + requests + 1, view.cu_q)", "true")
plant(rule, "every-layer-plans", ONE_CALL, "if (is_planned(buffer, batch)) return", "if (false) return")
plant(rule, "page-ids-unchecked", ONE_CALL, "  if (gpu == nullptr) validate(args.page_table,", "  if (false) validate(args.page_table,")
plant(rule, "the-newest-is-forgotten", ONE_CALL, "std::ranges::min_element(prepared", "std::ranges::max_element(prepared")
