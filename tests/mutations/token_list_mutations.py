"""Mistakes in the token pool's lists of slots, draft branches and trees, many of them SGLang's; see mutations.py."""

from mutations import plant

TOKEN_POOL = "src/backends/token_pool/"
LISTS = TOKEN_POOL + "kv_indices.cc"
LIST_RULE = TOKEN_POOL + "device/kv_indices_rule.hpp"
DRAFT = TOKEN_POOL + "draft_kv_indices.cc"
DRAFT_RULE = TOKEN_POOL + "device/draft_indices_rule.hpp"
TREE = TOKEN_POOL + "draft_tree.cc"
TREE_RULE = TOKEN_POOL + "device/draft_tree_rule.hpp"
TREE_CHECKS = TOKEN_POOL + "draft_tree_checks.cc"
MASK = TOKEN_POOL + "tree_mask.cc"
MASK_RULE = TOKEN_POOL + "device/tree_mask_rule.hpp"

rule = "windows of slot lists"
plant(rule, "list-window-one-short", LIST_RULE, "(position - window_left) / page_size", "(position - window_left + 1) / page_size")
plant(rule, "list-window-one-long", LIST_RULE, "(position - window_left) / page_size", "(position - window_left - 1) / page_size")
plant(rule, "list-window-inside-a-page", LIST_RULE, "(position - window_left) / page_size * page_size", "(position - window_left)")
plant(rule, "list-window-of-the-next-query", LISTS, "int64_t{seq_len} - 1 : prefix_lens[r]", "int64_t{seq_len} : prefix_lens[r]")
plant(rule, "list-window-of-the-last-query", LISTS, ": prefix_lens[r];", ": int64_t{seq_len} - 1;")
plant(rule, "prefix-slice-one-long", LISTS, "Range{window_start(prefix_lens[r], ", "Range{window_start(int64_t{prefix_lens[r]} - 1, ")

rule = "slot lists"
plant(rule, "list-padding-pages-refused", LIST_RULE, "row == kPaddingRow && slot == kDummySlot", "row < kPaddingRow && slot == kDummySlot")
plant(rule, "list-indptr-from-1", LISTS, "indptr[0] = 0;", "indptr[0] = 1;")
plant(rule, "list-indptr-shifted", LISTS, "indptr[r + 1] = indptr[r] + core::ceil_div(lens[r], page_size)",
      "indptr[r + 1] = (r == 0 ? 0 : indptr[r]) + (r == 0 ? 0 : core::ceil_div(lens[r - 1], page_size))")
plant(rule, "list-partial-page-dropped", LISTS, "indptr[r + 1] = indptr[r] + core::ceil_div(lens[r], page_size)",
      "indptr[r + 1] = indptr[r] + lens[r] / page_size")
plant(rule, "list-start-ignored", LIST_RULE, "out[j] = job.table.at(row, start + j);", "out[j] = job.table.at(row, j);")
plant(rule, "list-pages-from-neighbours", LIST_RULE, "start + j * job.page_size) / job.page_size", "start + j) / job.page_size")
plant(rule, "list-slots-for-pages", LIST_RULE, "start + j * job.page_size) / job.page_size", "start + j * job.page_size)")
plant(rule, "list-start-not-in-the-row", LIST_RULE, "job.end(request) > job.table.columns_of(row)",
      "job.lens[request] > job.table.columns_of(row)")
plant(rule, "list-one-column-too-many", LIST_RULE, "job.end(request) > job.table.columns_of(row)",
      "job.end(request) > job.table.columns_of(row) + 1")
plant(rule, "list-one-row-too-many", LIST_RULE, "row >= 0 && row < num_rows", "row >= 0 && row <= num_rows")
plant(rule, "list-padding-row-refused", LIST_RULE, "row >= 0 && row < num_rows", "row > 0 && row < num_rows")
plant(rule, "list-dummy-slot-refused", LIST_RULE, "(slot < 0 || slot >= job.num_slots ||", "(slot <= 0 || slot >= job.num_slots ||")
plant(rule, "list-one-slot-too-many", LIST_RULE, "slot >= job.num_slots || last_slot < 0 || last_slot >= job.num_slots",
      "slot > job.num_slots || last_slot < 0 || last_slot > job.num_slots")
plant(rule, "list-output-one-short", LIST_RULE, "job.indptr[request + 1] > job.capacity", "job.indptr[request + 1] > job.capacity + 1")
plant(rule, "list-offsets-unchecked", LIST_RULE, "job.indptr[request + 1] - begin != job.num_entries(request)", "false")
plant(rule, "list-pages-unchecked", LIST_RULE, "last_slot - slot != past - 1 - first", "false")
plant(rule, "list-last-row-runs-over", LIST_RULE, "(left < num_columns ? left : num_columns)", "num_columns")

