"""Mistakes in dynamic schedules, and in the combine tiles that work tiles name; see mutations.py."""

from mutations import SCHEDULER, plant

RULE = SCHEDULER + "split_rule.hpp"
LPT = SCHEDULER + "dynamic_scheduler.hpp"
DYNAMIC = SCHEDULER + "dynamic_scheduler.cc"
STATIC = SCHEDULER + "static_scheduler.cc"
TILE_SPACE = SCHEDULER + "tile_space.cc"
DEVICE = SCHEDULER + "device/dynamic_scheduler.hpp"

rule = "dynamic schedules"
plant(rule, "dynamic-tiles-of-heads-in-any-order", DYNAMIC, "visit(dynamic_tile + i, first + i);", "visit(dynamic_tile + count - 1 - i, first + i);")
plant(rule, "splits-share-partial-rows", DYNAMIC, "(int64_t{head} * splits + split) * (tile.row_end - tile.row_begin)",
      "int64_t{split} * (tile.row_end - tile.row_begin)")
plant(rule, "split-budget-ignored", DYNAMIC, "if (splits[t] > 1 && spent > budget) splits[t] = 1;", "")
plant(rule, "splits-cut-what-is-folded-later", DYNAMIC, "tile.divisible ? count_kv_splits(", "true ? count_kv_splits(")
plant(rule, "more-splits-than-the-most", RULE, "splits += by_rule < most ? by_rule : most;", "splits += by_rule;")
plant(rule, "most-splits-of-each-segment", RULE, "output_tile.max_splits / used;", "output_tile.max_splits;")
plant(rule, "workers-for-one-split-too-many", SCHEDULER + "static_scheduler.hpp",
      "const int64_t most = total * (max_splits - 1) / longest;", "const int64_t most = total * max_splits / longest;")
plant(rule, "one-split-is-cut", STATIC, "tile.divisible && config_.max_splits != 1;", "tile.divisible;")
plant(rule, "most-splits-unknown-to-the-device", DEVICE, ".max_splits = job.in.max_splits};", ".max_splits = 0};")
plant(rule, "most-splits-and-single-tiles", SCHEDULER + "device_scheduler.cc", "input.max_splits > 0 || ", "")
plant(rule, "continuation-of-another-tile", DYNAMIC, "last ? at_end : static_cast<int32_t>(continuation + 1)",
      "last ? at_end : static_cast<int32_t>(continuation + 2)")
plant(rule, "split-remainder-lost", RULE, "run.begin + count * (place + 1) / num_splits}",
      "run.begin + count / num_splits * (place + 1)}")
plant(rule, "splits-do-not-shrink", RULE, "return space.share(space.total - (space.total >> index)) / 2;",
      "return space.share(0) / 2;")
plant(rule, "splits-of-one-head-fill-the-workers", RULE,
      "int64_t{trials.of[i]} * space.num_kv_heads <= space.num_workers", "trials.of[i] <= space.num_workers")
plant(rule, "dynamic-splits-at-relative-positions", RULE,
      "const int64_t begin = (narrow_div(range.begin, split) + index) * split;",
      "const int64_t begin = range.begin + index * split;")
plant(rule, "swizzle-groups-overlap", DYNAMIC, "const int64_t dynamic_tile = first * all_dynamic_tiles_ + (dynamic_tiles_ + split) * count;",
      "const int64_t dynamic_tile = first + (dynamic_tiles_ + split) * heads_;")
plant(rule, "device-splits-forget-the-budget", DEVICE,
      "if (split_price(job, total) > job.in.split_budget) {", "if (false) {")
plant(rule, "device-tiles-cost-nothing-to-begin", SCHEDULER + "device/tile_space.hpp",
      "return job.in.start_cost + (priced", "return (priced")
plant(rule, "device-combine-tiles-lose-sources", DEVICE, ".source_end = source_begin + place.splits}",
      ".source_end = source_begin + place.splits - (place.splits > 3)}")

