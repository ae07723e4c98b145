"""Mistakes in plans whose items are claimed, and in the merges that items name; see mutations.py."""

from mutations import PLANNER, plant

RULE = PLANNER + "claim_rule.hpp"
PARTS = PLANNER + "claim_parts.hpp"
WORK = PLANNER + "claim_work.cc"
DEVICE = PLANNER + "device/claims.hpp"

rule = "claimed plans"
plant(rule, "claims-head-by-head", WORK, "items_[(claims_ + i) * heads_ + head]",
      "items_[claims_ * heads_ + int64_t{head} * parts + i]")
plant(rule, "claims-share-partial-rows", WORK, "(int64_t{head} * parts + part) * (tile.row_end - tile.row_begin)",
      "int64_t{part} * (tile.row_end - tile.row_begin)")
plant(rule, "claim-budget-ignored", WORK, "if (parts[t] > 1 && spent > budget) parts[t] = 1;", "")
plant(rule, "claims-cut-what-is-folded-later", WORK, "tile.divisible ? count_parts(", "true ? count_parts(")
plant(rule, "claims-followed-by-another", WORK, "item.partial = static_cast<int32_t>(follower + 1);",
      "item.partial = static_cast<int32_t>(follower + 2);")
plant(rule, "claimed-remainder-lost", RULE, "run.begin + count * (index + 1) / run.pieces",
      "run.begin + count / run.pieces * (index + 1)")
plant(rule, "claims-do-not-shrink", RULE, "const int64_t piece = line.share(begin) / 2;",
      "const int64_t piece = line.share(0) / 2;")
plant(rule, "claims-of-one-head-fill-the-workers", RULE,
      "int64_t{trials.of[i]} * line.num_kv_heads <= line.num_workers", "trials.of[i] <= line.num_workers")
plant(rule, "claimed-splits-at-relative-positions", PARTS,
      "const int64_t begin = (narrow_div(range.begin, split) + index) * split;",
      "const int64_t begin = range.begin + index * split;")
plant(rule, "device-claims-forget-the-budget", DEVICE,
      "if (claim_price(job, total) > job.in.claim_budget) {", "if (false) {")
plant(rule, "device-claims-cost-nothing-to-begin", PLANNER + "device/row_tile.hpp",
      "return job.in.start_cost + (priced", "return (priced")
plant(rule, "device-merges-lose-sources", DEVICE, ".source_end = source_begin + place.parts}",
      ".source_end = source_begin + place.parts - (place.parts > 3)}")

rule = "merges that items name"
plant(rule, "parts-name-the-merge-before", PLANNER + "emit_work.cc",
      "item.merge = static_cast<int32_t>(arrays_.merges.size());",
      "item.merge = static_cast<int32_t>(arrays_.merges.size()) - 1;")
plant(rule, "parts-of-shared-segments-name-merges", PLANNER + "emit_work.cc",
      "if (chain_parts_ == nullptr) item.merge", "item.merge")
plant(rule, "device-tails-name-the-merge-before", PLANNER + "device/emit.hpp",
      "cut.tail_merge = before.merges + (work.head_ends ? 1 : 0);", "cut.tail_merge = before.merges;")