rule = "draft branches"
plant(rule, "draft-offset-without-topk", DRAFT_RULE, "return branches.topk * (sum_before + int64_t{request} * step)",
      "return (sum_before + int64_t{request} * step)")
plant(rule, "draft-offset-without-drafts", DRAFT_RULE, "branch * (len + step)", "branch * len")
plant(rule, "draft-stride-of-a-page", DRAFT_RULE, "branch * pages * branches.page_size", "int64_t{branch} * branches.page_size")
plant(rule, "draft-pages-rounded-down", DRAFT_RULE, "last + branches.num_steps + branches.page_size - 1", "last + branches.num_steps")
plant(rule, "draft-pages-without-the-rest", DRAFT_RULE, "(last + branches.num_steps +", "(branches.num_steps +")
plant(rule, "draft-at-a-page-begin", DRAFT_RULE, "branches.page_size + last;", "branches.page_size;")
plant(rule, "draft-window-moves-drafts", DRAFT_RULE, "branch_begin(job.branches, start + len, branch)", "branch_begin(job.branches, len, branch)")
plant(rule, "draft-row-without-topk", DRAFT, "checked_mul(tokens, int64_t{branches.topk})", "checked_mul(tokens, int64_t{1})")
plant(rule, "draft-capacity-without-topk", DRAFT, "int64_t{branches.topk}, int64_t{max_context_len}", "int64_t{1}, int64_t{max_context_len}")
plant(rule, "draft-first-branch-checked", DRAFT_RULE, "job.lens[r], job.branches.topk - 1);", "job.lens[r], 0);")
plant(rule, "draft-slots-unchecked", DRAFT, "check_slots(job, r, branch_begin(job.branches, start + len, k), job.num_iterations);", "")
plant(rule, "draft-faults-list-others", DRAFT_RULE, "lens[r] < 0 || lens[r] > table.num_columns ? 0 : lens[r]", "lens[r]")
plant(rule, "draft-overrun", DRAFT_RULE, "(begin < capacity ? capacity - begin : 0)", "len + step")
plant(rule, "draft-offset-behind-the-row", DRAFT_RULE, "static_cast<int32_t>(begin < capacity ? begin : capacity)", "static_cast<int32_t>(begin)")
plant(rule, "draft-faulty-slot-listed", DRAFT_RULE, "out[j] = listed ? slot : kDummySlot;", "out[j] = slot;")

rule = "draft trees"
plant(rule, "tree-parent-off-by-one", TREE_RULE, "selected[low] == candidate ? low + 1", "selected[low] == candidate ? low")
plant(rule, "tree-parent-may-be-itself", TREE_RULE, "int32_t high = node - 1;", "int32_t high = node;",
      TREE_RULE, "low < node - 1 && selected", "low < node && selected")
plant(rule, "tree-lost-parent-is-the-root", TREE_RULE, "low + 1 : kNoParent", "low + 1 : 0")
plant(rule, "tree-node-blind-to-itself", TREE_RULE, "for (; node >= 0; node", "for (node = parents[node]; node >= 0; node")
plant(rule, "tree-node-blind-to-ancestors", TREE_RULE, "(; node >= 0; node = parent_of(parents, node)) {", "(; node >= 0; node = -1) {")
plant(rule, "tree-device-takes-any-parent", TREE_RULE, "return parents[node] >= 0 && parents[node] < node ? parents[node] : 0;", "return parents[node] < node ? parents[node] : 0;")
plant(rule, "tree-device-ties-later-first", TREE_RULE, "scores[a] > scores[b] : a < b;", "scores[a] > scores[b] : a > b;")
plant(rule, "tree-device-nan-first", TREE_RULE, "a_is_nan == b_is_nan ? a < b : b_is_nan;", "a_is_nan == b_is_nan ? a < b : a_is_nan;")
plant(rule, "tree-device-sibling-is-itself", TREE_RULE, "int32_t node = after + 1; node < num_nodes", "int32_t node = after; node < num_nodes")
plant(rule, "tree-device-candidate-beyond", TREE_RULE, "candidate >= num_candidates", "candidate > num_candidates")
plant(rule, "tree-depth-of-the-parent", TREE, "parents[i])] + 1;", "parents[i])];")
plant(rule, "tree-children-in-reverse", TREE, "parents[static_cast<size_t>(root + node)]];",
      "parents[static_cast<size_t>(root + draft_token_num - node)]];", TREE, "next_sibling[static_cast<size_t>(root + node)] = child;",
      "next_sibling[static_cast<size_t>(root + draft_token_num - node)] = child;", TREE, "      child = node;", "      child = draft_token_num - node;")