rule = "dynamic schedules: longest first"
plant(rule, "longest-row-tiles-last", DYNAMIC, "for (int32_t t = block.tile_end - 1; t >= block.tile_begin; --t) {",
      "for (int32_t t = block.tile_begin; t < block.tile_end; ++t) {")
plant(rule, "longest-requests-last", DYNAMIC, "order[next.of[class_of(b)]++]", "order[count - 1 - next.of[class_of(b)]++]")
plant(rule, "lpt-in-request-order", DYNAMIC, "return cost_class(half_octave(last_tile(b).cost()), octave);",
      "return cost_class(octave, octave);")
plant(rule, "row-tiles-split-without-need", LPT, "return end <= space.share(0) + space.share(0) / 8;",
      "return end <= space.share(0);")
plant(rule, "long-appends-stay-whole", LPT, "if (space.num_workers == 1 || ends_evenly(space, waves))",
      "if (space.num_workers >= 1)")
plant(rule, "swizzle-groups-end-late", LPT, "return long_enough ? heads_each : heads;", "return heads_each;")
plant(rule, "no-head-swizzle", LPT, "if (wanted <= 1) return heads;", "if (wanted <= 100) return heads;")
plant(rule, "heads-together-in-any-batch", DYNAMIC, "2 * count <= config.num_workers", "count <= 1000 * config.num_workers")
plant(rule, "long-request-split-head-by-head", DYNAMIC, "if (!few && longest <= totals.space.total / config.num_workers / 2) return 1;",
      "if (!few) return 1;")
plant(rule, "uneven-workers-get-equal-splits", DYNAMIC, "!even && config_.uneven_workers", "false")
plant(rule, "short-batches-split-too-finely", DYNAMIC, "config_.uneven_workers && !is_short(space_)", "config_.uneven_workers")
plant(rule, "claims-of-heads-split-as-heads", DYNAMIC, "ceil_div(config.num_kv_heads, claimed_heads_)", "config.num_kv_heads")
plant(rule, "heads-together-beyond-a-work-tile", DYNAMIC, "std::clamp(config.tile.rows / rows, 1,", "std::clamp(config.tile.rows / rows * 64, 1,")
plant(rule, "device-lpt-of-one-class", DEVICE, "scratch.request_octave[r] = half_octave(here.cost);",
      "scratch.request_octave[r] = 1;")

rule = "plans of the decode and the prefill pass"
plant(rule, "decode-rows-taken-twice", TILE_SPACE, "return rows >= config_.min_rows && rows <= config_.max_rows;",
      "return rows <= config_.max_rows;")
plant(rule, "shared-batches-divided", TILE_SPACE, "if (divided || takes_all) {", "if (divided || !takes_all || takes_all) {")
plant(rule, "shared-batches-by-length-at-fixed-splits", TILE_SPACE, "fixed_splits_ ? config_.max_rows == INT32_MAX :", "")
plant(rule, "device-takes-all-rows", SCHEDULER + "device/batch.hpp",
      "if (rows < job.in.min_rows || rows > job.in.max_rows) return 0;", "")

rule = "combine tiles that work tiles name"
plant(rule, "splits-name-the-combine-tile-before", STATIC,
      "work_tile.combine_tile = static_cast<int32_t>(arrays_.combine_tiles.size());",
      "work_tile.combine_tile = static_cast<int32_t>(arrays_.combine_tiles.size()) - 1;")
plant(rule, "splits-of-shared-segments-name-combine-tiles", STATIC,
      "if (output_partials_ == nullptr) work_tile.combine_tile", "work_tile.combine_tile")
plant(rule, "device-tails-name-the-combine-tile-before", SCHEDULER + "device/static_scheduler.hpp",
      "cut.tail_combine_tile = before.combine_tiles + (work.head_ends ? 1 : 0);", "cut.tail_combine_tile = before.combine_tiles;")

rule = "device scheduler: lengths are read once"
plant(rule, "unread-fault-overwritten", SCHEDULER + "device/batch.hpp", "if (out.problem != PlanProblem::kNone) return;", "")
