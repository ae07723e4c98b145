"""Mistakes in plans whose items are claimed, and in the merges that items name; see mutations.py."""

from mutations import SCHEDULER, plant

RULE = SCHEDULER + "claim_rule.hpp"
PARTS = SCHEDULER + "claim_parts.hpp"
WORK = SCHEDULER + "claim_work.cc"
DEVICE = SCHEDULER + "device/claims.hpp"
ORDER = SCHEDULER + "claim_order.hpp"
SORT = SCHEDULER + "order_claims."
LINE = SCHEDULER + "work_line.cc"

rule = "claimed plans"
plant(rule, "claims-of-heads-in-any-order", WORK, "visit(claim + i, first + i);", "visit(claim + count - 1 - i, first + i);")
plant(rule, "claims-share-partial-rows", WORK, "(int64_t{head} * parts + part) * (tile.row_end - tile.row_begin)",
      "int64_t{part} * (tile.row_end - tile.row_begin)")
plant(rule, "claim-budget-ignored", WORK, "if (parts[t] > 1 && spent > budget) parts[t] = 1;", "")
plant(rule, "claims-cut-what-is-folded-later", WORK, "tile.divisible ? count_parts(", "true ? count_parts(")
plant(rule, "claims-followed-by-another", WORK, "last ? at_end : static_cast<int32_t>(follower + 1)",
      "last ? at_end : static_cast<int32_t>(follower + 2)")
plant(rule, "claimed-remainder-lost", RULE, "run.begin + count * (place + 1) / pieces}",
      "run.begin + count / pieces * (place + 1)}")
plant(rule, "claims-do-not-shrink", RULE, "return line.share(line.total - (line.total >> index)) / 2;",
      "return line.share(0) / 2;")
plant(rule, "claims-of-one-head-fill-the-workers", RULE,
      "int64_t{trials.of[i]} * line.num_kv_heads <= line.num_workers", "trials.of[i] <= line.num_workers")
plant(rule, "claimed-splits-at-relative-positions", PARTS,
      "const int64_t begin = (narrow_div(range.begin, split) + index) * split;",
      "const int64_t begin = range.begin + index * split;")
plant(rule, "sections-of-heads-overlap", WORK, "const int64_t claim = first * all_claims_ + (claims_ + part) * count;",
      "const int64_t claim = first + (claims_ + part) * heads_;")
plant(rule, "device-claims-forget-the-budget", DEVICE,
      "if (claim_price(job, total) > job.in.claim_budget) {", "if (false) {")
plant(rule, "device-claims-cost-nothing-to-begin", SCHEDULER + "device/row_tile.hpp",
      "return job.in.start_cost + (priced", "return (priced")
plant(rule, "device-merges-lose-sources", DEVICE, ".source_end = source_begin + place.parts}",
      ".source_end = source_begin + place.parts - (place.parts > 3)}")

rule = "claimed plans: the dearest first"
plant(rule, "dearest-row-tiles-last", SORT + "hpp", "for (int32_t t = block.tile_end - 1; t >= block.tile_begin; --t) {",
      "for (int32_t t = block.tile_begin; t < block.tile_end; ++t) {")
plant(rule, "dear-requests-last", SORT + "cc", "order[next.of[class_of(b)]++]", "order[count - 1 - next.of[class_of(b)]++]")
plant(rule, "dear-requests-as-they-come", SORT + "cc", "return cost_class(half_octave(last_tile(b).cost()), octave);",
      "return cost_class(octave, octave);")
plant(rule, "row-tiles-cut-without-need", ORDER, "return end <= line.share(0) + line.share(0) / 8;",
      "return end <= line.share(0);")
plant(rule, "long-appends-stay-whole", ORDER, "if (line.num_workers == 1 || ends_evenly(line, waves))",
      "if (line.num_workers >= 1)")
plant(rule, "sections-end-late", ORDER, "return long_enough ? heads_each : heads;", "return heads_each;")
plant(rule, "no-sections", ORDER, "if (wanted <= 1) return heads;", "if (wanted <= 100) return heads;")
plant(rule, "device-order-of-one-class", SCHEDULER + "device/order.hpp", "scratch.request_octave[r] = half_octave(here.cost);",
      "scratch.request_octave[r] = 1;")

rule = "plans of few and of many rows"
plant(rule, "few-rows-taken-twice", LINE, "return rows >= config_.min_rows && rows <= config_.max_rows;",
      "return rows <= config_.max_rows;")
plant(rule, "shared-batches-divided", LINE, "if (divided || takes_all) {", "if (divided || !takes_all || takes_all) {")
plant(rule, "shared-batches-by-length-at-fixed-splits", LINE, "fixed_splits_ ? config_.max_rows == INT32_MAX :", "")
plant(rule, "device-takes-all-rows", SCHEDULER + "device/lengths.hpp",
      "if (rows < job.in.min_rows || rows > job.in.max_rows) return 0;", "")

rule = "merges that items name"
plant(rule, "parts-name-the-merge-before", SCHEDULER + "emit_work.cc",
      "item.combine_tile = static_cast<int32_t>(arrays_.combine_tiles.size());",
      "item.combine_tile = static_cast<int32_t>(arrays_.combine_tiles.size()) - 1;")
plant(rule, "parts-of-shared-segments-name-merges", SCHEDULER + "emit_work.cc",
      "if (chain_parts_ == nullptr) item.combine_tile", "item.combine_tile")
plant(rule, "device-tails-name-the-merge-before", SCHEDULER + "device/emit.hpp",
      "cut.tail_merge = before.merges + (work.head_ends ? 1 : 0);", "cut.tail_merge = before.merges;")