plant(rule, "tree-equal-scores-later-first", TREE, "place > 0 && scores[c] > scores[best[place - 1]]",
      "place > 0 && scores[c] >= scores[best[place - 1]]", TREE, "!(scores[c] > scores[best[count - 1]])",
      "!(scores[c] >= scores[best[count - 1]])")
plant(rule, "tree-selection-unsorted", TREE, "std::sort(selected, selected + count);", "")
plant(rule, "tree-nan-accepted", TREE, "require(!std::isnan(scores[i]),", "require(true,")
plant(rule, "tree-cycle-accepted", TREE_CHECKS, "tree[node] >= 0 && tree[node] < node,", "tree[node] >= 0,")
plant(rule, "mask-without-cached-tokens", MASK, "set_bits(mask, row + first, row + cached);", "")
plant(rule, "mask-window-without-depth", TREE_RULE, "cached + depth - window_left;", "cached - window_left;")
plant(rule, "mask-window-one-short", TREE_RULE, "cached + depth - window_left;", "cached + depth - window_left + 1;")
plant(rule, "mask-window-not-in-the-tree", TREE_RULE, "if (window_left-- == 0) break;", "")
plant(rule, "mask-bits-one-too-many", TREE_RULE, "begin + 8 <= end;", "begin < end;")
plant(rule, "mask-rows-on-bytes", MASK_RULE, "word_bytes() * 8 : cached_tokens + num_nodes;", "word_bytes() * 8 : (cached_tokens + num_nodes + 7) / 8 * 8;")
plant(rule, "mask-left-as-it-was", MASK, "std::fill_n(mask, shape.request_bytes(seq_len), uint8_t{0});", "")
plant(rule, "mask-requests-on-bits", MASK_RULE, "cells : (cells + 7) / 8;", "cells : cells / 8;")
plant(rule, "mask-device-window-one-long", TREE_RULE, "if (window_left-- == 0) return false;", "if (window_left-- < 0) return false;")
plant(rule, "mask-device-overrun", MASK_RULE, "const int64_t count = bytes < room ? bytes : room;", "const int64_t count = bytes;")
plant(rule, "mask-device-last-request-left-out", MASK_RULE, "bytes <= capacity ? bytes", "bytes < capacity ? bytes")

WRITE_RULE = TOKEN_POOL + "device/request_table_rule.hpp"
TABLE = TOKEN_POOL + "device_req_to_token_pool.cc"
INPUTS_RULE = TOKEN_POOL + "device/graph_inputs_rule.hpp"

rule = "the request table on a device, captured inputs"
plant(rule, "table-decodes-behind-the-end", WRITE_RULE, "ends[r] - len(r)", "int64_t{ends[r]}")
plant(rule, "table-one-column-too-many", WRITE_RULE, "if (end > job.num_columns)", "if (end > job.num_columns + 1)")
plant(rule, "table-padding-written", WRITE_RULE, "  if (row == kPaddingRow) return;\n", "")
plant(rule, "table-one-row-too-many", WRITE_RULE, "row < 0 || row >= job.num_rows", "row < 0 || row > job.num_rows")
plant(rule, "table-faulty-lengths-take-slots", WRITE_RULE, "return len(r) < 0 ? 0 : len(r);", "return len(r);")
plant(rule, "table-slots-beyond-those-given", WRITE_RULE, "if (offset + len > job.num_slots)", "if (offset > job.num_slots)")
plant(rule, "table-wide-slots-cut", WRITE_RULE, "slot >= INT32_MIN && slot <= INT32_MAX", "slot >= INT32_MIN")
plant(rule, "table-host-pool-forgotten", TABLE, "if (host != nullptr) write_host_pool(job);", "")
plant(rule, "table-free-rows-written", TABLE, "if (job.rows[r] != token_pool::kPaddingRow) check_held(job.rows[r]);", "")
plant(rule, "inputs-padding-sees-the-future", INPUTS_RULE, "bit % drafts <= row", "bit % drafts <= row + 1")
plant(rule, "inputs-tree-of-the-first-request", INPUTS_RULE, "job.tree.fill(r * bytes + b,", "job.tree.fill(b,")
